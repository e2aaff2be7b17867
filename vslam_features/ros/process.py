"""A node as a process: spin, stop cleanly on SIGINT and SIGTERM, and report failure by the exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Protocol

import rclpy
from rclpy.exceptions import NameValidationException, ParameterException
from rclpy.executors import SingleThreadedExecutor
from rclpy.logging import get_logger
from rclpy.signals import SignalHandlerOptions

from ..errors import ConfigError, VslamFeaturesError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.1
"""A signal is noticed after this at the latest."""


class Runnable(Protocol):
    """What ``run`` needs of a ``rclpy.node.Node``. ``failure``: why it ended badly, empty where all went well.

    ``busy``: a caller still waits for an answer; a first signal lets the node give it, a second one does not.
    """

    failure: str
    busy: bool

    def start(self, stop: threading.Event) -> None:
        """Begin; set ``stop`` when the work is over. Raises VslamFeaturesError to end the process with 1."""

    def stop(self) -> None:
        """End threads and release what they used; also called after a failed ``start``."""


def run(make_node: Callable[[], Runnable], name: str, args: list[str] | None = None) -> int:
    """Run a node until a signal or until it is done; the exit code.

    rclpy's own signal handlers end the context at once, and with it the
    publishing of results that are still being computed. So ours only note the
    signal, and the main thread stops the node first. They take no lock: a
    second signal may interrupt the first.
    """
    asked: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: asked.append(number))
    try:
        return _with_rclpy(make_node, name, args, asked)
    finally:
        # It ends anyway. The interpreter gives signals their deadly default back on its way out, but not these.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _with_rclpy(make_node: Callable[[], Runnable], name: str, args: list[str] | None, asked: list[int]) -> int:
    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:  # bad --ros-args, or a parameter file that is not there
        unknown = "unknown ROS arguments: " if type(error).__name__ == "UnknownROSArgsError" else ""
        get_logger(name).fatal(unknown + str(error).splitlines()[0])
        return 1
    try:
        node = _make(make_node)
        try:
            return _run(node, asked)
        finally:
            node.destroy_node()
    except (VslamFeaturesError, ParameterException, NameValidationException, OSError) as error:
        get_logger(name).fatal(" ".join(str(error).split()).rstrip(" ^"))  # rclpy points at the place on a new line
        return 1
    finally:
        if rclpy.ok():
            rclpy.shutdown()


def _make(make_node: Callable[[], Runnable]) -> Runnable:
    try:
        return make_node()
    except ValueError as error:
        if "PARAMETER_NOT_SET" not in str(error):
            raise
        raise ConfigError("a parameter was given without a value; an empty list [] is none either") from error


def _run(node: Runnable, asked: list[int]) -> int:
    stop = threading.Event()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    wake = node.create_guard_condition(lambda: None)
    crash: list[Exception] = []

    def spin() -> None:
        try:
            while not stop.is_set():
                executor.spin_once()
        except Exception as error:  # raised again below: a node without callbacks must not stay
            crash.append(error)
        finally:
            stop.set()

    # Not in the main thread, since only there Python can react to a signal while it waits.
    thread = threading.Thread(target=spin, name="executor", daemon=True)
    try:
        node.start(stop)
        thread.start()
        while not (len(asked) > node.busy or stop.wait(POLL_S)):
            pass
        stop.set()
        wake.trigger()
        thread.join()
    finally:
        # Only now: shutting down an executor that still waits destroys what it waits for.
        executor.shutdown()
        node.stop()
    if crash:
        raise crash[0]
    if node.failure:
        node.get_logger().fatal(node.failure)
        return 1
    return 0
