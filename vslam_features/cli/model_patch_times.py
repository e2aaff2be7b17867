"""What a stop after each checked layer saves: a patched matcher is made to stop there, and timed against the plain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..artifacts.binding import Binding
from ..artifacts.card import ModelCard
from ..artifacts.contract import breaches
from ..errors import ExportError
from .model_patch_run import PlainRun, load

_ROUNDS = 7
_CERTAIN, _UNLIKELY = 2.0, 1e-3  # a limit that no score reaches; how much less one must be before the layer that stops
_LARGEST = {np.float16: 6e4, np.float32: 1e30}  # values of min_covisibility that its type holds


@dataclass(frozen=True)
class StopTimes:
    """The shortest of several runs of one pair, in ms.

    Args:
        runtime: what ran it. keypoints: of each image; 0: it is not known.
        plain_ms, never_ms: the plain matcher, and the patched one that does not stop.
        after_ms: checked layer -> the patched one that stops there; None where the pair stopped before it.
    """

    runtime: str
    keypoints: int
    plain_ms: float
    never_ms: float
    after_ms: dict[int, float | None]


def stop_times(plain: PlainRun, patched: Path, card: ModelCard) -> StopTimes:
    """Run both in turn; the patched one must find what the plain one does where it does not stop.

    Args:
        card: of the patched file.
    Raises:
        ExportError: it does not, or it does not stop where it is told to. ModelError, DataError: it does not run.
    """
    session, inputs = load(patched), plain.inputs
    stopping = Binding(session, card, str(patched))
    _same(plain.outputs, stopping.run(inputs), card)
    runs: dict[object, Callable[[], dict]] = {"plain": lambda: plain.run(inputs), 0: lambda: stopping.run(inputs)}
    dtype = stopping.inputs["min_covisibility"].dtype
    stopped = {}
    for layer in card.early_stop_layers:
        told = inputs | forced_stop(layer, card.layers, dtype)
        runs[layer] = partial(stopping.run, told)
        outputs = runs[layer]()
        stopped[layer] = int(outputs["stopped_after_layer"].flat[0])
        if not 0 < stopped[layer] <= layer or stopped[card.early_stop_layers[0]] != card.early_stop_layers[0]:
            raise ExportError(f"told to stop after layer {layer}, it stopped after {stopped[layer]} (0: it did not)")
        if broken := breaches(card, told, outputs):  # such as a rejection of the other image's length
            raise ExportError(f"told to stop after layer {layer}: {'; '.join(broken)}; check --like and --scores")
    times = _shortest(runs)
    after = {layer: times[layer] if stopped[layer] == layer else None for layer in card.early_stop_layers}
    return StopTimes(str(session.active), len(inputs.get("keypoints0", ())), times["plain"], times[0], after)


def forced_stop(layer: int, num_layers: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """Inputs with which the limit is 2, more than any score, at a layer, and next to 0 at the checked ones before."""
    largest = _LARGEST[np.dtype(dtype).type]
    power = num_layers - layer
    decay = np.float32(1 - max(_UNLIKELY, (_CERTAIN / largest) ** (1 / power)))
    kept = float(np.float32(1) - decay)
    return {
        "min_covisibility": np.array(_CERTAIN / kept**power, np.float32),
        "early_stop_decay": np.array(decay, np.float32),
    }


def _same(expected: dict, got: dict, card: ModelCard) -> None:
    """In half precision a CPU rounds elsewhere within branches: no two files have the same bits there."""
    if card.precision != "fp32":
        return
    stop = int(got["stopped_after_layer"].flat[0])
    others = [n for n in expected if n in got and not np.array_equal(expected[n], got[n])]
    if stop or others:
        what = f"stops after layer {stop}" if stop else f"computes another '{others[0]}' than the plain one"
        raise ExportError(f"the patched matcher, told not to stop, {what}; nothing was written")


def _shortest(runs: dict, rounds: int = _ROUNDS) -> dict:
    """In turn, so that what else the machine does meets all."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: min(values) for name, values in times.items()}


def time_cells(times: StopTimes, layers: Sequence[int]) -> list[list[str]]:
    """Cells ``ms`` and ``of plain`` of the rows: stops after each layer, never, the plain matcher."""
    figures = [*(times.after_ms[layer] for layer in layers), times.never_ms, times.plain_ms]
    return [["-", "-"] if ms is None else [f"{ms:.1f}", f"{ms / times.plain_ms:.0%}"] for ms in figures]
