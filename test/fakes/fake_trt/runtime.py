"""Runtime and ICudaEngine."""

from __future__ import annotations

import hashlib

import onnxruntime
from fake_gpu.device import current, gpus
from fake_gpu.faults import FAULTS, misuse

from . import versions
from .context import IExecutionContext
from .dims import Dims, integer, text
from .enums import DataType, ExecutionContextAllocationStrategy, TensorIOMode, TensorLocation
from .graph_facts import Tensor
from .host_memory import host_memory
from .logger import error, register, warn
from .objects import alive
from .plan import unpack
from .prediction import Prediction


class Runtime:
    """Reads engines. Where there is no GPU the real one crashes, so this one does."""

    def __init__(self, logger):
        if not gpus():
            raise misuse("Runtime without a GPU: the real one crashes (segmentation fault)")
        register(self, logger)
        self._logger, self.engine_host_code_allowed, self.max_threads = logger, False, 1
        alive("runtimes", self)

    logger = property(lambda self: self._logger)

    def deserialize_cuda_engine(self, serialized_engine):
        """The engine, or None with the reason in the log."""
        plan = bytes(memoryview(serialized_engine))
        try:
            if FAULTS.hit("deserialize"):
                raise ValueError("Serialization assertion failed: ordered fault")
            facts, graph = unpack(plan)
            _check(facts)
        except ValueError as failure:
            error(f"IRuntime::deserializeCudaEngine: Error Code 1: Serialization ({failure})")
            return None
        return ICudaEngine(self, facts, graph, plan)


class ICudaEngine:
    """An engine on the GPU on which it was read."""

    def __init__(self, runtime: Runtime, facts: dict, graph: bytes, plan: bytes):
        self._runtime, self._facts, self._plan, self._device = runtime, facts, plan, current()
        self._inputs = [Tensor(**each) for each in facts["inputs"]]
        self._outputs = [Tensor(**each) for each in facts["outputs"]]
        self._profiles = facts["profiles"]
        self._key = hashlib.sha256(plan).hexdigest()
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        self._session = onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self._prediction = Prediction(self._session, self._inputs, self._outputs, facts["ks"])
        alive("engines", self)

    name = property(lambda self: self._facts["network"])
    num_io_tensors = property(lambda self: len(self._inputs) + len(self._outputs))
    num_layers = property(lambda self: len(self._facts["layers"]))
    num_optimization_profiles = property(lambda self: len(self._profiles))
    num_aux_streams = property(lambda self: 0)
    refittable = property(lambda self: False)
    device_memory_size_v2 = property(lambda self: 1 << 20)
    if not versions.ELEVEN:
        device_memory_size = property(lambda self: 1 << 20)
        has_implicit_batch_dimension = property(lambda self: False)

    def serialize(self):
        return host_memory(self._plan)

    def __getitem__(self, index):
        if not -self.num_io_tensors <= integer(index) < self.num_io_tensors:
            raise IndexError("Out of bounds")
        return self.get_tensor_name(index % self.num_io_tensors)

    def get_tensor_name(self, index):
        names = [each.name for each in [*self._inputs, *self._outputs]]
        return names[index] if 0 <= integer(index) < len(names) else None

    def get_tensor_mode(self, name):
        if any(each.name == text(name) for each in self._inputs):
            return TensorIOMode.INPUT
        return TensorIOMode.OUTPUT if self._find(name, "getTensorIOMode") else TensorIOMode.NONE

    def get_tensor_dtype(self, name):
        found = self._find(name, "getTensorDataType")
        return DataType.__members__[found.dtype if found else "FLOAT"]

    def get_tensor_shape(self, name):
        found = self._find(name, "getTensorShape")
        return Dims(found.shape if found else ())

    def get_tensor_location(self, name):
        found = self._find(name, "getTensorLocation")
        return TensorLocation.HOST if found and found.is_shape else TensorLocation.DEVICE

    def is_shape_inference_io(self, name):
        found = self._find(name, "isShapeInferenceIO")
        return bool(found and found.is_shape)

    def get_tensor_profile_shape(self, name, profile_index):
        """Three shapes; of an input without a range, its own three times."""
        found = self._find(name, "getProfileShape")
        given = self._profiles[integer(profile_index)]["shapes"].get(name)
        return [Dims(each) for each in given or [found.shape] * 3] if found else []

    def get_tensor_profile_values(self, name, profile_index):
        """The real binding has its two arguments the wrong way round: ``name`` is the number of the profile."""
        if not self.is_shape_inference_io(profile_index):
            raise RuntimeError("Binding index does not correspond to an input shape tensor.")
        return [list(each) for each in self._profiles[integer(name)]["values"][profile_index]]

    def get_tensor_bytes_per_component(self, name):
        found = self._find(name, "getTensorBytesPerComponent")
        return DataType.__members__[found.dtype].itemsize if found else -1

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        """A context, or None where the GPU has no memory for it."""
        if not isinstance(strategy, ExecutionContextAllocationStrategy):
            raise TypeError("create_execution_context(): incompatible function arguments")
        if FAULTS.hit("create_execution_context"):
            error("ICudaEngine::createExecutionContext: Error Code 2: OutOfMemory (Requested size was too large)")
            return None
        return IExecutionContext(self, managed=strategy == ExecutionContextAllocationStrategy.USER_MANAGED)

    if not versions.ELEVEN:

        def create_execution_context_without_device_memory(self):
            return self.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)

    def _find(self, name, call: str) -> Tensor | None:
        for each in [*self._inputs, *self._outputs]:
            if each.name == text(name):
                return each
        error(f"ICudaEngine::{call}: Error Code 3: API Usage Error (no tensor of the name {name})")
        return None


def _check(facts: dict) -> None:
    """Raises ValueError for an engine of another version or for a GPU of another kind."""
    if facts["version"] != versions.VERSION:
        raise ValueError(
            "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed. Version tag does not match. "
            f"Note: Current Version: {versions.VERSION}, Serialized Engine Version: {facts['version']}"
        )
    gpu, made = gpus()[current()], ".".join(str(part) for part in facts["capability"])
    here = ".".join(str(part) for part in gpu.capability)
    if made != here:
        raise ValueError(
            "The engine plan file is generated on an incompatible device, "
            f"expecting compute {here} got compute {made}, please rebuild."
        )
    if facts["gpu"] != gpu.name:
        warn(
            "Using an engine plan file across different models of devices is not recommended and is likely to "
            "affect performance or even cause errors."
        )
