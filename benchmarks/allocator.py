"""What it is worth to keep freed memory (`torchcaps.utils.memory.keep_freed_memory`), in a training step.

python -m benchmarks.allocator [--batch 64] [--seconds 10] [--json benchmarks/allocator.json]

One thread, one process: every case first as glibc does by itself, then all of them again with memory kept, since that
cannot be taken back. A page fault is a page that the kernel fills with zeros and hands out.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.cases import case_of
from benchmarks.table_command import table_parser, warn_if_busy, write_table
from benchmarks.timing import best_times, threads
from torchcaps.train.train_state import flushed_denormals
from torchcaps.utils.memory import keep_freed_memory

__all__ = ["CASES", "HEAD", "main", "measure_step"]

CASES = ("em-64-8-16-16", "capsnet-28", "sparse-40", "cd-576x8-20x16")
HEAD = ["network or layer", "batch", "returned ms", "kept ms", "ratio", "page faults returned", "kept"]


class StepCost(NamedTuple):
    """Seconds of the fastest of some steps, and page faults of a step."""

    seconds: float
    faults: int


def measure_step(step: Callable[[], object], seconds: float) -> StepCost:
    """Time a step and count its page faults.

    Args:
        step: Runs one.
        seconds: How long it may be repeated.
    """
    step()  # compiles
    best = best_times({"step": step}, seconds)["step"]
    before = _faults()
    step()
    return StepCost(best, _faults() - before)


def _faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the table, print it and write it; 2 if this process cannot keep freed memory."""
    parser = table_parser(__doc__, 10.0, "for each case, before and after")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    given = parser.parse_args(arguments)
    warn_if_busy()
    with flushed_denormals(), threads(1):
        steps = {name: case_of(name).ours(given.batch).step for name in CASES}
        returned = {name: measure_step(step, given.seconds) for name, step in steps.items()}
        if not keep_freed_memory():
            print("benchmarks: memory is not kept here: no glibc, or MALLOC_ variables are set", file=sys.stderr)
            return 2
        kept = {name: measure_step(step, given.seconds) for name, step in steps.items()}
    rows = []
    for name in CASES:
        milliseconds = [f"{1000 * cost[name].seconds:.1f}" for cost in (returned, kept)]
        ratio = f"{returned[name].seconds / kept[name].seconds:.2f}"
        faults = [f"{cost[name].faults:,}" for cost in (returned, kept)]
        rows.append([name, str(given.batch), *milliseconds, ratio, *faults])
    write_table([HEAD, *rows], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
