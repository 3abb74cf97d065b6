"""Whether fast paths may be taken, and the threads that compiled loops run on.

After each of its operations torch lets its own threads spin for some milliseconds, waiting for the next one, on the
very cores that loops want: two threads are then no faster than one. The command line therefore asks for a short wait
(GOMP_SPINCOUNT=1000, unless it is set) before it loads torch. A program of your own does so in its environment, since
the variable counts only when torch is loaded, and a library should not write it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from torchcaps.errors import RecipeError, suggestion
from torchcaps.kernels.records import IntArray, Range

__all__ = [
    "SWITCH",
    "ThreadRank",
    "in_threads",
    "kernel_mode",
    "kernels_enabled",
    "piece_of",
    "run_together",
    "split_range",
]

SWITCH = "TORCHCAPS_KERNELS"
"""Environment variable: "fast" (the default), or "plain" for the readable path everywhere."""

CANCELLED = -(2**62)
"""A number of arrivals with which no thread waits for another."""

T = TypeVar("T")

_together = Lock()
"""Held while threads run together: two such calls could each wait for threads of the pool that the other one has."""
_modes: list[str] = []
"""Modes of the `kernel_mode` contexts that are open, the innermost last."""


class ThreadRank(NamedTuple):
    """Which of several threads this is, how many there are, and the counter [1] of their barrier (`loops.barrier`)."""

    rank: int
    threads: int
    arrivals: IntArray


def kernels_enabled() -> bool:
    """Return whether fast paths may be taken; read at every call, so that a test or a notebook can switch.

    Inside of `torch.func.grad`, `vmap` and their like they may not: torch's operators have no rules for these.

    Raises:
        RecipeError: If the environment variable is neither "fast" nor "plain".
    """
    value = _modes[-1] if _modes else os.environ.get(SWITCH, "fast")
    if value not in ("fast", "plain"):
        raise RecipeError(f"{SWITCH}={value}{suggestion(value, ('fast', 'plain'))}; 'fast' or 'plain' is wanted")
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return value == "fast" and not transformed


@contextmanager
def kernel_mode(mode: str) -> Iterator[None]:
    """Take or avoid fast paths in all threads of this process, whatever the environment variable says.

    Args:
        mode: "fast" or "plain", until the context ends.
    """
    _modes.append(mode)
    try:
        yield
    finally:
        _modes.pop()


def split_range(count: int, pieces: int) -> list[Range]:
    """Split [0, count) into runs of nearly equal length.

    Args:
        count: Length of the whole.
        pieces: The most runs that there may be.

    Returns:
        The runs in order; none is empty unless count is 0.
    """
    pieces = max(1, min(pieces, count))
    return [piece_of(count, n, pieces) for n in range(pieces)]


def piece_of(count: int, n: int, pieces: int) -> Range:
    """Return the n-th of so many runs of [0, count), of nearly equal length; empty if there are fewer numbers."""
    # Rounding the edges, not the lengths, spreads the remainder over all runs
    return Range(count * n // pieces, count * (n + 1) // pieces)


def in_threads(work: Callable[[int, int, int], None], count: int) -> None:
    """Call work(n, start, stop) for the n-th run of [0, count), each on its own thread.

    There are as many runs as torch may use threads (`torch.set_num_threads`), so that what each run adds up is the same
    for a fixed number of threads.

    Args:
        work: Spends its time without the interpreter's lock, as compiled loops do.
        count: Length of the range.
    """
    pieces = split_range(count, torch.get_num_threads())
    waiting = [_pool(len(pieces)).submit(work, n, *piece) for n, piece in enumerate(pieces[1:], 1)]
    # The first run is worked on by this thread itself
    work(0, *pieces[0])
    # An exception of a thread is raised here
    for each in waiting:
        each.result()


def run_together(prepare: Callable[[], T], work: Callable[[T, ThreadRank], None]) -> None:
    """Run one function on all threads that torch may use; inside, they may wait for each other (`loops.barrier`).

    Args:
        prepare: Makes what all of them need, on this thread, while the others wake up.
        work: One thread's work on it.
    """
    # Imported when it is needed, as all loops are
    from torchcaps.kernels.loops.barrier import await_start

    threads = torch.get_num_threads()
    started = np.zeros(1, np.int64)
    arrivals = np.zeros(1, np.int64)
    made: list[T] = []

    def cancel() -> None:
        started[0] = CANCELLED
        arrivals[0] = CANCELLED

    def run_rank(n: int) -> None:
        try:
            if await_start(started):
                work(made[0], ThreadRank(n, threads, arrivals))
        except BaseException:
            cancel()
            raise

    with _together:
        try:
            waiting = [_pool(threads).submit(run_rank, n) for n in range(1, threads)]
            made.append(prepare())
            started[0] = 1
            work(made[0], ThreadRank(0, threads, arrivals))
        except BaseException:
            # No thread may wait for one that failed
            cancel()
            raise
        for each in waiting:
            each.result()


@lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of so many threads; threads are started when they are first needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix="torchcaps")
