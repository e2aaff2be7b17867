"""The learned models on real images: what README says of them holds. Minutes on two cores, so run with test/export."""

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest
from model_helpers import learned  # noqa: F401

from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.images import read_image
from vslam_features.replay.loop_truth import LoopTruth
from vslam_features.replay.metrics import metrics
from vslam_features.replay.open_source import open_source
from vslam_features.replay.runner import replay
from vslam_features.types import Frame

pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("learned"),
]


def corridor(data_dir: Path) -> Path:
    folder = data_dir / "corridor_loop"
    if not folder.is_dir():
        pytest.skip(f"no corridor_loop in {data_dir}")
    return folder


def test_the_default_closes_the_loops_of_a_corridor_and_no_others(data_dir):
    folder = corridor(data_dir)
    log = replay(open_source(folder / "images"))
    assert log.instead == "" and {e.name for e in log.engines} == {"xfeat", "lighterglue-early-stop"}
    assert all(e.runs and not e.faults for e in log.engines)
    numbers = metrics(log, LoopTruth.load(folder / "loop_matrix.png"))
    statuses, truth = numbers["by_kind"]["loop"]["statuses"], numbers["loop_truth"]
    assert statuses["stopped_early"] > 5 and "stopped_early" not in numbers["by_kind"]["track"]["statuses"]
    assert truth["queries"] == 44
    assert truth["recall_at_1"] >= 0.90 and truth["recall_at_5"] >= 0.97
    assert truth["queries_with_loop"] >= 34
    assert truth["false_loops"] == []


def test_effnet_cov_finds_places_again(data_dir):
    folder = corridor(data_dir)
    front_end = FrontEnd(Config.from_flat({"features.name": "orb", "retrieval.name": "effnet_cov"}))
    images = [read_image(path) for path in sorted((folder / "images").iterdir())]
    d = np.stack([front_end.global_descriptor.describe(Frame(i, "c", x), None) for i, x in enumerate(images)])
    truth = cv2.imread(str(folder / "loop_matrix.png"), cv2.IMREAD_GRAYSCALE) > 0
    ranks = []
    for i in range(10, len(images)):
        allowed = np.arange(i - 9)  # candidates are at least ten images older
        if truth[i, allowed].any():
            best = allowed[np.argsort(-(d[allowed] @ d[i]))]
            ranks.append(int(np.flatnonzero(truth[i, best])[0]))
    assert len(ranks) == 44
    assert np.mean(np.array(ranks) < 1) >= 0.88 and np.mean(np.array(ranks) < 5) >= 0.97


def test_poses_of_wide_baselines_are_as_good_as_said(data_dir):
    """AUC@5/10/20 of the benchmark, median of five seeds of LO-RANSAC."""
    pytest.importorskip("poselib")
    path = Path(__file__).parents[2] / "benchmarks" / "pose_auc.py"
    spec = importlib.util.spec_from_file_location("pose_auc", path)
    pose_auc = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pose_auc)
    if not (data_dir / "reichstag_pairs").is_dir():
        pytest.skip(f"no reichstag_pairs in {data_dir}")
    config = Config()
    matched = pose_auc.match_all(data_dir, "reichstag_pairs", config, 640)
    values = np.median([pose_auc.scores(matched, config, "poselib", seed)[0] for seed in range(5)], axis=0)
    assert (values >= (57, 76, 87)).all(), values
