"""Speed of training on images in a mapped file, compared with the same images in memory.

    python -m benchmarks.mapped_data [--gigabytes 2] [--rounds 20] [--steps 10] [--recipe capsnet-folder]

Both sources feed the same model in one process and take turns, a few steps at a time, so that whatever else the machine
does slows both of them down. The file is made in a temporary folder, random values, and is removed at the end. It is in
the system's cache of files if memory is free, as it is after the first epoch of a training.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import TorchcapsError
from torchcaps.train import load_recipe
from torchcaps.train.batches import BatchRequest, DatasetSource, NextBatch
from torchcaps.train.train_state import build_training, flushed_denormals
from torchcaps.utils.distributed import ProcessGroup
from torchcaps.utils.mapped import map_file

__all__ = ["Speeds", "main", "measure"]

SHAPE = (3, 64, 64)
CLASSES = 4
_BLOCK = 4096
"""Images that are written at a time."""


class Speeds(NamedTuple):
    """Speed with mapped images as a share of that with images in memory, by two clocks.

    Attributes:
        wall: Median over the rounds, by the wall clock.
        cpu: The same by the CPU time of this process.
        milliseconds: Median of a step with images in memory, by the wall clock.
    """

    wall: float
    cpu: float
    milliseconds: float


def measure(folder: Path, *, images: int, rounds: int, steps: int, recipe: str = "capsnet-folder") -> Speeds:
    """Train on both sources by turns.

    Args:
        folder: Where the file is made.
        images: Number of images.
        rounds: Turns of each source.
        steps: Steps of a turn.
        recipe: Its model, optimizer and batch are used.

    Returns:
        The median of the rounds' ratios.
    """
    memory = torch.empty(images, *SHAPE, dtype=torch.uint8)
    path = folder / "images"
    with path.open("wb") as file:
        for block in torch.split(memory, _BLOCK):
            block.random_(0, 256)
            file.write(block.numpy().data)
    mapped = map_file(path, memory.shape)
    path.unlink()

    settings = load_recipe(recipe, {"data": {"name": "glyphs"}})
    labels = torch.arange(images) % CLASSES
    sets = [Dataset(values, labels, CLASSES) for values in (memory, mapped)]
    training = build_training(settings, sets[0].spec, images)
    optimizer = training.optimizer
    if optimizer is None:
        raise TorchcapsError(f"{recipe} is not trained by gradients; choose another recipe")
    training.model.train()

    def turn(next_batch: NextBatch) -> Tensor:
        """Time a few steps: seconds by the wall clock and of the CPU [2]."""
        begun = torch.tensor([perf_counter(), process_time()], dtype=torch.float64)
        for step in range(steps):
            batch = next_batch().batch
            loss = training.model.objective(batch, step)["loss"]
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
        return torch.tensor([perf_counter(), process_time()], dtype=torch.float64) - begun

    request = BatchRequest(settings.train, 0, ProcessGroup(), first=0, total=(rounds + 1) * steps)
    with flushed_denormals(), _opened(sets[0], request) as of_memory, _opened(sets[1], request) as of_file:
        # The first turn warms up. Which source comes first changes from round to round.
        pairs = []
        for number in range(rounds + 1):
            order = [of_memory, of_file] if number % 2 else [of_file, of_memory]
            taken = {id(source): turn(source) for source in order}
            pairs.append((taken[id(of_memory)], taken[id(of_file)]))
    ratios = [one / two for one, two in pairs[1:]]
    milliseconds = median(float(one[0]) for one, _ in pairs[1:]) / steps * 1000
    return Speeds(median(float(r[0]) for r in ratios), median(float(r[1]) for r in ratios), milliseconds)


@contextmanager
def _opened(data: Dataset, request: BatchRequest) -> Iterator[NextBatch]:
    with DatasetSource(data).stream(request) as next_batch:
        yield next_batch


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the set (2)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each source (20)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (10)")
    parser.add_argument("--recipe", default="capsnet-folder", help="whose model is trained (capsnet-folder)")
    given = parser.parse_args(words)
    images = max(1, int(given.gigabytes * 1e9) // torch.Size(SHAPE).numel())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), images=images, rounds=given.rounds, steps=given.steps, recipe=given.recipe)
    print(
        f"{given.recipe}, {images:,} images of {SHAPE}: mapped trains at {found.wall:.1%} of the speed in memory by "
        f"the wall clock, {found.cpu:.1%} by CPU time; {found.milliseconds:.1f} ms a step in memory"
    )


if __name__ == "__main__":
    main()
