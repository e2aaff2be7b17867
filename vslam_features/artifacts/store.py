"""Built model files in the cache, by name and precision."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError, ModelMissingError
from ..runtimes.content import content_sha256
from .cache import cache_folder
from .catalogue import find_entry

__all__ = ["SUFFIXES", "content_sha256", "locate", "model_path"]

SUFFIXES = (".onnx", ".xml", ".engine")


def model_path(name: str, precision: str) -> Path:
    """Where ``models build`` places a model of the registry."""
    return cache_folder("models") / f"{name}.{precision}.onnx"


def locate(model: str, precision: str) -> Path:
    """The file of a model: a path that ends in .onnx, .xml or .engine, else a name in the cache.

    Raises:
        ModelMissingError: it is not here; names the command which brings it.
        ConfigError: it is neither here nor in the registry; names the closest.
    """
    if Path(model).suffix in SUFFIXES:
        try:
            path = Path(model).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"model file {model}: {error}") from error
        if not path.is_file():
            raise ModelMissingError(f"there is no model file {path}: check the path, or give the name of a model")
        return path
    path = model_path(model, precision)
    if not path.is_file():
        entry = find_entry(model)
        raise ModelMissingError(
            f"model '{model}' ({precision}) is not on this machine (looked for {path}): {entry.how_to_get(precision)}"
        )
    return path
