"""The branches of a matcher that stops early: what a check computes, what a rejection returns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..errors import ConfigError, ModelFileError
from .names import Names

DECAY, STOPPED, LAYER_SCORES = "early_stop_decay", "stopped_after_layer", "layer_scores"
_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


class Branches:
    """Makes nodes, inputs and Ifs for a graph; the caller puts them where they belong.

    Args:
        results: matches (an integer type), their scores, and the covisibility score, all computed by nodes of
            ``graph``. They get other names, for the outermost If's outputs have theirs.
        scores: checked layer -> its score, in ascending order.
        num_layers: L of the stop rule.
    """

    def __init__(self, graph: ir.Graph, results: list[ir.Value], scores: Mapping[int, ir.Value], num_layers: int):
        self.graph, self.results, self.num_layers = graph, results, num_layers
        self._names = Names(graph)
        for name in (DECAY, STOPPED, LAYER_SCORES):
            if name in self._names:
                raise ModelFileError(f"graph '{graph.name}' has a node or value '{name}', the name of what is added")
        self.labels = (*(value.name for value in results), STOPPED, LAYER_SCORES)
        self._types = (results[0].dtype, results[1].dtype, _FLOAT, _INT64, _FLOAT)
        self._shapes = (*(value.shape for value in results), ir.Shape([]), ir.Shape([len(scores)]))
        for value in results:
            value.name = self._names.new(f"{value.name}_plain")
        self._scores = {layer: self._score(layer, value) for layer, value in scores.items()}

    def start(self, min_covisibility: str, like: tuple[str, int] | None) -> list[ir.Node]:
        """Nodes that all checks read, and the inputs for them.

        Raises:
            ConfigError: no input has the length of the matches.
            ModelFileError: ``min_covisibility`` is no input of one float.
        """
        limit = next((value for value in self.graph.inputs if value.name == min_covisibility), None)
        if limit is None:
            limit = self._input(min_covisibility)
        elif limit.shape is None or any(size != 1 for size in limit.shape) or not limit.dtype.is_floating_point():
            raise ModelFileError(f"input '{limit.name}' is {limit.dtype}{limit.shape}, expected one float")
        nodes: list[ir.Node] = []
        self._limit = self._float_scalar(nodes, limit)
        one = self._constant(nodes, np.float32(1))
        self._kept = self._add(nodes, "Sub", [one, self._input(DECAY)], "early_stop_kept", _FLOAT, [])
        known: dict[tuple, ir.Value] = {}
        self._lengths = [self._length(nodes, shape, like, known) for shape in self._shapes[:2]]
        return nodes

    def readout(self, part: list[ir.Node]) -> tuple[list[ir.Node], list[ir.Value]]:
        """What follows the last part, and the outputs of its branch: the results of the plain graph."""
        nodes: list[ir.Node] = []
        outputs = []
        for value, dtype in zip(self.results, self._types):
            if value.dtype != dtype:
                value = self._add(nodes, "Cast", [value], f"{value.name}_fp32", dtype, value.shape, to=int(dtype))
            elif value.producer() not in part:  # a branch returns values of its own
                value = self._add(nodes, "Identity", [value], f"{value.name}_end", dtype, value.shape)
            outputs.append(value)
        outputs.append(self._constant(nodes, np.int64(0), STOPPED))
        outputs.append(self._layer_scores(nodes, list(self._scores)[-1]))
        return nodes, outputs

    def check(self, layer: int, onward: ir.Graph) -> tuple[list[ir.Node], list[ir.Value]]:
        """Nodes that run ``onward`` where the score of a layer is enough or else stop, and the results of either."""
        nodes, score, _ = self._scores[layer]
        power = self._constant(nodes, np.float32(self.num_layers - layer))
        kept = self._add(nodes, "Pow", [self._kept, power], f"early_stop_kept_{layer}", _FLOAT, [])
        limit = self._add(nodes, "Mul", [self._limit, kept], f"early_stop_limit_{layer}", _FLOAT, [])
        # False for a score of NaN, which "less" would let pass.
        enough = self._add(nodes, "LessOrEqual", [limit, score], f"early_stop_enough_{layer}", _BOOL, [])
        outputs = [
            ir.Value(name=self._names.new(f"{label}_{layer}"), type=ir.TensorType(dtype), shape=shape.copy())
            for label, dtype, shape in zip(self.labels, self._types, self._shapes)
        ]
        branches = {"then_branch": onward, "else_branch": self._rejection(layer)}
        nodes.append(ir.node("If", [enough], branches, outputs=outputs, name=self._names.new(f"early_stop_if_{layer}")))
        return nodes, outputs

    def _rejection(self, layer: int) -> ir.Graph:
        nodes: list[ir.Node] = []
        score = self._scores[layer][1]
        outputs = []
        for i, fill in enumerate((-1, 0)):
            value = ir.tensor([fill], self._types[i])
            name = f"{self.labels[i]}_stop_{layer}"
            filled = self._add(
                nodes, "ConstantOfShape", [self._lengths[i]], name, self._types[i], self._shapes[i], value=value
            )
            outputs.append(filled)
        name, shape = f"{self.labels[2]}_stop_{layer}", self._shapes[2]
        if len(shape):
            sizes = self._constant(nodes, np.ones(len(shape), np.int64))
            outputs.append(self._add(nodes, "Reshape", [score, sizes], name, _FLOAT, shape))
        else:
            outputs.append(self._add(nodes, "Identity", [score], name, _FLOAT, shape))
        outputs.append(self._constant(nodes, np.int64(layer), f"{STOPPED}_stop"))
        outputs.append(self._layer_scores(nodes, layer))
        return ir.Graph([], outputs, nodes=nodes, name=self._names.new(f"stop_after_layer_{layer}"))

    def _score(self, layer: int, value: ir.Value) -> tuple[list[ir.Node], ir.Value, ir.Value]:
        """Nodes that make a layer's score float32, and the score as () and as (1,)."""
        nodes: list[ir.Node] = []
        scalar = self._float_scalar(nodes, value)
        one = self._constant(nodes, np.ones(1, np.int64))
        return nodes, scalar, self._add(nodes, "Reshape", [scalar, one], f"{LAYER_SCORES}_of_{layer}", _FLOAT, [1])

    def _layer_scores(self, nodes: list[ir.Node], last: int) -> ir.Value:
        """Scores of the checked layers, -1 after the last that ran."""
        rows = [row for layer, (_, _, row) in self._scores.items() if layer <= last]
        if len(rows) < len(self._scores):
            rows.append(self._constant(nodes, np.full(len(self._scores) - len(rows), -1, np.float32)))
        size = len(self._scores)
        return self._add(nodes, "Concat", rows, f"{LAYER_SCORES}_until_{last}", _FLOAT, [size], axis=0)

    def _length(self, nodes: list[ir.Node], shape: ir.Shape, like, known: dict) -> ir.Value:
        """A shape as int64 (rank,), from constants and dimensions of inputs."""
        sizes = []
        for dim in shape:
            source = dim if isinstance(dim, int) else self._source(dim.value, like)
            if source not in known:
                known[source] = self._size(nodes, source)
            sizes.append(known[source])
        if len(sizes) == 1:
            return sizes[0]
        return self._add(nodes, "Concat", sizes, "early_stop_shape", _INT64, [len(sizes)], axis=0)

    def _source(self, dim: str | None, like: tuple[str, int] | None) -> tuple[ir.Value, int]:
        """The input and its axis that have the length of a dimension."""
        if like is not None:
            value = next((value for value in self.graph.inputs if value.name == like[0]), None)
            if value is None or value.shape is None or not 0 <= like[1] < len(value.shape):
                raise ConfigError(f"like: no input '{like[0]}' with an axis {like[1]}; inputs are {self._inputs()}")
            return value, like[1]
        for value in self.graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                if dim is not None and not isinstance(size, int) and size.value == dim:
                    return value, axis
        raise ConfigError(
            f"no input has the dimension '{dim}' of '{self.labels[0]}' and '{self.labels[1]}'; inputs are "
            f"{self._inputs()}; name the one that gives their length: like=(input, axis), or --like INPUT,AXIS"
        )

    def _inputs(self) -> dict[str, str]:
        return {value.name: str(value.shape) for value in self.graph.inputs}

    def _size(self, nodes: list[ir.Node], source: int | tuple[ir.Value, int]) -> ir.Value:
        if isinstance(source, int):
            return self._constant(nodes, np.array([source], np.int64))
        value, axis = source
        shape = self._add(nodes, "Shape", [value], f"{value.name}_shape", _INT64, [len(value.shape)])
        index = self._constant(nodes, np.array([axis], np.int64))
        return self._add(nodes, "Gather", [shape, index], f"{value.name}_size", _INT64, [1], axis=0)

    def _float_scalar(self, nodes: list[ir.Node], value: ir.Value) -> ir.Value:
        if value.dtype != _FLOAT:
            value = self._add(nodes, "Cast", [value], f"{value.name}_fp32", _FLOAT, value.shape, to=int(_FLOAT))
        if len(value.shape):
            value = self._add(nodes, "Squeeze", [value], f"{value.name}_scalar", _FLOAT, [])
        return value

    def _input(self, name: str) -> ir.Value:
        if name in self._names:
            raise ModelFileError(f"graph '{self.graph.name}': '{name}' is there and no input; rename it")
        value = ir.Value(name=self._names.new(name), type=ir.TensorType(_FLOAT), shape=ir.Shape([]))
        self.graph.inputs.append(value)
        return value

    def _constant(self, nodes: list[ir.Node], array, name: str = "early_stop_constant") -> ir.Value:
        tensor = ir.tensor(np.asarray(array))
        return self._add(nodes, "Constant", [], name, tensor.dtype, np.shape(array), value=tensor)

    def _add(self, nodes: list[ir.Node], op: str, inputs: list, name: str, dtype, shape, **attributes) -> ir.Value:
        name = self._names.new(name)
        result = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        nodes.append(ir.node(op, inputs, attributes, outputs=[result], name=name))
        return result
