"""Maps of dense features: made, verified, continued, localised in, exported; and pairs of pictures."""

import contextlib
import json
import sqlite3

import cv2
import helpers
import numpy as np
import pytest
from dense_models import (
    FEATURES_CARD,
    MAP,
    PICTURES,
    SET,
    _dense_cache,  # noqa: F401
    dense,  # noqa: F401
    dense_config,
    map_model,
    run,
)
from model_helpers import (
    command,
    learned,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    save,
)

from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.matching.flexglue import FlexGlue as FlexGlueMatcher
from vslam_features.models import Models
from vslam_features.types import Status

# -- maps ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """A folder: along a wall and back."""
    wall, folder = helpers.image(240, 900), tmp_path_factory.mktemp("walk")
    for i in range(10):
        x = 40 * min(i, 9 - i)
        cv2.imwrite(str(folder / f"{i:02d}.png"), wall[:, x : x + 320])
    return folder


@pytest.mark.usefixtures("dense")
def test_a_map_of_dense_features_is_made_verified_localised_in_and_exported(walk, tmp_path, capsys):
    house, common = tmp_path / "house.vmap", [*SET, "--set", "loops.consensus=1"]
    run("replay", walk, *common, "--map", house, "--out", tmp_path / "run")
    assert not verify(house).damaged
    with MapReader(house) as reader:
        headers = reader.headers()
        assert len(headers) == 10 and reader.models.features.name == "dense-features"
        for header in headers:
            features = reader.keyframe(header.id).features
            assert features.descriptors.shape == MAP and features.descriptors.dtype == np.float16
            assert len(features) == header.num_keypoints > 20
        track = [p.matches for h in headers for p in reader.pairs(h.id) if p.ref_kf_id == h.id - 1]
        live = [reader.keyframe(i).features for i in (3, 4)]
    assert len(track) == 9 and all(m.status is Status.OK for m in track)
    # What is read is matched as what was live.
    matcher = FlexGlueMatcher(FlexGlueMatcher.Options("dense-matcher", 0.1, 0.05), Models(dense_config()))
    np.testing.assert_array_equal(matcher.match(*live[::-1]).pairs, track[3].pairs)

    before = house.read_bytes()
    run("replay", walk, *common, "--map", house, "--map-mode", "localize", "--out", tmp_path / "there")
    found = json.loads((tmp_path / "there" / "metrics.json").read_text())
    assert house.read_bytes() == before and found["by_kind"]["relocalisation"]["statuses"] == {"ok": 30}
    run("replay", walk, *common, "--map", house, "--map-mode", "continue", "--out", tmp_path / "again")
    run("map", "verify", house)
    run("map", "info", house)
    run("map", "compact", house)
    for to in ("colmap", "hloc"):
        capsys.readouterr()
        run("map", "export", house, tmp_path / to, "--to", to)
        assert f"dense maps, which {to} has no place for: left out" in capsys.readouterr().err
    with contextlib.closing(sqlite3.connect(tmp_path / "colmap")) as colmap:
        rows = {t: colmap.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("keypoints", "descriptors")}
        assert rows == {"keypoints": 20, "descriptors": 0}
    run("map", "merge", house, house, tmp_path / "both.vmap")
    with MapReader(tmp_path / "both.vmap") as reader:
        assert len(reader.headers()) == 40 and reader.keyframe(39).features.descriptors.shape == MAP
    capsys.readouterr()


@pytest.mark.usefixtures("dense")
def test_other_detectors_continue_a_map(walk, tmp_path):
    """Keypoints are no part of the identity; another model is."""
    house, common = tmp_path / "house.vmap", [*SET]
    run("replay", walk, *common, "--map", house, "--out", tmp_path / "a")
    orb = ["--set", "features.options.detector=orb"]
    run("replay", walk, *common, *orb, "--map", house, "--map-mode", "continue", "--out", tmp_path / "b")
    save(map_model(half=False), FEATURES_CARD)
    assert command("replay", str(walk), *common, "--map", str(house), "--map-mode", "continue", "--out",
                   str(tmp_path / "c")) == 1  # fmt: skip


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("features", ["sift", "flexglue"])
def test_match_shows_dense_pairs(features, tmp_path, capsys):
    for i, image in enumerate(PICTURES["room-step"]):
        cv2.imwrite(str(tmp_path / f"{i}.png"), image)
    settings = SET if features == "flexglue" else ["--set", "matcher.name=nearest"]
    run("match", tmp_path / "0.png", tmp_path / "1.png", "--features", features, *settings, "--json", "--viz",
        tmp_path / "out.png")  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ok" and found["num_inliers"] > 50 and (tmp_path / "out.png").is_file()
    assert (found["covisibility"] is not None) == (features == "flexglue")
