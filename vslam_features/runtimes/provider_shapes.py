"""The shapes that ONNX Runtime's TensorRT provider builds for, as its options write them: ``a:1x16x2,b:1x16x64``.

https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#explicit-shape-range-for-dynamic-shape-input
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConfigError
from .onnx_inputs import read_inputs

KINDS = ("min", "opt", "max")
SHAPE = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*")
Shapes = dict[str, tuple[tuple[int, ...], ...]]


def given_shapes(options) -> Shapes:
    """Tensor name -> smallest, usual and largest shape, by the options ``trt_<kind>_shapes``; empty where none is set.

    Raises:
        ConfigError: one of the three is missing or not of this form, they are of different tensors, or do not ascend.
    """
    texts = {kind: getattr(options, f"trt_{kind}_shapes").strip() for kind in KINDS}
    if not any(texts.values()):
        return {}
    if not all(texts.values()):
        raise ConfigError("onnxruntime: give all of trt_min_shapes, trt_opt_shapes and trt_max_shapes, or none")
    low, usual, high = (_parsed(kind, text) for kind, text in texts.items())
    if not low.keys() == usual.keys() == high.keys():
        odd = sorted((low.keys() | usual.keys() | high.keys()) - (low.keys() & usual.keys() & high.keys()))
        raise ConfigError(f"onnxruntime: trt_min_shapes, trt_opt_shapes and trt_max_shapes do not all name '{odd[0]}'")
    shapes = {name: (low[name], usual[name], high[name]) for name in low}
    for name, three in shapes.items():
        if len({len(shape) for shape in three}) > 1 or any(not a <= b <= c for a, b, c in zip(*three)):
            texts = " ".join("x".join(map(str, shape)) for shape in three)
            raise ConfigError(
                f"onnxruntime: trt_*_shapes: '{name}' has {texts}: expected min <= opt <= max, axis by axis"
            )
    return shapes


def fixed_axes(path: Path, shapes: Shapes) -> dict[str, int]:
    """Name of an axis in an ONNX file -> its length, where a profile leaves it no choice.

    TensorRT wants some axes fixed in the graph, such as the channels of a convolution: equal lengths in a profile are
    not enough. Raises ModelFileError where the file cannot be read.
    """
    fixed: dict[str, int] = {}
    for name, tensor in read_inputs(path).items() if shapes else ():
        if name in shapes and tensor.dims is not None and len(shapes[name][0]) == len(tensor.dims):
            for dim, low, high in zip(tensor.dims, shapes[name][0], shapes[name][2]):
                if isinstance(dim, str) and dim and low == high:
                    fixed[dim] = low
    return fixed


def _parsed(kind: str, text: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, shape = part.strip().partition(":")  # the provider, too, ends a name at its first colon
        if not name or not SHAPE.fullmatch(shape) or name in found:
            raise ConfigError(
                f"onnxruntime: trt_{kind}_shapes: '{part.strip()}': expected each tensor once, as in "
                "'a:1x16x64,b:1x16x2'"
            )
        found[name] = tuple(map(int, shape.split("x")))
    return found
