"""A recording through the front end: numbers that repeat, honest ends, a report that opens anywhere."""

import json
import re
import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import pytest
from bag_helpers import IMAGE, INFO, POSE, STEP, T0, Messages, write

from vslam_features.config import Config
from vslam_features.errors import ConfigError, DataError, ImageError
from vslam_features.replay.files import write_json
from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.loop_truth import LoopTruth
from vslam_features.replay.metrics import judge_loops, metrics
from vslam_features.replay.open_source import open_source
from vslam_features.replay.pictures import encode, side_by_side, with_header
from vslam_features.replay.plots import _similarity, sparkline, ticks, timeline
from vslam_features.replay.report import MEANING, judge, write_report
from vslam_features.replay.run_log import KeyframeRecord, MatchPoints, PairRecord, RunLog
from vslam_features.replay.runner import _without_folder, replay
from vslam_features.types import Candidate, PairKind, Pose, Status

SIZE = (200, 160)
# Short recordings: every image counts, and a revisit after ten of them is a loop.
CONFIG = Config().with_values(
    keyframes__every=1, retrieval__exclude_s=1.0, loops__consensus=1, features__max_keypoints=300
)


def walk(count=30):
    """Images of a camera that pans along a wall and back, so the second half revisits the first."""
    noise = np.random.default_rng(5).integers(0, 256, (60, 240), np.uint8)
    wall = cv2.resize(noise, (1200, 300), interpolation=cv2.INTER_CUBIC)
    for i in range(count):
        x = 10 * min(i, count - 1 - i)
        yield x, np.ascontiguousarray(wall[20 : 20 + SIZE[1], x : x + SIZE[0]])


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """A recording of the walk with camera_info and poses."""
    m, items = Messages(), []
    for i, (x, image) in enumerate(walk()):
        stamp = T0 + i * STEP
        items.append((INFO, stamp, m.info(stamp, *SIZE, focal=150.0)))
        items.append((POSE, stamp, m.pose(stamp, x / 150)))
        items.append((IMAGE, stamp, m.image(stamp, image)))
    return write(tmp_path_factory.mktemp("replay") / "walk", items)


def run(path, **options):
    with open_source(path, CONFIG) as source:
        return replay(source, **options)


@pytest.fixture(scope="module")
def log(bag):
    return run(bag)


def stable(numbers):
    """What must not differ between runs."""
    numbers = json.loads(json.dumps(numbers, allow_nan=False))
    del numbers["latency_ms"], numbers["provenance"]["run"]
    return numbers


def test_two_runs_and_any_two_rates_give_equal_metrics(bag, log):
    first = stable(metrics(log))
    assert stable(metrics(run(bag))) == first
    assert stable(metrics(run(bag, rate=10.0))) == first


def test_a_paced_run_takes_its_time(bag):
    assert run(bag, rate=5.0, max_frames=11).run["seconds"] >= 0.2


def test_metrics_have_what_was_promised(log):
    m = metrics(log)
    for key in ("frames", "keyframes", "pairs", "matches_median", "inliers_median", "inlier_ratio_median",
                "zero_match_pairs", "statuses", "non_finite", "loops", "latency_ms", "provenance"):  # fmt: skip
        assert key in m
    assert m["frames"] == m["keyframes"] == 30 and m["input"]["complete"]
    assert sum(m["statuses"].values()) == m["pairs"] == 29 + m["loops"]["attempted"]
    assert m["loops"]["verified"] == len(m["loops"]["pairs"]) > 0
    assert {"candidates", "verified", "ambiguous", "gated", "pairs"} <= set(m["loops"])
    assert set(m["latency_ms"]["frame"]) == {"p50", "p95"} and "describe" in m["latency_ms"]
    p = m["provenance"]
    assert p["config"]["keyframes"]["every"] == 1 and "sift" in p["models"]["features"]
    assert p["source"]["image_topic"] == IMAGE and "opencv" in p["libraries"] and "seconds" in p["run"]
    assert m["retrieval"]["top1"] and all(len(row) == 3 for row in m["retrieval"]["top1"])


def test_progress_and_max_frames(bag):
    seen = []
    log = run(bag, max_frames=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)] and log.frames == log.expected == 4 and not log.incomplete
    with pytest.raises(ConfigError, match="-1"):
        run(bag, max_frames=-1)


def test_a_fault_in_a_stage_is_counted_and_the_rest_goes_on(bag, monkeypatch):
    from vslam_features.features.sift import Sift

    extract, calls = Sift.extract, []

    def fails_once(self, frame):
        calls.append(frame)
        if len(calls) == 5:
            raise RuntimeError("broken on purpose")
        return extract(self, frame)

    monkeypatch.setattr(Sift, "extract", fails_once)
    log = run(bag, max_frames=10)
    m = metrics(log)
    assert m["frames"] == 10 and m["keyframes"] == 9 and m["faults"] == {"describe": 1}
    assert "broken on purpose" in log.faults[0][2] and judge(log, m).level == "bad"


def test_a_partial_read_is_told(bag, tmp_path):
    file = tmp_path / "cut.mcap"
    file.write_bytes((bag / "walk.mcap").read_bytes()[:500_000])
    log = run(file)
    m = metrics(log)
    assert 0 < m["frames"] < 30 and not m["input"]["complete"] and "damaged" in m["input"]["reason"]
    html = write_report(tmp_path / "r.html", log, m).read_text()
    assert "not read whole" in html and "damaged" in html
    assert not log.expected_known and f"{m['frames']} images processed of a damaged input" in html
    assert run(file, max_frames=3).expected_known


# -- truth -------------------------------------------------------------------------------------


def made_log(loops=(), candidates=(), n=40, exclude=10):
    log = RunLog(config={"retrieval": {"exclude_frames": exclude}}, expected=n, frames=n)
    for i in range(n):
        log.add_keyframe(KeyframeRecord(i, i * STEP, "cam", i, (64, 48), 100))
    log.candidates += [Candidate(i, j, j * STEP, 0.9, 0.1, rank) for i, j, rank in candidates]
    for i, j in loops:
        log.add_pair(PairRecord(PairKind.LOOP, Status.OK, i, j, 50, 40))
    return log


def truth_matrix(n=40):
    matrix = np.zeros((n, n), bool)
    for i in range(25, n):
        matrix[i, i - 25] = True
    return matrix


def test_recall_and_false_loops():
    log = made_log(
        loops=[(25, 0), (26, 3), (30, 5), (30, 20)],
        candidates=[(25, 0, 0), (26, 9, 0), (26, 1, 3), (27, 9, 0), (30, 5, 0)],
    )
    result = judge_loops(log, LoopTruth(truth_matrix()))
    assert result["queries"] == 15 and result["recall_at_1"] == round(2 / 15, 4)
    assert result["recall_at_5"] == round(3 / 15, 4) and result["queries_with_loop"] == 2
    assert result["false_loops"] == [[30, 20]]


def test_revisits_inside_the_exclusion_are_no_queries():
    matrix = np.zeros((20, 20), bool)
    matrix[5, 4] = matrix[15, 2] = matrix[12, 2] = matrix[11, 2] = True
    assert judge_loops(made_log(n=20), LoopTruth(matrix))["queries"] == 2


def test_truth_files(tmp_path):
    cv2.imwrite(str(tmp_path / "m.png"), truth_matrix().astype(np.uint8) * 255)
    assert LoopTruth.load(tmp_path / "m.png").is_true(0, 25)
    with pytest.raises(DataError, match="square"):
        cv2.imwrite(str(tmp_path / "no.png"), np.zeros((3, 4), np.uint8))
        LoopTruth.load(tmp_path / "no.png")
    with pytest.raises(DataError, match="missing.png"):
        LoopTruth.load(tmp_path / "missing.png")
    n = 30
    view = np.eye(n, dtype=np.float32)
    view[20, 2] = view[2, 20] = view[20, 18] = view[18, 20] = 0.9
    GroundTruth(
        "s", np.arange(n) * STEP, np.zeros((n, 3)), np.tile(np.eye(3), (n, 1, 1)), np.eye(3), (64, 48), view
    ).save(tmp_path / "ground_truth.npz")
    truth = LoopTruth.load(tmp_path, exclude=0, exclude_s=1.0)
    assert truth.is_true(20, 2) and not truth.is_true(20, 18) and not truth.is_false(20, 18) and truth.is_false(20, 3)


def test_a_matrix_of_another_sequence_is_refused():
    with pytest.raises(DataError, match="for 30 images"):
        judge_loops(made_log(), LoopTruth(np.zeros((30, 30), bool)))


def test_strict_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "m.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


# -- log and report --------------------------------------------------------------------------------


def test_points_are_kept_for_the_worst_pairs_and_the_clearest_loops_only():
    log = made_log()
    log.max_pictures = 3
    points = MatchPoints(np.zeros((9, 2), np.float32), np.zeros((9, 2), np.float32), np.ones(9, bool))
    for i, inliers in enumerate([50, 5, 30, 0, 40, 20]):
        status = Status.OK if inliers >= 15 else Status.TOO_FEW_INLIERS
        log.add_pair(PairRecord(PairKind.TRACK, status, i + 1, i, 60, inliers), points)
        log.add_pair(PairRecord(PairKind.LOOP, status, i + 1, i, 60, inliers), points)
    assert [p.num_inliers for p, _ in log.pictured("worst")] == [0, 5, 20]
    assert [p.num_inliers for p, _ in log.pictured("loops")] == [50, 40, 30]
    assert log.pictured("ambiguous") == []


def test_pictures_stop_at_their_bound():
    log = RunLog(max_picture_bytes=3000)
    image = np.random.default_rng(0).integers(0, 256, (48, 64), np.uint8)
    for i in range(5):
        log.add_keyframe(KeyframeRecord(i, i, "cam", i, (64, 48), 1), image)
    kept = [k.picture is not None for k in log.keyframes]
    assert kept[0] and not kept[-1]


def assert_self_contained(html):
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe", html)
    for target in re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", html):
        assert target.startswith(("data:image/", "#"))


def test_the_report_opens_anywhere(log, tmp_path):
    html = write_report(tmp_path / "report.html", log, metrics(log)).read_text()
    assert_self_contained(html)
    for text in ("Complete", "Similarity and loops", "Trajectory and loops", "Worst pairs", "verified loops",
                 "data:image/jpeg;base64,", "p95", "Full configuration"):  # fmt: skip
        assert text in html


def test_the_report_of_a_long_run_stays_small_and_of_an_empty_one_is_told(tmp_path):
    n, rng = 1500, np.random.default_rng(0)
    log = RunLog(expected=n)
    image = cv2.resize(rng.integers(0, 256, (60, 80), np.uint8), (640, 480))
    for i in range(n):
        log.frames += 1
        log.add_keyframe(KeyframeRecord(i, i, "cam", i, (640, 480), 500, Pose(np.eye(3), rng.normal(size=3))), image)
        log.add_descriptor(i, rng.normal(size=64).astype(np.float32))
        log.add_latency({"frame": 1.0 + i % 7})
        points = rng.uniform(0, 480, (100, 2)).astype(np.float32)
        found = MatchPoints(points, points, points[:, 0] > 90)
        if i:
            log.add_pair(PairRecord(PairKind.TRACK, Status.OK, i, i - 1, 100, 80), found)
        for k in range(3 if i > 50 else 0):
            log.candidates.append(Candidate(i, i - 50 + k, 0, 0.5, float("nan"), k))
            log.add_pair(PairRecord(PairKind.LOOP, Status.OK, i, i - 50 + k, 100, 80), found)
    path = write_report(tmp_path / "long.html", log, metrics(log))
    assert path.stat().st_size < 10_000_000
    empty = RunLog(expected=3, incomplete="damaged: <everything>")
    html = write_report(tmp_path / "empty.html", empty, metrics(empty)).read_text()
    assert "Nothing was processed" in html and "&lt;everything&gt;" in html
    assert_self_contained(html)


def test_every_status_is_explained_and_shown(tmp_path):
    log = made_log()
    for i, status in enumerate(Status):
        inliers = 20 if status in (Status.OK, Status.FAULT_RECOVERED) else 0
        log.add_pair(PairRecord(PairKind.TRACK, status, i + 1, i, 20, inliers))
    log.add_fault("image 3", "match", "ValueError: <b>")
    html = write_report(tmp_path / "r.html", log, metrics(log)).read_text()
    for status in Status:
        assert MEANING[status][0] and f"s-{status.label}" in html
    assert "ValueError: &lt;b&gt;" in html and metrics(log)["non_finite"] == 1


def test_charts_of_little_or_nothing():
    assert timeline([]) == ""
    assert "<svg" in timeline([PairRecord(PairKind.TRACK, Status.NO_MATCHES, 1, 0, 0, 0)])
    assert "<svg" in sparkline([1.0], [0], 1)
    assert ticks(0, 0, 5) == [0] and ticks(0, 83, 10)[:2] == [0, 10]
    assert ticks(0, 3, 10, whole=True) == [0, 1, 2, 3] and ticks(-0.3, 0.25, 5) == [-0.2, 0.0, 0.2]


def test_match_pictures_mix_sizes_and_grey_with_colour():
    grey, colour = np.zeros((40, 60), np.uint8), np.zeros((80, 50, 3), np.uint8)
    points = np.array([[5, 5], [30, 30]], np.float32)
    picture = side_by_side(grey, colour, points, points, np.array([True, False]))
    assert picture.shape == (80, 120 + 6 + 50, 3) and picture.max() > 0
    empty = side_by_side(grey, grey, points[:0], points[:0], np.zeros(0, bool))
    assert with_header(empty, ["no_keypoints", "x" * 200]).shape[1] == 320  # wide enough for words


@pytest.mark.parametrize("shape", [(1, 8000), (8000, 1), (1, 60_000, 3)])
@pytest.mark.parametrize("height", [0, 320])
def test_elongated_images_make_no_huge_picture(shape, height):
    long, square = np.full(shape, 200, np.uint8), np.zeros((512, 512), np.uint8)
    end = np.array([[shape[1] - 1, shape[0] - 1]], np.float32)
    for images in ((long, square), (long, long), (square, long)):
        picture = with_header(side_by_side(*images, end, end, np.array([True]), height=height), ["ok", "x" * 80])
        assert picture.nbytes < 40_000_000 and encode(picture, ".jpg") and picture.max() > 0


def test_points_of_an_image_that_is_scaled_by_its_width_lie_on_it():
    wide = np.zeros((100, 8000), np.uint8)
    point = np.array([[7999, 99]], np.float32)
    picture = side_by_side(
        wide, np.zeros((320, 320), np.uint8), point, point[:, ::-1] * 0, np.array([False]), height=320
    )
    y, x = np.argwhere(picture[:, :1280, 0] > 60).T  # the circle at the end of the line
    assert picture.shape == (320, 1280 + 6 + 320, 3) and x.max() > 1270 and abs(y[x > 1275].mean() - 16) < 4


def test_a_picture_that_cannot_be_written_says_so():
    with pytest.raises(ImageError, match="70000x1 pixels"):
        encode(np.zeros((1, 70_000, 3), np.uint8), ".jpg")
    with pytest.raises(ImageError, match="nope"):
        encode(np.zeros((1, 7), np.uint8), ".nope")


def test_the_similarity_of_a_long_run_takes_little_memory():
    n, rng = 8000, np.random.default_rng(0)
    log = RunLog(descriptors={i: rng.normal(size=64).astype(np.float16) for i in range(n)})
    tracemalloc.start()
    image = _similarity(log, range(n), range(n))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert image.shape == (800, 800) and (image.diagonal() < 60).all() and peak < 50e6


def test_the_words_of_a_report_agree_with_their_numbers(tmp_path):
    log = made_log(candidates=[(30, 5, 0)])
    log.add_pair(PairRecord(PairKind.LOOP, Status.AMBIGUOUS, 30, 5, 50, 40))
    log.add_pair(PairRecord(PairKind.TRACK, Status.OK, 1, 0, 50, 40))
    log.add_fault("image 3", "match", "x")
    html = write_report(tmp_path / "r.html", log, metrics(log)).read_text()
    assert "1 of 1 pair of consecutive keyframes is connected" in html and "1 pair is ambiguous, 0 were" in html
    assert "1 fault in stage match" in html and "what to do" in html
    log = made_log()
    log.add_pair(PairRecord(PairKind.TRACK, Status.OK, 1, 0, 50, 40))
    assert "what to do" not in write_report(tmp_path / "r.html", log, metrics(log)).read_text()


def test_advice_names_only_commands_that_exist():
    from vslam_features.cli.main import build_parser

    known = build_parser()._subparsers._group_actions[0].choices
    for _, advice in MEANING.values():
        for command in re.findall(r"'([a-z]+)[^']*'", advice):
            assert command in known


def test_examples_name_files_as_they_are_in_the_input(tmp_path):
    folder = tmp_path / "f"
    assert _without_folder(f"{folder}/1.png: cannot be read", folder) == "1.png: cannot be read"
    assert _without_folder(f"/topic: {folder}: a message", folder) == "/topic: f: a message"
    assert _without_folder("/data/x: image 3", Path("a")) == "/data/x: image 3"


# -- real images ---------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.slow
def test_corridor_loop(data_dir):
    folder = data_dir / "corridor_loop"
    if not folder.is_dir():
        pytest.skip(f"no corridor_loop in {data_dir}")
    log = replay(open_source(folder / "images"))
    truth = metrics(log, LoopTruth.load(folder / "loop_matrix.png"))["loop_truth"]
    assert truth["queries"] == 44
    assert truth["recall_at_1"] >= 0.93
    assert truth["queries_with_loop"] >= 30
    assert truth["false_loops"] == []
