#!/usr/bin/env python3
"""Make the VLAD codebooks that ship in ``vslam_features/codebooks``.

    python tools/make_codebooks.py
    python tools/make_codebooks.py --features xfeat aliked

Learned features need their model on this machine (``vslam-features models
fetch xfeat aliked-n16``).

Training images are those that scikit-image ships (public domain or CC0, see
its ``skimage/data/README.txt``) and frames of this package's synthetic scenes,
so that anybody may remake the files. Seeded: the same library versions give
the same words. Descriptors of each image are limited, so that no picture
dominates.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
import skimage
from skimage import data

from vslam_features import registry
from vslam_features.config import Config
from vslam_features.features.base import FeatureExtractor
from vslam_features.matching.base import as_vectors
from vslam_features.models import Models
from vslam_features.replay.scenes import SceneOptions, make_scene
from vslam_features.types import Frame

PHOTOS = (
    "astronaut brick camera chelsea clock coffee coins grass gravel hubble_deep_field immunohistochemistry moon page "
    "retina rocket text"
).split()
WEIGHTED = ("xfeat",)
"""Features whose scores say how reliable a descriptor is (see ``vslam_features/retrieval/vlad.py``)."""
OUT = Path(__file__).resolve().parent.parent / "vslam_features" / "codebooks"


def training_images(seed: int):
    """Yields uint8 images: photographs, a stereo pair, and synthetic views."""
    for name in PHOTOS:
        yield getattr(data, name)()
    yield from data.stereo_motorcycle()[:2]
    for name in ("room", "corridor"):
        scene = make_scene(name, SceneOptions(seed=seed))
        for i in np.linspace(0, len(scene) - 1, 8).astype(int):
            yield scene.frame(int(i)).image


def descriptors(extractor: FeatureExtractor, seed: int) -> np.ndarray:
    """(N, D) f32 local descriptors of the training images."""
    rows = []
    for image in training_images(seed):
        image = np.ascontiguousarray(image)
        if image.dtype != np.uint8:
            image = cv2.normalize(image.astype(np.float32), None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
        rows.append(as_vectors(extractor.extract(Frame(0, "", image))))
    return np.concatenate(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--per-image", type=int, default=600, help="descriptors taken from an image at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", nargs="+", default=["sift", "orb"], help="plug-ins")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    models = Models(Config())
    for plugin in args.features:
        cls = registry.get("features", plugin)
        extractor = cls(args.per_image, 640, cls.Options(), models)
        d = descriptors(extractor, args.seed)
        cv2.setRNGSeed(args.seed)
        criteria = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 100, 1e-4)
        _, _, words = cv2.kmeans(d, args.words, None, criteria, 5, cv2.KMEANS_PP_CENTERS)
        name = extractor.identity.name  # of the model, which may differ from the plug-in's
        path = args.out / f"vlad_{name}.npz"
        facts = {"seed": args.seed, "descriptors": len(d), "scikit_image": skimage.__version__}
        if name in WEIGHTED:
            facts["weighted"] = True
        np.savez_compressed(path, words=words.astype(np.float16), **facts)
        size = path.stat().st_size / 1024
        print(f"{path}: {args.words} words of {d.shape[1]} from {len(d)} descriptors, {size:.0f} KiB")


if __name__ == "__main__":
    main()
