#!/usr/bin/env python3
"""Two-view pose accuracy (AUC of the larger of rotation and translation-direction error) on image pairs.

    python benchmarks/pose_auc.py --data ../shared/data --solver poselib opencv --seeds 5
    python benchmarks/pose_auc.py --set features.name=orb --set matcher.options.ratio=1.0

Reads ``reichstag_pairs``, ``lund_pairs`` (``pairs.json``: K0, K1, T_1_0) and
``kitti_snippet`` (``poses.txt``, ``calib.txt``; pairs 10 frames apart from
frames 0, 4, ... 40). Images are shrunk to ``--long-side`` and intrinsics with
them. Prints a row a data set and solver: the median over the seeds. The first
row, ``sift nearest opencv-ransac``, is the fixed baseline (OpenCV's plain
RANSAC, essential matrix, 1 px).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
import yaml

from vslam_features import registry
from vslam_features.camera import Camera
from vslam_features.config import Config
from vslam_features.geometry import Verifier
from vslam_features.images import read_image, resize_long_side
from vslam_features.models import Models
from vslam_features.two_view import pose_difference_deg
from vslam_features.types import Frame, Pose

THRESHOLDS = (5, 10, 20)
BASELINE = "opencv-ransac"


def load_pairs(data: Path, name: str):
    """Yields (path0, path1, K0, K1, Pose of camera 0 in camera 1)."""
    folder = data / name
    if name == "kitti_snippet":
        poses = np.loadtxt(folder / "poses.txt").reshape(-1, 3, 4)
        K = np.loadtxt(folder / "calib.txt")[0].reshape(3, 4)[:, :3]
        for i in range(0, 41, 4):
            j = i + 10
            R = poses[j, :, :3].T @ poses[i, :, :3]
            t = poses[j, :, :3].T @ (poses[i, :, 3] - poses[j, :, 3])
            yield folder / f"left/{i:06d}.jpg", folder / f"left/{j:06d}.jpg", K, K, Pose(R, t)
        return
    for pair in json.loads((folder / "pairs.json").read_text()):
        T = np.array(pair["T_1_0"])
        paths = (folder / "images" / pair[k] for k in ("image0", "image1"))
        yield *paths, np.array(pair["K0"]), np.array(pair["K1"]), Pose(T[:3, :3], T[:3, 3])


def auc(errors: np.ndarray, threshold: float) -> float:
    """Area under the recall curve up to ``threshold`` degrees, in percent (SuperGlue's definition)."""
    errors = np.sort(errors)
    recall = (np.arange(len(errors)) + 1) / len(errors)
    errors, recall = np.r_[0.0, errors], np.r_[0.0, recall]
    last = np.searchsorted(errors, threshold)
    x, y = np.r_[errors[:last], threshold], np.r_[recall[:last], recall[last - 1]]
    return 100 * float(np.trapezoid(y, x) if hasattr(np, "trapezoid") else np.trapz(y, x)) / threshold


def match_all(data: Path, name: str, config: Config, long_side: int):
    """Matched points, cameras and true pose of each pair; features are computed once an image."""
    f = config.features
    cls = registry.get("features", f.name)
    models = Models(config)
    extractor = cls(f.max_keypoints, 0, cls.Options(**f.options), models)
    matcher_cls = registry.get("matcher", config.matcher.name)
    matcher = matcher_cls(matcher_cls.Options(**config.matcher.options), models)
    matcher.require(extractor.identity)
    cache, out = {}, []
    for path0, path1, K0, K1, truth in load_pairs(data, name):
        sides = []
        for path, K in ((path0, K0), (path1, K1)):
            if path not in cache:
                image = read_image(path)
                size = image.shape[1], image.shape[0]
                image, _ = resize_long_side(image, long_side)
                camera = Camera(*size, K).scaled_to((image.shape[1], image.shape[0]))
                cache[path] = extractor.extract(Frame(0, "", image)), camera
            sides.append(cache[path])
        (f0, c0), (f1, c1) = sides
        pairs = matcher.match_overlapping(f0, f1).pairs if len(f0) and len(f1) else np.empty((0, 2), np.int32)
        out.append((f0.keypoints[pairs[:, 0]], f1.keypoints[pairs[:, 1]], c0, c1, truth))
    return out


def error_deg(pose: Pose | None, truth: Pose) -> float:
    """The larger of the rotation and translation-direction errors; infinite without a pose."""
    return max(pose_difference_deg(pose, truth)) if pose is not None else np.inf


def plain_ransac(p0, p1, c0, c1, seed: int) -> Pose | None:
    """The baseline: OpenCV RANSAC, essential matrix, 1 px."""
    if len(p0) < 5:
        return None
    cv2.setRNGSeed(seed)
    focal = np.mean([c0.mean_focal, c1.mean_focal])
    n0, n1 = ((np.float64(p) - c.K[:2, 2]) / [c.K[0, 0], c.K[1, 1]] for p, c in ((p0, c0), (p1, c1)))
    E, mask = cv2.findEssentialMat(n0, n1, np.eye(3), cv2.RANSAC, 0.9999, 1.0 / focal)
    if E is None or E.shape != (3, 3):
        return None
    _, R, t, _ = cv2.recoverPose(E, n0, n1, np.eye(3), mask=mask)
    return Pose(R, t, scale_known=False)


def scores(matched, config: Config, solver: str, seed: int) -> tuple[list[float], int]:
    """AUC at each threshold over matched pairs, and how many pairs are called degenerate."""
    verifier = None
    if solver != BASELINE:
        verifier = Verifier(config.with_values(geometry__solver=solver, geometry__seed=seed).geometry)
    errors, degenerate = [], 0
    for p0, p1, c0, c1, truth in matched:
        if verifier is None:
            pose = plain_ransac(p0, p1, c0, c1, seed)
        else:
            result = verifier.verify(p0, p1, c0, c1)
            pose, degenerate = result.best_pose, degenerate + (result.status.label == "degenerate")
        errors.append(error_deg(pose, truth))
    return [auc(np.array(errors), t) for t in THRESHOLDS], degenerate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", default=["reichstag_pairs", "kitti_snippet", "lund_pairs"])
    parser.add_argument("--solver", nargs="+", default=["poselib", "opencv"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-seed", action="store_true", help="also a row for each seed")
    parser.add_argument("--long-side", type=int, default=640)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="values")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    base = Config.load(args.config) if args.config else Config()
    given = dict(v.split("=", 1) for v in args.values)
    base = Config.from_flat({k: yaml.safe_load(v) for k, v in given.items()}, base=base)
    method = f"{base.features.name} {base.matcher.name}"
    print(
        f"{'data':<16} {'method':<14} {'solver':<14} {'seed':<8} {'AUC@5':>6} {'@10':>5} {'@20':>5}  matches degenerate"
    )
    rows = []

    def add(name, solver, seed, values, matches, degenerate):
        rows.append([name, method, solver, seed, *(round(float(v), 1) for v in values), matches, int(degenerate)])
        numbers = " ".join(f"{v:5.1f}" for v in values)
        print(f"{name:<16} {method:<14} {solver:<14} {seed:<8} {numbers}  {matches:7.0f} {degenerate:4.0f}")

    for name in args.sets:
        matched = match_all(args.data, name, base, args.long_side)
        count = float(np.median([len(m[0]) for m in matched]))
        for solver in [BASELINE, *args.solver]:
            per_seed = [scores(matched, base, solver, seed) for seed in range(args.seeds)]
            if args.per_seed:
                for seed, (values, degenerate) in enumerate(per_seed):
                    add(name, solver, str(seed), values, count, degenerate)
            median = np.median([values for values, _ in per_seed], axis=0)
            add(name, solver, f"median{args.seeds}", median, count, np.median([d for _, d in per_seed]))
    if args.json:
        columns = ["data", "method", "solver", "seed", *(f"auc{t}" for t in THRESHOLDS), "matches", "degenerate"]
        args.json.write_text(json.dumps([dict(zip(columns, row)) for row in rows], indent=1))


if __name__ == "__main__":
    main()
