"""Where the time of a training step goes, system by system.

python -m benchmarks.steps [--batch 128] [--threads 2] [--steps 5] [--json benchmarks/steps.json]

Each step runs under torch's profiler; the time that an operation spends itself, not in those it calls, counts for the
part that it belongs to, or the outermost operation with a part that called it. "outside" is the time between
operations: Python's, and in contrastive divergence the loops', which it calls without an operator. "batch" is what it
takes to pick, shift and convert the images of a step, measured by itself and as a share of the step: the loop does it
between steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import case_of
from benchmarks.timing import busy, threads
from torchcaps.data import BatchPosition, Dataset, make_batch
from torchcaps.errors import TorchcapsError
from torchcaps.systems.report import text_table
from torchcaps.train.train_state import flushed_denormals
from torchcaps.utils.files import write_atomically
from torchcaps.utils.random import permutation

SYSTEMS = {"capsnet-28": 28, "em-64-8-16-16": 32, "sparse-40": 40, "cd-576x8-20x16": None}
"""Cases, and the side of the images that their step begins with; contrastive divergence has features at hand."""

PARTS: dict[str, Sequence[str]] = {
    "convolution": ("convolution", "fourier_conv", "column_conv"),
    "routing": ("torchcaps::", "torchcaps_", "_Contrast"),
    "linear": ("::addmm", "::mm", "::bmm", "::baddbmm", "::linear"),
    "optimizer": ("optimizer.step", "::_fused_adam", "::_foreach", "::lerp", "::addcdiv", "::addcmul"),
}
"""Part -> what the names of its operations hold; the first that fits counts, and all others are "the rest"."""


def part_of(name: str) -> str:
    """The part that an operation belongs to.

    >>> part_of("aten::convolution_backward"), part_of("Optimizer.step#Adam.step"), part_of("aten::mul")
    ('convolution', 'optimizer', 'the rest')
    """
    low = name.lower()
    return next((part for part, words in PARTS.items() if any(word.lower() in low for word in words)), "the rest")


def owner(event: Any) -> str:
    """The part of the outermost operation around an event that has one: a product inside a convolution is its own."""
    found = "the rest"
    while event is not None:
        part = part_of(event.name)
        found = found if part == "the rest" else part
        event = event.cpu_parent
    return found


def shares(step: Callable[[], object], steps: int) -> tuple[dict[str, float], float]:
    """Part -> its share of the step's time, and milliseconds a step without the profiler."""
    for _ in range(2):
        step()
    start = perf_counter()
    for _ in range(steps):
        step()
    seconds = (perf_counter() - start) / steps
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        start = perf_counter()
        for _ in range(steps):
            step()
        whole = 1e6 * (perf_counter() - start)
    times = dict.fromkeys([*PARTS, "the rest"], 0.0)
    for event in seen.events() or ():
        times[owner(event)] += event.self_cpu_time_total
    times["outside"] = max(0.0, whole - sum(times.values()))
    whole = sum(times.values())
    return {part: time / whole for part, time in times.items()}, 1000 * seconds


def batch_ms(side: int, batch: int, steps: int) -> float:
    """Milliseconds to make a batch of shifted images, as the loop does."""
    images = torch.randint(256, (4 * batch, 1, side, side), dtype=torch.uint8)
    data = Dataset(images, torch.zeros(len(images), dtype=torch.long), 1)
    order = permutation(0, 0, len(images))
    start = perf_counter()
    for n in range(steps):
        make_batch(data, order, BatchPosition(0, n % 4), batch, seed=0, max_shift=2)
    return 1000 * (perf_counter() - start) / steps


def rows(batch: int, steps: int) -> list[list[str]]:
    """The table: a line a system."""
    found = [["system", "ms a step", *PARTS, "the rest", "outside", "batch"]]
    for name, side in SYSTEMS.items():
        parts, whole = shares(case_of(name).ours(batch).step, steps)
        made = "-" if side is None else f"{batch_ms(side, batch, steps) / whole:.1%}"
        found.append([name, f"{whole:.1f}", *(f"{share:.1%}" for share in parts.values()), made])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the table into")
    given = parser.parse_args(arguments)
    if busy():
        print(f"steps: {busy()}", file=sys.stderr)
    try:
        with flushed_denormals(), threads(given.threads):
            found = rows(given.batch, given.steps)
        print(text_table(found))
        if given.json:
            write_atomically(given.json, [(json.dumps(found, indent=1) + "\n").encode()])
    except (TorchcapsError, OSError) as error:
        print(f"steps: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
