"""Tiny models of dense features: a map by convolution, and a matcher that samples two maps where keypoints are.

``map_model`` filters the image with smooth kernels, one value a channel every 8 pixels; filters are linear, so the map
may be interpolated. ``map_matcher`` samples both maps bilinearly and takes mutual nearest neighbours of cosine over
``least``. It can be made to take its inputs in every way that a file of others may.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import spox.opset.ai.onnx.v18 as op
from model_helpers import GLOBAL_CARD, build, card, command, global_model, own_cache, save  # noqa: F401
from spox import Tensor, Var, argument

from vslam_features.artifacts import golden
from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.models import Models

CHANNELS, STRIDE = 96, 8
SEEN = (512, 384)  # width and height that the map model sees
MAP = (CHANNELS, SEEN[1] // STRIDE, SEEN[0] // STRIDE)
STEPS = Preprocessing("grey", *SEEN, "area")
FEATURES_CARD = card("features", "dense-features", preprocessing=STEPS)
MATCHER_CARD = card("matcher", "dense-matcher", features_model="dense-features")
DENSE = {
    "features.name": "flexglue",
    "features.options.model": "dense-features",
    "features.max_keypoints": 400,
    "matcher.name": "flexglue",
    "matcher.options.model": "dense-matcher",
    "matcher.options.min_covisibility": 0.05,
    "retrieval.name": "effnet_cov",
    "retrieval.options.model": "tiny-global",
    "keyframes.every": 1,
    "runtime.threads": 1,
    "threads": 1,
}


def dense_config(**values) -> Config:
    """A front-end of these models; each frame is a keyframe."""
    given = {name.replace("__", "."): value for name, value in values.items()}
    others = tuple(name.replace(".name", ".options") for name in given if name.endswith(".name"))
    return Config.from_flat({n: v for n, v in DENSE.items() if not (others and n.startswith(others))} | given)


def place_dense_models() -> None:
    """Both into the cache."""
    save(map_model(), FEATURES_CARD)
    save(map_matcher(), MATCHER_CARD)


def map_model(
    half: bool = True, layout: str = "chw", batch: bool = False, seen: tuple[int, int] = SEEN
) -> onnx.ModelProto:
    """Image (1, 1, 384, 512) to a map of 96 channels.

    Args:
        seen: another width and height of the image.
        half: values are rounded to fp16, as those of an fp16 engine.
        layout: of the map: chw, hwc or tokens. batch: with an axis of length 1 in front.
    """
    image = argument(Tensor(np.float32, (1, 1, seen[1], seen[0])))
    kernels = _kernels()
    margin = (kernels.shape[-1] - STRIDE) // 2
    padded = op.pad(image, _i64(0, 0, margin, margin, 0, 0, margin, margin), mode="reflect")
    found = op.conv(padded, _f32(kernels), strides=[STRIDE, STRIDE])
    if half:
        found = op.cast(op.cast(found, to=np.float16), to=np.float32)
    found = op.squeeze(found, _i64(0))
    found = found if layout == "chw" else op.transpose(found, perm=[1, 2, 0])
    found = op.reshape(found, _i64(-1, CHANNELS)) if layout == "tokens" else found
    return build({"image": image}, {"descriptors": op.unsqueeze(found, _i64(0)) if batch else found})


def map_matcher(
    least: float = 0.8,
    keypoints: str = "pixels",
    layout: str = "chw",
    order: str = "xy",
    batch: bool = False,
    dtype=np.float32,
    index=np.int64,
    image_size: bool = True,
    number: tuple = ("M", "N"),
    shape: tuple = MAP,
) -> onnx.ModelProto:
    """Two maps and keypoints to ``matches0``, ``mscores0``, ``covisibility_score`` (the share of image 0 that matched).

    Below the input ``min_covisibility`` nothing matches.

    Args:
        keypoints, layout, order: how the file takes them. batch: with an axis of length 1 in front of each tensor.
        dtype: of the maps' inputs. index: of ``matches0``.
        image_size: there are such inputs; conventions in pixels of the image need them.
        number: of keypoints, fixed or dynamic. shape: of the maps.
    """
    lead = (1,) if batch else ()
    c, h, w = shape
    inputs, rows = {}, []
    for i in range(2):
        inputs[f"keypoints{i}"] = argument(Tensor(np.float32, (*lead, number[i], 2)))
        form = {"chw": (c, h, w), "hwc": (h, w, c), "tokens": (h * w, c)}[layout]
        inputs[f"descriptors{i}"] = argument(Tensor(dtype, (*lead, *form)))
        size = None
        if image_size:
            size = inputs[f"image_size{i}"] = argument(Tensor(np.float32, (*lead, 2)))
            size = op.reshape(size, _i64(2))
        points = op.reshape(inputs[f"keypoints{i}"], _i64(-1, 2))
        points = points if order == "xy" else op.gather(points, _i64(1, 0), axis=1)
        grid = op.reshape(_signed(points, keypoints, size), _i64(1, 1, -1, 2))
        values = op.cast(inputs[f"descriptors{i}"], to=np.float32)
        if layout != "chw":
            values = op.transpose(op.reshape(values, _i64(1, h, w, c)), perm=[0, 3, 1, 2])
        sampled = op.grid_sample(op.reshape(values, _i64(1, c, h, w)), grid, padding_mode="border")
        sampled = op.transpose(op.reshape(sampled, _i64(c, -1)), perm=[1, 0])
        rows.append(op.div(sampled, op.max([op.reduce_l2(sampled, _i64(1), keepdims=1), _f32(1e-6)])))
    inputs["min_covisibility"] = argument(Tensor(np.float32, lead))
    cosine = op.matmul(rows[0], op.transpose(rows[1], perm=[1, 0]))
    forth, back = (op.arg_max(cosine, axis=axis, keepdims=0) for axis in (1, 0))
    best = op.reduce_max(cosine, _i64(1), keepdims=0)
    count = op.shape(cosine, start=0, end=1)
    mutual = op.equal(op.gather(back, forth), op.range(op.const(0), op.squeeze(count), op.const(1)))
    mutual = op.and_(mutual, op.greater(best, _f32(least)))
    share = op.reduce_mean(op.cast(mutual, to=np.float32), keepdims=0)
    mutual = op.and_(mutual, op.not_(op.less(share, op.reshape(inputs["min_covisibility"], _i64(1)))))
    outputs = {
        "matches0": op.cast(op.where(mutual, forth, _i64(-1)), to=index),
        "mscores0": op.where(mutual, best, _f32(0)),
        "covisibility_score": share,
    }
    return build(inputs, {n: op.unsqueeze(v, _i64(0)) if batch else v for n, v in outputs.items()})


def _signed(points: Var, convention: str, size: Var | None) -> Var:
    """The file's coordinates to those of GridSample, where -1 and 1 are the outer borders of the image."""
    seen = _f32(SEEN)
    centre = {
        "pixels": lambda: points,
        "unit_centres": lambda: op.mul(points, op.sub(size, _f32(1))),
        "signed_centres": lambda: op.mul(op.div(op.add(points, _f32(1)), _f32(2)), op.sub(size, _f32(1))),
        "long_side": lambda: op.div(op.add(op.mul(points, op.reduce_max(size, keepdims=0)), size), _f32(2)),
    }
    if convention in centre:  # pixels of the image, 0 at the first centre
        return _from_unit(op.div(op.add(centre[convention](), _f32(0.5)), size))
    return {
        "corner_pixels": lambda: _from_unit(op.div(points, size)),
        "unit": lambda: _from_unit(points),
        "signed": lambda: points,
        "model_pixels": lambda: _from_unit(op.div(op.add(points, _f32(0.5)), seen)),
        "model_corner_pixels": lambda: _from_unit(op.div(points, seen)),
    }[convention]()


def _from_unit(points: Var) -> Var:
    return op.sub(op.mul(points, _f32(2)), _f32(1))


def renamed(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """The same graph with other names of these inputs and outputs, and of all that is between them."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    values = {v for n in graph.node for v in (*n.input, *n.output) if v} | {t.name for t in graph.initializer}
    own = {t.name: t.name for t in (*graph.input, *graph.output)}
    told = {v: f"t{i}" for i, v in enumerate(sorted(values))} | own | names
    for node in graph.node:
        node.input[:] = [told.get(v, v) for v in node.input]
        node.output[:] = [told.get(v, v) for v in node.output]
        node.name = ""
    for tensor in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        tensor.name = told.get(tensor.name, tensor.name)
    return model


def file_of(model: onnx.ModelProto, path: Path, own: ModelCard) -> Path:
    """A model file with its card inside."""
    return save(model, own, path)


def _kernels() -> np.ndarray:
    """(96, 1, 40, 40) f32 smooth filters without a mean: noise that is blurred, under a Gaussian."""
    rng, side = np.random.default_rng(0), 40
    y, x = np.indices((side, side)) - (side - 1) / 2
    window = np.exp(-(x**2 + y**2) / (2 * 7.0**2))
    out = np.stack([cv2.GaussianBlur(rng.normal(size=(side, side)), (0, 0), 2.5) * window for _ in range(CHANNELS)])
    out -= (out.mean(axis=(1, 2)) / window.mean())[:, None, None] * window
    return (out / np.sqrt((out**2).sum(axis=(1, 2), keepdims=True)))[:, None].astype(np.float32)


def _i64(*values) -> Var:
    return op.const(np.array(values, np.int64))


def _f32(value) -> Var:
    return op.const(np.asarray(value, np.float32))


# -- for tests ---------------------------------------------------------------------------------

PICTURES = {p.name: p.images for p in golden.pairs()}
SET = [text for name, value in DENSE.items() for text in ("--set", f"{name}={value}")]


def run(*args) -> None:
    """``vslam-features``, which must end well."""
    assert command(*map(str, args)) == 0


@pytest.fixture(scope="session")
def _dense_cache(tmp_path_factory):
    """The models with their parity records."""
    root = tmp_path_factory.mktemp("dense") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(root))
        place_dense_models()
        save(global_model(), GLOBAL_CARD)
        FrontEnd(dense_config())
        Models(dense_config(runtime__name="fake")).open("features", "dense-features")
        Models(dense_config(runtime__name="fake")).open("matcher", "dense-matcher")
    return root


@pytest.fixture
def dense(own_cache, _dense_cache):  # noqa: F811
    shutil.copytree(_dense_cache, own_cache)
    return own_cache
