"""Enums, handles and structures of ``cuda.bindings.runtime``."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "cudaDeviceAttr", "cudaDeviceProp", "cudaError_t", "cudaEvent_t", "cudaGraphExec_t", "cudaGraph_t",
    "cudaMemcpyKind", "cudaStreamCaptureMode", "cudaStreamCaptureStatus", "cudaStream_t",
    "cudaEventDefault", "cudaEventDisableTiming", "cudaHostAllocDefault", "cudaStreamDefault", "cudaStreamNonBlocking",
]  # fmt: skip

cudaEventDefault, cudaEventDisableTiming = 0, 2
cudaHostAllocDefault = 0
cudaStreamDefault, cudaStreamNonBlocking = 0, 1


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInitializationError = 3
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchFailure = 719
    cudaErrorNotSupported = 801
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorStreamCaptureUnmatched = 903
    cudaErrorStreamCaptureImplicit = 906
    cudaErrorStreamCaptureWrongThread = 908
    cudaErrorUnknown = 999


TEXTS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    35: "CUDA driver version is insufficient for CUDA runtime version",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    400: "invalid resource handle",
    600: "device not ready",
    700: "an illegal memory access was encountered",
    719: "unspecified launch failure",
    801: "operation not supported",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    903: "capture was not ended in the same stream as it began",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    908: "attempt to terminate a thread-local capture sequence from another thread",
    999: "unknown error",
}


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class cudaStreamCaptureStatus(IntEnum):
    cudaStreamCaptureStatusNone = 0
    cudaStreamCaptureStatusActive = 1
    cudaStreamCaptureStatusInvalidated = 2


class cudaDeviceAttr(IntEnum):
    cudaDevAttrMultiProcessorCount = 16
    cudaDevAttrIntegrated = 18
    cudaDevAttrUnifiedAddressing = 41
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


class _Handle:
    """A pointer of the library; ``int()`` gives its value."""

    def __init__(self, init_value=0):
        self._value = int(init_value)

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    def __eq__(self, other) -> bool:
        return type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._value:#x}>"


class cudaStream_t(_Handle): ...


class cudaEvent_t(_Handle): ...


class cudaGraph_t(_Handle): ...


class cudaGraphExec_t(_Handle): ...


class cudaDeviceProp:
    """What a GPU is; ``name`` is bytes."""

    def __init__(self):
        self.name, self.uuid = b"", None
        self.major = self.minor = self.totalGlobalMem = self.multiProcessorCount = self.integrated = 0
