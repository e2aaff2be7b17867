"""ONNX Runtime's execution providers: what a device name means, how each is set up, and in which precision it computes.

Of options that a provider does not know a session is not made, or, before 1.23, made with the provider's defaults on
its first GPU: so names go by the version of the library, and ``ort.py`` compares what a session says of its settings.
"""

from __future__ import annotations

import os
import re

from ..errors import ConfigError
from .provider_shapes import KINDS, given_shapes

CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
BY_DEVICE = {
    "cpu": CPU,
    "cuda": _CUDA,
    "tensorrt": _TENSORRT,
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
# What decides the results of a session; each is read back from it.
DECIDING = ("device_id", "use_tf32", "trt_fp16_enable", "trt_bf16_enable")
_MEBIBYTE = 1 << 20
# The versions that brought them, by the options that the providers in the wheels know (1.16 to 1.19, 1.22, 1.23, 1.31
# looked at here; use_tf32: https://github.com/microsoft/onnxruntime/pull/19426).
_TF32_FROM, _BF16_FROM = (1, 18), (1, 23)

Chain = list[tuple[str, dict[str, str]]]


def release(version: str) -> tuple[int, ...]:
    """(1, 23) of ``1.23.2``."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def provider_chain(device: str, options, version: str) -> Chain:
    """Providers and their settings in order of preference; the CPU comes last for the operators that others lack.

    Args:
        device: a key of ``BY_DEVICE``; ``cuda`` and ``tensorrt`` may carry a device id, as in ``cuda:1``.
        options: an ``OnnxRuntime.Options``.
        version: of the library.

    Raises:
        ConfigError: no such device, a device id that is not a number, or options that this version has not got or that
            do not fit one another.
    """
    name, colon, number = device.partition(":")
    if name not in BY_DEVICE:
        raise ConfigError(f"onnxruntime: unknown device '{device}'; choose one of: {', '.join(BY_DEVICE)}")
    if colon and not (name in ("cuda", "tensorrt") and number.isdecimal()):
        raise ConfigError(f"onnxruntime: device '{device}': only cuda and tensorrt take a number, as in 'cuda:1'")
    device_id = str(int(number or 0))
    if name == "tensorrt":
        return [
            (_TENSORRT, _tensorrt(device_id, options, version)),
            (_CUDA, _cuda(device_id, options, version)),
            (CPU, {}),
        ]
    chain = {
        "cpu": [],
        "cuda": [(_CUDA, _cuda(device_id, options, version))],
        "coreml": [(BY_DEVICE["coreml"], {})],
        "openvino": [(BY_DEVICE["openvino"], {"device_type": "CPU"})],
    }[name]
    return [*chain, (CPU, {})]


def precision_of(provider: str, told: dict[str, str]) -> str:
    """What a provider computes in where that is not the model's own, in words behind its name, e.g. `` fp16 tf32``.

    Both multiply float32 matrices in TF32 unless told not to. TensorRT's has no option for it, nor has CUDA's before
    1.18; but NVIDIA's libraries all obey ``NVIDIA_TF32_OVERRIDE=0`` in the environment.

    Args:
        told: what the session says of the provider's settings.
    """
    if provider not in (_CUDA, _TENSORRT):
        return ""
    kinds = [kind for kind in ("fp16", "bf16") if told.get(f"trt_{kind}_enable") in ("1", "True")]
    if told.get("use_tf32", "1") != "0" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        kinds.append("tf32")
    return "".join(f" {kind}" for kind in kinds)


def other_settings(chain: Chain, told: dict[str, str]) -> str:
    """What a session says of its first provider's settings that it was not asked for; empty: nothing."""
    asked = {n: {"True": "1", "False": "0"}.get(v, v) for n, v in chain[0][1].items() if n in DECIDING and n in told}
    spelt = {n: {"True": "1", "False": "0"}.get(told[n], told[n]) for n in asked}
    return ", ".join(f"{n} {spelt[n]} instead of {value}" for n, value in asked.items() if spelt[n] != value)


def _cuda(device_id: str, options, version: str) -> dict[str, str]:
    settings = {
        "device_id": device_id,
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": options.conv_search.upper(),
    }
    if release(version) >= _TF32_FROM:
        settings["use_tf32"] = str(int(options.tf32))
    if options.gpu_mem_limit_mb:
        settings["gpu_mem_limit"] = str(options.gpu_mem_limit_mb * _MEBIBYTE)
    return settings


def _tensorrt(device_id: str, options, version: str) -> dict[str, str]:
    settings = {"device_id": device_id, "trt_fp16_enable": str(options.trt_fp16)}
    if release(version) >= _BF16_FROM:
        settings["trt_bf16_enable"] = str(options.trt_bf16)
    elif options.trt_bf16:
        raise ConfigError(f"onnxruntime {version}: its TensorRT provider has no bf16, 1.23 brought it: trt_bf16: false")
    if options.trt_optimisation_level != 3:  # the default; TensorRT before 8.6 knows no levels
        settings["trt_builder_optimization_level"] = str(options.trt_optimisation_level)
    if options.trt_workspace_mb:
        settings["trt_max_workspace_size"] = str(options.trt_workspace_mb * _MEBIBYTE)
    if given_shapes(options):
        settings |= {f"trt_profile_{k}_shapes": _tidy(getattr(options, f"trt_{k}_shapes")) for k in KINDS}
    return settings


def _tidy(text: str) -> str:
    return ",".join(part.strip() for part in text.split(","))  # the provider would take a space for part of a name
