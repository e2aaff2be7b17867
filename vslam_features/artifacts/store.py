"""Built model files in the cache, by name and precision."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelMissingError
from .cache import cache_folder

SUFFIXES = (".onnx", ".xml", ".engine")


def model_path(name: str, precision: str) -> Path:
    """Where ``models build`` places a model of the registry."""
    return cache_folder("models") / f"{name}.{precision}.onnx"


def locate(model: str, precision: str) -> Path:
    """The file of a model: a path that ends in .onnx, .xml or .engine, else a name in the cache.

    Raises ModelMissingError that names the command which brings it.
    """
    path = Path(model).expanduser()
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise ModelMissingError(f"model file {path} is not there; got it as the name of a model: check the path")
        return path
    path = model_path(model, precision)
    if not path.is_file():
        variant = "" if precision == "fp32" else f" --precision {precision}"
        raise ModelMissingError(
            f"model '{model}' ({precision}) is not on this machine (looked for {path}): "
            f"run 'vslam-features models fetch {model}{variant}'"
        )
    return path
