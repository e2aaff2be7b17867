"""Camera calibration of one image size: pixels to rays and back.

Pixels follow the OpenCV convention ((0, 0) is the centre of the top-left
pixel); rays are in the optical frame of REP-103 (x right, y down, z forward).
Distortion models: :mod:`vslam_features.distortion`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .distortion import COEFFICIENTS, Distortion
from .errors import CameraError, DataError

_TOLERANCE_PX = 1e-4
"""An undistorted point is accepted if it projects back to within this distance."""


@dataclass(frozen=True, eq=False)
class Camera:
    """Calibration for images of exactly ``width`` x ``height`` pixels.

    Args:
        width, height: image size in pixels.
        K: (3, 3) f64 [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], pixels.
        D: (n,) f64 distortion coefficients in OpenCV's order.
        model: a key of ``COEFFICIENTS``.
        rectified: the image is rectified already, so it has no distortion.
    Raises:
        CameraError: a value that no camera can have; the message says which.

    The arrays are read-only copies. Cameras with equal values are equal and hash alike.
    """

    width: int
    height: int
    K: np.ndarray
    D: np.ndarray = field(default_factory=lambda: np.empty(0))
    model: str = "plumb_bob"
    rectified: bool = False

    def __post_init__(self):
        width, height = _size((self.width, self.height))
        K, D = _array("K", self.K, (3, 3)), _array("D", self.D, (-1,))
        if self.model not in COEFFICIENTS:
            raise CameraError(f"camera: unknown distortion model '{self.model}'; valid: {', '.join(COEFFICIENTS)}")
        if D.size not in COEFFICIENTS[self.model]:
            counts = " or ".join(map(str, COEFFICIENTS[self.model]))
            raise CameraError(f"camera: {self.model} takes {counts} distortion coefficients, got {D.size}")
        if D.size and np.abs(D).max() > 1e6:
            raise CameraError(f"camera: distortion coefficients must be below 1e6, got {D.tolist()}")
        if K[0, 0] <= 0 or K[1, 1] <= 0:
            raise CameraError(f"camera: focal lengths must be positive, got fx={K[0, 0]:g} fy={K[1, 1]:g}")
        canonical = np.array([[K[0, 0], 0, K[0, 2]], [0, K[1, 1], K[1, 2]], [0, 0, 1.0]])
        if not np.allclose(K, canonical, rtol=0, atol=1e-9 * K[0, 0]):
            raise CameraError(f"camera: K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], got {K.tolist()}")
        if self.rectified and (self.model == "equidistant" or D.any()):
            raise CameraError(
                "camera: a rectified image has no distortion, got coefficients; use K and D of the raw one"
            )
        canonical.flags.writeable = D.flags.writeable = False
        for name, value in (("width", width), ("height", height), ("K", canonical), ("D", D)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "rectified", bool(self.rectified))

    @classmethod
    def from_info(
        cls,
        width: int,
        height: int,
        K,
        D,
        P,
        distortion_model: str,
        binning_x: int,
        binning_y: int,
        roi: tuple[int, int, int, int],
        image_size: tuple[int, int],
        rectified: bool,
    ) -> Camera | None:
        """Camera of an image from the plain values of a ``sensor_msgs/CameraInfo``.

        ``width`` x ``height`` is the calibration resolution; the region of
        interest is cut from it first, then pixels are binned. Binning 0 means
        1, an all-zero ROI means the full image, an empty model with no (or
        zero) D means no distortion.

        Args:
            K, D, P: 9, n and 12 numbers, row-major. The message's R is not
                needed: rays of a rectified image are in the rectified optical frame.
            roi: (x_offset, y_offset, width, height) in calibration pixels.
            image_size: (width, height) of the image that the camera is for.
            rectified: use P without distortion (True) or K and D (False).
        Returns:
            None if K[0] is 0, which CameraInfo defines as uncalibrated.
        Raises:
            CameraError: invalid values, or a result for another image size.
        """
        K = _array("K", K, (3, 3))
        if K[0, 0] == 0:
            return None
        D = _array("D", D, (-1,))
        if rectified:
            P = _array("P", P, (3, 4))
            if P[0, 0] == 0:
                raise CameraError(
                    "camera_info: P is zero, but the image is said to be rectified; calibrate, or subscribe to "
                    "the raw image and say that it is not rectified"
                )
            camera = cls(width, height, P[:, :3], rectified=True)
        elif not distortion_model and not D.any():
            camera = cls(width, height, K)
        else:
            camera = cls(width, height, K, D, distortion_model)
        if any(roi):
            camera = camera.cropped(*roi)
        camera = camera.binned(binning_x or 1, binning_y or 1)
        if camera.size != _size(image_size):
            raise CameraError(
                f"camera_info: {width}x{height} with ROI {tuple(roi)} and binning {binning_x}x{binning_y} describes "
                f"images of {camera.width}x{camera.height}, got an image of {image_size[0]}x{image_size[1]}; fix the "
                "driver's camera_info, or, if the image was resized afterwards, scale the calibration with it"
            )
        return camera

    def __eq__(self, other) -> bool:
        return self._key == other._key if isinstance(other, Camera) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple:
        return (self.size, tuple(self.K.ravel()), tuple(self.D), self.model, self.rectified)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.width, self.height

    @property
    def mean_focal(self) -> float:
        """(fx + fy) / 2 in pixels: converts a threshold in pixels to one in normalised coordinates."""
        return float(self.K[0, 0] + self.K[1, 1]) / 2

    # -- other images of the same camera ---------------------------------------------------

    def scaled_to(self, size: tuple[int, int]) -> Camera:
        """The camera of this image resized to ``size`` (width, height): x -> (x + 0.5) s - 0.5 on each axis."""
        width, height = _size(size)
        return self._with(width, height, width / self.width, height / self.height, 0, 0)

    def cropped(self, x: int, y: int, width: int, height: int) -> Camera:
        """The camera of the window whose top-left pixel is (x, y).

        Raises:
            CameraError: the window is empty or leaves the image.
        """
        x, y = _integer("crop offset", x), _integer("crop offset", y)
        width, height = _size((width, height))
        if x < 0 or y < 0 or x + width > self.width or y + height > self.height:
            raise CameraError(
                f"camera: window {width}x{height} at ({x}, {y}) leaves the image of {self.width}x{self.height} pixels"
            )
        return self._with(width, height, 1, 1, x, y)

    def binned(self, binning_x: int, binning_y: int) -> Camera:
        """The camera of this image with blocks of pixels merged; an incomplete last block is dropped."""
        bx, by = _size((binning_x, binning_y), "binning")
        if bx > self.width or by > self.height:
            raise CameraError(f"camera: binning {bx}x{by} leaves nothing of {self.width}x{self.height} pixels")
        return self._with(self.width // bx, self.height // by, 1 / bx, 1 / by, 0, 0)

    def _with(self, width: int, height: int, sx: float, sy: float, x: int, y: int) -> Camera:
        (fx, _, cx), (_, fy, cy), _ = self.K
        K = [[fx * sx, 0, (cx - x + 0.5) * sx - 0.5], [0, fy * sy, (cy - y + 0.5) * sy - 0.5], [0, 0, 1]]
        return Camera(width, height, K, self.D, self.model, self.rectified)

    # -- pixels and rays -------------------------------------------------------------------

    def project(self, points_3d: np.ndarray) -> np.ndarray:
        """(N, 3) points in the optical frame to (N, 2) f64 pixels, distortion included.

        NaN where there is no image: at or behind the camera's plane (z <= 0;
        ``equidistant`` sees there, so only the ray straight backwards has
        none), and beyond the angle where the distortion polynomial folds back
        and would show the point at a second, wrong place. Pixels outside the
        image are returned as they are.
        """
        points = _points(points_3d, 3)
        pixels = np.full((len(points), 2), np.nan)
        finite = np.flatnonzero(np.isfinite(points).all(axis=1))
        xy, seen = self._distortion.project(points[finite])
        pixels[finite[seen]] = xy * self._focal + self._centre
        return pixels

    def bearings(self, points: np.ndarray) -> np.ndarray:
        """(N, 2) pixels to (N, 3) f64 unit rays in the optical frame; NaN where no ray images there."""
        points = _points(points, 2)
        rays = self._distortion.rays((points - self._centre) / self._focal)
        with np.errstate(all="ignore"):  # rays where there is no answer may be anything; the check drops them
            wrong = ~(np.abs(self.project(rays) - points).max(axis=1, initial=0) < _TOLERANCE_PX)
        rays[wrong] = np.nan
        return rays

    def undistort(self, points: np.ndarray) -> np.ndarray:
        """(N, 2) pixels to (N, 2) f64 pixels of the ideal pinhole camera with the same K.

        NaN where there is no such pixel: rays 90 degrees or more off the axis,
        and pixels that no ray reaches.
        """
        if self.model != "equidistant" and not self.D.any():
            points = _points(points, 2).copy()
            points[~np.isfinite(points).all(axis=1)] = np.nan
            return points
        rays = self.bearings(points)
        rays[~(rays[:, 2] > 1e-9)] = np.nan
        return rays[:, :2] / rays[:, 2:] * self._focal + self._centre

    @cached_property
    def _distortion(self) -> Distortion:
        return Distortion(self.model, self.D)

    @property
    def _focal(self) -> np.ndarray:
        return self.K[[0, 1], [0, 1]]

    @property
    def _centre(self) -> np.ndarray:
        return self.K[:2, 2]


def _points(points, columns: int) -> np.ndarray:
    array = np.asarray(points, np.float64)
    if array.size == 0:
        return np.empty((0, columns))
    if array.ndim != 2 or array.shape[1] != columns:
        raise DataError(f"camera: expected points (N, {columns}), got {array.shape}")
    return array


def _array(name: str, values, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.array(values, np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise CameraError(f"camera: {name} must be numbers of shape {shape}: {error}") from None
    if not np.isfinite(array).all():
        raise CameraError(f"camera: {name} is not finite: {array.tolist()}")
    return array + 0.0  # -0.0 becomes 0.0


def _integer(name: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise CameraError(f"camera: {name} must be an integer, got {value!r}") from None


def _size(size, name: str = "size") -> tuple[int, int]:
    width, height = (_integer(name, value) for value in size)
    if width <= 0 or height <= 0:
        raise CameraError(f"camera: {name} must be positive, got {width}x{height}")
    return width, height
