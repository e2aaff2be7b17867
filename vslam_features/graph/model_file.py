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

    Raises ModelFileError where it is no ONNX file, or not a valid one, or data that it names are missing.
    """
    if path.suffix != ".onnx":
        raise ModelFileError(f"{path}: only graphs of .onnx files can be changed; give the file that it was made from")
    require_kind(path, FileKind.ONNX)
    if problem := _problem(path, types=False):  # which onnx cannot infer where they depend on external data
        raise ModelFileError(f"{path} is not valid ONNX: {problem}")
    try:
        model = ir.load(path)
        return ir.external_data.load_to_model(model)
    except (DecodeError, RuntimeError, ValueError, TypeError, KeyError, OSError) as error:  # of onnx_ir at damage
        raise ModelFileError(f"{path}: the graph cannot be read: {first_line(error)}") from error


def require_strict(path: Path) -> None:
    """Raises ModelFileError where strict inference of types and shapes refuses a file, as TensorRT's parser would.

    It needs no GPU, and is what tells of a mixture of types before a long build does.
    """
    require_kind(path, FileKind.ONNX)
    if problem := _problem(path):
        raise ModelFileError(f"{path}: strict inference of types and shapes refuses it, as TensorRT would: {problem}")


def write(model: ir.Model, path: Path) -> None:
    """Write a graph and prove the file: the full checker and strict type inference, both on what was written.

    Raises:
        ExportError: it is over 2 GB, which one ONNX file cannot be, or is not valid. CacheError.
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
    try:
        proto = ir.to_proto(model)
    except RuntimeError as error:  # of onnx_ir, as at a name of a damaged file that is not UTF-8
        raise ExportError(f"{path.name} cannot be written: {first_line(error)}") from error
    path.write_bytes(proto.SerializeToString(deterministic=True))


def _problem(path: Path, types: bool = True) -> str:
    """Why a file is not valid; empty where it is. By path, so that onnx reads it without a copy in Python.

    Args:
        types: infer types and shapes strictly, too.
    """
    strict = {"check_type": True, "strict_mode": True, "data_prop": True}
    try:
        onnx.checker.check_model(str(path), full_check=types)
        if types:  # The graph with inferred shapes is written somewhere in any case.
            onnx.shape_inference.infer_shapes_path(str(path), os.devnull, **strict)
    # RuntimeError: what is no protobuf message; UnicodeDecodeError: of the bindings, at names that are not UTF-8.
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """What a library said first of all, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]
