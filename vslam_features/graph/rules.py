"""Rules: which nodes of a graph a pass leaves alone.

A rule that finds nothing raises ConfigError, for a pattern that matches no node of a new export is a mistake that no
other check sees. Nodes in the bodies of If and Loop count; a node that stays takes its body along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import onnx_ir as ir

from ..errors import ConfigError

Rule = Callable[[ir.Graph], "set[ir.Node]"]


def downstream_of_last(op_type: str = "LayerNormalization") -> Rule:
    """The last node of a type, in the order of the graph, and everything that depends on it."""

    def rule(graph: ir.Graph) -> set[ir.Node]:
        last = [node for node in graph.all_nodes() if node.op_type == op_type]
        return _downstream(graph, _some(last, f"of type {op_type}", graph)[-1:])

    return rule


def downstream_of(*inputs: str) -> Rule:
    """Everything that depends on inputs of these names, such as positions in pixels; on each at least one node."""

    def rule(graph: ir.Graph) -> set[ir.Node]:
        readers = []
        for name in inputs:
            found = [user for value in graph.inputs if value.name == name for user in value.consumers()]
            readers += _some(found, f"that reads an input '{name}'", graph)
        return _downstream(graph, readers)

    return rule


def back_to(op_type: str, *values: str) -> Rule:
    """What computes the values of these names, back to the nearest nodes of a type, these included."""

    def rule(graph: ir.Graph) -> set[ir.Node]:
        makers = []
        for name in values:
            found = [node for node in graph.all_nodes() if any(value.name == name for value in node.outputs)]
            makers += _some(found, f"that computes '{name}'", graph)
        return _upstream(makers, op_type)

    return rule


def _downstream(graph: ir.Graph, nodes: list[ir.Node]) -> set[ir.Node]:
    owners = {body: node for node in graph.all_nodes() for body in bodies(node)}
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += [user for output in node.outputs for user in output.consumers()]
        if node.graph in owners:
            waiting.append(owners[node.graph])
    return found


def _upstream(nodes: Iterable[ir.Node], stop: str | None = None) -> set[ir.Node]:
    """Nodes and what they depend on, but for what those of the type ``stop`` depend on."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if node.op_type != stop:
            results = [output for body in bodies(node) for output in body.outputs]
            waiting += [value.producer() for value in (*node.inputs, *results) if value and value.producer()]
    return found


def by_name(pattern: str) -> Rule:
    """Nodes whose name matches a pattern as in a shell; a node without a name has that of its first output."""

    def rule(graph: ir.Graph) -> set[ir.Node]:
        found = [n for n in graph.all_nodes() if fnmatchcase(n.name or n.outputs[0].name or "", pattern)]
        return set(_some(found, f"named like '{pattern}'", graph))

    return rule


def by_op(*op_types: str) -> Rule:
    """Nodes of these types, of each at least one."""

    def rule(graph: ir.Graph) -> set[ir.Node]:
        found = {op: [n for n in graph.all_nodes() if n.op_type == op] for op in op_types}
        return {node for op, nodes in found.items() for node in _some(nodes, f"of type {op}", graph)}

    return rule


def upstream_of(rule: Rule) -> Rule:
    """What a rule finds and everything that this depends on, such as the positions in pixels before a sine."""

    return lambda graph: _upstream(rule(graph))


def union(*rules: Rule) -> Rule:
    """What any of the rules finds; of no rules: nothing."""
    return lambda graph: set().union(*(rule(graph) for rule in rules))


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node runs: branches of If, body of Loop or Scan."""
    graphs = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs


def _some(nodes: list[ir.Node], what: str, graph: ir.Graph) -> list[ir.Node]:
    if not nodes:
        there = sorted({f"{n.op_type} '{n.name}'" for n in graph.all_nodes()})
        raise ConfigError(f"graph '{graph.name}' has no node {what}; there are: {', '.join(there[:8])}, ...")
    return nodes
