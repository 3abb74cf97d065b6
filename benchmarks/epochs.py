"""How fast whole training steps of matrix capsules are: images a second, CPU time a sample, time for an epoch.

python -m benchmarks.epochs [--batch 128] [--threads 2] [--seconds 10] [--json benchmarks/epochs.json]

A step is the whole of it: forward, loss, backward, clipped gradients, optimizer. CPU time is that of all threads
together. What a step takes of memory is in `python -m benchmarks`, cases em-64-8-16-16 and em-32-32-32-32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import torch

from benchmarks.timing import busy, threads
from torchcaps.errors import TorchcapsError
from torchcaps.models import MatrixConfig, SmallMatrixConfig
from torchcaps.systems.report import text_table
from torchcaps.train.train_state import flushed_denormals
from torchcaps.types import Batch, ImageSpec
from torchcaps.utils.files import write_atomically

STEREO = ImageSpec(2, 32, 32, 5)
PAIRS = 24_300
"""smallNORB as networks see it, and how many stereo pairs an epoch has."""
NETWORKS: dict[str, MatrixConfig] = {"matrix-small": SmallMatrixConfig(), "matrix": MatrixConfig()}
ITERATIONS = (2, 3)
HEAD = ["network", "iterations", "images/s", "CPU ms a sample", "minutes an epoch"]


def measure(name: str, iterations: int, batch: int, seconds: float) -> list[str]:
    """One row."""
    config = NETWORKS[name]
    model = replace(config, routing=replace(config.routing, iterations=iterations)).build(STEREO)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(batch, *STEREO[:3])
    labels = torch.arange(batch) % STEREO.classes

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(model.objective(Batch(images, labels, labels), 0)["loss"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()  # compiles, or finds what was compiled
    steps = 0
    start = perf_counter()
    used = process_time()
    while steps < 2 or perf_counter() - start < seconds:
        step()
        steps += 1
    wall = perf_counter() - start
    cpu = process_time() - used
    seen = steps * batch
    return [name, str(iterations), f"{seen / wall:.0f}", f"{1000 * cpu / seen:.1f}", f"{PAIRS * wall / seen / 60:.1f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="file to write the table into")
    given = parser.parse_args(arguments)
    if min(given.batch, given.threads) < 1:
        parser.error(f"--batch {given.batch} --threads {given.threads} came; at least 1 is wanted of each")
    if busy():
        print(f"epochs: {busy()}", file=sys.stderr)
    try:
        with flushed_denormals(), threads(given.threads):
            rows = [measure(name, t, given.batch, given.seconds) for name in NETWORKS for t in ITERATIONS]
        print(text_table([HEAD, *rows]))
        if given.json:
            write_atomically(given.json, [(json.dumps([HEAD, *rows], indent=1) + "\n").encode()])
    except (TorchcapsError, OSError) as error:
        print(f"epochs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
