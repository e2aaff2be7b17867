"""Lens distortion on the normalised image plane, and its exact inverse.

Normalised means pixels minus the principal point, over the focal length. The
models are those of ``sensor_msgs/distortion_models.hpp``:

- ``plumb_bob``: k1 k2 p1 p2 [k3]; no coefficients mean no distortion.
- ``rational_polynomial``: k1 k2 p1 p2 k3 k4 k5 k6 [s1 s2 s3 s4 [tau_x tau_y]].
- ``equidistant``: k1 k2 k3 k4 of theta_d = theta (1 + k1 theta^2 + ... + k4 theta^8).

Formulas: OpenCV documentation of ``calib3d`` (pinhole) and ``fisheye``.
"""

from __future__ import annotations

from functools import cached_property

import cv2
import numpy as np
from numpy.polynomial import Polynomial

COEFFICIENTS = {"plumb_bob": (0, 4, 5), "rational_polynomial": (8, 12, 14), "equidistant": (4,)}
"""Distortion models and how many coefficients each may have."""


class Distortion:
    """A distortion model with its coefficients ``D`` (n,) f64; ``model`` and n as in ``COEFFICIENTS``."""

    def __init__(self, model: str, D: np.ndarray):
        self.D = D
        self._fisheye = model == "equidistant"

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finite points (N, 3) in the optical frame to distorted normalised coordinates.

        Returns:
            (n, 2) f64 coordinates of the points that have an image, and which
            those are, (N,) bool: not behind the camera's plane (``equidistant``
            sees there), nor beyond the angle where the polynomial folds back.
        """
        radius = np.hypot(points[:, 0], points[:, 1])
        angle = np.arctan2(radius, points[:, 2])
        seen = (angle < self._max_angle) & points.any(axis=1)
        points, radius, angle = points[seen], radius[seen], angle[seen]
        if self._fisheye:
            # on the axis the direction is (0, 0) and any finite scale will do
            return points[:, :2] * (self._radial(angle) / np.where(radius > 0, radius, 1))[:, None], seen
        return self._distort(points[:, :2] / points[:, 2:])[0], seen

    def rays(self, distorted: np.ndarray) -> np.ndarray:
        """(N, 2) distorted normalised coordinates to (N, 3) f64 unit rays; anything where there is no such ray."""
        distance = np.hypot(distorted[:, 0], distorted[:, 1])
        scale = 1 / np.where(distance > 0, distance, 1)[:, None]
        with np.errstate(all="ignore"):  # points without an answer run to infinity
            angle = np.interp(distance, *self._inverse_table)
            if self._fisheye:
                slope = self._equidistant.deriv()
                for _ in range(8):
                    angle = angle - (self._radial(angle) - distance) / slope(angle)
                return np.column_stack([distorted * scale * np.sin(angle)[:, None], np.cos(angle)])
            xy = self._newton(distorted * (np.tan(angle)[:, None] * scale), distorted)
            rays = np.column_stack([xy, np.ones(len(xy))])
            return rays / np.linalg.norm(rays, axis=1, keepdims=True)

    def _radial(self, angle: np.ndarray) -> np.ndarray:
        """Distance of the image from the principal point over the focal length, at an angle off the axis (rad)."""
        if self._fisheye:
            return self._equidistant(angle)
        over, under = self._fraction
        return np.tan(angle) * over(np.tan(angle) ** 2) / under(np.tan(angle) ** 2)

    @property
    def _equidistant(self) -> Polynomial:
        k1, k2, k3, k4 = self.D
        return Polynomial([0, 1, 0, k1, 0, k2, 0, k3, 0, k4])

    @property
    def _fraction(self) -> tuple[Polynomial, Polynomial]:
        """Numerator and denominator of the radial distortion factor, polynomials of r^2."""
        k1, k2, _, _, k3, k4, k5, k6 = np.pad(self.D, (0, 14))[:8]
        return Polynomial([1, k1, k2, k3]), Polynomial([1, k4, k5, k6])

    @cached_property
    def _max_angle(self) -> float:
        """Angle off the axis (rad) up to which a larger angle lies farther out in the image."""
        if self._fisheye:
            return _first_positive_root(self._equidistant.deriv(), np.pi)
        over, under = self._fraction
        u = Polynomial([0, 1])
        slope = (over + 2 * u * over.deriv()) * under - 2 * u * over * under.deriv()
        limit = min(_first_positive_root(slope, np.inf), _first_positive_root(under, np.inf))
        return float(np.arctan(np.sqrt(limit)))

    @cached_property
    def _inverse_table(self) -> tuple[np.ndarray, np.ndarray]:
        """(distances, angles), both increasing: where the inversion starts, so that it stays on the first branch."""
        angles = np.linspace(0, min(self._max_angle, np.pi if self._fisheye else np.radians(89.9)), 1024)
        return self._radial(angles), angles

    def _distort(self, xy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ideal to distorted normalised coordinates, (N, 2), and the Jacobian (N, 2, 2)."""
        n = len(xy)
        if n == 0 or self.D.size == 0:
            return xy, np.broadcast_to(np.eye(2), (n, 2, 2))
        points = np.column_stack([xy, np.ones(n)]).reshape(n, 1, 3)
        out, jacobian = cv2.projectPoints(points, np.zeros(3), np.zeros(3), np.eye(3), self.D.copy())
        # columns 3 and 4 are by the translation in x and y, which at z = 1 are the coordinates
        return out.reshape(n, 2), jacobian[:, 3:5].reshape(n, 2, 2)

    def _newton(self, xy: np.ndarray, distorted: np.ndarray) -> np.ndarray:
        """Invert ``_distort`` from the start ``xy``; converges where cv2.undistortPoints' fixed point diverges."""
        for _ in range(12):
            value, J = self._distort(xy)
            (ex, ey), det = (value - distorted).T, J[:, 0, 0] * J[:, 1, 1] - J[:, 0, 1] * J[:, 1, 0]
            step = (
                np.column_stack([J[:, 1, 1] * ex - J[:, 0, 1] * ey, J[:, 0, 0] * ey - J[:, 1, 0] * ex]) / det[:, None]
            )
            xy = xy - step
            if not (np.abs(step) > 1e-12).any():
                break
        return xy


def _first_positive_root(polynomial: Polynomial, default: float) -> float:
    # the constant is 1: smaller coefficients act only outside any field of view, but overflow in the root finder
    polynomial = polynomial.trim(1e-12)
    roots = polynomial.roots() if polynomial.degree() else np.empty(0)
    real = roots.real[(np.abs(roots.imag) <= 1e-9 * np.abs(roots)) & (roots.real > 0)]
    return float(min(real.min(initial=default), default))
