"""What one more parent, and four times as many children, cost in a training step of a layer.

python -m benchmarks.size_steps [--seconds 1.5] [--json benchmarks/size-steps.json]

CPU time on one thread; the two layers of a row take turns in one process. A ratio equal to that of the sizes means that
cost grows with the number of votes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks.cases import case_of
from benchmarks.table_command import table_parser, warn_if_busy, write_table
from benchmarks.timing import best_times, threads
from torchcaps.train.train_state import flushed_denormals

__all__ = ["PAIRS", "main", "measure_pair"]

HEAD = ["layer", "ms", "larger layer", "ms", "batch", "ratio", "of sizes"]
BATCHES = (32, 64, 128)
PAIRS = {
    ("dynamic-1152x8-16x16", "dynamic-1152x8-17x16"): 17 / 16,
    ("em-256x16", "em-256x17"): 17 / 16,
    ("dynamic-1024x8-10x16", "dynamic-4096x8-10x16"): 4.0,
    ("em-1024x10", "em-4096x10"): 4.0,
}
"""Two layers, and how many times as many votes the second one has."""


def measure_pair(small: str, large: str, batch: int, seconds: float) -> list[str]:
    """Measure a training step of two layers.

    Args:
        small: Name of the smaller one.
        large: Name of the larger one.
        batch: Samples of a step.
        seconds: For each of them.

    Returns:
        A row of the table.
    """
    steps = {name: case_of(name).ours(batch).step for name in (small, large)}
    for step in steps.values():
        step()  # compiles
    best = best_times(steps, seconds, time.process_time)
    milliseconds = [f"{1000 * best[name]:.1f}" for name in (small, large)]
    ratio = f"{best[large] / best[small]:.2f}"
    return [small, milliseconds[0], large, milliseconds[1], str(batch), ratio, f"{PAIRS[small, large]:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the whole table, print it and write it.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code.
    """
    parser = table_parser(__doc__, 1.5, "for each layer of a row")
    given = parser.parse_args(arguments)
    warn_if_busy()
    with flushed_denormals(), threads(1):
        rows = [measure_pair(*pair, batch, given.seconds) for pair in PAIRS for batch in BATCHES]
    write_table([HEAD, *rows], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
