"""How fast whole training steps of matrix capsules are: images a second, CPU time a sample, time for an epoch, memory.

python benchmarks/epochs.py [--batch 128] [--threads 2] [--seconds 10] [--json benchmarks/epochs.json]

A step is the whole of it: forward, loss, backward, clipped gradients, optimiser. CPU time is that of all threads
together. Memory is the peak of a process that has done nothing else, over what it held once all code was there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import torch

from torchcaps.bench.memory import measurable, now_mb, peak_mb
from torchcaps.bench.timing import busy, threads
from torchcaps.errors import TorchcapsError
from torchcaps.evaluate.report import text_table
from torchcaps.models import MatrixConfig, SmallMatrixConfig
from torchcaps.train.files import write_atomically
from torchcaps.train.training import flushed_denormals
from torchcaps.types import Batch, ImageSpec

TOYS, PAIRS = ImageSpec(2, 32, 32, 5), 24_300
"""smallNORB as networks see it, and how many stereo pairs an epoch has."""
NETWORKS: dict[str, MatrixConfig] = {"matrix-small": SmallMatrixConfig(), "matrix": MatrixConfig()}
ITERATIONS = (2, 3)
HEAD = ["network", "iterations", "images/s", "CPU ms a sample", "minutes an epoch", "peak MB"]


def measure(name: str, iterations: int, batch: int, count: int, seconds: float) -> list[str]:
    """One row, right in its memory only in a process that has done nothing else."""
    config = NETWORKS[name]
    model = replace(config, routing=replace(config.routing, iterations=iterations)).build(TOYS)
    optimiser = torch.optim.Adam(model.parameters())

    def step(size: int) -> None:
        images, labels = torch.randn(size, *TOYS[:3]), torch.arange(size) % TOYS.classes
        optimiser.zero_grad(set_to_none=True)
        model.objective(Batch(images, labels, labels), 0)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    with flushed_denormals(), threads(count):
        step(8)  # compiles, or finds what was compiled
        held = now_mb() if measurable() else 0.0
        step(batch)
        steps, start, used = 0, perf_counter(), process_time()
        while steps < 2 or perf_counter() - start < seconds:
            step(batch)
            steps += 1
        wall, cpu = perf_counter() - start, process_time() - used
    images = steps * batch
    memory = f"{peak_mb() - held:.0f}" if measurable() else "-"
    row = [f"{images / wall:.0f}", f"{1000 * cpu / images:.1f}", f"{PAIRS * wall / images / 60:.1f}", memory]
    return [name, str(iterations), *row]


def rows(batch: int, count: int, seconds: float) -> list[list[str]]:
    """The table, each row by a process of its own."""
    found = [HEAD]
    for name in NETWORKS:
        for iterations in ITERATIONS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(measure, (name, iterations, batch, count, seconds)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="file to write the table into")
    given = parser.parse_args(arguments)
    if busy():
        print(f"epochs: {busy()}", file=sys.stderr)
    try:
        found = rows(given.batch, given.threads, given.seconds)
        print(text_table(found))
        if given.json:
            write_atomically(given.json, [(json.dumps(found, indent=1) + "\n").encode()])
    except (TorchcapsError, OSError) as error:
        print(f"epochs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
