"""Tell which object instances of smallNORB a classifier fails on, from which viewpoints, and what it takes them for.

    python experiments/held_out_instances.py NAME runs/one
    python experiments/held_out_instances.py NAME runs/one --picture worst.png

The images are those that the run held out for validation (`data.aside`), or the test images if there are none. Written
to results/lab-NAME.json: a row for each class, a column for each of its object instances, the error and the commonest
confusion; and to results/lab-NAME-views.json: the errors by elevation, azimuth and lighting, of all instances and of
the worst ones. The picture shows, for each of the worst instances, some images that are wrong, and below each the
training image of the class it is taken for that looks most like it, seen from the same viewpoint in the same light.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.data import Dataset, Splits
from torchcaps.errors import RecipeError
from torchcaps.evaluate.classification import class_scores, load_classifier
from torchcaps.evaluate.figures import image_grid, pixels

VIEWS = ("elevation", "azimuth", "lighting")
"""The factors of an image that are no property of its object."""

WORST = 3
"""Object instances that are looked at more closely."""

SHOWN = 6
"""Wrong images of an instance in the picture."""


class Instance(NamedTuple):
    """One object: the number of its class and its own among those of the class."""

    label: int
    number: int

    def rows(self, data: Dataset) -> Tensor:
        """Return a mask [n] of the images that show it."""
        return (data.labels == self.label) & (data.factors["instance"] == self.number)


def held_out(splits: Splits) -> Dataset:
    """Return the validation images, or the test images where nothing is held out."""
    data = splits.validation or splits.test
    if "instance" not in data.factors:
        raise RecipeError("the run was not trained on smallNORB; its images have no object instances")
    return data


def instances_of(data: Dataset) -> list[Instance]:
    """List every object of the data, class by class."""
    pairs = torch.stack((data.labels, data.factors["instance"]), dim=1).unique(dim=0)
    return [Instance(label, number) for label, number in pairs.tolist()]


def instance_rows(data: Dataset, predicted: Tensor) -> list[list[str]]:
    """Tabulate the error of each object, and the class it is most often taken for; `predicted` is [n]."""
    objects = instances_of(data)
    numbers = sorted({one.number for one in objects})
    rows = [["wrong (%) of instance", *(str(number) for number in numbers)]]
    for label in range(data.classes):
        cells = []
        for number in numbers:
            answers = predicted[Instance(label, number).rows(data)]
            wrong = answers[answers != label]
            confusion = f", {data.name_of(int(wrong.mode().values))}" if len(wrong) else ""
            cells.append(f"{100 * len(wrong) / len(answers):.1f}{confusion}" if len(answers) else "-")
        rows.append([data.name_of(label), *cells])
    return rows


def worst_instances(data: Dataset, predicted: Tensor, count: int = WORST) -> list[Instance]:
    """Return the objects with the most wrong images, the worst first; none without an error."""
    wrong = predicted != data.labels  # [n]
    counts = {one: int(wrong[one.rows(data)].sum()) for one in instances_of(data)}
    ranked = sorted(counts, key=lambda one: counts[one], reverse=True)
    return [one for one in ranked[:count] if counts[one]]


def view_rows(data: Dataset, predicted: Tensor, objects: Sequence[Instance]) -> list[list[str]]:
    """Tabulate the error (%) by each value of `VIEWS`, of all images and of those of each of the objects."""
    wrong = (predicted != data.labels).double()  # [n]
    masks = [torch.ones(len(data), dtype=torch.bool), *(one.rows(data) for one in objects)]
    rows = [["wrong (%)", "all", *(f"{data.name_of(one.label)} {one.number}" for one in objects)]]
    for factor in VIEWS:
        for value in data.factors[factor].unique().tolist():
            here = data.factors[factor] == value
            parts = [wrong[here & mask] for mask in masks]
            rows.append([f"{factor} {value}", *(f"{100 * float(x.mean()):.1f}" if len(x) else "-" for x in parts)])
    return rows


def look_alike(image: Tensor, view: Tensor, train: Dataset, label: int) -> Tensor:
    """Find the training image of a class that correlates most with an image, of the same view if there is one.

    Args:
        image: [c h w] in [0, 1].
        view: The values [f] of `VIEWS`.
        train: The training images.
        label: The class to search.

    Returns:
        [c h w] in [0, 1].
    """
    views = torch.stack([train.factors[factor] for factor in VIEWS], dim=1)  # [n f]
    of_class = train.labels == label
    same = of_class & (views == view).all(1)
    rows = (same if bool(same.any()) else of_class).nonzero().flatten()
    candidates = train.pixels(rows)  # [m c h w]
    flat = torch.nn.functional.normalize(candidates.flatten(1) - candidates.flatten(1).mean(1, keepdim=True), dim=1)
    best = int((flat @ (image - image.mean()).flatten()).argmax())
    return candidates[best]


def draw(data: Dataset, predicted: Tensor, train: Dataset, objects: Sequence[Instance]) -> bytes:
    """Draw wrong images of each object above the training images that they look like, as one PNG."""
    grid = []
    notes = {}
    for one in objects:
        wrong = (one.rows(data) & (predicted != data.labels)).nonzero().flatten()
        # Evenly from all viewpoints, as the images are stored.
        chosen = wrong[torch.linspace(0, len(wrong) - 1, min(SHOWN, len(wrong))).long()]
        views = torch.stack([data.factors[factor][chosen] for factor in VIEWS], dim=1)  # [m f]
        images = data.pixels(chosen)  # [m c h w]
        answers = predicted[chosen].tolist()
        alike = [look_alike(*pair, train, label) for *pair, label in zip(images, views, answers, strict=True)]
        grid.append((f"{data.name_of(one.label)} {one.number}", pixels(images)))
        notes[len(grid)] = [data.name_of(label) for label in answers]
        grid.append(("looks like\nin training", pixels(torch.stack(alike))))
    return image_grid(grid, 0.8, notes)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the tables")
    parser.add_argument("run", type=Path, help="folder of a classifier that was trained on smallNORB")
    parser.add_argument("--picture", type=Path, help="also draw wrong images of the worst instances into this file")
    arguments = parser.parse_args(words)

    run = load_classifier(arguments.run)
    splits = run.recipe.data.load()
    data = held_out(splits)
    split = "test" if splits.validation is None else "validation"
    predicted = class_scores(run.model, data).argmax(-1)  # [n]
    objects = worst_instances(data, predicted)
    # Two tables, and the picture if it is wanted.
    origin = {"run": run.recipe.name, "steps": run.step, "split": split}
    write_rows(arguments.name, instance_rows(data, predicted), **origin)
    write_rows(f"{arguments.name}-views", view_rows(data, predicted, objects), **origin)
    if arguments.picture and objects:
        arguments.picture.write_bytes(draw(data, predicted, splits.train, objects))


if __name__ == "__main__":
    main()
