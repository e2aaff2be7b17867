"""Enums as pybind11 makes them: no ``enum.Enum``, equal only to their own type, and no ``<<`` without ``int()``."""

from __future__ import annotations

from . import versions


class _Enum:
    def __init__(self, value):
        self._value = int(value)

    @property
    def value(self) -> int:
        return self._value

    @property
    def name(self) -> str:
        names = [name for name, member in self.__members__.items() if member == self]
        return names[0] if names else "???"

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    def __eq__(self, other) -> bool:
        return type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def _enum(name: str, members: dict[str, int]) -> type:
    made = type(name, (_Enum,), {"__members__": {}})
    for each, value in members.items():
        made.__members__[each] = made(value)
        setattr(made, each, made.__members__[each])
    return made


BuilderFlag = _enum("BuilderFlag", versions.builder_flags())
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag", versions.network_flags())
DataType = _enum("DataType", versions.data_types())
PreviewFeature = _enum("PreviewFeature", versions.preview_features())
HardwareCompatibilityLevel = _enum("HardwareCompatibilityLevel", versions.hardware_levels())
TensorIOMode = _enum("TensorIOMode", {"NONE": 0, "INPUT": 1, "OUTPUT": 2})
TensorLocation = _enum("TensorLocation", {"DEVICE": 0, "HOST": 1})
MemoryPoolType = _enum(
    "MemoryPoolType",
    {
        "WORKSPACE": 0,
        "DLA_MANAGED_SRAM": 1,
        "DLA_LOCAL_DRAM": 2,
        "DLA_GLOBAL_DRAM": 3,
        "TACTIC_DRAM": 4,
        "TACTIC_SHARED_MEMORY": 5,
    },
)
ProfilingVerbosity = _enum("ProfilingVerbosity", {"LAYER_NAMES_ONLY": 0, "NONE": 1, "DETAILED": 2})
ExecutionContextAllocationStrategy = _enum(
    "ExecutionContextAllocationStrategy", {"STATIC": 0, "ON_PROFILE_CHANGE": 1, "USER_MANAGED": 2}
)
Severity = _enum("Severity", {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "INFO": 3, "VERBOSE": 4})
LayerType = _enum("LayerType", versions.layer_types())
OnnxParserFlag = _enum(
    "OnnxParserFlag",
    {"NATIVE_INSTANCENORM": 0}
    | ({"ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA": 1} if versions.since(10, 13) else {}),
)
ErrorCode = _enum(
    "ErrorCode",
    {
        "SUCCESS": 0,
        "INTERNAL_ERROR": 1,
        "MEM_ALLOC_FAILED": 2,
        "MODEL_DESERIALIZE_FAILED": 3,
        "INVALID_VALUE": 4,
        "INVALID_GRAPH": 5,
        "INVALID_NODE": 6,
        "UNSUPPORTED_GRAPH": 7,
        "UNSUPPORTED_NODE": 8,
    },
)
