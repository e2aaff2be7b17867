"""Resize kernels against the reference of MegaLoc: torch's antialiased bilinear on floats, on natural images.

Prints a table a set of images: the largest and the mean error of each kernel, in grey levels (1/255).
"""

from pathlib import Path

import cv2
import numpy as np
import pytest
import skimage

from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.resize import KERNELS
from vslam_features.images import read_image

torch = pytest.importorskip("torch", reason="torch is not installed; run make test-export")

SIZE = 322  # MegaLoc's
LIMITS = {"pillow": (1.0, 0.3), "antialias": (0.01, 0.01)}  # largest and mean error in 1/255, of images to shrink
# Pillow rounds twice. The more an image grows, the less the second pass averages the first one's errors; two that are
# independent and even between -1/2 and 1/2 have a sum of mean size 1/3.
ENLARGED = LIMITS | {"pillow": (1.0, 1 / 3)}
ROUNDING = 1e-3  # torch computes in f32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SKIMAGE = Path(skimage.__file__).parent / "data"  # photographs of the wheel; skimage.data would look for others online
PHOTOGRAPHS = ("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png")
PHOTOGRAPHS += ("gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "retina.jpg", "rocket.jpg")
GOLDEN = Path(__file__).resolve().parents[2] / "vslam_features" / "golden"
REAL = ("corridor_loop/images", "kitti_snippet/left", "looper_stereo", "lund_pairs/images", "realsense_stereo")
REAL += ("reichstag_pairs/images",)


def reference(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """(C, height, width) f32 in [0, 1]: what torchvision's Resize(antialias=True) calls for float tensors."""
    tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.atleast_3d(picture), 2, 0)))[None].float() / 255
    return torch.nn.functional.interpolate(
        tensor, (height, width), mode="bilinear", align_corners=False, antialias=True
    )[0].numpy()


def errors(picture: np.ndarray, width: int, height: int) -> dict[str, tuple[float, float]]:
    """Kernel -> largest and mean error in 1/255."""
    right = reference(picture, width, height)
    wrong = {k: np.abs(Preprocessing("any", width, height, k).apply(picture)[0] - right) * 255 for k in KERNELS}
    return {k: (float(v.max()), float(v.mean())) for k, v in wrong.items()}


def table(pictures: dict[str, np.ndarray]) -> list[dict]:
    """Errors of each picture at MegaLoc's size, printed."""
    print(f"\n{'max, mean error in 1/255':<44}" + "".join(f"{k:>18}" for k in KERNELS))
    rows = []
    for name, picture in pictures.items():
        rows.append(errors(picture, SIZE, SIZE))
        label = f"{name} {picture.shape[1]}x{picture.shape[0]}"
        print(f"{label:<44}" + "".join(f"{a:>10.4f}{b:>8.4f}" for a, b in rows[-1].values()))
    return rows


def within(limits: dict[str, tuple[float, float]], rows: list[dict]) -> bool:
    return all(
        row[kernel][0] <= largest + ROUNDING and row[kernel][1] <= mean
        for row in rows
        for kernel, (largest, mean) in limits.items()
    )


def test_photographs():
    rows = table({name: read_image(SKIMAGE / name) for name in PHOTOGRAPHS})
    assert len(rows) >= 10 and within(LIMITS, rows)
    # That the others fail shows that the limits tell kernels apart.
    assert all(row[kernel][0] > 1.5 for row in rows for kernel in ("area", "linear"))


def test_golden_pictures_which_are_enlarged():
    rows = table({p.name: read_image(p) for p in sorted(GOLDEN.glob("*.png"))})
    assert len(rows) >= 10 and within(ENLARGED, rows)


@pytest.mark.data
def test_real_images(data_dir):
    pictures = {}
    for folder in REAL:
        found = sorted(p for p in (data_dir / folder).glob("*.*") if p.suffix in (".jpg", ".png"))
        pictures |= {f"{folder}/{p.name}": read_image(p) for p in found[:: max(1, len(found) // 3)]}
    if not pictures:
        pytest.skip(f"none of {', '.join(REAL)} in {data_dir}")
    assert within(LIMITS, table(pictures))


@pytest.mark.parametrize("size", [(322, 322), (640, 100), (100, 640), (1000, 900), (1, 1), (7, 322)])
def test_other_sizes_larger_and_smaller_on_each_axis(size):
    for name in ("chelsea.png", "coins.png"):
        found = errors(read_image(SKIMAGE / name), *size)
        assert found["antialias"][0] <= LIMITS["antialias"][0], (name, size, found)
        assert found["pillow"][0] <= 1 + ROUNDING, (name, size, found)


def test_the_whole_input_is_that_of_the_reference():
    """Resize and normalise; also of a grey image, which the reference opens as RGB."""
    for name in ("astronaut.png", "camera.png"):
        picture = read_image(SKIMAGE / name)
        colours = picture if picture.ndim == 3 else cv2.cvtColor(picture, cv2.COLOR_GRAY2RGB)
        expected = (reference(colours, SIZE, SIZE) - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
        made = Preprocessing("rgb", SIZE, SIZE, "antialias", MEAN, STD).apply(picture)[0]
        assert np.abs(made - expected).max() * 255 * min(STD) <= LIMITS["antialias"][0]
