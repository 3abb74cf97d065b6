"""What routers cost: composed of operations on `Votes` against fused kernels, and in the network of the router table.

    python -m benchmarks.routers fused [--cpu] [--seconds 10] [--json benchmarks/fused.json]
    python -m benchmarks.routers table [--cpu] [--seconds 10] [--json benchmarks/router-costs.json]

Whole training steps at batch 128, the sides of a table in turn in one process: time on all threads or, with --cpu, CPU
time on one thread, which other programs on the machine disturb less. The second table also has the peak memory of a
step over import, each in a process of its own; its runs are those of experiments/routers.toml.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.cases import ROUTER_RUNS, case_of
from benchmarks.memory import peaks
from benchmarks.table_command import table_parser, warn_if_busy, write_table
from benchmarks.timing import best_times, threads
from torchcaps.train.train_state import flushed_denormals

__all__ = ["FUSED", "cost_table", "fused_table", "main"]

BATCH = 128
UNITS = {False: "ms", True: "CPU ms"}
"""What times are called: on all threads, and CPU time on one."""

FUSED = {
    "dynamic-user-1152x8-10x16": "dynamic-1152x8-10x16",
    "dynamic-composed-1152x8-10x16": "dynamic-1152x8-10x16",
    "em-composed-64-8-16-16": "em-64-8-16-16",
}
"""Cases on `Votes`, and the case of the fused kernel of the same algorithm."""


def fused_table(seconds: float, *, cpu: bool = False) -> list[list[str]]:
    """Measure routers on `Votes` against fused kernels.

    Args:
        seconds: For each case.
        cpu: Whether to measure CPU time on one thread.

    Returns:
        The table, its head first; a ratio is composed over fused.
    """
    best = _step_times([*FUSED, *dict.fromkeys(FUSED.values())], seconds, cpu=cpu)
    unit = UNITS[cpu]
    rows = [["on Votes", unit, "fused", unit, "ratio"]]
    for name, fused in FUSED.items():
        milliseconds = [f"{1000 * best[each]:.1f}" for each in (name, fused)]
        rows.append([name, milliseconds[0], fused, milliseconds[1], f"{best[name] / best[fused]:.2f}"])
    return rows


def cost_table(seconds: float, *, cpu: bool = False) -> list[list[str]]:
    """Measure time and memory of a training step of every run of the router table.

    Args:
        seconds: For each run.
        cpu: Whether to measure CPU time on one thread.

    Returns:
        The table, its head first; times are relative to uniform routing on the same data, the first run of each.
    """
    best = _step_times(ROUTER_RUNS, seconds, cpu=cpu)
    # Two processes at a time: memory does not mind company
    with ThreadPoolExecutor(2) as pool:
        memories = list(pool.map(lambda name: peaks(name, BATCH, "fast"), ROUTER_RUNS))
    rows = [["run", f"{UNITS[cpu]} a step", "x uniform", "peak MB"]]
    for name, found in zip(ROUTER_RUNS, memories, strict=True):
        control = "-".join(name.split("-")[:2])
        memory = "-" if found is None else f"{found.step:.0f}"
        rows.append([name, f"{1000 * best[name]:.0f}", f"{best[name] / best[control]:.2f}", memory])
    return rows


def _step_times(names: Sequence[str], seconds: float, *, cpu: bool) -> dict[str, float]:
    """The best time of a step of each case, in seconds: on all threads, or CPU time on one."""
    count = 1 if cpu else torch.get_num_threads()
    clock = time.process_time if cpu else time.perf_counter
    with flushed_denormals(), threads(count):
        steps = {name: case_of(name).ours(BATCH).step for name in names}
        for step in steps.values():
            step()  # compiles
        return best_times(steps, seconds, clock)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one of the tables, print it and write it.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code.
    """
    parser = table_parser(__doc__, 10.0, "for each case")
    parser.add_argument("what", choices=("fused", "table"), help="which of the tables")
    parser.add_argument("--cpu", action="store_true", help="CPU time on one thread instead of time on all threads")
    given = parser.parse_args(arguments)
    warn_if_busy()
    make = fused_table if given.what == "fused" else cost_table
    table = make(given.seconds, cpu=given.cpu)
    write_table(table, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
