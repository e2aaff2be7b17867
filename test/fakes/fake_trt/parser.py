"""OnnxParser: what it takes, and the errors that it lists."""

from __future__ import annotations

from pathlib import Path

import onnx
from fake_gpu.faults import FAULTS

from . import versions
from .cpu_graph import for_cpu
from .dims import text
from .enums import ErrorCode
from .graph_facts import all_nodes, facts
from .logger import error
from .network import KINDS, INetworkDefinition


class ParserError:
    """One reason why a file was refused. All are methods."""

    def __init__(self, desc: str, code: str, node: int = -1, name: str = "", operator: str = ""):
        self._all = desc, code, node, name, operator

    def desc(self):
        return self._all[0]

    def code(self):
        return ErrorCode.__members__[self._all[1]]

    def node(self):
        return self._all[2]

    def node_name(self):
        return self._all[3]

    def node_operator(self):
        return self._all[4]

    def file(self):
        return "ModelImporter.cpp"

    def func(self):
        return "parseNode"

    def line(self):
        return 0

    def local_function_stack(self):
        return []

    def local_function_stack_size(self):
        return 0

    def __str__(self) -> str:
        desc, code, node, name, operator = self._all
        return f"In node {node} with name: {name} and operator: {operator} (parseNode): {code}: {desc}"


class OnnxParser:
    """Fills a network from a file."""

    def __init__(self, network, logger):
        if not isinstance(network, INetworkDefinition):
            raise TypeError("__init__(): incompatible constructor arguments")
        self._network, self._logger, self._errors, self.flags = network, logger, [], 0

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index):
        return self._errors[index] if 0 <= index < len(self._errors) else None

    def clear_errors(self):
        self._errors = []

    def set_flag(self, flag):
        self.flags |= 1 << int(flag)

    def clear_flag(self, flag):
        self.flags &= ~(1 << int(flag))

    def get_flag(self, flag):
        return bool(self.flags >> int(flag) & 1)

    def supports_operator(self, op_name):
        return text(op_name) in KINDS

    def parse_from_file(self, model):
        path = Path(text(model))
        if not path.is_file():
            return self._refuse([ParserError(f"Failed to open file: {path}", "MODEL_DESERIALIZE_FAILED")])
        return self.parse(path.read_bytes(), str(path))

    def parse(self, model, path=None):
        content = bytes(memoryview(model))
        if FAULTS.hit("parse"):
            return self._refuse([ParserError("Assertion failed: ordered fault", "INTERNAL_ERROR", 3, "/x/Add", "Add")])
        try:
            proto = onnx.load_model_from_string(content)
            if path:
                onnx.load_external_data_for_model(proto, str(Path(path).parent))
        except Exception as failure:  # protobuf raises its own kinds
            return self._refuse([ParserError(f"Failed to parse the ONNX model: {failure}", "MODEL_DESERIALIZE_FAILED")])
        errors = self._unsupported(proto) or self._wrongly_typed(proto)
        if errors:
            return self._refuse(errors)
        found = facts(proto)
        if found.unequal_branches and not versions.since(10, 11):
            desc = "IIfConditionalOutputLayer inputs must have the same shape."
            return self._refuse([ParserError(desc, "INVALID_NODE", 0, name, "If") for name in found.unequal_branches])
        if found.shapes_of_data:
            desc = "the shape must be a build time constant or come of shape tensors"
            return self._refuse([ParserError(desc, "UNSUPPORTED_NODE", 0, name) for name in found.shapes_of_data])
        self._network._fill(found, for_cpu(proto, found.ks))
        return True

    def _unsupported(self, proto) -> list[ParserError]:
        if not proto.graph.node:
            return [ParserError("The model holds no graph", "MODEL_DESERIALIZE_FAILED")]
        return [
            ParserError(
                f"No importer registered for op: {node.op_type}. Attempting to import as plugin. Plugin not found",
                "UNSUPPORTED_NODE",
                i,
                node.name,
                node.op_type,
            )
            for i, node in enumerate(all_nodes(proto.graph.node))
            if node.op_type not in KINDS or node.domain not in ("", "ai.onnx")
        ]

    def _wrongly_typed(self, proto) -> list[ParserError]:
        if not self._network._strong():
            return []
        try:
            onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
        except onnx.shape_inference.InferenceError as failure:
            return [ParserError(str(failure), "INVALID_NODE")]
        return []

    def _refuse(self, errors: list[ParserError]) -> bool:
        self._errors += errors
        for each in errors:
            error(str(each))
        return False
