"""A fake of ``tensorrt``, of the version in ``VSLAM_FAKE_TENSORRT``.

What a version lacks is not here either: ``test/test_fake_tensorrt.py`` holds the names to those of the real libraries.
"""

from fake_trt.allocator import IOutputAllocator
from fake_trt.builder import Builder, IBuilderConfig
from fake_trt.context import IExecutionContext
from fake_trt.dims import Dims, nptype, volume
from fake_trt.enums import (
    BuilderFlag,
    DataType,
    ErrorCode,
    ExecutionContextAllocationStrategy,
    HardwareCompatibilityLevel,
    LayerType,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParserFlag,
    PreviewFeature,
    ProfilingVerbosity,
    TensorIOMode,
    TensorLocation,
)
from fake_trt.host_memory import IHostMemory
from fake_trt.logger import ILogger, Logger
from fake_trt.network import ILayer, INetworkDefinition, ITensor
from fake_trt.parser import OnnxParser, ParserError
from fake_trt.profile import IOptimizationProfile
from fake_trt.runtime import ICudaEngine, Runtime
from fake_trt.timing import IProgressMonitor, ITimingCache
from fake_trt.versions import VERSION as __version__

float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
int8, int32, int64, uint8, bool = DataType.INT8, DataType.INT32, DataType.INT64, DataType.UINT8, DataType.BOOL

__all__ = [
    "Builder",
    "BuilderFlag",
    "DataType",
    "Dims",
    "ErrorCode",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "ILayer",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IOutputAllocator",
    "IProgressMonitor",
    "ITensor",
    "ITimingCache",
    "LayerType",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "OnnxParserFlag",
    "ParserError",
    "PreviewFeature",
    "ProfilingVerbosity",
    "Runtime",
    "TensorIOMode",
    "TensorLocation",
    "__version__",
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "int32",
    "int64",
    "int8",
    "nptype",
    "uint8",
    "volume",
]
