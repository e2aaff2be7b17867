"""``vslam-features map``: what it prints and writes, exit codes, JSON, errors."""

import contextlib
import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from map_damage import COUNT, known, map_bytes, pages
from model_helpers import command
from power_cut.entries import MODELS, entry
from power_cut.maps import write_map
from test_map_file import LFS

from vslam_features.cli.map_sheet import MAX_TILES
from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry, MapModels, ModelIdentity


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    return path


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A map whose keyframe 5 is damaged."""
    data = bytearray(map_bytes())
    data[next(p for p in pages() if p.rows == (5,) and p.kind == "overflow").start + 99] ^= 1
    path = tmp_path / "damaged.vmap"
    path.write_bytes(data)
    return path


def run(capsys, *args) -> tuple[int, str, str]:
    code = command("map", *map(str, args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_has_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "vslam-features map verify" in out
    for verb in ("info", "verify", "recover", "merge", "compact", "export", "import"):
        code, out, _ = run(capsys, verb, "--help")
        assert code == 0 and f"example: vslam-features map {verb}" in out


@pytest.mark.parametrize("args", [[], ["info"], ["recover", "a"], ["export", "a", "b"], ["fly", "a"]])
def test_wrong_usage_is_2(capsys, args):
    code, _, err = run(capsys, *args)
    assert code == 2 and "usage" in err


# -- info --------------------------------------------------------------------------------------


def test_info(path, capsys):
    code, out, err = run(capsys, "info", path)
    assert code == 0 and not err
    for said in (
        "schema version 1",
        "test (weights 000000000000, preprocessing none)",
        f"keyframes            {COUNT}, ",
        f"{COUNT} x float32 (N, 16)",
        f"pairs, track         {COUNT - 1} ok",
        f"{COUNT - 4} confirmed, {COUNT - 4} candidates, {COUNT - 4} gated",
        "640x480, fx 500.0 fy 500.0 cx 319.5 cy 239.5, no distortion",
        "uncalibrated",
        "session 1",
        "13 keyframes from id 17 on, 1.2 s",
        "poses in 'odom': 1.60 x 0.00 x 0.00 m, path 1.60 m",
    ):
        assert said in out, said


def test_info_as_json(path, capsys):
    code, out, _ = run(capsys, "info", path, "--json")
    numbers = json.loads(out)
    assert code == 0 and numbers["keyframes"] == COUNT and numbers["path"] == str(path)
    assert [m["role"] for m in numbers["models"]] == ["features", "global"]


def test_info_of_a_map_that_is_being_written(tmp_path, capsys):
    path = tmp_path / "a.vmap"
    with MapWriter(path, MODELS, create=True) as writer:
        assert run(capsys, "info", path)[0] == 0  # an empty one
        for n in range(3):
            writer.append(entry(n))
        code, out, _ = run(capsys, "info", path)
        assert code == 0 and "keyframes            3, " in out
        code, out, _ = run(capsys, "verify", path)
        assert code == 0 and "a process writes to the map" in out


def test_the_sheet_shows_thumbnails_and_loops(path, tmp_path, capsys):
    sheet = tmp_path / "sheet.png"
    code, out, _ = run(capsys, "info", path, "--sheet", sheet)
    assert code == 0 and f"{sheet}, {COUNT} keyframes" in out
    picture = cv2.imread(str(sheet))
    columns = (picture.shape[1] - 6) // 166
    tiles = [np.array(divmod(n, columns)) * (144, 166) + 6 for n in range(COUNT)]
    for n, (y, x) in enumerate(tiles):
        tile = picture[y : y + 120, x : x + 160]
        green = (tile[0] == (0, 130, 0)).all()
        assert green == bool(known(n).candidates), n  # each is confirmed
        if known(n).keyframe.thumbnail is None:
            assert (tile[5:-5, 5:-5] == 225).all()
        else:  # (12, 16) pixels, ten times as large
            wanted = cv2.resize(known(n).keyframe.thumbnail, (160, 120), interpolation=cv2.INTER_LINEAR)
            assert np.array_equal(tile[5:-5, 5:-5, 0], wanted[5:-5, 5:-5])
        assert (picture[y + 120 : y + 138, x : x + 160] < 120).any(), "no id"


def test_the_sheet_is_bounded(tmp_path, capsys):
    path, kf = tmp_path / "a.vmap", entry(1).keyframe
    colour = np.full((300, 100, 3), (255, 0, 0), np.uint8)
    with MapWriter(path, MODELS, create=True, durable=False) as writer:
        for n in range(MAX_TILES + 57):
            writer.append(MapEntry(replace(kf, id=n, stamp_ns=n, thumbnail=colour)))
    code, out, _ = run(capsys, "info", path, "--sheet", tmp_path / "s.png", "--json")
    assert code == 0 and json.loads(out)["sheet"]["keyframes"] == MAX_TILES
    picture = cv2.imread(str(tmp_path / "s.png"))
    assert max(picture.shape) < 4000
    assert tuple(picture[6 + 60, 6 + 80]) == (0, 0, 255), "a red picture, in OpenCV's order"
    assert tuple(picture[6 + 60, 6 + 10]) == (225, 225, 225), "a high one leaves room at its sides"


def test_the_sheet_does_not_replace_the_map(path, capsys):
    code, _, err = run(capsys, "info", path, "--sheet", path)
    assert code == 1 and "ends with .png" in err and path.read_bytes() == map_bytes()
    code, _, err = run(capsys, "info", path, "--sheet", path.parent / "no" / "s.png")
    assert code == 1 and err.count("\n") == 1 and "does not exist" in err


# -- verify, recover ---------------------------------------------------------------------------


def test_verify_a_whole_map(path, capsys):
    code, out, _ = run(capsys, "verify", path)
    assert code == 0 and out.startswith(f"{path}: intact")
    assert f"keyframes intact with all that belongs to them: {COUNT} of {COUNT}" in out
    code, out, _ = run(capsys, "verify", path, "--json")
    assert code == 0 and json.loads(out)["damaged"] is False


def test_verify_a_damaged_map(damaged, capsys):
    code, out, _ = run(capsys, "verify", damaged)
    assert code == 1 and out.startswith(f"{damaged}: DAMAGED")
    for said in ("0-4, 6-29", "features 5: keypoints: the checksum is wrong", f"map recover {damaged}"):
        assert said in out
    code, out, _ = run(capsys, "verify", damaged, "--json")
    report = json.loads(out)
    assert code == 1 and report["intact_ranges"] == [[0, 4], [6, 29]] and report["keyframes_intact"] == COUNT - 1
    assert report["tables"]["features"] == {"rows": COUNT, "intact": COUNT - 1}


@pytest.mark.parametrize("content", [b"", LFS, b"no map at all" * 100, map_bytes()[:5000]])
def test_what_is_no_map_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "a.vmap"
    path.write_bytes(content)
    code, out, _ = run(capsys, "verify", path)
    assert code == 1 and "DAMAGED" in out
    for verb in (["info", path], ["recover", path, tmp_path / "b.vmap"], ["compact", path]):
        code, out, err = run(capsys, *verb)
        assert code == 1 and err.startswith("error: ") and err.count("\n") == 1 and str(path) in err and not out
    assert path.read_bytes() == content and [p.name for p in tmp_path.iterdir()] == ["a.vmap"]


def test_recover(damaged, tmp_path, capsys):
    target = tmp_path / "saved.vmap"
    code, out, _ = run(capsys, "recover", damaged, target)
    assert code == 0 and f"{COUNT - 1} of {COUNT} keyframes saved" in out
    assert "0-4, 6-29" in out and "the first is 5" in out and "saved without: 2 matches" in out
    assert run(capsys, "verify", target)[0] == 0
    code, _, err = run(capsys, "recover", damaged, target)
    assert code == 1 and "there already" in err
    code, out, _ = run(capsys, "recover", damaged, target, "--force", "--json")
    report = json.loads(out)
    assert code == 0 and report["saved"] == COUNT - 1 and report["old_ids"][5] == 6 and list(report["lost"]) == ["5"]


def test_recover_with_the_models_of_another_map(path, tmp_path, capsys):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE models SET sha256 = 'x'")
        db.commit()
    like = tmp_path / "like.vmap"
    like.write_bytes(map_bytes())
    code, _, err = run(capsys, "recover", path, tmp_path / "b.vmap")
    assert code == 1 and "--like" in err
    assert run(capsys, "recover", path, tmp_path / "b.vmap", "--like", like)[0] == 0


# -- merge, compact, export, import ----------------------------------------------------------------


def test_merge(path, tmp_path, capsys):
    target = tmp_path / "b.vmap"
    code, out, _ = run(capsys, "merge", path, path, target)
    assert code == 0 and out.startswith(f"{target}: {2 * COUNT} keyframes")
    assert not verify(target).damaged
    assert run(capsys, "merge", path, path, target)[0] == 1
    assert run(capsys, "merge", path, path, target, "--force")[0] == 0


def test_merge_refuses_other_models(path, tmp_path, capsys):
    model, kf = ModelIdentity("features", "orb", "3" * 64, "none"), entry(0).keyframe
    other = tmp_path / "b.vmap"
    with MapWriter(other, MapModels(model, MODELS.global_descriptor), create=True) as writer:
        writer.append(MapEntry(replace(kf, features=replace(kf.features, model=model))))
    code, _, err = run(capsys, "merge", path, other, tmp_path / "c.vmap")
    assert code == 1 and "'test'" in err and "'orb'" in err and err.count("\n") == 1


def test_compact(path, tmp_path, capsys):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t AS SELECT zeroblob(500000)")
        db.execute("DROP TABLE t")
        db.commit()
    target = tmp_path / "b.vmap"
    code, out, _ = run(capsys, "compact", path, target)
    assert code == 0 and "0.7 MB, was 1.2 MB" in out and not verify(target).damaged
    code, _, err = run(capsys, "compact", path, target)
    assert code == 1 and "--force" in err
    assert run(capsys, "compact", path)[0] == 0
    assert path.stat().st_size == target.stat().st_size and not verify(path).damaged
    with MapWriter(path, MODELS):
        code, _, err = run(capsys, "compact", path)
        assert code == 1 and "another process" in err


def test_there_and_back_by_hloc(tmp_path, capsys):
    pytest.importorskip("h5py")
    path, folder, target = tmp_path / "a.vmap", tmp_path / "hloc", tmp_path / "b.vmap"
    write_map(path, 8)
    assert run(capsys, "export", path, folder, "--to", "hloc")[0] == 0
    code, out, _ = run(capsys, "import", folder, target, "--from", "hloc", "--like", path)
    assert code == 0 and out.startswith(f"{target}: 8 keyframes")
    with MapReader(target) as reader:
        assert reader.models == MODELS
        got, want = reader.entry(5), entry(5)
        assert np.array_equal(got.keyframe.features.descriptors, want.keyframe.features.descriptors)
        assert np.array_equal(got.keyframe.global_descriptor, want.keyframe.global_descriptor)
        assert {p.ref_kf_id for p in got.pairs} == {p.ref_kf_id for p in want.pairs}
    code, _, err = run(capsys, "import", folder, target, "--from", "hloc")
    assert code == 1 and "there already" in err
    assert run(capsys, "import", folder / "features.h5", target, "--from", "hloc", "--force")[0] == 0
    code, _, err = run(capsys, "import", folder, target, "--from", "hloc", "--image-size", "640x480")
    assert code == 1 and "tinynav" in err


def test_export_to_colmap(path, tmp_path, capsys):
    target = tmp_path / "database.db"
    code, out, _ = run(capsys, "export", path, target, "--to", "colmap")
    assert code == 0 and f"{COUNT} images" in out
    with contextlib.closing(sqlite3.connect(target)) as db:
        assert db.execute("SELECT count(*) FROM images").fetchone() == (COUNT,)
    assert run(capsys, "export", path, target, "--to", "colmap")[0] == 1
    assert run(capsys, "export", path, target, "--to", "colmap", "--force")[0] == 0


@pytest.mark.parametrize("size", ["640", "640x", "axb", "0x480", "640x480x3"])
def test_a_wrong_image_size_is_told(tmp_path, capsys, size):
    code, _, err = run(capsys, "import", tmp_path, tmp_path / "b.vmap", "--from", "tinynav", "--image-size", size)
    assert code == 1 and "WIDTHxHEIGHT" in err and err.count("\n") == 1


def test_import_of_nothing_is_one_line(tmp_path, capsys):
    for source_format in ("hloc", "tinynav"):
        code, _, err = run(capsys, "import", tmp_path / "no", tmp_path / "b.vmap", "--from", source_format)
        assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_looking_at_a_map_loads_no_models_and_no_ros(path):
    program = "import sys; from vslam_features.cli.main import main; code = main(sys.argv[1:]); "
    program += "print(code, [m for m in ('torch', 'onnx', 'onnxruntime', 'rclpy') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program, "map", "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout.endswith("0 []\n"), found.stdout + found.stderr
