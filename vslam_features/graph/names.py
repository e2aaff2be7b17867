"""Names in a graph: those that are there, and new ones for what a pass adds."""

from __future__ import annotations

import onnx_ir as ir


class Names:
    """Names of all values and nodes of a graph and its bodies, and those that were given since."""

    def __init__(self, graph: ir.Graph):
        graphs = [graph, *graph.subgraphs()]
        self._taken = {v.name for g in graphs for v in (*g.inputs, *g.initializers.values())}
        self._taken |= {v.name for n in graph.all_nodes() for v in n.outputs} | {n.name for n in graph.all_nodes()}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def new(self, wish: str) -> str:
        """A name that no value and no node has: the wish, or that with a number."""
        name, i = wish, 2
        while name in self._taken:
            name, i = f"{wish}_{i}", i + 1
        self._taken.add(name)
        return name
