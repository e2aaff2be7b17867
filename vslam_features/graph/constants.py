"""What a value holds where it is the same in every run."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Of an initialiser or a Constant node; None for what is none, such as an initialiser that an input may replace."""
    if value is None or value.is_graph_input():
        return None
    maker = value.producer()
    if value.const_value is None and (maker is None or maker.op_type != "Constant"):
        return None
    return ir.convenience.get_const_tensor(value)


def drop_unread(constants: Iterable[ir.Value]) -> None:
    """Removes those that no node reads any more and no graph gives out."""
    for value in constants:
        if value.uses() or value.is_graph_output() or constant_tensor(value) is None:
            continue
        maker = value.producer()
        if maker is None:
            del value.graph.initializers[value.name]
        else:
            maker.graph.remove(maker, safe=True)
