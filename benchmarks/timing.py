"""Times on a machine that is never quite quiet: everything in turn, again and again, and the best of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

__all__ = ["SGEMM_FLOP", "best_times", "busy", "sgemm", "threads"]

SGEMM_SIDE = 1024
SGEMM_FLOP = 2 * SGEMM_SIDE**3
"""Operations of the matrix product that stands for what the processor can do."""

MOST_ROUNDS = 200
PATIENCE = 4
"""What takes more than so many times its share of the time is run only once."""


def best_times(
    tasks: Mapping[str, Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The shortest time of each task, in seconds. In a round every task has its turn, so that what slows the machine
    down slows them all; a task leaves when another run would take it beyond `seconds`, though not before its second
    run, which is the first warm one, unless that would be long."""
    best = dict.fromkeys(tasks, float("inf"))
    spent = dict.fromkeys(tasks, 0.0)
    turn = list(tasks)
    for done in range(1, MOST_ROUNDS + 1):
        for name in turn:
            start = clock()
            tasks[name]()
            taken = clock() - start
            best[name] = min(best[name], taken)
            spent[name] = spent[name] + taken
        few = done < 2
        turn = [n for n in turn if spent[n] + best[n] <= seconds or (few and best[n] <= PATIENCE * seconds)]
        if not turn:
            break
    return best


def sgemm() -> Callable[[], object]:
    """A product of two matrices of SGEMM_SIDE, into memory that is there."""
    a, b = torch.rand(2, SGEMM_SIDE, SGEMM_SIDE).unbind()
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads inside, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def busy(limit: float = 0.5) -> str | None:
    """A line to warn with if other programs keep the processor busy; None if not, or if nobody knows."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    if load <= limit:
        return None
    return (
        f"the machine is busy (load average {load:.1f} on {os.cpu_count()} cores): ratios are rough, times are too long"
    )
