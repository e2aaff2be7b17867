"""What ONNX Runtime's TensorRT provider is told of a model beside what the configuration says: shapes and a cache."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .cache import cache_folder
from .card import ModelCard
from .profiles import profiles_of
from .shapes import KINDS, joined


def provider_options(path: Path, card: ModelCard, options: dict, device: str) -> dict:
    """Options of the runtime ``onnxruntime`` for a model on a device; the given ones where it is not TensorRT's.

    Shapes come from the card (``profiles_of``) where the options have none. Engines go into the cache of models.

    Raises:
        ConfigError: fp16 is asked of a graph whose attention was patched to BF16, or a name of an input cannot be told.
        ModelFileError: nobody says which shapes an input has.
    """
    if device.partition(":")[0] != "tensorrt":
        return options
    if options.get("trt_fp16") and any(patch.startswith("bf16-attention") for patch in card.patches):
        raise ConfigError(
            f"{path}: runtime.options.trt_fp16 lets TensorRT choose types, and so undoes the patch bf16-attention: "
            "leave it off, the types in the file are kept then; the fp16 file, patched, computes the rest in float16"
        )
    added = {}
    if not any(options.get(f"trt_{kind}_shapes") for kind in KINDS):
        profiles = profiles_of(path, card)
        added = {f"trt_{kind}_shapes": joined(profiles, kind) for kind in KINDS}
    if not options.get("cache_dir"):
        added["cache_dir"] = str(cache_folder("engines") / "onnxruntime")
    return options | added
