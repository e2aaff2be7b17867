"""ONNX Runtime's execution providers: what a device name means and how each is set up."""

from __future__ import annotations

from ..errors import ConfigError

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
_MEBIBYTE = 1 << 20


def provider_chain(device: str, options) -> list[tuple[str, dict[str, str]]]:
    """Providers and their settings in order of preference; the CPU comes last for the operators that others lack.

    Args:
        device: a key of ``BY_DEVICE``; ``cuda`` and ``tensorrt`` may carry a device id, as in ``cuda:1``.
        options: an ``OnnxRuntime.Options``.

    Raises:
        ConfigError: no such device, or a device id that is not a number.
    """
    name, _, number = device.partition(":")
    if name not in BY_DEVICE:
        raise ConfigError(f"onnxruntime: unknown device '{device}'; choose one of: {', '.join(BY_DEVICE)}")
    if number and not (name in ("cuda", "tensorrt") and number.isdecimal()):
        raise ConfigError(f"onnxruntime: device '{device}': only cuda and tensorrt take a number, as in 'cuda:1'")
    device_id = str(int(number or 0))
    chain = {
        "cpu": [],
        "cuda": [(_CUDA, _cuda(device_id, options))],
        "tensorrt": [(_TENSORRT, _tensorrt(device_id, options)), (_CUDA, _cuda(device_id, options))],
        "coreml": [(BY_DEVICE["coreml"], {})],
        "openvino": [(BY_DEVICE["openvino"], {"device_type": "CPU"})],
    }[name]
    return [*chain, (CPU, {})]


def _cuda(device_id: str, options) -> dict[str, str]:
    settings = {
        "device_id": device_id,
        "use_tf32": str(int(options.tf32)),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",  # the default tries all algorithms again for every new shape
    }
    if options.gpu_mem_limit_mb:
        settings["gpu_mem_limit"] = str(options.gpu_mem_limit_mb * _MEBIBYTE)
    return settings


def _tensorrt(device_id: str, options) -> dict[str, str]:
    settings = {"device_id": device_id, "trt_fp16_enable": str(options.trt_fp16)}
    if options.trt_workspace_mb:
        settings["trt_max_workspace_size"] = str(options.trt_workspace_mb * _MEBIBYTE)
    if options.cache_dir:
        settings |= {
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": options.cache_dir,
            "trt_timing_cache_enable": "True",
            "trt_timing_cache_path": options.cache_dir,
        }
    shapes = {f"trt_profile_{k}_shapes": getattr(options, f"trt_{k}_shapes") for k in ("min", "opt", "max")}
    if any(shapes.values()):
        if not all(shapes.values()):
            raise ConfigError("onnxruntime: give all of trt_min_shapes, trt_opt_shapes and trt_max_shapes, or none")
        settings |= shapes
    return settings
