"""From a plan to rows: at each case and batch a timing for each number of threads, then memory.

A timing times, in turn and in one process, ours, the plain path, the trunk and a matrix product. Where the plain path
would take too much memory or time, it gets a smaller batch n, and its cost goes on along the line through n / 2 and n:
to multiply by batch / n would multiply what does not grow with the batch, such as the optimizer. Memory comes last: by
then the loops are compiled, and compiling would count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.cases import NAMES, Case, Work, case_of
from benchmarks.cost import Cost
from benchmarks.memory import Peaks, available_mb, measurable, peaks
from benchmarks.rows import Row
from benchmarks.timing import SGEMM_FLOP, best_times, sgemm, threads
from torchcaps.errors import RecipeError
from torchcaps.train.train_state import flushed_denormals

__all__ = ["FULL", "KINDS", "QUICK", "Plan", "Timings", "extrapolate", "measure", "plain_batch", "rows_of", "time_case"]

KINDS = ("forward", "step")

COPIES = 24
"""Tensors of the votes' size that the plain path may hold at once in a step: three iterations of EM hold about 20."""

SMALL = 2
"""The batch that tells how long the plain path takes."""

LEAST = 4
"""The smallest batch that stands for a larger one."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long.

    threads        0 stands for all of them
    seconds        for each of the things that a timing times
    plain_seconds  the longest run of the plain path
    """

    names: tuple[str, ...] = NAMES
    batches: tuple[int, ...] = (1, 32, 128)
    threads: tuple[int, ...] = (0, 1)
    seconds: float = 1.0
    plain_seconds: float = 10.0
    memory: bool = True

    def __post_init__(self) -> None:
        for word, counts, least in (("batch", self.batches, 1), ("threads", self.threads, 0)):
            for count in counts:
                if count < least:
                    raise RecipeError(f"--{word} {count} is asked for; at least {least} is wanted")

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of threads, the largest first."""
        return tuple(sorted({count or torch.get_num_threads() for count in self.threads}, reverse=True))


FULL = Plan()
QUICK = Plan(batches=(32,), threads=(0,), seconds=0.4, plain_seconds=2.0)


class Timings(NamedTuple):
    """Seconds of each kind for ours, plain and trunk, as "ours step", at the whole batch; and of "sgemm"."""

    threads: int
    plain_batch: int
    seconds: dict[str, float]


def measure(plan: Plan, progress: Callable[[list[tuple[str, int]]], Iterable[tuple[str, int]]] = iter) -> list[Row]:
    """All rows of a plan; `progress` goes through the pairs of case and batch, to show how far it is."""
    cases = {name: case_of(name) for name in plan.names}
    pairs = [(name, batch) for name in cases for batch in plan.batches]
    rows: list[Row] = []
    with flushed_denormals():
        for name, batch in progress(pairs):
            timings = [time_case(cases[name], batch, count, plan) for count in plan.counts]
            memory = _memory(name, batch, timings[0]) if plan.memory and measurable() else (None, None)
            rows += rows_of(name, batch, cases[name].cost(), timings, memory)
    return rows


def time_case(case: Case, batch: int, count: int, plan: Plan) -> Timings:
    """The times of one case at one batch with so many threads."""
    with threads(count):
        fits = plain_batch(case, batch, plan.plain_seconds)
        works = {"ours": case.ours(batch), "plain": case.plain(fits)}
        _warm_up(works["ours"])
        if case.trunk:
            works["trunk"] = case.trunk(batch)
        if fits < batch:
            works["half"] = case.plain(fits // 2)
        tasks = {f"{who} {kind}": getattr(work, kind) for kind in KINDS for who, work in works.items()}
        best = best_times({**tasks, "sgemm": sgemm()}, plan.seconds)
    if fits < batch:
        best |= {f"plain {k}": extrapolate(batch, fits, best[f"plain {k}"], best.pop(f"half {k}")) for k in KINDS}
    return Timings(count, fits, best)


def extrapolate(batch: int, n: int, cost: float, cost_of_half: float) -> float:
    """The cost at a larger batch, along the line through n // 2 and n; noise may not make it fall."""
    slope = (cost - cost_of_half) / (n - n // 2)
    return cost + (batch - n) * max(0.0, slope)


def _warm_up(work: Work) -> None:
    """At the whole batch: which kernel is compiled, and whether one is worth it, depends on the sizes."""
    for kind in KINDS:
        getattr(work, kind)()


def plain_batch(case: Case, batch: int, seconds: float) -> int:
    """The batch, halved until a step of the plain path should fit half of the free memory and so many seconds."""
    if batch <= LEAST:
        return batch
    work = case.plain(SMALL)
    a_sample = best_times({"step": work.step}, seconds / 10)["step"] / SMALL
    bytes_each = 4 * COPIES * case.cost().votes
    room = available_mb() * 2**20 / 2
    while batch >= 2 * LEAST and (batch * a_sample > seconds or batch * bytes_each > room):
        batch //= 2
    return batch


def _memory(name: str, batch: int, timing: Timings) -> tuple[Peaks | None, Peaks | None]:
    """Ours and the plain path's, at the same time: memory does not mind company."""
    ask = partial(peaks, count=timing.threads)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(ask, name, batch, "fast")
        plain = pool.submit(_plain_memory, ask, name, batch, timing.plain_batch)
        return ours.result(), plain.result()


def _plain_memory(ask: Callable[..., Peaks | None], name: str, batch: int, n: int) -> Peaks | None:
    whole = ask(name, n, "plain")
    half = ask(name, n // 2, "plain") if n < batch else whole
    if whole is None or half is None or n == batch:
        return whole
    return Peaks(*(extrapolate(batch, n, *pair) for pair in zip(whole, half, strict=True)))


def rows_of(
    name: str, batch: int, cost: Cost, timings: list[Timings], memory: tuple[Peaks | None, Peaks | None]
) -> list[Row]:
    """Two rows a timing: forward and step."""
    return [row for timing in timings for row in _rows(name, batch, cost, timing, memory)]


def _rows(
    name: str, batch: int, cost: Cost, timing: Timings, memory: tuple[Peaks | None, Peaks | None]
) -> Iterator[Row]:
    seconds = timing.seconds
    speed = SGEMM_FLOP / timing.seconds["sgemm"]
    ours, plain = memory
    for kind in KINDS:
        mine = seconds[f"ours {kind}"]
        trunk = seconds.get(f"trunk {kind}")
        peak = getattr(ours, kind) if ours else None
        other = getattr(plain, kind) if plain else None
        yield Row(
            name=name,
            kind=kind,
            batch=batch,
            threads=timing.threads,
            ms_per_sample=1000 * mine / batch,
            plain_ratio=seconds[f"plain {kind}"] / mine,
            memory_ratio=other / peak if peak and other is not None else None,
            peak_mb=peak,
            sgemm_fraction=getattr(cost, kind) * batch / mine / speed,
            sgemm_gflops=speed / 1e9,
            trunk_ratio=mine / trunk if trunk else None,
            plain_batch=timing.plain_batch,
        )
