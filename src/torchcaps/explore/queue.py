"""A bounded queue in front of the one thread that computes: whoever comes when it is full is told so at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["WAITING", "FullError", "GoneError", "Queue"]

T = TypeVar("T")

WAITING = 64
"""Requests that may wait while another is answered."""


class FullError(Exception):
    """As many wait as may; ask again in a moment."""


class GoneError(Exception):
    """Whoever asked has hung up."""


class Queue:
    """Work in the order in which it comes, one piece at a time, in a thread of its own."""

    def __init__(self, waiting: int = WAITING) -> None:
        self.places = waiting + 1  # one is being served
        self.taken = 0
        self._worker = ThreadPoolExecutor(1, "explore")

    async def answer(self, work: Callable[[], T], gone: Callable[[], Awaitable[object]]) -> T:
        """What `work` returns or raises; FullError if there is no place for it.

        `gone` comes back once nobody waits for the answer any more: work that has not begun by then is dropped.
        """
        if self.taken >= self.places:
            raise FullError
        self.taken += 1
        future = self._worker.submit(work)
        future.add_done_callback(self._leave(asyncio.get_running_loop()))
        return await _first(future, asyncio.ensure_future(gone()))

    def begin(self, work: Callable[[], object]) -> None:
        """Do something before the first request, which nobody waits for; whatever it raises is not heard."""
        self._worker.submit(work)

    def close(self) -> None:
        """Drop what waits; what is being served comes to its end."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
        def give_back() -> None:
            self.taken -= 1

        def left(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(give_back)

        return left


async def _first(future: Future[T], gone: asyncio.Future[object]) -> T:
    """The answer, or GoneError if that comes before the work began."""
    answer = asyncio.wrap_future(future)
    both: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and future.cancel():
            raise GoneError
        return await answer
    finally:
        gone.cancel()
