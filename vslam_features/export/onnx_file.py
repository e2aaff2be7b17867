"""A torch module as an ONNX graph: exported by way of ``torch.export``, stripped; written and checked as any other.

Exported files hold no traces of the machine: the exporter notes source files and stack traces at every node, and
these are removed. What wrote the file stays (``producer_name``).
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from ..errors import ExportError
from ..graph.model_file import add_card, first_line, write

__all__ = ["OPSET", "add_card", "export", "release", "write"]

logger = logging.getLogger(__name__)

OPSET = 18


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    debug: bool = False,
) -> ir.Model:
    """The graph of a module, optimised, in opset 18, without metadata and doc strings.

    The tensors of the graph are those of the module: they are not copied.

    Args:
        module: in evaluation mode; it is called with ``inputs`` by position.
        inputs: name in the graph -> example, in the order of the module's arguments.
        outputs: names in the graph, in the order in which the module returns them.
        dynamic: input name -> axis -> name of its extent, where that is not the example's. Axes of the same name have
            the same extent.
        debug: let the exporter say what it does.
    Raises:
        ExportError: the module cannot be traced or has an operator that ONNX lacks.
    """
    shapes = None
    if dynamic:
        axes = {name: torch.export.Dim(name) for extents in dynamic.values() for name in extents.values()}
        shapes = tuple({i: axes[n] for i, n in dynamic.get(name, {}).items()} or None for name in inputs)
    module.eval()
    with contextlib.nullcontext() if debug else _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=OPSET,
                dynamic_shapes=shapes,
                dynamo=True,
                optimize=True,
                external_data=False,
                verbose=debug,
            )
        except Exception as error:  # every kind that torch.export and the decompositions raise
            raise ExportError(f"{type(module).__name__} cannot be exported: {first_line(error)}") from error
    model = program.model.clone()
    # The exporter's rewrite rules keep the graph that they looked at last as long as the process lives.
    for value in program.model.graph.initializers.values():
        value.const_value = None
    ClearMetadataAndDocStringPass()(model)
    for value in model.graph.initializers.values():  # which the pass leaves out
        value.metadata_props.clear()
        value.doc_string = None
    model.metadata_props.clear()
    return model


def release(module: torch.nn.Module) -> None:
    """Give the memory of a module's tensors back; it is of no use after. The exporter holds on to some of them."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.empty(0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporter prints and warns of goes to the debug log."""
    said = io.StringIO()
    names = ("torch", "onnxscript", "onnx_ir")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            for name in names:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if said.getvalue():
            logger.debug("exporter: %s", said.getvalue())
