"""Puts image, calibration and pose of one moment together. Knows messages only as objects with a stamp.

Everything here runs in the executor's one thread, so there are no locks.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..types import Pose
from .poses import JUMP_NS, PoseSource

logger = logging.getLogger(__name__)

WAIT_S = 0.5
"""Longest wait of an image for its calibration or pose."""

GAP_NS = 60_000_000_000
"""A longer gap between stamps is called so: how many images are missing in it is anybody's guess.

The next image must confirm it, or the stamp was wrong.
"""

SPACING_S = 0.05
"""A confirming image follows the one that it confirms after this time, so that the front-end can take both."""

MAX_PENDING = 32
"""Images that may wait; beyond, the oldest goes on with what is there."""


@dataclass(frozen=True)
class Input:
    """An image with what belongs to it. ``session`` grows with each jump back in time and each reset.

    ``image`` None is the command to begin the session at once. ``reset``: the latest session that a reset began,
    0 where none did; so that an input tells of a reset, also where those just after it were dropped.
    """

    session: int
    stamp_ns: int = 0
    image: object = None
    info: object = None
    pose: Pose | None = None
    reset: int = 0


@dataclass
class PairingCounts:
    """Losses and gaps since the start. ``received`` = out_of_order + pending + passed on.

    ``together``: passed on in one go with one after it, which takes its place
    where the front-end has not. ``gaps``: too long to say how many are missing.
    """

    received: int = 0
    out_of_order: int = 0
    together: int = 0
    missing: int = 0
    gaps: int = 0
    last_gap_s: float = 0.0
    jumps: int = 0
    info_missing: int = 0
    info_inexact: int = 0
    pose_missing: int = 0
    pose_rejected: int = 0


@dataclass
class _Pending:
    stamp_ns: int
    image: object
    deadline: float
    not_before: float


class Pairing:
    """Images in order of arrival, each with its exact-stamp camera_info and its pose, as far as they come.

    An image waits at most ``wait_s`` for them; then it goes on with the latest
    calibration (none: uncalibrated) and without a pose, which is counted.
    A source that missed once is not waited for until it delivers within
    ``wait_s`` of an image again, so a missing or late topic costs one short
    delay and never stops images.

    An image of another time (a jump back, or a gap too long) is held until the
    next one comes: if that goes on from it, both are passed on, in a new
    session after a jump back; if not, its stamp was wrong and it is dropped.

    Args:
        emit: called with each :class:`Input`, in order.
        poses: where poses come from; None: poses are not used.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        emit: Callable[[Input], None],
        poses: PoseSource | None = None,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.counts = PairingCounts()
        self.session = self._reset_session = 0
        self._emit, self._poses, self._wait_s, self._clock = emit, poses, wait_s, clock
        self._infos: OrderedDict[int, object] = OrderedDict()
        self._latest_info = None
        self._pending: deque[_Pending] = deque()
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=MAX_PENDING)
        self._wait_info = self._wait_pose = True
        self._gaps = _Gaps()
        self._last_ns: int | None = None
        self._held: tuple[int, object] | None = None

    @property
    def pending(self) -> int:
        """Images that wait for calibration, pose or the one after them."""
        return len(self._pending) + (self._held is not None)

    @property
    def pose_resets(self) -> int:
        """How often the poses began anew: another frame, or a jump back in time."""
        return 0 if self._poses is None else self._poses.resets

    def add_image(self, stamp_ns: int, message) -> None:
        """An image came. One a little older than the last is dropped and counted."""
        self.counts.received += 1
        last, held, self._held = self._last_ns, self._held, None
        if held is not None:
            jumped = held[0] < last
            if stamp_ns > held[0] and (stamp_ns <= last or not jumped):
                if jumped:
                    self.counts.jumps += 1
                    self.restart()
                    if self._poses is not None:
                        self._poses.restart()
                self._accept(*held)
                self._accept(stamp_ns, message, SPACING_S)
                self.release()
                return
            self.counts.out_of_order += 1  # nothing goes on from it: a wrong stamp
        if last is not None and last - JUMP_NS < stamp_ns <= last:
            self.counts.out_of_order += 1
        elif last is not None and (stamp_ns <= last or self._gaps.too_long(stamp_ns)):
            self._held = stamp_ns, message
        else:
            self._accept(stamp_ns, message)
            self.release()

    def _accept(self, stamp_ns: int, message, spacing_s: float = 0.0) -> None:
        self._last_ns = stamp_ns
        missing, gap_s = self._gaps.add(stamp_ns)
        self.counts.missing += missing
        if gap_s:
            self.counts.gaps += 1
            self.counts.last_gap_s = gap_s
        if self._poses is not None:
            try:
                self._poses.add_image(stamp_ns, message)
            except Exception:  # it costs the pose, not the image
                self.counts.pose_rejected += 1
                logger.exception("the image at %d ns gets no pose", stamp_ns)
        now = self._clock()
        self._arrivals.append((stamp_ns, now + self._wait_s))
        self._pending.append(_Pending(stamp_ns, message, now + self._wait_s, now + spacing_s))

    def add_info(self, stamp_ns: int, message) -> None:
        """A camera_info came."""
        self._infos.pop(stamp_ns, None)
        self._infos[stamp_ns] = message
        if self._latest_info is None or _calibrated(message):
            self._latest_info = message
        if len(self._infos) > 2 * MAX_PENDING:
            self._infos.popitem(last=False)
        self._wait_info |= stamp_ns in self._in_time()
        self.release()

    def add_pose(self, stamp_ns: int, message) -> None:
        """A pose came. Raises DataError where the message holds none."""
        if self._poses is not None:
            self._poses.add_pose(stamp_ns, message)
            self._wait_pose = self._wait_pose or any(self._poses.look(ns)[0] for ns in self._in_time())
            self.release()

    def reset(self) -> None:
        """Pass on what waits, then the command to begin a new session with an empty map."""
        self.restart()
        self._reset_session = self.session
        self._emit(Input(self.session, reset=self._reset_session))

    def restart(self) -> None:
        """Pass on what waits and begin a new session."""
        self.flush()
        self._arrivals.clear()
        self._gaps = _Gaps()
        self.session += 1

    def flush(self) -> None:
        """Pass on what waits, as it is; a held image is dropped."""
        self.counts.out_of_order += self._held is not None
        self._held = None
        self.counts.together += max(0, len(self._pending) - 1)
        while self._pending:
            self._pass_on(waited=False)

    def forget_gap(self) -> None:
        """The next image follows an intended pause: its distance to the last is no loss."""
        self._gaps = _Gaps()

    def release(self) -> None:
        """Pass on the images that are complete or have waited long enough. Call it every few 10 ms, too."""
        passed = 0
        while self._pending:
            first, now = self._pending[0], self._clock()
            waited = now >= first.deadline
            ready = now >= first.not_before and (waited or self._complete(first))
            if not (ready or len(self._pending) > MAX_PENDING):
                break
            self._pass_on(waited)
            passed += 1
        self.counts.together += max(0, passed - 1)

    def _in_time(self) -> list[int]:
        """Stamps of the images that may still wait, or might have: what comes for them now comes in time."""
        now = self._clock()
        return [stamp_ns for stamp_ns, deadline in self._arrivals if now < deadline]

    def _complete(self, p: _Pending) -> bool:
        if self._wait_info and p.stamp_ns not in self._infos:
            return False
        return self._poses is None or not self._wait_pose or self._poses.look(p.stamp_ns)[0]

    def _pass_on(self, waited: bool) -> None:
        p = self._pending.popleft()
        info = self._infos.get(p.stamp_ns)
        if info is None:
            self._wait_info &= not waited
            info = self._latest_info
            self.counts.info_missing += info is None
            self.counts.info_inexact += info is not None
        pose = None
        if self._poses is not None:
            known, pose = self._poses.look(p.stamp_ns)
            self._wait_pose &= known or not waited
            self.counts.pose_missing += pose is None
        self._emit(Input(self.session, p.stamp_ns, p.image, info, pose, self._reset_session))


def _calibrated(info) -> bool:
    """Whether a camera_info says so; its K is 0 otherwise."""
    k = getattr(info, "k", None)
    return k is None or k[0] > 0


class _Gaps:
    """Estimates images that never came from the stamps, by the median of the latest periods."""

    def __init__(self):
        self._last: int | None = None
        self._periods: deque[int] = deque(maxlen=31)

    def too_long(self, stamp_ns: int) -> bool:
        """Whether there is a gap before this one."""
        return self._last is not None and stamp_ns - self._last > GAP_NS

    def add(self, stamp_ns: int) -> tuple[int, float]:
        """How many images are missing before this one; or the length of the gap in seconds, where it is too long."""
        last, self._last = self._last, stamp_ns
        if last is None:
            return 0, 0.0
        period = stamp_ns - last
        if period > GAP_NS:
            return 0, period / 1e9
        usual = float(np.median(self._periods)) if len(self._periods) >= 5 else period
        self._periods.append(period)
        return (round(period / usual) - 1 if period > 1.5 * usual else 0), 0.0
