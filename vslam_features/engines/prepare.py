"""The graph that TensorRT is given: checked strictly, patched, and written beside what is built.

What TensorRT's parser would refuse is refused here, where no GPU is needed: strict inference of types and shapes; the
branches of an If that older versions want equal. What a profile leaves no choice is fixed in the graph: TensorRT takes
no convolution whose number of channels is dynamic, whatever its profile says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from ..artifacts.card import PRECISIONS, ModelCard
from ..artifacts.engine_key import EngineWish
from ..artifacts.engine_source import EngineSource
from ..artifacts.store import content_sha256
from ..errors import ConfigError, ModelFileError
from ..graph import bf16_attention, cumsum, model_file
from ..graph.attention_cores import MOVES, Core, find_cores
from ..graph.names import Names
from ..graph.patching import Source
from ..graph.rules import bodies
from ..runtimes.trt_library import Capabilities, version_numbers

_MANY_TOKENS = 2048  # whose products TensorRT fuses, so that logits of (heads, tokens, tokens) never lie in memory
_MISCOMPUTES_CUMSUM = (10, 3)  # and older, on Jetson (tinynav, pull request 261)


@dataclass(frozen=True)
class Prepared:
    """What is built from.

    Args:
        path: of the file; the source itself, where nothing had to be changed. sha256: its ``content_sha256``.
        card: of the engine.
        layers: nodes of the cores of attention, in the order of the graph; empty for a strongly typed engine.
        core_type: ``bf16`` or ``fp32``, that cores of attention were given; empty: none were.
        has_if: whether the graph branches.
        notes: what was done and what was not, in words.
    """

    path: Path
    sha256: str
    card: ModelCard
    layers: tuple[str, ...]
    core_type: str
    has_if: bool
    notes: tuple[str, ...]


def prepare(source: EngineSource, wish: EngineWish, able: Capabilities, folder: Path) -> Prepared:
    """Check and patch a file, and write the result to a folder.

    Raises:
        ModelFileError: strict inference refuses it, this version of TensorRT cannot have it, or a patch cannot be made
            that it needs. ConfigError: an axis of CumSum is too long for the patch that this version needs.
        ExportError, CacheError: what was patched is not valid, or cannot be written.
    """
    model_file.require_strict(source.path)
    plain = Source.read(source.path)
    fixed = _fix_axes(plain.model, wish.profiles)
    model, notes, patches = _inferred(plain.model), [fixed], []
    has_if = _check_branches(model, source.path, able)
    if "cumsum" in wish.patches:
        model, text = _without_cumsum(model, source.path, able.version)
        notes.append(text)
        patches += [cumsum.PATCH] * text.startswith("CumSum: ")
    done = _attention(model, source) if "attention" in wish.patches else _Attention(model, "")
    notes.append(done.note)
    patches += [done.patch] if done.patch else []
    changed = bool(fixed or done.changed or cumsum.PATCH in patches)
    precision = max(source.precision, "bf16", key=PRECISIONS.index) if done.core_type == "bf16" else source.precision
    card = replace(plain.card, precision=precision)
    for patch in patches:
        card = replace(plain, card=card).patched_card(patch)
    path, sha256 = source.path, source.sha256
    if changed:
        path = folder / f"{source.path.stem}.patched.onnx"
        model_file.write(done.model, path)
        sha256 = content_sha256(path)
    return Prepared(path, sha256, card, done.layers, done.core_type, has_if, tuple(filter(None, notes)))


def _fix_axes(model: ir.Model, profiles: Mapping[str, list[list[int]]]) -> str:
    """Give the axes of inputs that are equally long in all of a profile that length; what was done, in words."""
    done = []
    for value in model.graph.inputs:
        least, _, most = profiles.get(value.name or "", ((), (), ()))
        if value.shape is None or len(value.shape) != len(least):
            continue
        choices = zip(value.shape, least, most)
        sizes = [low if low == high and not isinstance(n, int) else n for n, low, high in choices]
        if sizes != list(value.shape):
            value.shape = ir.Shape(sizes)
            done.append(f"{value.name} {'x'.join(str(n) if isinstance(n, int) else '?' for n in sizes)}")
    return f"fixed in the graph: {', '.join(done)}" if done else ""


def _inferred(model: ir.Model) -> ir.Model:
    if model.functions:
        InlinePass()(model)
    ShapeInferencePass()(model)
    return model


def _check_branches(model: ir.Model, path: Path, able: Capabilities) -> bool:
    """Whether there is an If. Before 10.11 both branches of each must give equal shapes."""
    found = [node for node in model.graph.all_nodes() if node.op_type == "If" and node.domain in ("", "ai.onnx")]
    for node in () if able.unequal_branches else found:
        first, second = bodies(node)
        for a, b in zip(first.outputs, second.outputs):
            shapes = [_sizes(v) for v in (a, b)]
            if shapes[0] != shapes[1] or shapes[0] is None or None in shapes[0]:
                told = " and ".join("?" if s is None else f"({', '.join(str(n or '?') for n in s)})" for s in shapes)
                raise ModelFileError(
                    f"{path}: the branches of If '{node.name}' give '{a.name}' the shapes {told}; TensorRT "
                    f"{able.version} wants equal ones, 10.11 and newer do not: build from the plain model, before "
                    "'models patch early-stop' or its like"
                )
    return bool(found)


def _sizes(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape]


def _without_cumsum(model: ir.Model, path: Path, version: str) -> tuple[ir.Model, str]:
    """The graph, and what there is to say."""
    try:
        done = cumsum.cumsum_to_matmul(model)
    except (ConfigError, ModelFileError) as error:
        if version_numbers(version)[:2] <= _MISCOMPUTES_CUMSUM:
            raise type(error)(
                f"{path}: {error}. TensorRT {version} may miscompute a CumSum that it fuses, so that it must go; "
                "change the model, or build with 10.4 or newer"
            ) from error
        return model, f"warning: CumSum stays, which TensorRT 10.3 miscomputed on Jetson: {error}"
    return done.model, f"CumSum: {len(done.sums)} replaced by MatMul" if done.sums else ""


@dataclass(frozen=True)
class _Attention:
    """The graph, what is said, nodes that a weakly typed engine gives a type, that type, what changed, the patch."""

    model: ir.Model
    note: str
    layers: tuple[str, ...] = ()
    core_type: str = ""
    changed: bool = False
    patch: str = ""


def _attention(model: ir.Model, source: EngineSource) -> _Attention:
    cores, others = find_cores(model)
    if not cores:
        what = f"; Softmax that is none: {', '.join(list(others)[:4])}" if others else ""
        return _Attention(model, f"no core of attention: all of it computes as the file says{what}")
    core_type = _core_type(cores) if source.core_type == "auto" else source.core_type
    if source.typing == "weak":
        layers, renamed = _named(model, cores)
        note = f"attention: {len(cores)} cores in {core_type} by layer precisions"
        return _Attention(model, note, layers, core_type, renamed, f"{core_type}-attention by layer precisions")
    if core_type == "fp32":
        model, count = bf16_attention.attention_in_float32(model)
        if not count:
            return _Attention(model, f"attention: none of {len(cores)} cores is in half precision")
        note = f"attention: {count} cores cast to float32"
        return _Attention(model, note, (), core_type, True, bf16_attention.PATCH_FLOAT)
    done = bf16_attention.attention_in_bf16(model, centre_keys=True)
    if not done.cores:
        return _Attention(model, f"attention: {done.done} cores are in BF16 already")
    note = f"attention: {len(done.cores)} cores cast to BF16, keys of {done.centred} centred"
    return _Attention(done.model, note, (), core_type, True, done.patch)


def _core_type(cores: list[Core]) -> str:
    """Attention over a large map, as FlexGlue's, takes too long in float32; over keypoints BF16 loses matches."""
    return "bf16" if any(isinstance(core.keys, int) and core.keys >= _MANY_TOKENS for core in cores) else "fp32"


def _named(model: ir.Model, cores: list[Core]) -> tuple[tuple[str, ...], bool]:
    """Names of the nodes of cores that compute, and whether some are new: TensorRT calls its layers by unique ones.

    Moves of axes compute nothing, and TensorRT's parser may leave them out.
    """
    names = Names(model.graph)
    uses: dict[str, int] = {}
    for node in model.graph.all_nodes():
        uses[node.name or ""] = uses.get(node.name or "", 0) + 1
    chosen = dict.fromkeys(node for core in cores for node in core.nodes if node.op_type not in MOVES)
    unclear = [node for node in chosen if not node.name or uses[node.name] > 1]
    for node in unclear:
        node.name = names.new(node.name or f"{node.op_type}_{node.outputs[0].name}")
    return tuple(node.name for node in chosen), bool(unclear)
