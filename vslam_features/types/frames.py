"""Images, what was measured with them, and what is found in them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from ..camera import Camera
from ..errors import DataError


@dataclass(frozen=True)
class ModelIdentity:
    """What makes descriptors comparable: only equal identities may be matched.

    Precision, runtime and engine are provenance and not part of it.
    """

    role: str
    name: str
    sha256: str
    preprocessing: str

    @classmethod
    def of_algorithm(cls, role: str, name: str, preprocessing: str, **parameters) -> ModelIdentity:
        """Identity of a method without weights: the hash covers the parameters that shape descriptors."""
        text = json.dumps({"name": name, **parameters}, sort_keys=True)
        return cls(role, name, hashlib.sha256(text.encode()).hexdigest(), preprocessing)

    def __str__(self) -> str:
        return f"{self.role} '{self.name}' (weights {self.sha256[:12]}, preprocessing {self.preprocessing})"


@dataclass(frozen=True)
class Pose:
    """A rigid transform x_parent = R x_child + t (R (3, 3) f64, t (3,) f64, metres if ``scale_known``).

    Of a frame: camera (optical frame) in ``frame_id``. Of a pair: current
    camera in the reference camera, where ``t`` has unit length unless
    ``scale_known``, and length zero for a pure rotation.
    """

    R: np.ndarray
    t: np.ndarray
    frame_id: str = ""
    scale_known: bool = True

    def __post_init__(self):
        R, t = np.asarray(self.R, np.float64), np.asarray(self.t, np.float64).reshape(-1)
        if R.shape != (3, 3) or t.shape != (3,):
            raise DataError(f"pose: expected R (3, 3) and t (3,), got {R.shape} and {t.shape}")
        if not (np.isfinite(R).all() and np.isfinite(t).all()):
            raise DataError("pose: R or t is not finite")
        object.__setattr__(self, "R", R)
        object.__setattr__(self, "t", t)

    @staticmethod
    def comparable(a: Pose | None, b: Pose | None) -> bool:
        """True where both are there and in the same frame, so that their difference is a motion."""
        return a is not None and b is not None and a.frame_id == b.frame_id


@dataclass(frozen=True)
class Frame:
    """One camera image. ``image``: uint8 (H, W) grey or (H, W, 3) RGB.

    ``camera`` None means uncalibrated; ``pose`` None means no odometry.
    ``mask``: bool (H, W), True where keypoints are allowed.
    """

    stamp_ns: int
    frame_id: str
    image: np.ndarray
    camera: Camera | None = None
    pose: Pose | None = None
    mask: np.ndarray | None = None

    def __post_init__(self):
        image = self.image
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
            raise DataError(f"frame: expected a uint8 image (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
        if image.size == 0:
            raise DataError(f"frame: the image is empty, shape {image.shape}")
        if self.camera is not None and self.camera.size != self.image_size:
            raise DataError(
                f"frame: camera is for {self.camera.size[0]}x{self.camera.size[1]} pixels, "
                f"the image has {self.image_size[0]}x{self.image_size[1]}: "
                "check camera_info (ROI, binning) or scale the camera to the image"
            )
        mask = self.mask
        if mask is not None and (mask.shape != image.shape[:2] or mask.dtype != bool):
            raise DataError(f"frame: mask must be bool {image.shape[:2]} as the image, got {mask.dtype} {mask.shape}")

    @property
    def image_size(self) -> tuple[int, int]:
        """(width, height) of the image."""
        return self.image.shape[1], self.image.shape[0]


@dataclass(frozen=True)
class Features:
    """Local features of one image.

    Args:
        keypoints: (N, 2) f32, pixels of the input image. Never fp16.
        scores: (N,) f32, higher is better, detector's own unit.
        descriptors: (N, D) f16, f32 or u8 (bit-packed), or a dense map (C, h, w).
        image_size: (width, height) of the input image.
        model: identity of what computed them.
        pixel_scale: input pixels per pixel of the image that was searched
            (> 1 where it was shrunk first); scales geometric thresholds.
        recovered: the fault after which the fallback computed them, else empty.
    Raises:
        DataError: shapes or dtypes that break the contract, non-finite keypoints.
    """

    keypoints: np.ndarray
    scores: np.ndarray
    descriptors: np.ndarray
    image_size: tuple[int, int]
    model: ModelIdentity
    pixel_scale: float = 1.0
    recovered: str = ""

    def __post_init__(self):
        n = len(self.keypoints)
        if self.keypoints.shape != (n, 2) or self.keypoints.dtype != np.float32:
            raise DataError(
                f"features: keypoints must be (N, 2) f32, got {self.keypoints.dtype} {self.keypoints.shape}"
            )
        if self.scores.shape != (n,):
            raise DataError(f"features: scores must be ({n},), got {self.scores.shape}")
        if self.descriptors.ndim not in (2, 3) or (self.descriptors.ndim == 2 and len(self.descriptors) != n):
            raise DataError(f"features: descriptors must be ({n}, D) or (C, h, w), got {self.descriptors.shape}")
        if not np.isfinite(self.keypoints).all():
            raise DataError("features: keypoints are not finite")

    def __len__(self) -> int:
        return len(self.keypoints)
