"""Functions about devices, versions and errors."""

from __future__ import annotations

from . import device as devices
from .calls import LAST, Failed, api
from .memory import MEMORY
from .runtime_types import TEXTS, cudaDeviceAttr, cudaDeviceProp
from .streams import drain_all, forbid_while_capturing

__all__ = [
    "cudaGetErrorName",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaRuntimeGetVersion",
    "cudaDriverGetVersion",
    "cudaGetDeviceCount",
    "cudaSetDevice",
    "cudaGetDevice",
    "cudaGetDeviceProperties",
    "cudaDeviceGetAttribute",
    "cudaMemGetInfo",
    "cudaDeviceSynchronize",
]


@api(1, gpu=False, tells=True)
def cudaGetErrorName(error):
    return (error.name.encode(),)


@api(1, gpu=False, tells=True)
def cudaGetErrorString(error):
    return (TEXTS[int(error)].encode(),)


@api(gpu=False, tells=True)
def cudaGetLastError():
    name, LAST.error = getattr(LAST, "error", None), None
    if name:
        raise Failed(name)


@api(1, gpu=False)
def cudaRuntimeGetVersion():
    return devices.runtime_version()


@api(1, gpu=False)
def cudaDriverGetVersion():
    return devices.driver_version()


@api(1, fails_as="cudaErrorInitializationError")
def cudaGetDeviceCount():
    return len(devices.gpus())


@api(fails_as="cudaErrorInvalidDevice")
def cudaSetDevice(device):
    this_gpu(device)
    devices.CURRENT.index = int(device)


@api(1)
def cudaGetDevice():
    return devices.current()


@api(1, fails_as="cudaErrorInvalidDevice")
def cudaGetDeviceProperties(device):
    gpu, properties = this_gpu(device), cudaDeviceProp()
    properties.name, (properties.major, properties.minor) = gpu.name.encode(), gpu.capability
    properties.totalGlobalMem, properties.integrated = gpu.memory_mb << 20, int("Orin" in gpu.name)
    properties.multiProcessorCount = 8
    return properties


@api(1, fails_as="cudaErrorInvalidDevice")
def cudaDeviceGetAttribute(attr, device):
    gpu = this_gpu(device)
    values = {"ComputeCapabilityMajor": gpu.capability[0], "ComputeCapabilityMinor": gpu.capability[1]}
    values |= {"MultiProcessorCount": 8, "Integrated": int("Orin" in gpu.name), "UnifiedAddressing": 1}
    return values[cudaDeviceAttr(attr).name.replace("cudaDevAttr", "")]


@api(2)
def cudaMemGetInfo():
    total = this_gpu(devices.current()).memory_mb << 20
    return total - MEMORY.total("device"), total


@api(fails_as="cudaErrorLaunchFailure")
def cudaDeviceSynchronize():
    forbid_while_capturing()
    drain_all()


def this_gpu(index) -> devices.Gpu:
    """By its number. Raises Failed where there is none of it."""
    found = devices.gpus()
    if not 0 <= int(index) < len(found):
        raise Failed("cudaErrorInvalidDevice")
    return found[int(index)]
