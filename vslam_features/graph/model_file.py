"""An ONNX file: read for a change of its graph, written again, proved to be valid."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ..artifacts.cache import writing
from ..artifacts.card import METADATA_KEY, ModelCard
from ..artifacts.file_kind import FileKind, require_kind
from ..errors import ExportError, ModelFileError

MAX_PROTO_BYTES = 2**31 - 1  # of one protobuf message


def read(path: Path) -> ir.Model:
    """The graph of a file, its weights in memory, those of external data files among them.

    Raises ModelFileError where it is no ONNX file, is damaged, or data that it names are missing or too large for one
    file.
    """
    if path.suffix != ".onnx":
        raise ModelFileError(f"{path}: only graphs of .onnx files can be changed; give the file that it was made from")
    require_kind(path, FileKind.ONNX)
    try:
        model = ir.load(path)
        return ir.external_data.load_to_model(model)
    except (DecodeError, ValueError, TypeError, KeyError, OSError) as error:  # what onnx_ir raises at damaged graphs
        raise ModelFileError(f"{path}: the graph cannot be read: {first_line(error)}") from error


def write(model: ir.Model, path: Path) -> None:
    """Write a graph and prove the file: the full checker and strict type inference, both on what was written.

    Raises:
        ExportError: it is over 2 GB, which one ONNX file cannot be, or the file is not valid. CacheError.
    """
    with writing(path.parent):
        _serialise(model, path)
    problem = _problem(path)
    if problem:
        raise ExportError(f"the written {path.name} is not valid ONNX: {problem}")


def add_card(path: Path, card: ModelCard) -> None:
    """Append a card to the metadata of a file that has none. Raises CacheError.

    Fields of a protobuf message may come in any order, and repeated ones add up: nothing else is written again.
    """
    entry = onnx.ModelProto()
    onnx.helper.set_model_props(entry, {METADATA_KEY: card.to_json()})
    with writing(path.parent), open(path, "ab") as file:
        file.write(entry.SerializeToString())


def _serialise(model: ir.Model, path: Path) -> None:
    """Two copies of the weights at most are in memory: the message, and its bytes."""
    graphs = (model.graph, *model.graph.subgraphs())
    tensors = [value.const_value for graph in graphs for value in graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if size > MAX_PROTO_BYTES:
        raise ExportError(f"{path.name}: its weights take {size / 1e9:.1f} GB, one ONNX file has 2 GB at most")
    proto = ir.to_proto(model)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def _problem(path: Path) -> str:
    """Why a file is not valid; empty where it is. By path, so that onnx reads it without a copy in Python."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
        # The graph with inferred shapes is written somewhere in any case.
        onnx.shape_inference.infer_shapes_path(str(path), os.devnull, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """What a library said, without its trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]
