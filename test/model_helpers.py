"""Tiny ONNX models with cards, which need no weights, and the real default models where they are on this machine.

``tiny-features`` finds blobs and describes them by their surroundings,
``tiny-matcher`` takes mutual nearest neighbours of cosine over 0.6,
``tiny-global`` is a picture of 8x8 pixels: each does its job on small scenes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument
from spox import build as spox_build

from vslam_features.artifacts.cache import cache_root, place
from vslam_features.artifacts.card import METADATA_KEY, ModelCard, identity, read_card
from vslam_features.artifacts.incidents import Incidents
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.cli.main import _Handler, main
from vslam_features.config import Config
from vslam_features.engine import Engine, OpenedModel
from vslam_features.models import Models
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.fake import Fake
from vslam_features.runtimes.ort import OnnxRuntime

USERS_CACHE = cache_root()  # before a fixture sets another
DIM = 64
ONE = LoadRequest(threads=1)
TINY = {
    "features.name": "xfeat",
    "features.options.model": "tiny-features",
    "features.max_keypoints": 300,
    "features.long_side": 0,
    "matcher.name": "lighterglue",
    "matcher.options.model": "tiny-matcher",
    "retrieval.name": "effnet_cov",
    "retrieval.options.model": "tiny-global",
    "keyframes.every": 1,
    "runtime.threads": 1,
    "threads": 1,
}
DEFAULTS = ("xfeat", "lighterglue-early-stop", "effnet_cov")


def tiny_config(**values) -> Config:
    """A front-end of the tiny models; each frame is a keyframe."""
    return Config.from_flat({**TINY, **{name.replace("__", "."): value for name, value in values.items()}})


def weights_sha256(name: str) -> str:
    """What the cards of the tiny models say of the weights that they were made from."""
    return hashlib.sha256(name.encode()).hexdigest()


def card(role: str, name: str, **fields) -> ModelCard:
    """A card with made-up source weights."""
    return ModelCard(role, name, "CC0-1.0", **{"source_sha256": weights_sha256(name), **fields})


def save(model: onnx.ModelProto, card: ModelCard, path: Path | None = None) -> Path:
    """Write a model with its card to a path, or to where its name is looked for."""
    onnx.helper.set_model_props(model, {METADATA_KEY: card.to_json()})
    return place(path or model_path(card.name, card.precision), model.SerializeToString(deterministic=True))


def place_tiny_models() -> None:
    """All of ``TINY`` into the cache."""
    save(features_model(), card("features", "tiny-features"))
    save(matcher_model(), card("matcher", "tiny-matcher", features_model="tiny-features"))
    save(global_model(), GLOBAL_CARD)


# -- the models ----------------------------------------------------------------------------------


def features_model(seed: int = 0, half: bool = False, noise: float = 0.0) -> onnx.ModelProto:
    """Local maxima of a difference of Gaussians, with blurred samples on an 8x8 grid around them as descriptors.

    Args:
        seed: moves the samples, so that other seeds describe otherwise.
        half: descriptors are rounded to fp16.
        noise: of which a fixed amount is added to descriptors, relative to their length.
    """
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    limit = argument(Tensor(np.int64, (1,)))
    grey = op.reduce_mean(image, _i64(1), keepdims=1)
    score = op.abs(_filtered(grey, _gauss(1.0) - _gauss(2.0)))
    peaks = op.equal(op.max_pool(score, kernel_shape=[5, 5], pads=[2] * 4)[0], score)
    score = op.where(op.and_(peaks, op.greater(score, _f32(0.005))), score, _f32(0.0))
    flat, width = op.reshape(score, _i64(-1)), op.shape(score, start=3, end=4)
    scores, index = op.top_k(flat, op.min([limit, op.shape(flat)]))
    x, y = op.mod(index, width), op.div(index, width)
    # Samples of the blurred image, with a margin so that all lie within.
    margin = 14
    offsets = (
        np.random.default_rng(seed).integers(-1, 2, (2, DIM)) + np.indices((8, 8)).reshape(2, -1) * 3 - 11 + margin
    )
    blurred = op.pad(_filtered(grey, _gauss(1.5)), _i64(0, 0, margin, margin, 0, 0, margin, margin), mode="edge")
    wide = op.add(width, _i64(2 * margin))
    at = op.add(
        op.unsqueeze(op.add(op.mul(y, wide), x), _i64(0)),
        op.add(op.mul(_i64(*offsets[:1].T), wide), _i64(*offsets[1:].T)),
    )
    rows = op.gather(op.reshape(blurred, _i64(-1)), at)
    keypoints = op.concat([op.unsqueeze(x, _i64(1)), op.unsqueeze(y, _i64(1))], axis=1)
    described = op.sub(rows, op.reduce_mean(rows, _i64(0), keepdims=1))
    described = op.transpose(_normalised(described, 0), perm=[1, 0])
    if half:
        described = op.cast(op.cast(described, to=np.float16), to=np.float32)
    if noise:
        described = op.add(described, _f32(noise * np.random.default_rng(1).normal(size=(1, DIM)) / DIM**0.5))
    inputs = {"image": image, "max_keypoints": limit}
    outputs = {"keypoints": op.cast(keypoints, to=np.float32), "scores": scores, "descriptors": described}
    return build(inputs, outputs)


def centroid_model(
    inputs=("image", "max_keypoints"), outputs=("keypoints", "scores", "descriptors")
) -> onnx.ModelProto:
    """One keypoint: the centroid of intensity. Names of tensors can be chosen."""
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    limit = argument(Tensor(np.int64, (1,)))
    grey = op.reduce_mean(image, _i64(0, 1), keepdims=0)
    total = op.add(op.reduce_sum(grey, keepdims=0), _f32(1e-12))
    places = []
    for axis, along in ((1, 0), (0, 1)):  # x: over columns
        steps = op.cast(
            op.range(op.const(0), op.squeeze(op.shape(grey, start=axis, end=axis + 1)), op.const(1)), to=np.float32
        )
        places.append(op.div(op.reduce_sum(op.mul(op.reduce_sum(grey, _i64(along), keepdims=0), steps)), total))
    keypoints = op.reshape(op.concat([op.reshape(p, _i64(1)) for p in places], axis=0), _i64(1, 2))
    scores = op.reshape(op.mul(total, op.cast(op.greater(limit, _i64(0)), to=np.float32)), _i64(1))
    values = keypoints, scores, op.concat([keypoints, keypoints], axis=1)
    return build(dict(zip(inputs, (image, limit))), dict(zip(outputs, values)))


def matcher_model(dim: int = DIM, least: float = 0.6) -> onnx.ModelProto:
    """Mutual nearest neighbours whose cosine is over ``least``; any number of keypoints, also none."""
    inputs = {}
    for i, count in enumerate("MN"):
        inputs[f"keypoints{i}"] = argument(Tensor(np.float32, (count, 2)))
        inputs[f"descriptors{i}"] = argument(Tensor(np.float32, (count, dim)))
        inputs[f"image_size{i}"] = argument(Tensor(np.float32, (2,)))
    cosine = op.matmul(inputs["descriptors0"], op.transpose(inputs["descriptors1"], perm=[1, 0]))
    rows, columns = (op.shape(cosine, start=i, end=i + 1) for i in (0, 1))
    nobody = [op.expand(_f32([[least]]), op.concat(size, axis=0)) for size in ([rows, _i64(1)], [_i64(1), columns])]
    best = op.concat([cosine, nobody[0]], axis=1)
    forth = op.arg_max(best, axis=1, keepdims=0)
    back = op.concat([op.arg_max(op.concat([cosine, nobody[1]], axis=0), axis=0, keepdims=0), _i64(-1)], axis=0)
    own = op.range(op.const(0), op.squeeze(rows), op.const(1))
    mutual = op.equal(op.gather(back, forth), own)
    unused = [
        op.mul(op.reduce_sum(inputs[f"{n}{i}"], keepdims=0), _f32(0))
        for i in (0, 1)
        for n in ("keypoints", "image_size")
    ]
    scores = op.where(mutual, op.reduce_max(best, _i64(1), keepdims=0), _f32(0))
    outputs = {"matches0": op.where(mutual, forth, _i64(-1)), "mscores0": op.add(scores, op.sum(unused))}
    return build(inputs, outputs)


GLOBAL_CARD = card("global", "tiny-global", preprocessing=Preprocessing("grey", 32, 32, "area"))


def global_model() -> onnx.ModelProto:
    """The picture in 8x8 pixels, without its mean, of unit length."""
    image = argument(Tensor(np.float32, (1, 1, 32, 32)))
    small = op.reshape(op.average_pool(image, kernel_shape=[4, 4], strides=[4, 4]), _i64(-1))
    return build({"image": image}, {"descriptor": _normalised(op.sub(small, op.reduce_mean(small)), 0)})


def build(inputs: dict[str, Var], outputs: dict[str, Var]) -> onnx.ModelProto:
    """The ONNX model, of the version of its format that belongs to opset 18: runtimes of 2023 read it."""
    model = spox_build(inputs, outputs)
    model.ir_version = 8
    return model


def _filtered(grey: Var, kernel: np.ndarray) -> Var:
    r = len(kernel) // 2
    return op.conv(op.pad(grey, _i64(0, 0, r, r, 0, 0, r, r), mode="edge"), _f32(kernel[None, None]))


def _gauss(sigma: float, radius: int = 5) -> np.ndarray:
    y, x = np.indices((2 * radius + 1, 2 * radius + 1)) - radius
    kernel = np.exp(-(y**2 + x**2) / (2 * sigma**2))
    return kernel / kernel.sum()


def _normalised(x: Var, axis: int) -> Var:
    return op.div(x, op.max([op.reduce_l2(x, _i64(axis), keepdims=1), _f32(1e-6)]))


def _i64(*values) -> Var:
    return op.const(np.array(values, np.int64))


def _f32(value) -> Var:
    return op.const(np.asarray(value, np.float32))


# -- engines -------------------------------------------------------------------------------------


def engine(path: Path, folder: Path, fallback: Path | None = None, **faults) -> Engine:
    """An engine of a model file, without gate and record.

    Args:
        folder: of the incidents.
        fallback: model file that repeats failed runs.
        faults: options of the fake runtime.
    """
    runtime = Fake(Fake.Options(**faults)) if faults else OnnxRuntime()
    session = runtime.load(path, ONE)
    own, sha256 = read_card(path), content_sha256(path)
    opened = OpenedModel(path, own, sha256, identity(own, sha256), True, "for a test")

    def load():
        return OnnxRuntime().load(fallback, ONE), read_card(fallback)

    return Engine(opened, session, load if fallback else None, Incidents(folder, 20, 50, 0.0))


class Opened:
    """Stands for ``Models``: plug-ins that open a model here get this engine."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def open(self, role: str, model: str) -> Engine:
        return self.engine


# -- fixtures ------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own."""
    root = tmp_path / "cache"
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(root))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    return root


@pytest.fixture(scope="session")
def _tiny_cache(tmp_path_factory) -> Path:
    """The tiny models with their parity records on ONNX Runtime and on the fake runtime."""
    root = tmp_path_factory.mktemp("tiny") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(root))
        place_tiny_models()
        for runtime in ("onnxruntime", "fake"):
            models = Models(tiny_config(runtime__name=runtime))
            for role in ("features", "matcher", "global"):
                models.open(role, f"tiny-{role}")
    return root


@pytest.fixture
def tiny(own_cache, _tiny_cache) -> Path:
    """A cache with the tiny models and their records."""
    shutil.copytree(_tiny_cache, own_cache)
    return own_cache


@pytest.fixture
def learned(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own with the default models of this machine's cache, and their records."""
    source = {name: USERS_CACHE / name for name in ("models", "weights", "records")}
    missing = [name for name in DEFAULTS if not (source["models"] / f"{name}.fp32.onnx").is_file()]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)} in {source['models']}: run vslam-features models fetch {' '.join(missing)}"
        )
    root = tmp_path / "cache"
    for name, folder in source.items():
        (root / name).mkdir(parents=True)
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.is_file() and not file.name.startswith("."):
                (root / name / file.name).symlink_to(file.resolve())
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(root))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    return root


def weights_file(cache: Path, part: str) -> Path:
    """Fetched weights in a cache, by part of their name; skips the test where there are none."""
    found = [p for p in (cache / "weights").iterdir() if part in p.name and not p.name.startswith(".")]
    if not found:
        pytest.skip(f"no weights {part} in {cache}: run vslam-features models fetch default")
    return found[0]


def with_precision(card: ModelCard, precision: str) -> ModelCard:
    """The same card of a file that computes in another precision."""
    return replace(card, precision=precision)


def command(*args: str) -> int:
    """Run ``vslam-features``; its log handler goes with it, for it writes to the captured stderr of one test."""
    try:
        return main(list(args))
    finally:
        root = logging.getLogger()
        root.handlers = [h for h in root.handlers if not isinstance(h, _Handler)]


def clear_environment(monkeypatch) -> None:
    """No settings of the user's for fetching."""
    for name in [n for n in os.environ if n.startswith("PIP_") or n.lower() in ("http_proxy", "all_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
