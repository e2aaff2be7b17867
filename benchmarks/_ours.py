"""Our models as the plug-ins run them, and the real images that they run on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from vslam_features import registry
from vslam_features.config import Config
from vslam_features.images import read_image
from vslam_features.models import Models
from vslam_features.types import Features, Frame

SIZE = (640, 480)
PLUGINS = {  # model -> role, plug-in, option
    "xfeat": ("features", "xfeat"),
    "aliked-n16": ("features", "aliked"),
    "aliked-t16": ("features", "aliked"),
    "lighterglue": ("matcher", "lighterglue"),
    "lightglue-aliked": ("matcher", "lightglue"),
    "effnet_cov": ("global", "effnet_cov"),
}
FEATURES_OF = {"lighterglue": "xfeat", "lightglue-aliked": "aliked-n16"}
Pair = tuple[Features, Features]


def configuration(runtime: str, threads: int) -> Config:
    """The defaults on a runtime with so many threads."""
    cv2.setNumThreads(threads)
    return Config().with_values(runtime__name=runtime, runtime__threads=threads, threads=threads)


def plugin(model: str, runtime: str, threads: int, max_keypoints: int):
    """The plug-in of a model, on images of any size as they are."""
    role, name = PLUGINS[model]
    cls, models = registry.get(role, name), Models(configuration(runtime, threads))
    options = cls.Options(model=model)
    if role == "features":
        return cls(max_keypoints, 0, options, models)
    return cls(options, models) if role == "matcher" else cls(options, None, models)


def load(model: str, runtime: str, threads: int, max_keypoints: int) -> Callable:
    """A model: of an image (H, W, 3) uint8, or for matchers of a pair of features."""
    p, role = plugin(model, runtime, threads, max_keypoints), PLUGINS[model][0]
    if role == "features":
        return lambda image: p.extract(Frame(0, "", image))
    if role == "matcher":
        return lambda pair: p.match(*pair)
    return lambda image: p.describe(Frame(0, "", image), None)


def image_files(data: Path) -> list[Path]:
    """The images of ``reichstag_pairs``, two that show the same one after the other; raises SystemExit without them."""
    folder = data / "reichstag_pairs"
    if not (folder / "pairs.json").is_file():
        raise SystemExit(f"{folder}/pairs.json: not there; give the folder of the real images with --data")
    pairs = json.loads((folder / "pairs.json").read_text())
    return [folder / "images" / pair[name] for pair in pairs for name in ("image0", "image1")]


def images(data: Path, count: int) -> list[np.ndarray]:
    """Real images (480, 640, 3) uint8, two that show the same one after the other."""
    return [cv2.resize(read_image(p), SIZE, interpolation=cv2.INTER_AREA) for p in image_files(data)[:count]]


def pairs(model: str, data: Path, count: int, keypoints: int, threads: int) -> list[Pair]:
    """Features of real images for a matcher, ``keypoints`` each, or all where an image has fewer."""
    extract = load(FEATURES_OF[model], "onnxruntime", threads, keypoints)
    found = [extract(image) for image in images(data, 2 * count)]
    return list(zip(found[::2], found[1::2]))


def first(features: Features, n: int) -> Features:
    """The best n keypoints."""
    f = features
    return dataclasses.replace(f, keypoints=f.keypoints[:n], scores=f.scores[:n], descriptors=f.descriptors[:n])


def graph_inputs(pair: Pair) -> dict[str, np.ndarray]:
    """A pair by the names of our graph's inputs."""
    sides = {"0": pair[0], "1": pair[1]}
    return {
        name + i: value
        for i, f in sides.items()
        for name, value in (
            ("keypoints", f.keypoints),
            ("descriptors", f.descriptors),
            ("image_size", np.array(f.image_size, np.float32)),
        )
    }
