"""The nodes of a graph by what needs them first, and the constants that go with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from .rules import bodies


def partition(graph: ir.Graph, goals: Sequence[Collection[ir.Value]]) -> list[list[ir.Node]]:
    """For each goal the nodes that it needs and no earlier goal does, in the order of the graph.

    What no goal needs is in none of the lists. A node with bodies (If, Loop) needs what these read from outside.
    """
    first: dict[ir.Node, int] = {}
    for i, goal in enumerate(goals):
        waiting = [value.producer() for value in goal]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in first:
                first[node] = i
                waiting += [value.producer() for value in read_by(node)]
    groups: list[list[ir.Node]] = [[] for _ in goals]
    for node in graph:
        if node in first:
            groups[first[node]].append(node)
    return groups


def detach(graph: ir.Graph, parts: Sequence[Sequence[ir.Node]]) -> None:
    """Takes all nodes but those of the first part out of the graph; those of no part stop reading values."""
    placed = {node for part in parts for node in part}
    for node in graph:
        if node not in placed:
            for reader in (node, *(inner for body in bodies(node) for inner in body.all_nodes())):
                for i in range(len(reader.inputs)):
                    reader.replace_input_with(i, None)
    first = set(parts[0])
    graph.remove([node for node in graph if node not in first])


def first_readers(graph: ir.Graph, groups: Sequence[Sequence[ir.Node]]) -> list[list[ir.Value]]:
    """For each group of nodes the graph's initialisers that it reads and no earlier group does.

    Initialisers that are inputs too are the caller's to replace and are left out.
    """
    mine = {value for value in graph.initializers.values() if not value.is_graph_input()}
    found: list[list[ir.Value]] = []
    for group in groups:
        read = dict.fromkeys(value for node in group for value in read_by(node) if value in mine)
        mine.difference_update(read)
        found.append(list(read))
    return found


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, and what its bodies do, their own values among it."""
    yield from (value for value in node.inputs if value is not None)
    for body in bodies(node):
        yield from body.outputs
        for inner in body:
            yield from read_by(inner)


def constant_bytes(nodes: Collection[ir.Node], initialisers: Collection[ir.Value]) -> int:
    """Bytes of initialisers and of Constant nodes, those in bodies among them."""
    tensors = [value.const_value for value in initialisers]
    for node in nodes:
        for body in bodies(node):
            tensors += [value.const_value for value in body.initializers.values()]
        if node.op_type == "Constant" and "value" in node.attributes:
            tensors.append(node.attributes["value"].as_tensor())
    nested = sum(constant_bytes(list(body), ()) for node in nodes for body in bodies(node))
    return nested + sum(tensor.nbytes for tensor in tensors if tensor is not None)
