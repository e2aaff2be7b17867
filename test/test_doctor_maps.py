"""What ``doctor`` says of folders, free disk and the configured map."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
from doctor_helpers import only
from helpers import IDENTITY, keyframe

from vslam_features.cli import doctor_maps
from vslam_features.config import Config
from vslam_features.features.sift import Sift
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry, MapModels

GB = 1 << 30
SIFT = Config.from_flat({"features.name": "sift", "retrieval.name": "vlad"})
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """State and cache of this test."""
    for name in ("state", "cache"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"VSLAM_FEATURES_{name.upper()}", str(tmp_path / name))
    return tmp_path


def lines(config: Config = SIFT) -> dict[str, tuple[str, str, str]]:
    return {c.name: (c.state, c.text, c.fix) for c in doctor_maps.check_folders(config)}


def free(monkeypatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 * size, size, size))


@pytest.mark.parametrize("name", ["state", "cache"])
def test_a_folder_that_is_a_file(name, folders):
    (folders / name).rmdir()
    (folders / name).write_text("")
    found = lines()
    assert found[name][0] == "FAIL" and "is a file" in found[name][1]
    assert f"VSLAM_FEATURES_{name.upper()}" in found[name][2]
    assert [state for other, (state, *_) in found.items() if other != name] == ["OK"]


def test_a_folder_without_rights_and_a_read_only_disk(folders, monkeypatch):
    monkeypatch.setattr(doctor_maps.os, "access", lambda path, mode: "cache" not in str(path))
    state, text, _ = lines()["cache"]
    assert state == "FAIL" and "no right to write" in text

    def refuse(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor_maps.tempfile, "TemporaryFile", refuse)
    state, text, _ = lines()["state"]
    assert state == "FAIL" and "Read-only file system" in text


def test_a_folder_that_is_made_later_is_not_made_now(folders, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(folders / "a" / "b"))
    assert lines()["cache"][0] == "OK" and not (folders / "a").exists()


@pytest.mark.parametrize(
    "size, states, said",
    [
        # 0.1 to 2 MB a keyframe, one a second: 10 GB are 1.4 to 28 hours, and the hours are 10240 / 2 / 3600 and so on.
        (10 * GB, ("OK", "OK"), "85 min to 28 h of mapping"),
        (2 * GB, ("WARN", "OK"), "17 min to 6 h of mapping"),
        (50 << 20, ("FAIL", "FAIL"), "50 MB free"),
    ],
)
def test_free_disk_in_hours_of_mapping(size, states, said, monkeypatch):
    free(monkeypatch, size)
    found = lines()
    assert (found["state"][0], found["cache"][0]) == states and said in found["state"][1]
    assert states[0] != "FAIL" or "full" in found["state"][2]


# -- the configured map ----------------------------------------------------------------------------


def write(path, models: MapModels) -> None:
    with MapWriter(path, models, create=True) as writer:
        frame = keyframe()
        writer.append(MapEntry(replace(frame, features=replace(frame.features, model=models.features))))


def check(path, **values):
    config = Config.from_flat(
        {"map_path": str(path), **{n.replace("__", "."): v for n, v in values.items()}}, base=SIFT
    )
    return {c.name: (c.state, c.text, c.fix) for c in doctor_maps.check_map(config)}


def test_no_map_is_no_line():
    assert not list(doctor_maps.check_map(SIFT))


def test_a_map_of_the_configured_models(tmp_path):
    write(tmp_path / "house.vmap", MapModels(Sift(100, 640, Sift.Options()).identity))
    found = check(tmp_path / "house.vmap")
    assert found["map"][0] == "OK" and "1 keyframes" in found["map"][1] and "of sift" in found["map"][1]
    assert found["map disk"][0] == "OK"


def test_a_map_of_other_models(tmp_path):
    write(tmp_path / "house.vmap", MapModels(IDENTITY))
    state, text, fix = check(tmp_path / "house.vmap")["map"]
    assert state == "FAIL" and "the map is of test, configured is sift" in text and "features.name" in fix


def test_a_damaged_map_and_one_that_is_not_there(tmp_path):
    (tmp_path / "house.vmap").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    state, _, fix = check(tmp_path / "house.vmap")["map"]
    assert state == "FAIL" and "map verify" in fix
    state, text, _ = check(tmp_path / "new.vmap")["map"]
    assert state == "OK" and "is made at the start" in text
    state, text, _ = check(tmp_path / "new.vmap", mode="localization")["map"]
    assert state == "FAIL" and "is not there" in text


def test_a_map_in_a_folder_that_is_not_there_and_localisation_without_a_map(tmp_path):
    state, text, _ = check(tmp_path / "none" / "house.vmap")["map"]
    assert state == "FAIL" and "does not exist" in text
    (line,) = doctor_maps.check_map(Config.from_flat({"mode": "localization"}, base=SIFT))
    assert line.state == "FAIL" and "localization needs a map" in line.text


def test_a_full_disk_under_the_map(tmp_path, monkeypatch):
    free(monkeypatch, 20 << 20)
    state, text, fix = check(tmp_path / "new.vmap")["map disk"]
    assert state == "FAIL" and "20 MB free" in text and "full" in fix
    assert only([c for c in doctor_maps.check_folders(SIFT) if c.name == "state"])[0] == "FAIL"
