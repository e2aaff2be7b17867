"""Which map is the running one, on the disk of this machine."""

import hashlib
import os
from contextlib import contextmanager
from dataclasses import replace

import helpers
import numpy as np
import pytest

from vslam_features import running_map
from vslam_features.config import Config
from vslam_features.errors import ConfigError, IdentityError, MapDamagedError, MapError, MapFileError
from vslam_features.frontend import FrontEnd
from vslam_features.map_keeper import MapKeeper
from vslam_features.maps.lock import WriterLock
from vslam_features.maps.reader import MapReader
from vslam_features.maps.writer import MapWriter
from vslam_features.session_files import state_folder
from vslam_features.types import PairKind

PARAMETERS = {
    "features.name": "orb",
    "features.max_keypoints": 200,
    "matcher.name": "nearest",
    "keyframes.every": 1,
    "retrieval.exclude_s": 0.0,
    "retrieval.exclude_frames": 2,
}
WALL = helpers.image(200, 500)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "sessions"


@pytest.fixture
def make():
    """make(parameter=value, ...) -> MapKeeper of a front-end; double underscores stand for dots."""
    keepers = []

    def build(**parameters):
        given = {name.replace("__", "."): str(v) if name == "map_path" else v for name, v in parameters.items()}
        keepers.append(MapKeeper(FrontEnd(Config.from_flat({**PARAMETERS, **given}))))
        return keepers[-1]

    yield build
    for keeper in keepers:
        keeper.close()


def walk(keeper, count, start=0):
    """Process images of a walk along the wall; (tracked, loops) of each."""
    out = []
    for i in range(start, start + count):
        picture = np.ascontiguousarray(WALL[:, 20 * i : 20 * i + 200])
        out.append(keeper._front_end.process(helpers.frame(picture, helpers.T0 + i * helpers.SECOND)))
        assert not out[-1][0].faults and not out[-1][1].faults
    return out


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def content(path):
    """(session, stamp, pixels, number of pairs) of all keyframes, from the file."""
    with MapReader(path) as m:
        entries = [m.entry(h.id) for h in m.headers()]
    return [
        (e.keyframe.session, e.keyframe.stamp_ns, e.keyframe.features.keypoints.tobytes(), len(e.pairs))
        for e in entries
    ]


def files(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


# -- start and end -----------------------------------------------------------------------------


def test_a_run_has_a_file_of_its_own_where_none_is_named(make, state):
    keeper = make()
    assert keeper.start().endswith("is new")
    assert keeper.path.parent == state and state == state_folder() / "sessions"
    seen = [t.keyframe.features.keypoints.tobytes() for t, _ in walk(keeper, 4)]
    keeper.close()
    stored = content(keeper.path)
    assert [(session, pixels) for session, _, pixels, _ in stored] == [(0, pixels) for pixels in seen]
    assert files(state) == [keeper.path.name]


def test_a_run_without_keyframes_leaves_no_file(make, state):
    keeper = make()
    keeper.start()
    assert len(files(state)) == 1
    keeper.close()
    assert files(state) == []


def test_only_the_newest_files_of_earlier_runs_are_kept(make, state):
    state.mkdir(parents=True)
    names = [f"2024010{i}T000000.000000Z-1.vmap" for i in range(5)]
    for name in names:
        (state / name).write_text("a map")
    held = WriterLock(state / names[0])
    keeper = make(map__keep_sessions=2)
    keeper.start()
    held.release()
    assert files(state) == [names[0], *names[3:], keeper.path.name]


def test_a_map_is_made_and_continued(make, tmp_path):
    path = tmp_path / "a.vmap"
    first = make(map_path=path)
    assert first.start() == f"{path} is new"
    walk(first, 3)
    first.close()
    second = make(map_path=path)
    assert second.start() == f"{path} is continued: 3 keyframes, session 1"
    assert second.status().first_id == 3
    results = walk(second, 3)
    assert [t.keyframe.id for t, _ in results] == [3, 4, 5]
    loops = [p for _, found in results for p in found.pairs]
    assert {p.kind for p in loops} == {PairKind.LOOP} and {0, 1, 2} & {p.ref_kf_id for p in loops if len(p.matches)}
    second.close()
    assert [(session, stamp) for session, stamp, _, _ in content(path)] == [
        (session, helpers.T0 + i * helpers.SECOND) for session in (0, 1) for i in range(3)
    ]


def test_what_cannot_be_meant_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="mode: localization needs a map"):
        make(mode="localization").start()
    with pytest.raises(ConfigError, match="map_path: the folder .*/no does not exist; create it"):
        make(map_path=tmp_path / "no" / "a.vmap").start()
    with pytest.raises(MapFileError, match="a.vmap"):
        make(map_path=tmp_path / "a.vmap", mode="localization").start()
    (tmp_path / "text.vmap").write_text("no map")
    with pytest.raises(MapFileError, match="text.vmap is no map"):
        make(map_path=tmp_path / "text.vmap").start()
    assert (tmp_path / "text.vmap").read_text() == "no map"


def test_a_map_has_one_writer(make, tmp_path):
    path = tmp_path / "a.vmap"
    first = make(map_path=path)
    first.start()
    walk(first, 1)
    first.flush()
    with pytest.raises(MapError, match=f"a.vmap: another process .*{os.getpid()}.* writes to this map"):
        make(map_path=path).start()
    reader = make(map_path=path, mode="localization")
    assert reader.start() == f"localising in {path}: 1 keyframe"


# -- save --------------------------------------------------------------------------------------


def test_save_copies_the_running_map_and_mapping_goes_on(make, tmp_path):
    keeper, target = make(), tmp_path / "a.vmap"
    keeper.start()
    assert (keeper.status().last_save, np.isnan(keeper.status().last_save_age_s)) == ("", True)
    walk(keeper, 3)
    text = keeper.save(target)
    assert text == f"3 keyframes in {target}, {target.stat().st_size / 1e6:.1f} MB"
    assert keeper.status().last_save == text and 0 <= keeper.status().last_save_age_s < 60
    assert content(target) == content(keeper.path) and len(content(target)) == 3
    walk(keeper, 2, start=3)
    keeper.save(target)  # an older one is replaced
    assert len(content(target)) == 5 and files(tmp_path) == ["a.vmap", "state"]


def test_save_of_the_running_map_itself(make, tmp_path):
    path = tmp_path / "a.vmap"
    keeper = make(map_path=path)
    keeper.start()
    walk(keeper, 2)
    (tmp_path / "link.vmap").symlink_to(path)
    for name in ("a.vmap", "link.vmap", "state/../a.vmap"):
        assert "2 keyframes in" in keeper.save(tmp_path / name) and "the running map" in keeper.save(tmp_path / name)
    assert len(content(path)) == 2 and (tmp_path / "link.vmap").is_symlink()


def test_what_save_refuses_stays_as_it_was(make, tmp_path):
    keeper = make()
    keeper.start()
    walk(keeper, 2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MapError, match="notes.txt is no map.*it is not replaced"):
        keeper.save(tmp_path / "notes.txt")
    with pytest.raises(MapError, match="the folder .*/no does not exist; create it"):
        keeper.save(tmp_path / "no" / "a.vmap")
    with pytest.raises(MapError, match="folder"):
        keeper.save(tmp_path)
    other = make(map_path=tmp_path / "other.vmap")
    other.start()
    with pytest.raises(MapError, match="other.vmap: another process .*writes to this map"):
        keeper.save(tmp_path / "other.vmap")
    assert (tmp_path / "notes.txt").read_text() == "mine" and keeper.status().last_save == ""
    assert files(tmp_path) == ["notes.txt", "other.vmap", "state"]
    assert walk(keeper, 1, start=2)[0][0].keyframe.id == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root ignores permissions")
def test_a_folder_that_cannot_be_written(make, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    keeper = make()
    keeper.start()
    walk(keeper, 1)
    with pytest.raises(MapError, match="a.vmap.*Permission denied"):
        keeper.save(folder / "a.vmap")


def test_a_map_in_memory_is_told_and_can_be_saved(make, tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    keeper = make()
    assert keeper.start().startswith("the map is in memory only: ")
    seen = [t.keyframe.features.keypoints.tobytes() for t, _ in walk(keeper, 4)]
    status = keeper.status()
    assert (status.path, status.keyframes, status.stored) == ("", 4, 0)
    assert "in memory only" in status.warning and "map_path" in status.warning
    with pytest.raises(MapError, match="in memory only.*save it, and load it"):
        keeper.set_localization(True)
    assert keeper.save(tmp_path / "a.vmap").startswith("4 keyframes in")
    assert [pixels for _, _, pixels, _ in content(tmp_path / "a.vmap")] == seen
    assert keeper.load(tmp_path / "a.vmap").endswith("is continued: 4 keyframes, session 1")
    assert keeper.status().warning == ""


def test_a_disk_that_fails(make, tmp_path, monkeypatch):
    keeper = make()
    keeper.start()

    def fails(self, *entries):
        raise MapError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(MapWriter, "append", fails)
        walk(keeper, 3)
        with pytest.raises(MapError, match="disk is full"):
            keeper.save(tmp_path / "a.vmap")
        status = keeper.status()
        assert (status.stored, status.waiting) == (0, 3) and "disk is full" in status.problem
        assert not (tmp_path / "a.vmap").exists()
    assert keeper.save(tmp_path / "a.vmap").startswith("3 keyframes")
    assert keeper.status().problem == ""


# -- load --------------------------------------------------------------------------------------


@pytest.fixture
def saved(make, tmp_path):
    """A map of four keyframes."""
    keeper = make(map_path=tmp_path / "saved.vmap")
    keeper.start()
    walk(keeper, 4)
    keeper.close()
    return tmp_path / "saved.vmap"


def test_load_continues_another_map(make, saved):
    keeper = make()
    keeper.start()
    own = keeper.path
    walk(keeper, 2)
    assert keeper.load(saved) == f"{saved} is continued: 4 keyframes, session 1"
    assert len(content(own)) == 2, "the map before stays whole"
    assert walk(keeper, 1)[0][0].keyframe.id == 4
    assert "it is the running map already" in keeper.load(saved)
    keeper.flush()
    assert len(content(saved)) == 5


def broken(path, what):
    data = bytearray(path.read_bytes())
    if what == "magic":
        data[0] ^= 1
    elif what == "version":
        data[60:64] = (int.from_bytes(data[60:64], "big") + 1).to_bytes(4, "big")
    elif what == "cut":
        del data[len(data) // 2 :]
    elif what == "descriptor":  # read when the index is built, after the file was opened
        with MapReader(path) as m:
            blob = m.keyframe(2).global_descriptor.astype("<f4").tobytes()[:64]
            half = m.keyframe(2).global_descriptor.astype("<f2").tobytes()[:64]
        at = max(data.find(blob), data.find(half))
        assert at > 0
        data[at + 10] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["magic", "version", "cut", "descriptor", "missing", "folder"])
def test_a_map_that_cannot_be_loaded_changes_nothing(make, saved, tmp_path, what):
    keeper = make()
    keeper.start()
    walk(keeper, 2)
    path = {"missing": tmp_path / "saved_.vmap", "folder": tmp_path}.get(what, saved)
    if path == saved:
        broken(saved, what)
    before, running, own = digest(saved), keeper._front_end.keyframes, keeper.path
    with pytest.raises(MapError, match=path.name):
        keeper.load(path)
    assert keeper._front_end.keyframes is running and keeper.path == own and digest(saved) == before
    assert walk(keeper, 1, start=2)[0][0].keyframe.id == 2
    WriterLock(saved).release()  # nobody holds it


def test_a_map_of_other_models_is_refused_by_both_names(make, saved):
    keeper = make(features__name="sift")
    keeper.start()
    with pytest.raises(IdentityError, match="orb.*sift|sift.*orb"):
        keeper.load(saved)
    with pytest.raises(IdentityError):
        make(features__name="sift", map_path=saved).start()
    with pytest.raises(IdentityError):
        make(features__name="sift", map_path=saved, mode="localization").start()


def test_maps_are_exchanged_between_frames(make, saved):
    keeper, steps = make(), []

    @contextmanager
    def between_frames():
        steps.append("in")
        yield
        steps.append("out")

    keeper._between_frames, keeper._exchanged = between_frames, lambda: steps.append("exchanged")
    keeper.start()
    steps.clear()
    keeper.load(saved)
    keeper.set_localization(True)
    assert steps == ["in", "exchanged", "out"] * 2


# -- localisation ------------------------------------------------------------------------------


def test_localisation_recognises_from_the_first_frame_and_changes_nothing(make, saved):
    before = digest(saved)
    keeper = make(map_path=saved, mode="localization")
    assert keeper.start() == f"localising in {saved}: 4 keyframes"
    results = walk(keeper, 3)
    best = [max(loops.pairs, key=lambda p: p.matches.num_inliers) for _, loops in results]
    assert [(p.kind, p.kf_id, p.ref_kf_id) for p in best] == [(PairKind.RELOCALISATION, 4 + i, i) for i in range(3)]
    status = keeper.status()
    assert (status.mode, status.keyframes, status.first_id, status.stored) == ("localization", 7, 4, 4)
    assert keeper.save(saved).startswith("4 keyframes in")
    assert keeper.reset(forget=True) and keeper.status().keyframes == 4
    assert walk(keeper, 1)[0][0].keyframe.id == 4
    assert keeper.reset(forget=False) and keeper.status().mode == "localization"
    keeper.close()
    assert digest(saved) == before and not list(saved.parent.glob("saved.vmap?*"))


def test_localisation_is_switched_on_and_off(make, state):
    keeper = make()
    keeper.start()
    path = keeper.path
    with pytest.raises(MapError, match="has no keyframe yet"):
        keeper.set_localization(True)
    assert "nothing changed" in keeper.set_localization(False)
    walk(keeper, 3)
    assert keeper.set_localization(True) == f"localising in {path}: 3 keyframes"
    before = digest(path)
    assert {p.kind for _, loops in walk(keeper, 2) for p in loops.pairs} == {PairKind.RELOCALISATION}
    assert digest(path) == before
    other = make(map_path=path)
    other.start()
    with pytest.raises(MapError, match="another process"):
        keeper.set_localization(False)
    assert keeper.status().mode == "localization" and walk(keeper, 1, start=2)
    other.close()
    assert keeper.set_localization(False) == f"{path} is continued: 3 keyframes, session 1"
    assert walk(keeper, 1)[0][0].keyframe.id == 3
    keeper.close()
    assert [session for session, *_ in content(path)] == [0, 0, 0, 1]


# -- reset -------------------------------------------------------------------------------------


def test_a_reset_begins_an_empty_map_and_leaves_the_old_one(make, saved, state):
    keeper = make(map_path=saved)
    keeper.start()
    walk(keeper, 2)
    assert keeper.reset(forget=True)
    assert keeper.path.parent == state and f"{saved} was left (reset)" in keeper.status().warning
    assert walk(keeper, 1)[0][0].keyframe.id == 0
    assert len(content(saved)) == 6
    own = keeper.path
    assert keeper.reset(forget=False), "a file of this run begins anew at a jump back in time, too"
    assert keeper.path != own and len(content(own)) == 1
    keeper.close()
    assert files(state) == [own.name]


def test_a_jump_back_in_time_continues_a_named_map(make, saved):
    keeper = make(map_path=saved)
    keeper.start()
    walk(keeper, 2)
    assert not keeper.reset(forget=False)
    assert keeper.path == saved and keeper.status().warning == ""
    assert walk(keeper, 1)[0][0].keyframe.id == 6
    keeper.close()
    assert [session for session, *_ in content(saved)] == [0, 0, 0, 0, 1, 1, 2]


def test_a_map_that_cannot_be_continued_after_a_jump_is_told(make, saved, state, monkeypatch):
    keeper = make(map_path=saved)
    keeper.start()
    walk(keeper, 1)
    opens = running_map.FileStore

    def fails(path, *args, **options):
        if path == saved or no_folder:
            raise MapError(f"{path} is gone")
        return opens(path, *args, **options)

    monkeypatch.setattr(running_map, "FileStore", fails)
    no_folder = False
    assert keeper.reset(forget=False)
    assert keeper.path.parent == state and f"{saved} was left ({saved} is gone)" in keeper.status().warning
    assert walk(keeper, 1)[0][0].keyframe.id == 0
    no_folder = True
    assert keeper.reset(forget=True)
    assert keeper.path is None and "in memory only" in keeper.status().warning
    assert walk(keeper, 1)[0][0].keyframe.id == 0


def test_a_localisation_goes_on_where_its_file_is_gone(make, saved):
    keeper = make(map_path=saved, mode="localization")
    keeper.start()
    walk(keeper, 1)
    saved.unlink()
    assert keeper.reset(forget=True)
    assert walk(keeper, 1, start=1)[0][0].keyframe.id == 4


def test_status_without_a_start_is_that_of_memory(make):
    assert replace(make().status(), last_save_age_s=0.0).path == ""


def test_damaged_headers_are_named(make, saved):
    data = bytearray(saved.read_bytes())
    at = data.find((helpers.T0 + helpers.SECOND).to_bytes(8, "big"))
    assert at > 0
    data[at + 7] ^= 1
    saved.write_bytes(data)
    with pytest.raises(MapDamagedError, match="saved.vmap.*keyframes"):
        make(map_path=saved).start()
    WriterLock(saved).release()
