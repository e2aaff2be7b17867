"""A matcher that stops where its layers show that two images do not see the same place.

After each checked layer k of L, a pair is rejected when its covisibility score is below
``min_covisibility * (1 - early_stop_decay) ** (L - k)`` (FlexGlue, onnx/export.py ``--early_stop_layers``,
https://github.com/cvg/FlexGlue). What the following layers and the readout compute is then not run: the nodes of the
graph are split by the first checked score that needs them, and each part after a check is the branch of an If within
the part before it. Each initialiser goes where it is first read.

What a runtime needs to know:

- A rejection has the shapes of the results it stands for. TensorRT before 10.11 takes no others.
- CUDA graphs are refused for graphs with If.
- Optimisers of runtimes had faults with Ifs within Ifs. Tested with ONNX Runtime 1.20, 1.27 and 1.32 at all levels, and
  with OpenVINO 2026.4.
- Offline optimisers that do not enter the branches of If come before this pass, and so does half precision
  (:func:`~.fp16.to_half`): strict type inference fails where the types within branches change afterwards.
- Without a stop, float32 results are those of the plain graph bit for bit. In half precision ONNX Runtime's CPU, which
  computes in float32, rounds at the edges of branches where it does not within a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from ..errors import ConfigError, ModelFileError
from .branches import DECAY, STOPPED, Branches
from .partition import constant_bytes, detach, first_readers, partition

_OPSET = 12  # that LessOrEqual is of


@dataclass(frozen=True)
class Stage:
    """A part of the matcher that runs unless it stopped before.

    Attributes:
        after_layer: the checked layer whose score decides whether it runs; 0: it always does.
        nodes: of the plain graph, in this part; bodies of If and Loop not counted.
        constant_bytes: of the initialisers and Constant nodes that lie in it.
    """

    after_layer: int
    nodes: int
    constant_bytes: int


@dataclass(frozen=True)
class EarlyStop:
    """The matcher that stops early, and its parts in the order in which they run."""

    model: ir.Model
    stages: tuple[Stage, ...]

    @property
    def patch(self) -> str:
        """How cards record it, e.g. ``early-stop 2,4``."""
        return f"early-stop {','.join(str(stage.after_layer) for stage in self.stages[1:])}"

    def skipped(self, layer: int) -> tuple[int, int]:
        """Nodes and bytes of constants that a stop after a checked layer spares."""
        spared = [stage for stage in self.stages if stage.after_layer >= layer]
        return sum(stage.nodes for stage in spared), sum(stage.constant_bytes for stage in spared)


def add_early_stop(
    model: ir.Model,
    scores: Mapping[int, str],
    layers: Sequence[int],
    num_layers: int,
    *,
    matches: str = "matches0",
    match_scores: str = "mscores0",
    covisibility: str = "covisibility_score",
    min_covisibility: str = "min_covisibility",
    like: tuple[str, int] | None = None,
    force: bool = False,
) -> EarlyStop:
    """A copy of a matcher that stops after checked layers; ``model`` stays as it is and shares its constants.

    Where it stops after layer k, ``matches`` are -1, ``match_scores`` 0 and ``covisibility`` is the score of layer k.
    Where it does not, they are those of the plain graph: always at ``early_stop_decay`` 1 or ``min_covisibility`` 0, as
    scores are in [0, 1]. A NaN score ends the run at every decay, with a ``covisibility`` of NaN: nothing that follows
    it could be trusted, and the caller must take it for a fault, not for a stop.

    Added: the input ``early_stop_decay`` float32 () in [0, 1]; the input ``min_covisibility`` float32 () where the
    graph has none; the outputs ``stopped_after_layer`` int64 (), 0 where it did not stop, and ``layer_scores`` float32
    (len(layers),), the scores of the checked layers, -1 of those that did not run. ``covisibility`` is float32 even
    where the plain graph's is not. Outputs that are scores of layers, and what only they need, are removed.

    Args:
        scores: layer, from 1 -> name of its covisibility score, a float value of one element in the main graph.
        layers: those to check, ascending. The score of layer 1 says too little: it is checked with ``force`` only.
        num_layers: L of the formula.
        matches, match_scores, covisibility: names of the outputs.
        min_covisibility: name of the input.
        like: input and axis that has the length of the matches. Unless given, it is the one whose dimension has the
            name of the matches' dimension.

    Raises:
        ConfigError: ``layers`` cannot be checked, or the graph has no value of a name that was given.
        ModelFileError: the graph stops early already, has a name that is added, is of an opset before 12, or cannot be
            split.
    """
    check_layers(scores, layers, num_layers, force)
    model = model.clone()
    ShapeInferencePass()(model)
    graph = model.graph
    if any(value.name in (DECAY, STOPPED) for value in (*graph.inputs, *graph.outputs)):
        raise ModelFileError(f"graph '{graph.name}' stops early already; take the one without '{STOPPED}'")
    if (opset := graph.opset_imports.get("", 0)) < _OPSET:
        raise ModelFileError(f"graph '{graph.name}' is of opset {opset}, expected {_OPSET} or newer; convert it first")
    checked = {layer: _score(graph, layer, scores[layer]) for layer in layers}
    results = [_output(graph, name) for name in (matches, match_scores, covisibility)]
    _check_types(results)
    others = [value for value in graph.outputs if value not in results and value.name not in scores.values()]
    _check_order(graph, checked)
    parts = partition(graph, [*([score] for score in checked.values()), [*results, *others]])
    _check_parts(parts, others, scores, layers)

    branches = Branches(graph, results, checked, num_layers)
    start = branches.start(min_covisibility, like)
    end, outputs = branches.readout(parts[-1])
    homes = first_readers(graph, parts)
    stages = tuple(
        Stage(layer, len(part), constant_bytes(part, home)) for layer, part, home in zip((0, *layers), parts, homes)
    )
    kept = [value for value in graph.outputs if value in results or value in others]
    graph.outputs.clear()
    detach(graph, parts)
    for name in [name for name, value in graph.initializers.items() if not _stays(value, homes[0], others)]:
        del graph.initializers[name]
    onward = [*parts[-1], *end]
    for layer, part, home in reversed(list(zip(layers, parts[:-1], homes[1:]))):
        inner = ir.Graph([], outputs, nodes=onward, initializers=home, name=f"after_layer_{layer}")
        check, outputs = branches.check(layer, inner)
        onward = [*part, *check]
    graph.extend([*start, *check])
    for value, label in zip(outputs, branches.labels):
        value.name = label
    graph.outputs.extend([outputs[results.index(v)] if v in results else v for v in kept] + outputs[3:])
    return EarlyStop(model, stages)


def check_layers(scores: Collection[int], layers: Sequence[int], num_layers: int, force: bool) -> None:
    """Raises ConfigError unless ``layers`` ascend and have scores; ``scores``: the layers that have."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= num_layers:
        raise ConfigError(f"early stop: layers are {list(layers)}, expected ascending ones from 1 to {num_layers - 1}")
    missing = [layer for layer in layers if layer not in scores]
    if missing:
        raise ConfigError(f"early stop: no score of layers {missing}; there are those of {sorted(scores)}")
    if layers[0] == 1 and not force:
        raise ConfigError("early stop: the score of layer 1 says too little to reject a pair; check it with force only")


def _check_types(results: list[ir.Value]) -> None:
    matches, match_scores, covisibility = results
    if matches.dtype is None or not matches.dtype.is_integer():
        raise ModelFileError(f"output '{matches.name}' has type {matches.dtype}, expected integers")
    for value in (match_scores, covisibility):
        if value.dtype is None or not value.dtype.is_floating_point():
            raise ModelFileError(f"output '{value.name}' has type {value.dtype}, expected floats")
    for value in (matches, match_scores):
        if not value.shape:
            raise ModelFileError(f"output '{value.name}' has shape {value.shape}; export it with named dimensions")
    for value in results:
        if value.producer() is None:
            raise ModelFileError(f"output '{value.name}' is an input or a constant: no matcher computes it")
    _one_element(covisibility)


def _check_order(graph: ir.Graph, checked: Mapping[int, ir.Value]) -> None:
    """A later layer's score needs all that an earlier one's does, but for the latter's head."""
    needs = {layer: len(partition(graph, [[score]])[0]) for layer, score in checked.items()}
    for before, layer in zip(list(needs), list(needs)[1:]):
        if needs[layer] < needs[before]:
            raise ConfigError(
                f"score '{checked[layer].name}' of layer {layer} needs {needs[layer]} nodes, fewer than "
                f"'{checked[before].name}' of layer {before} with {needs[before]}; are they exchanged?"
            )


def _check_parts(parts: list[list[ir.Node]], others: list[ir.Value], scores: Mapping, layers: Sequence[int]) -> None:
    for part, layer in zip(parts[1:], layers):
        if not part:
            raise ConfigError(
                f"nothing is left to skip after the score of layer {layer}; is each the right one? {scores}"
            )
    first = set(parts[0])
    for value in others:
        if value.producer() is not None and value.producer() not in first:
            raise ModelFileError(f"output '{value.name}' has no value where the matcher stops; export it without")


def _stays(value: ir.Value, read: list[ir.Value], others: list[ir.Value]) -> bool:
    """Whether an initialiser stays in the main graph."""
    return value.is_graph_input() or value in read or value in others


def _score(graph: ir.Graph, layer: int, name: str) -> ir.Value:
    found = [value for node in graph for value in node.outputs if value.name == name]
    if not found:
        there = [value.name for value in graph.outputs]
        raise ConfigError(f"graph '{graph.name}' computes no '{name}', the score of layer {layer}; outputs are {there}")
    if found[0].dtype is None or not found[0].dtype.is_floating_point():
        raise ConfigError(f"score '{name}' of layer {layer} has type {found[0].dtype}, expected a float")
    return _one_element(found[0])


def _output(graph: ir.Graph, name: str) -> ir.Value:
    for value in graph.outputs:
        if value.name == name:
            return value
    raise ConfigError(f"graph '{graph.name}' has no output '{name}'; there are {[v.name for v in graph.outputs]}")


def _one_element(value: ir.Value) -> ir.Value:
    if value.shape is None or any(size != 1 for size in value.shape):
        raise ConfigError(f"'{value.name}' has shape {value.shape}, expected one element: () or (1,)")
    return value
