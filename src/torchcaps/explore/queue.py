"""A bounded queue in front of the one thread that computes; requests that find it full are refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["WAITING", "ClientGoneError", "Queue", "QueueFullError"]

T = TypeVar("T")

WAITING = 64
"""Requests that may wait while another is computed."""


class QueueFullError(Exception):
    """The queue has no place left; try again in a moment."""


class ClientGoneError(Exception):
    """The client disconnected before its work began."""


class Queue:
    """Runs work in order of arrival, one piece at a time, in a thread of its own.

    Args:
        waiting: pieces of work that may wait while another runs.
    """

    def __init__(self, waiting: int = WAITING) -> None:
        self.capacity = waiting + 1  # one is running
        self.size = 0
        # One thread: torch uses all cores for one computation, and the registry is not thread-safe
        self._worker = ThreadPoolExecutor(1, "explore")

    async def run(self, work: Callable[[], T], disconnected: Callable[[], Awaitable[object]]) -> T:
        """Wait for the result of `work`.

        Args:
            work: what to compute, in the worker's thread.
            disconnected: awaited beside the work; returns once nobody waits for the result any more.

        Returns:
            What `work` returns.

        Raises:
            QueueFullError: there is no place for it.
            ClientGoneError: `disconnected` returned before the work began, which is dropped then.
        """
        # Places are counted here, in the event loop, since the executor's own queue has no limit
        if self.size >= self.capacity:
            raise QueueFullError
        self.size += 1
        future = self._worker.submit(work)
        future.add_done_callback(self._release(asyncio.get_running_loop()))
        return await _result_unless_gone(future, asyncio.ensure_future(disconnected()))

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` in its turn, without a result; it takes no place, and what it raises is dropped."""
        self._worker.submit(work)

    def close(self) -> None:
        """Drop all work that waits; what runs is completed."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _release(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
        """Make a callback that gives a place back; `size` belongs to the event loop's thread."""

        def decrement() -> None:
            self.size -= 1

        def callback(_: Future[T]) -> None:
            # A server that stops closes its loop while work may still run
            if not loop.is_closed():
                loop.call_soon_threadsafe(decrement)

        return callback


async def _result_unless_gone(future: Future[T], gone: asyncio.Future[object]) -> T:
    """Wait for a result, or raise ClientGoneError if `gone` is done before the work began."""
    # Whichever comes first: the result, or the end of the connection
    result = asyncio.wrap_future(future)
    pending: set[asyncio.Future[T] | asyncio.Future[object]] = {result, gone}
    try:
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        # `cancel` succeeds only if the work has not begun; work that has is awaited
        if not result.done() and future.cancel():
            raise ClientGoneError
        return await result
    finally:
        # Else it would read from the connection forever
        gone.cancel()
