"""A node as a process: spin, stop cleanly on SIGINT and SIGTERM, and report failure by the exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Protocol

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.logging import get_logger
from rclpy.signals import SignalHandlerOptions

from ..errors import VslamFeaturesError


class Runnable(Protocol):
    """What ``run`` needs of a ``rclpy.node.Node``. ``failure``: why it ended badly, empty where all went well."""

    failure: str

    def start(self, stop: threading.Event) -> None:
        """Begin; set ``stop`` when the work is over. Raises VslamFeaturesError to end the process with 1."""

    def stop(self) -> None:
        """End threads and release what they used; also called after a failed ``start``."""


def run(make_node: Callable[[], Runnable], name: str, args: list[str] | None = None) -> int:
    """Run a node until a signal or until it is done; the exit code.

    rclpy's own signal handlers end the context at once, and with it the
    publishing of results that are still being computed. So ours only wake the
    main thread, which stops the node first.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:  # bad --ros-args, or a parameter file that is not there
        get_logger(name).fatal(str(error).splitlines()[0])
        return 1
    try:
        node = make_node()
        try:
            return _run(node, stop)
        finally:
            node.destroy_node()
    except VslamFeaturesError as error:
        get_logger(name).fatal(str(error))
        return 1
    finally:
        if rclpy.ok():
            rclpy.shutdown()


def _run(node: Runnable, stop: threading.Event) -> int:
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
        stop.wait()
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
