"""Services whose work takes its time: it is done in a thread of its own while messages come in as before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.task import Future

from ..errors import VslamFeaturesError

logger = logging.getLogger(__name__)

Work = Callable[[], str]
"""Does what was asked for and says what was done. Raises VslamFeaturesError with the reason where it could not."""


class SlowServices:
    """Services of types with ``success`` and ``message``; one call after the other, and each gets an answer.

    A callback is a coroutine: it hands the work over to the thread and gives the executor back, which sends the answer
    when the work is done. Its callback group is reentrant: an exclusive one would hold all its other callbacks back
    until then. The services live as long as the node, since one that is removed cannot answer any more.
    """

    def __init__(self, node: Node):
        self._node = node
        self._group = ReentrantCallbackGroup()
        self._pool = ThreadPoolExecutor(1, "services")
        self._jobs: set[Job] = set()
        self._unanswered = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Somebody waits for an answer."""
        return self._unanswered > 0

    def add(self, kind: type, name: str, prepare: Callable[[object], Work]) -> None:
        """Offer a service.

        Args:
            prepare: request -> work; called in the executor's thread, and may refuse by a VslamFeaturesError.
        """

        async def answer(request, response):
            self._unanswered += 1
            try:
                response.message = await self._done(prepare(request))
                response.success = True
                self._node.get_logger().info(f"{name}: {response.message}")
            except VslamFeaturesError as error:
                response.message = " ".join(str(error).split())
                self._node.get_logger().error(f"{name} failed: {response.message}")
            finally:
                self._unanswered -= 1
            return response

        self._node.create_service(kind, name, answer, callback_group=self._group)

    def settle(self) -> None:
        """Let the work at hand end; calls whose turn has not come are refused."""
        for job in list(self._jobs):
            job.cancel()
        for job in list(self._jobs):
            if not job.cancelled():
                job.exception()

    def close(self) -> None:
        """Settle, and end the thread. Call it when the executor does not spin any more."""
        self._closed = True
        self.settle()
        self._pool.shutdown()

    async def _done(self, work: Work) -> str:
        executor = self._node.executor
        finished = Future(executor=executor)

        def wake(_) -> None:
            finished.set_result(None)
            if not self._closed:
                executor.wake()  # it looks after futures only when something happens

        job = self._pool.submit(_guarded, work)
        self._jobs.add(job)
        job.add_done_callback(wake)
        await finished
        self._jobs.discard(job)
        if job.cancelled():
            raise VslamFeaturesError("the node left its state before the turn of this call came: call again")
        return job.result()


def _guarded(work: Work) -> str:
    try:
        return work()
    except VslamFeaturesError:
        raise
    except Exception as error:  # the caller gets an answer, and the node goes on
        logger.debug("a service failed", exc_info=True)
        raise VslamFeaturesError(f"{type(error).__name__}: {error}") from error
