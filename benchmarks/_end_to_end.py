"""Files to verified matches, against the bare runs of the models and the solver on the same data."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import _ours
import numpy as np
from _timing import Spread, fastest_ratio, interleaved

from vslam_features.artifacts.stop_rule import NEVER
from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.images import read_image
from vslam_features.types import Frame, Matches


class Parts:
    """What lies between a pair of files and its matches: as a whole, bare, and part after part.

    ``whole`` is what the command ``match`` does. ``bare`` runs what cannot be left out on data prepared before: the
    runtime's own run of the features of both images and of the matcher, without our checks, and the verification.
    """

    def __init__(self, config: Config):
        front_end = FrontEnd(config.with_values(loops__enabled=False))
        self.features, self.matcher = front_end.features, front_end.matcher
        self.engines = {"features": self.features.engine, "matcher": self.matcher.matcher.engine}
        self.prepared: dict[tuple[Path, Path], dict] = {}

    def whole(self, files: tuple[Path, Path]) -> Matches:
        """Decode, features, match, verify."""
        f0, f1 = (self.features.extract(self._frame(file)) for file in files)
        return self.matcher.match(f0, f1, overlapping=True)

    def prepare(self, files: tuple[Path, Path]) -> None:
        """Keep what ``bare`` needs of a pair."""
        frames = [self._frame(file) for file in files]
        features = [self.features.extract(frame) for frame in frames]
        pairs = self.matcher.matcher.match_overlapping(*features).pairs
        self.prepared[files] = {
            "features": [self._image_inputs(frame) for frame in frames],
            "matcher": self._named("matcher", _ours.graph_inputs(features) | self._never()),
            "points": [f.keypoints[pairs[:, i]] for i, f in enumerate(features)],
            "pair": features,
            "frames": frames,
        }

    def _never(self) -> dict[str, np.ndarray]:
        """Inputs with which a matcher that can stop early does not."""
        has = self.engines["matcher"].binding.inputs
        return {name: np.array(value, np.float32) for name, value in NEVER.items() if name in has}

    def bare(self, files: tuple[Path, Path]) -> None:
        """Model runs and solver alone."""
        ready = self.prepared[files]
        for inputs in ready["features"]:
            self.engines["features"].session._run(inputs)  # private: without the checks of run()
        self.engines["matcher"].session._run(ready["matcher"])
        self.matcher.verifier.verify(*ready["points"], None, None)

    def breakdown(self, files: tuple[Path, Path]) -> dict[str, float]:
        """Milliseconds of each part for a prepared pair; ``features`` and ``matcher`` are the bare runs."""
        ready = self.prepared[files]
        sessions = {name: engine.session for name, engine in self.engines.items()}
        found = {name: sessions[name]._run(inputs) for name, inputs in self._runs(ready)}
        return {
            "decode": _ms(lambda: [read_image(file) for file in files]),
            "to tensor": _ms(lambda: [self._image_inputs(frame) for frame in ready["frames"]]),
            "input checks": _ms(lambda: [sessions[name]._checked(inputs) for name, inputs in self._runs(ready)]),
            "output checks": 2 * _ms(lambda: _finite(found["features"])) + _ms(lambda: _finite(found["matcher"])),
            "features": _ms(lambda: [sessions["features"]._run(inputs) for inputs in ready["features"]]),
            "matcher": _ms(lambda: sessions["matcher"]._run(ready["matcher"])),
            "solver": _ms(lambda: self.matcher.verifier.verify(*ready["points"], None, None)),
        }

    def _runs(self, ready: dict) -> list[tuple[str, dict]]:
        return [*(("features", inputs) for inputs in ready["features"]), ("matcher", ready["matcher"])]

    def _frame(self, file: Path) -> Frame:
        return Frame(0, "", read_image(file))

    def _image_inputs(self, frame: Frame) -> dict[str, np.ndarray]:
        image = self.engines["features"].model.card.preprocessing.apply(frame.image)
        count = np.array([self.features.max_keypoints], np.int64)
        return self._named("features", {"image": image, "max_keypoints": count})

    def _named(self, engine: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """By the names of the file's tensors."""
        theirs = self.engines[engine].model.card.inputs
        return {theirs.get(name, name): value for name, value in inputs.items()}


def measure(features: str, matcher: str, runtime: str, threads: int, keypoints: int, files, rounds: int) -> dict:
    """Milliseconds a pair of the whole and the bare runs, their ratio, and the parts."""
    values = {"features.name": features, "features.max_keypoints": keypoints, "matcher.name": matcher}
    parts = Parts(Config.from_flat(values, base=_ours.configuration(runtime, threads)))
    pairs = list(zip(files[::2], files[1::2]))
    for pair in pairs:
        parts.prepare(pair)
    times = interleaved({"whole": parts.whole, "bare": parts.bare}, pairs, rounds)
    split = [parts.breakdown(pair) for pair in pairs]
    sizes = [[len(side) for side in parts.prepared[pair]["pair"]] for pair in pairs]
    return {
        "method": f"{features} + {matcher}",
        "solver": parts.matcher.verifier.solver.name,
        "engine": runtime,
        "keypoints": int(np.median(sizes)),
        "ms": Spread.of(times["whole"]),
        "bare_ms": Spread.of(times["bare"]),
        "ratio": Spread.of(times["whole"] / times["bare"]),
        "fastest_ratio": fastest_ratio(times["whole"], times["bare"], len(pairs)),
        "parts_ms": {name: round(float(np.median([s[name] for s in split])), 2) for name in split[0]},
    }


def _finite(outputs: dict[str, np.ndarray]) -> list[bool]:
    return [bool(np.isfinite(value).all()) for value in outputs.values() if value.dtype.kind == "f"]


def _ms(run: Callable, repeats: int = 3) -> float:
    """Median of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))
