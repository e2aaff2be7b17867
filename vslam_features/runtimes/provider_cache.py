"""Where ONNX Runtime's TensorRT provider keeps engines and timings."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ..errors import CacheError
from .content import content_sha256
from .hardware import gpu_name
from .providers import release

_TIMINGS_APART_FROM = (1, 17)  # before, they lie beside the engines, and the option is an unknown one


def cache_settings(root: str, path: Path, settings: dict[str, str], version: str) -> dict[str, str]:
    """Settings that make the provider keep what it builds below ``root``, in folders that are made here.

    The provider names an engine by graph, precision, compute capability and versions, and compares only the profile. So
    new weights in the same graph, another level of optimisation, TF32 or GPU would run the old one: engines are kept
    apart by the content of the model and by all of this (by the GPU's number where a machine has several models of
    them). Timings hold for whatever is built of one content.

    Args:
        root: the option ``cache_dir``. path: the model. settings: the provider's others. version: of ONNX Runtime.
    Raises:
        CacheError: a folder cannot be made, or the model cannot be read.
    """
    content = content_sha256(path)[:16]
    deciding = {**settings, "gpu": gpu_name(), "tf32": os.environ.get("NVIDIA_TF32_OVERRIDE", "")}
    text = json.dumps({n: v for n, v in deciding.items() if n != "device_id" or not gpu_name()}, sort_keys=True)
    try:
        timings = Path(root).expanduser() / content
        engines = timings / hashlib.sha256(text.encode()).hexdigest()[:8]
        engines.mkdir(parents=True, exist_ok=True)  # the provider makes one level only
    except (OSError, RuntimeError, ValueError) as error:  # also: nobody's home, or a name that no system takes
        why = getattr(error, "strerror", None) or error
        raise CacheError(
            f"a folder for TensorRT's engines cannot be made in '{root}': {why}: set runtime.options.cache_dir"
        ) from error
    found = {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(engines),
        "trt_timing_cache_enable": "True",
    }
    return found | ({"trt_timing_cache_path": str(timings)} if release(version) >= _TIMINGS_APART_FROM else {})
