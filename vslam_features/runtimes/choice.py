"""Which runtime runs a model file."""

from __future__ import annotations

from pathlib import Path

from ..config_groups import RuntimeConfig
from .base import LoadRequest


def runtime_of(path: Path, config: RuntimeConfig) -> tuple[str, dict, LoadRequest]:
    """Name and options of the runtime that loads a file, and how.

    It is the configured one, but that an engine runs on TensorRT alone, whatever the other models run on: on the GPU
    that is configured, else on the first. The fake runtime gets it as the runtime that does the work.
    """
    name, options, device = config.name, dict(config.options), config.device
    inner = options.get("inner") if name == "fake" else name
    if path.suffix == ".engine" and inner != "tensorrt":
        name, options = ("fake", {**options, "inner": "tensorrt"}) if name == "fake" else ("tensorrt", {})
        kind, _, number = device.partition(":")
        device = f"cuda:{number}" if number and kind in ("cuda", "gpu", "tensorrt") else "cuda"
    return name, options, LoadRequest(device, config.strict, config.threads)
