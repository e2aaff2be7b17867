"""Paired messages to core frames."""

from __future__ import annotations

import logging

from ..camera import Camera
from ..config import Config
from ..errors import CameraError
from ..types import Frame
from .messages import camera_of, image_array
from .pairing import Input
from .statistics import Statistics

logger = logging.getLogger(__name__)


class FrameBuilder:
    """Decodes images and fits the calibration to them. Runs in the track thread.

    A camera_info that does not fit its image is a counted fault (stage
    ``camera``), and the frame goes on uncalibrated: features, matches and
    places need no calibration.

    Args:
        image_topic: decides ``rectified: auto``.
    """

    def __init__(self, config: Config, image_topic: str, statistics: Statistics):
        self.rectified = config.is_rectified(image_topic)
        self._max_value = config.image_max_value or None
        self._statistics = statistics
        self._key: tuple | None = None
        self._camera: Camera | None = None
        self._error = ""

    def __call__(self, item: Input) -> Frame:
        """Raises ImageError where the image cannot be decoded."""
        image = image_array(item.image, self._max_value)
        camera = None if item.info is None else self._fit(item.info, (image.shape[1], image.shape[0]))
        return Frame(item.stamp_ns, item.image.header.frame_id, image, camera, item.pose)

    def _fit(self, info, size: tuple[int, int]) -> Camera | None:
        roi = info.roi
        key = (
            *(size, info.width, info.height, info.distortion_model, info.binning_x, info.binning_y),
            *(roi.x_offset, roi.y_offset, roi.width, roi.height),
            *(bytes(info.k), bytes(info.d), bytes(info.p)),
        )
        if key != self._key:  # the same calibration comes with every image
            self._key, self._camera, self._error = key, None, ""
            try:
                self._camera = camera_of(info, size, self.rectified)
            except CameraError as error:
                self._error = str(error)
                logger.error("%s; frames are processed uncalibrated", error)
        if self._error:
            self._statistics.fault("camera", self._error)
        elif self._camera is None:
            self._statistics.no_calibration()
        return self._camera
