"""Compute what the processes of a training send each other in a step, for each system and number of machines.

python experiments/communication.py

DistributedDataParallel adds up gradients by a ring all-reduce: of G bytes of gradients, each of n processes sends and
receives 2 (n - 1) / n G in 2 (n - 1) messages. Parameters are counted on models that are outlined, not built.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from lab_result import write_rows
from torchcaps.models import Model
from torchcaps.train import load_recipe
from torchcaps.train.model_sizes import model_outline
from torchcaps.types import ImageSpec

RECIPES = {
    "capsnet-mnist": ImageSpec(1, 28, 28, 10),
    "capsnet-mnist-small": ImageSpec(1, 28, 28, 10),
    "matrix-smallnorb": ImageSpec(2, 32, 32, 5),
    "sparse-affnist-paper": ImageSpec(1, 40, 40, 10),
    "poe-mnist": ImageSpec(1, 28, 28, 10),
}
MACHINES = (2, 4, 16, 64)
LINK = 10e9 / 8
"""Bytes per second of a link of 10 Gbit/s."""


def exchanged_bytes(stage: Model) -> int:
    """Return the bytes that processes add up in a step: gradients or, of a stage without, its sums in float64."""
    if stage.by_gradient:
        return sum(p.nbytes for p in stage.parameters() if p.requires_grad)
    return sum(b.nbytes for b in stage.buffers() if b.dtype == torch.float64)


def sent_bytes(size: int, machines: int) -> float:
    """Return the bytes that each process sends in a step, by a ring all-reduce."""
    return 2 * (machines - 1) / machines * size


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    header = ["recipe", "stage", "added up, MB", *(f"sent, MB, n = {n}" for n in MACHINES), "s at 10 Gbit/s, n = 64"]
    rows = [header]
    for name, spec in RECIPES.items():
        for stage, model in model_outline(load_recipe(name), spec).stages().items():
            size = exchanged_bytes(model)
            sent = [f"{sent_bytes(size, n) / 1e6:.2f}" for n in MACHINES]
            rows.append([name, stage, f"{size / 1e6:.2f}", *sent, f"{sent_bytes(size, 64) / LINK:.4f}"])
    write_rows("communication", rows)


if __name__ == "__main__":
    main()
