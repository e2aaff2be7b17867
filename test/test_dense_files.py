"""Dense models that others exported: beside one another, by a registry, or not there."""

import json

import cv2
import pytest
import yaml
from dense_models import (
    PICTURES,
    STEPS,
    _dense_cache,  # noqa: F401
    dense,  # noqa: F401
    dense_config,
    map_matcher,
    map_model,
    place_dense_models,
    renamed,
    run,
)
from helpers import frame
from model_helpers import (
    learned,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
)

from vslam_features.artifacts.cache import sha256_of
from vslam_features.artifacts.card import sidecar_path
from vslam_features.config import Config
from vslam_features.errors import (
    ConfigError,
)
from vslam_features.frontend import FrontEnd
from vslam_features.types import Status

# -- files of others -----------------------------------------------------------------------------

THEIRS = {"keypoints0": "kp_a", "keypoints1": "kp_b", "descriptors0": "x.7", "descriptors1": "x.8"}
BOUND = {
    "inputs": THEIRS,
    "keypoints": "signed",
    "layouts": {"descriptors0": "tokens", "descriptors1": "tokens"},
}


def their_files(folder):
    """A descriptor model and a matcher with names, layouts and coordinates of their own."""
    features, matcher = folder / "their_descriptor.onnx", folder / "their_matcher.onnx"
    model = map_matcher(layout="tokens", batch=True, keypoints="signed", image_size=False)
    matcher.write_bytes(renamed(model, THEIRS).SerializeToString())
    features.write_bytes(renamed(map_model(batch=True), {"image": "pixels", "descriptors": "map"}).SerializeToString())
    return features, matcher


@pytest.mark.usefixtures("own_cache")
def test_files_of_others_beside_one_another_are_bound_by_sidecars(tmp_path, capsys):
    features, matcher = their_files(tmp_path)
    base = {"licence": "CC0-1.0", "name": "theirs"}
    own = {"role": "features", "preprocessing": STEPS.to_dict(), "inputs": {"image": "pixels"}}
    sidecar_path(features).write_text(yaml.safe_dump({**base, **own, "outputs": {"descriptors": "map"}}))
    own = {"role": "matcher", "features_model": "theirs", **BOUND}
    sidecar_path(matcher).write_text(yaml.safe_dump({**base, **own}))
    for i, image in enumerate(PICTURES["room-step"]):
        cv2.imwrite(str(tmp_path / f"{i}.png"), image)
    settings = ["--set", f"features.options.model={features}", "--set", f"matcher.options.model={matcher}"]
    settings += ["--set", "features.max_keypoints=400", "--set", "matcher.options.min_covisibility=0.05"]
    run("match", tmp_path / "0.png", tmp_path / "1.png", "--features", "flexglue", *settings, "--json")
    found = json.loads(capsys.readouterr().out)
    # The gate of the matcher has the maps of the file beside it, and so has 'verify' with pictures.
    run("models", "verify", matcher, "--json")
    assert json.loads(capsys.readouterr().out)["pairs"][0]["name"] == "cup"
    run("models", "verify", matcher, "--images", tmp_path, "--set", "features.name=flexglue", *settings, "--json")
    assert json.loads(capsys.readouterr().out)["pairs"][-1]["matches"][0] > 100

    place_dense_models()
    front_end = FrontEnd(dense_config(loops__enabled=False))
    sides = [front_end.extract(frame(image)) for image in PICTURES["room-step"]]
    expected = front_end.matcher.match(*sides)
    assert found["num_matches"] == len(expected) > 100 and found["num_inliers"] == expected.num_inliers


@pytest.mark.usefixtures("own_cache")
def test_files_of_others_get_the_names_of_the_defaults_by_a_registry(tmp_path, monkeypatch, capsys):
    entries = []
    for path, own in zip(their_files(tmp_path), (
        {"preprocessing": STEPS.to_dict(), "inputs": {"image": "pixels"}, "outputs": {"descriptors": "map"}}, BOUND,
    )):  # fmt: skip
        matcher = "matcher" in path.name
        file = {"file": path.name, "sha256": sha256_of(path), "size": path.stat().st_size}
        entry = {"name": "flexglue-matcher" if matcher else "flexglue", "role": "matcher" if matcher else "features"}
        entry |= {"version": "1", "licence": "CC0-1.0", "homepage": "https://example.org", "card": own}
        entry |= {"file": {**file, "sources": [{"path": path.name}]}}
        entries.append(entry | ({"features_model": "flexglue"} if matcher else {}))
    (tmp_path / "registry.yaml").write_text(yaml.safe_dump({"schema": 2, "models": entries}))
    monkeypatch.setenv("VSLAM_FEATURES_MODELS", str(tmp_path / "registry.yaml"))
    run("models", "fetch", "flexglue", "flexglue-matcher")
    front_end = FrontEnd(Config.from_flat({"features.name": "flexglue", "loops.enabled": False, "runtime.threads": 1,
                                           "matcher.options.min_covisibility": 0.05}))  # fmt: skip
    assert not front_end.warning
    found = front_end.matcher.match(*[front_end.extract(frame(image)) for image in PICTURES["room-step"]])
    assert len(found) > 100 and found.status is Status.OK and found.covisibility > 0.1


@pytest.mark.usefixtures("own_cache")
def test_without_files_it_is_said_where_they_come_from():
    with pytest.raises(
        ConfigError, match="'flexglue' is not on this machine: its files are brought by you, see docs/fl"
    ):
        FrontEnd(Config.from_flat({"features.name": "flexglue"}))
