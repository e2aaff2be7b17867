"""What is in a graph: nodes, operators, initialisers and the size of the file, of one model or of two side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from .text_table import aligned


@dataclass(frozen=True)
class GraphFacts:
    """``operators``: type -> count, subgraphs included; ``megabytes``: MiB of the file."""

    nodes: int
    initialisers: int
    megabytes: float
    operators: dict[str, int]

    @classmethod
    def of(cls, model: ir.Model, path: Path) -> GraphFacts:
        """Of a graph and the file that it was written to."""
        counts = Counter(node.op_type for node in model.graph.all_nodes())
        operators = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
        return cls(counts.total(), len(model.graph.initializers), path.stat().st_size / 2**20, operators)


def graph_table(columns: dict[str, GraphFacts]) -> str:
    """A table with one column for each title; operators by their count in the first."""
    types = dict.fromkeys(op for facts in columns.values() for op in facts.operators)
    rows = [["", *columns]]
    rows.append(["nodes", *(str(f.nodes) for f in columns.values())])
    rows.append(["operator types", *(str(len(f.operators)) for f in columns.values())])
    rows.append(["initialisers", *(str(f.initialisers) for f in columns.values())])
    rows.append(["file, MiB", *(f"{f.megabytes:.1f}" for f in columns.values())])
    rows += [[f"  {op}", *(str(f.operators.get(op, "-")) for f in columns.values())] for op in types]
    return aligned(rows)
