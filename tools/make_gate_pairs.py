#!/usr/bin/env python3
"""Make the pairs of pictures that ship in ``vslam_features/golden`` for the parity gate.

    python tools/make_gate_pairs.py

Photographs are those of scikit-image that are in the public domain or CC0 (its
docstrings say which), seen through two homographies; the rest are views of this
package's synthetic scenes. The files are lossless, and the same library
versions give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
from skimage import data

from vslam_features.replay.scenes import SceneOptions, make_scene

OUT = Path(__file__).resolve().parent.parent / "vslam_features" / "golden"

# name, picture, colour, size (width, height), turn in degrees, zoom, perspective, gain of the second view, licence
PHOTOS = (
    ("cup", "coffee", True, (320, 224), 6, 1.06, 0.04, 1.0, "CC0, Rachel Michetti"),
    ("cat", "chelsea", False, (256, 192), -14, 1.25, 0.08, 1.0, "CC0, Stefan van der Walt"),
    ("gravel", "gravel", False, (256, 256), 25, 1.0, 0.15, 1.0, "CC0, CC0Textures"),
    ("stars-dim", "hubble_deep_field", False, (250, 187), 3, 1.1, 0.05, 0.7, "public domain, NASA and ESA"),
)
# name, scenes and frames of both views, size
VIEWS = (
    ("room-step", ("room", 20), ("room", 22), (320, 240)),
    ("room-wide", ("room", 95), ("room", 102), (320, 240)),
    ("corridor-turn", ("corridor", 40), ("corridor", 46), (256, 192)),
    ("two-places", ("room", 60), ("corridor", 10), (256, 192)),
)


def photo_pair(picture: np.ndarray, size, turn: float, zoom: float, tilt: float, gain: float) -> list[np.ndarray]:
    """Two views of a picture: the middle of it, and the same turned, zoomed, tilted and dimmed."""
    width, height = size
    scale = 1.15 * max(width / picture.shape[1], height / picture.shape[0])
    centre = np.array([[1, 0, (width - 1) / 2], [0, 1, (height - 1) / 2], [0, 0, 1]], float)
    origin = np.array([[1, 0, -(picture.shape[1] - 1) / 2], [0, 1, -(picture.shape[0] - 1) / 2], [0, 0, 1]], float)
    small = cv2.GaussianBlur(picture, (0, 0), 0.5 * max(1 / scale - 1, 0.01))
    views = []
    for angle, factor, bend, bright in ((0.0, 1.0, 0.0, 1.0), (turn, zoom, tilt, gain)):
        c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
        move = scale * factor * np.array([[c, -s, 0], [s, c, 0], [0, 0, 1 / (scale * factor)]])
        move[2, :2] = bend * scale / width, -0.5 * bend * scale / height
        view = cv2.warpPerspective(small, centre @ move @ origin, size, borderMode=cv2.BORDER_REFLECT_101)
        views.append(np.clip(np.rint(view * bright), 0, 255).astype(np.uint8))
    return views


def scene_pair(first, second, size) -> list[np.ndarray]:
    """Views of frames of two walks, with a little noise."""
    options = SceneOptions(width=size[0], height=size[1], seed=7, noise_sigma=1.5)
    return [make_scene(name, options).frame(i).image for name, i in (first, second)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = []
    for name, source, colour, size, *change, licence in PHOTOS:
        picture = getattr(data, source)()
        if picture.ndim == 3 and not colour:
            picture = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        kind = "homography"
        pairs.append((name, kind, photo_pair(picture, size, *change), f"scikit-image '{source}'", licence))
    for name, first, second, size in VIEWS:
        source = f"synthetic scenes {first[0]} {first[1]}, {second[0]} {second[1]}"
        kind = "different places" if first[0] != second[0] else "3-D scene"
        pairs.append((name, kind, scene_pair(first, second, size), source, "Apache-2.0"))
    entries, total = [], 0
    for name, kind, views, source, licence in pairs:
        files = [f"{name}_{i}.png" for i in range(2)]
        for file, view in zip(files, views):
            bgr = view if view.ndim == 2 else cv2.cvtColor(view, cv2.COLOR_RGB2BGR)
            cv2.imwrite(str(args.out / file), bgr, [cv2.IMWRITE_PNG_COMPRESSION, 9])
            total += (args.out / file).stat().st_size
        entries.append({"name": name, "kind": kind, "files": files, "source": source, "licence": licence})
    (args.out / "pairs.json").write_text(json.dumps({"pairs": entries}, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(pairs)} pairs, {total / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
