"""From how many votes on a kernel is faster than the plain path: what `routing.fused.WORTH` rests on.

python benchmarks/worth.py [--threads 1] [--json benchmarks/worth.json]

Small layers of both routers, forward and backward, with the kernel always taken and never taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchcaps.bench import case_of
from torchcaps.bench.timing import best_times, busy, threads
from torchcaps.evaluate.report import text_table
from torchcaps.routing import fused
from torchcaps.train.display import progress
from torchcaps.train.files import write_atomically
from torchcaps.train.training import flushed_denormals

LAYERS = [
    *((f"dynamic-{i}x8-4x16", 4 * i) for i in (4, 16, 64, 256)),
    *((f"em-{i}x4", 4 * i) for i in (4, 16, 64, 256)),
]
"""Names of cases, and the votes of one sample."""
BATCHES = (1, 4, 16, 64)


def rows(layers: Sequence[tuple[str, int]], batches: Sequence[int], seconds: float) -> list[list[str]]:
    """A line a layer and batch, in the order of the votes."""
    found = []
    for name, votes in progress(layers, "measuring"):
        for batch in batches:
            case = case_of(name)
            tasks = {"ours": case.ours(batch).step, "plain": case.plain(batch).step}
            tasks["ours"]()  # compiles
            best = best_times(tasks, seconds)
            found.append((votes * batch, name, batch, 1000 * best["ours"], 1000 * best["plain"]))
    head = ["layer", "batch", "votes", "ours ms", "plain ms", "plain / ours"]
    body = [[n, str(b), f"{v:,}", f"{o:.2f}", f"{p:.2f}", f"{p / o:.1f}"] for v, n, b, o, p in sorted(found)]
    return [head, *body]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each of ours and plain")
    parser.add_argument("--json", type=Path, help="file to write the table into")
    given = parser.parse_args(arguments)
    if busy():
        print(f"worth: {busy()}", file=sys.stderr)
    taken_from, fused.WORTH = fused.WORTH, 0
    try:
        with flushed_denormals(), threads(given.threads):
            found = rows(LAYERS, BATCHES, given.seconds)
    finally:
        fused.WORTH = taken_from
    print(text_table(found))
    if given.json:
        write_atomically(given.json, [(json.dumps(found, indent=1) + "\n").encode()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
