"""Maps of replays: made, continued, localised in, interrupted, killed, on a full disk; and what the report says."""

import dataclasses
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import cv2
import helpers
import numpy as np
import pytest

from vslam_features.cli.main import main
from vslam_features.config import Config
from vslam_features.errors import ConfigError, DataError, IdentityError
from vslam_features.frontend import FrontEnd
from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.replay.loop_truth import LoopTruth
from vslam_features.replay.metrics import judge_loops, metrics
from vslam_features.replay.open_source import open_source
from vslam_features.replay.plots import _described, loop_matrix, trajectory
from vslam_features.replay.report import judge, write_report
from vslam_features.replay.run_log import KeyframeRecord, MapRecord, MatchPoints, PairRecord, RunLog
from vslam_features.replay.runner import _uninterrupted, replay
from vslam_features.types import Candidate, PairKind, Pose, Status

COUNT = 24
SETTINGS = {
    "features.name": "orb",
    "features.max_keypoints": 120,
    "matcher.name": "nearest",
    "loops.consensus": 1,
    "loops.min_inlier_share": 0.0,
}
CONFIG = Config.from_flat(SETTINGS)
SET = [text for name, value in SETTINGS.items() for text in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder: along a wall and back, so that the second half revisits the first."""
    wall = helpers.image(200, 700)
    folder = tmp_path_factory.mktemp("walk")
    for i in range(COUNT):
        x = 20 * min(i, COUNT - 1 - i)
        cv2.imwrite(str(folder / f"{i:02d}.png"), wall[:, x : x + 240])
    return folder


def run(images, map_path=None, mode="new", config=CONFIG, **options):
    with open_source(images, config) as source:
        return replay(source, map_path=map_path, map_mode=mode, **options)


@pytest.fixture(scope="module")
def house(images, tmp_path_factory):
    """(file, log) of a map of the walk."""
    path = tmp_path_factory.mktemp("map") / "house.vmap"
    return path, run(images, path)


@pytest.fixture
def copy(house, tmp_path):
    path = tmp_path / "copy.vmap"
    path.write_bytes(house[0].read_bytes())
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def entries(path):
    """All entries of a map without damage as plain values, without what is measured in milliseconds."""
    report = verify(path)
    assert not report.damaged and not report.oddities, report.damages
    with MapReader(path) as m:
        found = [m.entry(h.id) for h in m.headers()]
    return [plain(e) for e in found]


def plain(value):
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "elapsed_ms"}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return "nan" if isinstance(value, float) and value != value else value


def stable(numbers):
    """What must not differ between runs."""
    numbers = json.loads(json.dumps(numbers, allow_nan=False))
    del numbers["latency_ms"], numbers["provenance"]["run"]
    return numbers


# -- one run after another -----------------------------------------------------------------------


def test_a_map_changes_no_result_and_without_one_nothing_is_written(images, house, tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_STATE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    without = stable(metrics(run(images)))
    assert list(tmp_path.iterdir()) == [] and "map" not in without and "relocalisation" not in without
    mapped = stable(metrics(house[1]))
    assert mapped.pop("map") == {
        "name": "house.vmap", "mode": "new", "session": 0, "keyframes_before": 0, "keyframes_after": COUNT,
        "loops_with_older_sessions": 0, "problems": [],
    }  # fmt: skip
    assert mapped["provenance"]["config"].pop("map_path") == "house.vmap"
    assert without["provenance"]["config"].pop("map_path") == "" and mapped == without
    assert mapped["loops"]["verified"] > 0


def test_the_map_has_what_the_run_found(house):
    path, log = house
    with MapReader(path) as m:
        found = [m.entry(h.id) for h in m.headers()]
    pairs = [(p.kind, p.kf_id, p.ref_kf_id, p.matches.status, p.matches.num_inliers) for e in found for p in e.pairs]
    assert sorted(pairs) == sorted((p.kind, p.kf_id, p.ref_kf_id, p.status, p.num_inliers) for p in log.pairs)
    candidates = [(c.kf_id, c.ref_kf_id, c.similarity, c.rank) for e in found for c in e.candidates]
    assert candidates == [(c.kf_id, c.ref_kf_id, c.similarity, c.rank) for c in log.candidates]
    assert [len(e.keyframe.features) for e in found] == [k.num_keypoints for k in log.keyframes]
    assert log.map.file_bytes == path.stat().st_size == metrics(log)["provenance"]["run"]["map_file_bytes"]
    assert sorted(p.name for p in path.parent.iterdir() if not p.name.startswith(".")) == ["house.vmap"]


def test_two_runs_give_equal_maps_and_equal_numbers_wherever_the_map_lies(images, house, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    again = run(images, folder / "house.vmap")
    assert entries(folder / "house.vmap") == entries(house[0])
    assert stable(metrics(again)) == stable(metrics(house[1]))


def test_a_map_is_continued(images, house, copy):
    before = entries(copy)
    log = run(images, copy, "continue")
    numbers = metrics(log)
    assert log.first_id == COUNT and [k.id for k in log.keyframes] == list(range(COUNT, 2 * COUNT))
    assert (numbers["map"]["keyframes_before"], numbers["map"]["keyframes_after"]) == (COUNT, 2 * COUNT)
    assert numbers["map"]["session"] == 1 and numbers["map"]["loops_with_older_sessions"] > COUNT / 2
    assert numbers["keyframes"] == COUNT and "relocalisation" not in numbers
    after = entries(copy)
    assert after[:COUNT] == before and [e["keyframe"]["session"] for e in after[COUNT:]] == [1] * COUNT
    # A keyframe of the same image is found at once; features are those of the first session.
    assert numbers["loops"]["pairs"][0][0] == COUNT
    for now, old in zip(after[COUNT:], before):
        assert now["keyframe"]["features"] == old["keyframe"]["features"]
    third = run(images, copy, "continue", max_frames=2)
    assert third.map.session == 2 and third.map.before == 2 * COUNT and third.map.after == 2 * COUNT + 2


def test_localisation_reads_only_and_counts_what_it_recognised(images, house):
    path, _ = house
    sha = digest(path)
    log = run(images, path, "localize")
    assert digest(path) == sha
    numbers = metrics(log)
    located = numbers["relocalisation"]
    assert located["first"] == [COUNT, 0] and located["keyframes"] == COUNT and located["share"] == 1.0
    assert located["attempted"] == numbers["by_kind"]["relocalisation"]["pairs"] > 0
    assert located["verified"] == len(located["pairs"]) and all(ref < COUNT <= kf for kf, ref in located["pairs"])
    assert numbers["loops"]["attempted"] == numbers["loops"]["verified"] == 0 and numbers["loops"]["candidates"] > 0
    assert numbers["map"]["keyframes_after"] == numbers["map"]["keyframes_before"] == COUNT
    assert stable(metrics(run(images, path, "localize"))) == stable(numbers)


def test_more_keyframes_than_a_localisation_keeps(images, house, monkeypatch):
    monkeypatch.setattr("vslam_features.maps.keyframe_map.LOCALISATION_KEEPS", 4)
    log = run(images, house[0], "localize")
    assert len(log.keyframes) == COUNT and not log.fault_counts


# -- what is refused ------------------------------------------------------------------------------


def refused(capsys, *argv):
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "mode, name, texts",
    [([], "copy.vmap", ["is there already", "--map-mode continue", "localize"]),
     (["--map-mode", "continue"], "no.vmap", ["no such map", "--map-mode new"]),
     (["--map-mode", "localize"], "no.vmap", ["no such map", "--map-mode new"]),
     ([], "no/a.vmap", ["folder", "does not exist"]),
     (["--map-mode", "continue"], "text.vmap", ["text.vmap", "no map"]),
     (["--map-mode", "localize", "--loop-matrix", "m.png"], "copy.vmap", ["--loop-matrix"])],
)  # fmt: skip
def test_a_map_that_does_not_fit_the_mode_is_refused(images, copy, tmp_path, capsys, mode, name, texts):
    (tmp_path / "text.vmap").write_text("not a map " * 2000)
    before = digest(copy), digest(tmp_path / "text.vmap")
    code, err = refused(capsys, "replay", images, "--out", tmp_path / "o", "--map", tmp_path / name, *mode, *SET)
    assert code == 1 and all(text in err for text in texts), err
    assert (digest(copy), digest(tmp_path / "text.vmap")) == before


def test_an_earlier_result_is_kept_where_the_map_is_refused(images, copy, tmp_path, capsys):
    (tmp_path / "metrics.json").write_text("{}")
    assert refused(capsys, "replay", images, "--out", tmp_path, "--map", copy, *SET)[0] == 1
    assert (tmp_path / "metrics.json").read_text() == "{}"


def test_a_mode_needs_a_map(images, capsys):
    code, err = refused(capsys, "replay", images, "--map-mode", "localize")
    assert code == 1 and "--map FILE" in err
    with pytest.raises(ConfigError, match="new, continue, localize"):
        run(images, "a.vmap", "append")


def test_a_map_of_other_features_is_refused(images, copy):
    before = digest(copy)
    for mode in ("continue", "localize"):
        with pytest.raises(IdentityError, match="'orb'.*'sift'"):
            run(images, copy, mode, Config.from_flat({**SETTINGS, "features.name": "sift"}))
    assert digest(copy) == before


def test_the_map_of_a_node_is_left_alone(images, copy):
    before = digest(copy)
    log = run(images, config=CONFIG.with_values(map_path=str(copy)), max_frames=2)
    assert digest(copy) == before and log.map is None and log.first_id == 0
    assert any("--map names the map" in note for note in log.notes)


def test_truth_of_the_images_says_nothing_of_older_keyframes(images, copy):
    log = run(images, copy, "continue", max_frames=2)
    with pytest.raises(DataError, match="24 keyframes were in the map before"):
        judge_loops(log, LoopTruth(np.zeros((COUNT, COUNT), bool)))


# -- runs that end early ----------------------------------------------------------------------------


def test_ctrl_c_leaves_a_whole_map(images, tmp_path, capsys, monkeypatch):
    track, calls = FrontEnd.track, []

    def interrupted(self, frame):
        calls.append(frame)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)  # while the image is worked on
        return track(self, frame)

    monkeypatch.setattr(FrontEnd, "track", interrupted)
    path = tmp_path / "a.vmap"
    code = main(["replay", str(images), "--out", str(tmp_path / "o"), "--map", str(path), *SET])
    captured = capsys.readouterr()
    assert code == 130 and "interrupted after 7 of 24" in captured.err
    numbers = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert numbers["map"]["keyframes_after"] == numbers["keyframes"] == 7 and numbers["map"]["problems"] == []
    monkeypatch.setattr(FrontEnd, "track", track)
    run(images, tmp_path / "whole.vmap", max_frames=7)
    assert entries(path) == entries(tmp_path / "whole.vmap")


def test_only_the_second_ctrl_c_breaks_in():
    done = []
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("second")
    assert done == ["first"]
    with pytest.raises(KeyboardInterrupt):
        with _uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("whole")
        done.append("not reached")
    assert done == ["first", "whole"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_replay_in_another_thread(images, tmp_path):
    logs = []
    thread = threading.Thread(target=lambda: logs.append(run(images, tmp_path / "a.vmap", max_frames=3)))
    thread.start()
    thread.join()
    assert logs[0].map.after == 3


def test_a_new_map_that_got_no_keyframe_is_not_left(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no picture")
    log = run(tmp_path / "in", tmp_path / "a.vmap")
    assert log.frames == 0 and log.map.after == 0 and not (tmp_path / "a.vmap").exists()


def test_an_error_in_the_source_leaves_a_whole_map(images, tmp_path):
    def progress(done, total):
        if done == 5:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(images, tmp_path / "a.vmap", progress=progress)
    assert len(entries(tmp_path / "a.vmap")) == 5
    assert run(images, tmp_path / "a.vmap", "continue", max_frames=1).map.before == 5


def command(images, out, path, *more):
    return [sys.executable, "-m", "vslam_features", "replay", str(images), "--out", str(out), "--no-report",
            "--map", str(path), *SET, *more]  # fmt: skip


def test_a_full_disk_is_told_and_what_is_in_the_map_is_whole(images, house, tmp_path):
    limit = house[0].stat().st_size // 2
    done = subprocess.run(
        command(images, tmp_path / "o", tmp_path / "a.vmap"),
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1 and "error: the map is not whole: a.vmap: " in done.stderr, done.stderr
    numbers = json.loads((tmp_path / "o" / "metrics.json").read_text())
    stored = numbers["map"]["keyframes_after"]
    assert 0 < stored < COUNT == numbers["keyframes"] and numbers["map"]["problems"]
    assert "limit of file sizes" in numbers["map"]["problems"][0]
    assert entries(tmp_path / "a.vmap") == entries(house[0])[:stored]
    more = run(images, tmp_path / "a.vmap", "continue", max_frames=3)  # there is room again
    assert more.map.before == stored and more.map.after == stored + 3


def test_the_report_of_a_map_that_is_not_whole(house, tmp_path):
    log = dataclasses.replace(house[1], map=MapRecord("a.vmap", "new", problems=["a.vmap: disk <full>"]))
    numbers = metrics(log)
    assert judge(log, numbers).level == "bad" and "not whole" in judge(log, numbers).title
    html = write_report(tmp_path / "r.html", log, numbers).read_text()
    assert html.count("disk &lt;full&gt;") == 2


LONG = [pytest.mark.slow, pytest.mark.endurance]


@pytest.mark.parametrize("keyframes", [6, *(pytest.param(n, marks=LONG) for n in (1, 3, 11, 16))])
def test_a_replay_that_is_killed_leaves_a_map_to_go_on_with(images, house, tmp_path, keyframes):
    path = tmp_path / "a.vmap"
    with open(tmp_path / "said", "wb") as said:
        child = subprocess.Popen(command(images, tmp_path / "o", path, "--rate", "0.4"), stdout=said, stderr=said)
        end = time.monotonic() + 60
        while stored(path) < keyframes:
            assert child.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
            time.sleep(0.01)
        child.kill()
        child.wait()
    whole = entries(path)
    assert keyframes <= len(whole) < COUNT and whole == entries(house[0])[: len(whole)]
    assert main(["replay", str(images), "--out", str(tmp_path / "o"), "--map", str(path), "--map-mode", "continue",
                 *SET]) == 0  # fmt: skip
    after = entries(path)
    assert after[: len(whole)] == whole and [e["keyframe"]["session"] for e in after[len(whole) :]] == [1] * COUNT


def stored(path):
    if not path.exists():
        return 0
    with MapReader(path) as m:
        return len(m.headers())


# -- the report -----------------------------------------------------------------------------------


def test_the_report_of_a_new_map(house, tmp_path):
    html = write_report(tmp_path / "r.html", house[1], metrics(house[1])).read_text()
    assert "<h2>Map</h2>" in html and "house.vmap is new, with 24 keyframes" in html and "of the map" not in html


def test_the_report_of_a_continued_map(images, copy, tmp_path):
    log = run(images, copy, "continue")
    assert set(log.older) and max(log.older) < COUNT and all(k.picture for k in log.older.values())
    html = write_report(tmp_path / "r.html", log, metrics(log)).read_text()
    for text in ("<h2>Map</h2>", "had 24 keyframes; session 1 added 24", "from keyframe 24 on", "dashed line",
                 "</b> of the map:", "by its thumbnail", "verified loop", 'class="border"'):  # fmt: skip
        assert text in html, text


def test_the_report_of_a_localisation(images, house, tmp_path, capsys):
    out = tmp_path / "o"
    code = main(["replay", str(images), "--out", str(out), "--map", str(house[0]), "--map-mode", "localize", *SET])
    table = capsys.readouterr().out
    assert code == 0 and "24 of 24 keyframes, first in image 0" in table and "house.vmap, localize" in table
    html = (out / "report.html").read_text()
    for text in ("24 of 24 keyframes were recognised in the map (100%), the first in image 0", "relocalised",
                 "was only read", "Clearest recognised places", "those of the map (across)", "keyframe of the map",
                 '<th class="n">relocalisation</th>', "</b> of the map:"):  # fmt: skip
        assert text in html, text
    assert "loop was tried" not in html and "verified loop" not in html


def test_a_localisation_that_recognises_nothing_is_no_success(house, tmp_path):
    rng, folder = np.random.default_rng(3), tmp_path / "other"
    folder.mkdir()
    for i in range(3):
        cv2.imwrite(str(folder / f"{i}.png"), cv2.blur(rng.integers(0, 256, (200, 240), np.uint8), (5, 5)))
    log = run(folder, house[0], "localize")
    numbers = metrics(log)
    assert numbers["relocalisation"]["keyframes"] == 0 and numbers["relocalisation"]["first"] is None
    verdict = judge(log, numbers)
    assert verdict.level != "good" and any("0 of 3 keyframes" in line for line in verdict.lines)
    write_report(tmp_path / "r.html", log, numbers)


def test_similarities_with_a_large_map_stay_bounded():
    log = RunLog(first_id=9000, max_descriptors=100, map=MapRecord("a", "localize", 1, 9000, 9000))
    log.add_older_descriptors((i, np.full(4, i, np.float32)) for i in range(9000))
    for i in range(9000, 9004):
        log.add_keyframe(KeyframeRecord(i, i, "cam", i - 9000, (64, 48), 5))
        log.add_descriptor(i, np.full(4, i, np.float32))
    assert len(log.descriptors) == 104
    shown, table = _described(log, range(9000))
    assert len(shown) == 800 and (np.abs(table[:, 0] - shown) < 95).all()
    log.candidates.append(Candidate(9003, 8000, 0, 0.5, 0.1, 0))
    assert "keyframe of the map" in loop_matrix(log) and ">9000<" in loop_matrix(log)


def test_older_keyframes_are_not_drawn_where_poses_are_of_other_sessions():
    log = RunLog(first_id=5, map=MapRecord("a", "continue", 1, 5, 8))
    far = Pose(np.eye(3), np.array([999.0, 0, 0]))
    log.add_older(KeyframeRecord(2, 0, "cam", -1, (64, 48), 9, far))
    for i in range(5, 8):
        log.add_keyframe(KeyframeRecord(i, i, "cam", i - 5, (64, 48), 9, Pose(np.eye(3), np.array([i, 0.0, 0]))))
    log.add_pair(PairRecord(PairKind.LOOP, Status.OK, 6, 2, 50, 40))
    drawn = trajectory(log)
    assert 'class="loop"' in drawn and "<line" not in drawn and "999" not in drawn


def test_pairs_with_keyframes_of_the_map_that_were_never_seen(tmp_path):
    """As in a recording of topics, where only the ids are known."""
    log = RunLog(first_id=5, frames=2, expected=2)
    for i in (5, 6):
        log.add_keyframe(KeyframeRecord(i, i, "cam", i - 5, (64, 48), 9))
    points = MatchPoints(*[np.ones((20, 2), np.float32)] * 2, np.ones(20, bool))
    log.add_pair(PairRecord(PairKind.RELOCALISATION, Status.OK, 6, 3, 20, 20), points)
    log.add_pair(PairRecord(PairKind.RELOCALISATION, Status.OK, 6, 7, 20, 20), points)
    log.candidates.append(Candidate(6, 3, 0, 0.5, 0.1, 0))
    assert log.leave_out_unseen() == [7]
    numbers = metrics(log)
    assert numbers["relocalisation"]["pairs"] == [[6, 3]] and numbers["relocalisation"]["first"] == [6, 1]
    html = write_report(tmp_path / "r.html", log, numbers).read_text()
    assert "<b>6 with 3</b> of the map" in html and "1 of 2 keyframes was recognised" in html
