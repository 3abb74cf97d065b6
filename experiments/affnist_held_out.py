"""Tabulate how often runs on shifted digits are right about affine transforms of digits that they hold out.

    python experiments/affnist_held_out.py NAME runs/one-0 runs/one-1 runs/other-0 ...

Settings for affNIST are chosen by this table: it is made of the last digits of MNIST's training set, and no test image
is used. A row for each setting, named after what it changes in the first one. Columns: the held-out digits as they are
shifted in training; the same digits under the transforms of affNIST; those of them that lie within the shifts of
training, and those beyond. Means over seeds. Written to results/lab-NAME.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor

from early_training_table import difference, settings_of
from lab_result import write_rows
from torchcaps.data import AffnistConfig, Dataset, MnistConfig
from torchcaps.data.affnist import affnist
from torchcaps.errors import RecipeError
from torchcaps.models import Model
from torchcaps.train.run import load_run
from torchcaps.train.validation import validation_accuracy

TRANSFORM_SEED = 12_345
"""A seed that no recipe draws its images by."""
IMAGES = 10_000


class Transformed(NamedTuple):
    """Held-out digits under the transforms of affNIST.

    Attributes:
        data: The images [n 1 size size] and their labels.
        beyond: [n] whether an image is shifted further than training images are.
    """

    data: Dataset
    beyond: Tensor


class Accuracies(NamedTuple):
    """How often (%) a run is right about held-out digits."""

    shifted: float
    transformed: float
    within: float
    beyond: float


def transform_held_out(data: AffnistConfig, largest_shift: int, count: int) -> Transformed:
    """Transform the digits that a run holds out.

    Args:
        data: Of the run; its last `validation` training digits are held out.
        largest_shift: Of training images, in pixels.
        count: How many images to make.
    """
    digits = MnistConfig(data_dir=data.data_dir).load().train
    first = data.train - data.validation
    labels = digits.labels[first : data.train]
    images, transforms = affnist(digits.images[first : data.train], TRANSFORM_SEED, torch.arange(count), data.size)
    far = torch.stack((transforms.x, transforms.y)).abs().amax(0)  # [n]
    return Transformed(Dataset(images, labels[transforms.source], digits.classes), far > largest_shift)


def measure(model: Model, shifted: Dataset, transformed: Transformed) -> Accuracies:
    """Measure a classifier in evaluation mode."""
    images, beyond = transformed
    parts = [None, (~beyond).nonzero().flatten(), beyond.nonzero().flatten()]
    cpu = torch.device("cpu")
    right = [
        validation_accuracy(model, shifted, cpu),
        *(validation_accuracy(model, images, cpu, rows) for rows in parts),
    ]
    return Accuracies(*(100 * share for share in right))


def measure_run(folder: Path, count: int) -> Accuracies:
    """Measure the run in a folder.

    Raises:
        RecipeError: If it is not of shifted digits, or holds out none.
    """
    run = load_run(folder)
    data = run.recipe.data
    if not isinstance(data, AffnistConfig) or data.train_on != "mnist" or not data.validation:
        raise RecipeError(f"'{folder}' is no run on shifted digits that holds out some (data.validation)")
    shifted = data.load().validation
    assert shifted is not None  # data.validation is not 0
    return measure(run.model.eval(), shifted, transform_held_out(data, run.recipe.train.max_shift, count))


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; the first is the reference")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"transformed images ({IMAGES:,})")
    arguments = parser.parse_args(words)

    # Runs of one setting, whatever their seed, share a row
    reference = settings_of(arguments.runs[0])
    found: dict[str, list[Accuracies]] = {}
    for folder in arguments.runs:
        ours = {key: value for key, value in settings_of(folder).items() if key != "seed"}
        setting = difference(ours, {key: value for key, value in reference.items() if key != "seed"})
        found.setdefault(setting or "as the first", []).append(measure_run(folder, arguments.images))
    rows = [["setting", "as in training (%)", "transformed (%)", "within its shifts (%)", "beyond (%)", "runs"]]
    for setting, accuracies in found.items():
        means = (f"{mean(column):.2f}" for column in zip(*accuracies, strict=True))
        rows.append([setting, *means, str(len(accuracies))])
    write_rows(arguments.name, rows, images=arguments.images)


if __name__ == "__main__":
    main()
