"""Whether fast paths may be taken, and the threads that compiled loops run on.

After each of its operations torch lets its own threads spin for some milliseconds, waiting for the next one, on the
very cores that loops want: two threads are then no faster than one. The command line therefore asks for a short wait
(GOMP_SPINCOUNT=1000, unless it is set) before it loads torch. A program of your own does so in its environment, since
the variable counts only when torch is loaded, and a library should not write it.
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
from torchcaps.kernels.records import Range

__all__ = ["SWITCH", "in_threads", "kernel_mode", "kernels_enabled", "split_range"]

SWITCH = "TORCHCAPS_KERNELS"
"""Environment variable: "fast" (the default), or "plain" for the readable path everywhere."""

_modes: list[str] = []
"""Modes of the `kernel_mode` contexts that are open, the innermost last."""


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
    # Rounding the edges, not the lengths, spreads the remainder over all runs
    edges = [count * n // pieces for n in range(pieces + 1)]
    return [Range(start, stop) for start, stop in itertools.pairwise(edges)]


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


@lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of so many threads; threads are started when they are first needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix="torchcaps")
