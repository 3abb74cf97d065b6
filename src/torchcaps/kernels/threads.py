"""Fast paths: whether they may be taken, and the threads that compiled loops run on.

After each of its operations torch lets its own threads spin for some milliseconds, waiting for the next one, on the
very cores that loops want: two threads are then no faster than one. The command line therefore asks for a short wait
(GOMP_SPINCOUNT=1000, unless it is set), which counts only if torch is not loaded yet. In a program of your own, set the
variable before torch is imported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import torch

from torchcaps.errors import RecipeError, suggestion

__all__ = ["SWITCH", "in_threads", "kernel_mode", "parts", "switched_on"]

SWITCH = "TORCHCAPS_KERNELS"
"""Environment variable: "fast" (the default), or "plain" for the readable path everywhere."""


def switched_on() -> bool:
    """Whether fast paths may be taken; read at every call, so that a test or a notebook can switch."""
    value = os.environ.get(SWITCH, "fast")
    if value not in ("fast", "plain"):
        raise RecipeError(f"{SWITCH}={value}{suggestion(value, ('fast', 'plain'))}; 'fast' or 'plain' is wanted")
    return value == "fast"


@contextmanager
def kernel_mode(value: str) -> Iterator[None]:
    """Inside, the switch of this process is "fast" or "plain"; what it was comes back, also after an error."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = value
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def parts(count: int, pieces: int) -> list[tuple[int, int]]:
    """[0, count) in at most so many runs (start, stop) of nearly equal length, none empty unless count is 0."""
    pieces = max(1, min(pieces, count))
    edges = [count * n // pieces for n in range(pieces + 1)]
    return list(itertools.pairwise(edges))


def in_threads(work: Callable[[int, int, int], None], count: int) -> None:
    """work(n, start, stop) for the n-th part of [0, count), each on a thread of its own.

    There are as many as torch may use (`torch.set_num_threads`), so that what each part adds up is the same for a fixed
    number of threads. `work` must spend its time without the interpreter's lock, as compiled loops do.
    """
    pieces = parts(count, torch.get_num_threads())
    waiting = [_pool(len(pieces)).submit(work, n, *piece) for n, piece in enumerate(pieces[1:], 1)]
    work(0, *pieces[0])
    for each in waiting:
        each.result()


@lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="torchcaps")
