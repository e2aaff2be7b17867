"""Figures that exported files of FlexGlue must reach against torch: of maps, of matches, of stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ..artifacts.comparison import LIMITS, figures_of
from ..artifacts.preprocessing import Preprocessing
from ..networks.flexglue import FlexGlue, Matching
from .descriptors import Picture, opened, run
from .placement import Progress
from .self_check import Check, SelfCheck

MAX_MAP_DIFFERENCE = 1e-3  # of channels with deviation 1, fp32 against fp32
MAX_SCORE_DIFFERENCE = 1e-4  # fp32 against fp32
MAX_SCORE_DIFFERENCE_HALF = 0.05
MIN_EQUAL = 0.99  # share of keypoints with the same match: two cells may be equally good, up to rounding
_KEYPOINTS = 400, 300  # of the two images

Tensors = dict[str, np.ndarray]


def check_maps(check: SelfCheck, network: FlexGlue, path: Path, tensors: Sequence[np.ndarray], progress: Progress):
    """The fp32 file against torch, and the maps (n, C h w) that it gives."""
    progress(f"running the encoder in torch on {len(tensors)} pictures, and its fp32 file on ONNX Runtime")
    expected = np.stack([network.describe(torch.from_numpy(tensor)).numpy().ravel() for tensor in tensors])
    maps = _maps(path, tensors)
    check.differ("ONNX fp32 against torch, max difference", maps, expected, MAX_MAP_DIFFERENCE)
    if find_spec("openvino"):
        progress("running the fp32 file on OpenVINO in f32")
        check.differ("OpenVINO f32 against torch", _maps(path, tensors, "openvino"), expected, MAX_MAP_DIFFERENCE)
    check.describe(maps, unit=False)
    return maps


def check_twin_maps(check: SelfCheck, path: Path, tensors, maps: np.ndarray, progress: Progress) -> None:
    """The fp16 file against the maps of the fp32 file."""
    progress("running the fp16 twin of the encoder on ONNX Runtime")
    found = _maps(path, tensors)
    rms = tuple(figures_of(e, g).rms for e, g in zip(maps, found))
    check.checks.append(Check("fp16 twin against fp32, relative RMS", rms, LIMITS["fp16"].rms))
    with np.errstate(over="ignore"):
        lost = tuple(float((row.astype(np.float16) != row).mean()) for row in found)
    check.checks.append(Check("fp16 twin, share of values that are no fp16", lost, 0.0))


def _maps(path: Path, tensors, runtime: str = "onnxruntime") -> np.ndarray:
    session = opened(path, runtime)
    return np.stack([run(session, {"image": tensor})["descriptors"].ravel() for tensor in tensors])


@dataclass
class MatcherCheck:
    """Checks of a matcher's files on pairs of pictures. ``table``: of the plain files; ``feeds``: their inputs."""

    table: SelfCheck
    feeds: list[Tensors]
    expected: list[Tensors]
    stopped: list[Matching]
    found: dict[str, list[Tensors]] = field(default_factory=dict)

    @classmethod
    def of(cls, network: FlexGlue, steps: Preprocessing, shown: Sequence[Picture], layers: Sequence[int]):
        """The first picture with the second, the third with the fourth and so on; seeded keypoints, results of torch.

        ``layers``: those that are checked where a matcher stops early.
        """
        pairs = [shown[i : i + 2] for i in range(0, len(shown) - 1, 2)]
        feeds = [_feed(network, steps, pair, seed) for seed, pair in enumerate(pairs)]
        expected = [_outputs(by_torch(network, feed)) for feed in feeds]
        # At 1 and decay 0 every score is too low: the first check stops.
        stopped = [by_torch(network, feed, 1.0, 0.0, layers) for feed in feeds] if layers else []
        return cls(SelfCheck([" ".join(p.name for p in pair) for pair in pairs]), feeds, expected, stopped)

    def plain(self, path: Path, progress: Progress) -> None:
        """The fp32 file on the runtimes that there are, against torch. Raises ExportError."""
        progress(f"matching {len(self.feeds)} pairs by the fp32 file on ONNX Runtime")
        self.found["fp32"] = self._run(path)
        self._compare(self.table, "ONNX fp32 against torch", self.found["fp32"], self.expected)
        if find_spec("openvino"):
            progress("matching on OpenVINO in f32")
            self._compare(self.table, "OpenVINO f32 against torch", self._run(path, "openvino"), self.expected)
        self.table.require()

    def half(self, path: Path, progress: Progress) -> None:
        """The fp16 file against the fp32 file."""
        progress("matching by the fp16 twin on ONNX Runtime")
        self.found["fp16"] = self._run(path)
        limits = MAX_SCORE_DIFFERENCE_HALF, LIMITS["fp16"].agreement
        self._compare(self.table, "fp16 twin against fp32", self.found["fp16"], self.found["fp32"], *limits)

    def early_stop(self, files: dict[str, Path], progress: Progress) -> SelfCheck:
        """Checks of the matcher that stops early: that it does what the plain files do, and stops where torch does."""
        table = SelfCheck(self.table.images)
        for precision, path in files.items():
            progress(f"matching by the {precision} file that stops early, without a stop and with one")
            never = self._run(path, early_stop_decay=np.float32(1))
            if precision == "fp32":
                apart = [sum(int((e[n] != g[n]).sum()) for n in e) for e, g in zip(self.found[precision], never)]
                table.checks.append(Check("fp32 at decay 1, values off the plain file", tuple(map(float, apart)), 0.0))
            else:
                limits = MAX_SCORE_DIFFERENCE_HALF, LIMITS["fp16"].agreement
                self._compare(table, "fp16 at decay 1, against the plain file", never, self.found[precision], *limits)
            stops = self._run(path, early_stop_decay=np.float32(0), min_covisibility=np.float32(1))
            apart = [
                float(abs(int(g["stopped_after_layer"]) - m.stopped_after_layer)) for g, m in zip(stops, self.stopped)
            ]
            table.checks.append(Check(f"{precision} at decay 0, layers off torch's stop", tuple(apart), 0.0))
        return table

    def _run(self, path: Path, runtime: str = "onnxruntime", **scalars) -> list[Tensors]:
        session = opened(path, runtime)
        return [run(session, feed | scalars) for feed in self.feeds]

    @staticmethod
    def _compare(
        table: SelfCheck,
        label: str,
        got: list[Tensors],
        expected: list[Tensors],
        scores: float = MAX_SCORE_DIFFERENCE,
        equal: float = MIN_EQUAL,
    ) -> None:
        figures = [_apart(e, g) for e, g in zip(expected, got)]
        table.checks.append(Check(f"{label}, scores", tuple(f[0] for f in figures), scores))
        table.checks.append(Check(f"{label}, equal matches", tuple(f[1] for f in figures), equal, True))


def by_torch(
    network: FlexGlue, feed: Tensors, min_covisibility: float = 0.0, decay: float = 1.0, layers: Sequence[int] = ()
) -> Matching:
    """What torch says of inputs by the names of the graph."""
    tensors = {name: torch.from_numpy(value) for name, value in feed.items() if name != "min_covisibility"}
    return network.match(**tensors, min_covisibility=min_covisibility, early_stop_decay=decay, layers=layers)


def _feed(network: FlexGlue, steps: Preprocessing, pair: Sequence[Picture], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    feed: Tensors = {"min_covisibility": np.array(0, np.float32)}
    for i, (picture, count) in enumerate(zip(pair, _KEYPOINTS)):
        height, width = picture.image.shape[:2]
        feed[f"keypoints{i}"] = rng.uniform(0, [width - 1, height - 1], (count, 2)).astype(np.float32)
        feed[f"descriptors{i}"] = network.describe(torch.from_numpy(steps.apply(picture.image))).numpy()
        feed[f"image_size{i}"] = np.array([width, height], np.float32)
    return feed


def _outputs(matching: Matching) -> Tensors:
    return {
        "matches0": matching.matches0.numpy(),
        "mscores0": matching.mscores0.numpy(),
        "covisibility_score": np.array(matching.covisibility_score, np.float32),
    }


def _apart(expected: Tensors, got: Tensors) -> tuple[float, float]:
    """Largest difference of scores, and the share of keypoints with the same match."""
    same = expected["matches0"] == got["matches0"]
    covisibility = np.abs(expected["covisibility_score"] - got["covisibility_score"])
    of_matches = np.abs(expected["mscores0"] - got["mscores0"])[same]
    return float(np.max([covisibility, *of_matches])), float(same.mean())
