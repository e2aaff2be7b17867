"""How large the values inside of a graph become: what half precision must hold, and no comparison on a CPU shows.

ONNX Runtime's CPU computes most float16 operators in float32, so that values beyond 65504 pass there and become
infinite on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

_PREFIX = "peak of "


def half_values(model: ir.Model) -> set[str]:
    """Names of the values that nodes of the main graph give in float16, and of those that are cast to it or from it."""
    names = set()
    for node in model.graph:
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT16:
                names.add(node.inputs[0].name if node.op_type == "Cast" and node.inputs[0] is not None else value.name)
    for value in model.graph.outputs:  # the old name of a value that has another one in float16
        maker = value.producer()
        if maker is not None and maker.op_type == "Cast" and maker.inputs[0].dtype == ir.DataType.FLOAT16:
            names.add(value.name)
    return names


def with_peaks(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy whose only outputs are the largest magnitudes of these values, scalars by :func:`peak_name`.

    Names that the main graph has no float32 value of are left out.
    """
    model = model.clone()
    graph = model.graph
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    watched = [v for v in values if v.name in names and v.dtype == ir.DataType.FLOAT]
    graph.outputs.clear()
    # Last first: ONNX Runtime orders a graph from the end, and so takes each peak where its value is made. The other
    # way round it makes all values before the first peak, and holds them: 20 GB of a transformer over 4096 tokens.
    for value in reversed(watched):
        size = ir.node("Abs", [value])
        peak = ir.node("ReduceMax", size.outputs, {"keepdims": 0})
        peak.outputs[0].name = peak_name(value.name)
        peak.outputs[0].type, peak.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
        graph.extend([size, peak])
        graph.outputs.append(peak.outputs[0])
    return model


def peak_name(value: str) -> str:
    """Name of the output that has the peak of a value."""
    return _PREFIX + value
