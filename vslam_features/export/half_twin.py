"""The fp16 twin of an exported file, and proof that what it computes in half precision fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..graph.fp16 import Half
from ..graph.peaks import half_values, with_peaks
from . import onnx_file
from .descriptors import peaks_by_file
from .graph_table import GraphFacts
from .placement import Progress
from .self_check import LARGEST_HALF, Check, SelfCheck


def write_half(
    source: Path,
    path: Path,
    halve: Callable[[ir.Model], Half],
    feeds: Sequence[dict[str, np.ndarray]],
    check: SelfCheck,
    progress: Progress,
) -> tuple[Half, GraphFacts]:
    """Write the twin of the fp32 file ``source``; its figures, without the graph, and its facts.

    The largest value of each of the ``feeds``, a column of ``check`` each, goes into the check. Raises ExportError.
    """
    progress("making the fp16 twin")
    model = ir.load(source)
    half = halve(model)
    onnx_file.write(half.model, path)
    facts, halved = GraphFacts.of(half.model, path), half_values(half.model)
    half = replace(half, model=None)
    gc.collect()
    progress("looking for values that half precision cannot hold")
    probe = source.with_name("peaks.onnx")
    onnx_file.write(with_peaks(model, halved), probe)
    del model
    gc.collect()
    check.checks.append(Check("largest value computed in fp16", peaks_by_file(probe, feeds), LARGEST_HALF))
    probe.unlink()
    return half, facts
