"""Refine the frame of each image so that its best capsule agrees more, and see what that does to the groups.

    torchcaps train poe-mnist --seed 0 --data.validation 10000 --out runs/poe-held-0        and other seeds
    python experiments/poe_refined_frames.py runs/poe-held-0 runs/poe-held-1

A frame is four numbers (log s, slant, center), at first those of the image's moments. A search by coordinates moves one
of them at a time, by a step that halves from round to round, and keeps what raises the support of the capsule that
supports the image most. W stays as it is; images that the run holds out are grouped by their best capsule. The last
row searches for every capsule by itself, as clustering with learned transformations does: the frame is the capsule's
own. Numbers are means over the runs. Writes results/lab-poe-refined-frames.json; two minutes a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import cast

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.errors import RecipeError
from torchcaps.metrics import nmi, purity
from torchcaps.models import PoE
from torchcaps.models.poe.edges import edge_children
from torchcaps.models.poe.frames import Frame, find_frame, into_frame
from torchcaps.train import load_run

MEASURED = 4000
"""Held-out images."""
STEPS = (0.1, 0.15, 1.0, 1.0)
"""First steps of log s, of the slant, and of the center in pixels."""
CHUNK = 500


@dataclass(frozen=True)
class HeldOut:
    """A trained model, images [n c h w] that it has not seen, and their classes [n]."""

    model: PoE
    images: Tensor
    labels: Tensor

    @classmethod
    def of_run(cls, folder: Path) -> HeldOut:
        """Load a run and the images that it held out.

        Raises:
            RecipeError: If it held out none, or has no frames and edges.
        """
        run = load_run(folder)
        validation = run.recipe.data.load().validation
        if validation is None:
            raise RecipeError(f"'{folder}' holds out no images; train it with --data.validation 10000")
        model = cast(PoE, run.model.eval())
        if not model.framed or model.energy.ranker is None:
            raise RecipeError(f"'{folder}' has no frames or no edges; poe-mnist has both")
        chosen = torch.arange(min(MEASURED, len(validation)))
        return cls(model, validation.model_input(chosen), validation.labels[chosen])


@torch.no_grad()
def capsule_support(model: PoE, images: Tensor, frame: Frame) -> Tensor:
    """Compute how well each capsule agrees with images [b c h w] in these frames, [b j]."""
    ranker = model.energy.ranker
    owner = model.energy.owner
    assert ranker is not None
    edges = edge_children(into_frame(images, frame), model.config.child_dimension)
    support = ranker.infer(ranker.visible(edges)).support  # [b n] of the ranking capsules
    assert support is not None
    if owner is None:
        return support
    # Of several ranking capsules of a capsule, the best counts
    groups = [support[:, owner == j].amax(1) for j in range(model.capsules)]
    return torch.stack(groups, 1)


def refine(score: Callable[[Tensor], Tensor], numbers: Tensor, rounds: int) -> Tensor:
    """Search by coordinates for numbers with a larger score.

    Args:
        score: Numbers [b f] -> [b].
        numbers: [b f] to start from.
        rounds: Times that every number is tried on both sides; the steps halve after each.

    Returns:
        [b f], whose scores are nowhere smaller.
    """
    best = score(numbers)
    for n in range(rounds):
        for place, step in enumerate(STEPS):
            for sign in (1, -1):
                moved = numbers.clone()
                moved[:, place] += sign * step / 2**n
                found = score(moved)
                better = found > best
                numbers = torch.where(better.unsqueeze(1), moved, numbers)
                best = torch.where(better, found, best)
    return numbers


def moments(model: PoE, images: Tensor) -> Tensor:
    """Support [b j] in the frames of moments."""
    return capsule_support(model, images, find_frame(images))


def refined(model: PoE, images: Tensor, rounds: int) -> Tensor:
    """Support [b j] in one frame an image, refined for its best capsule."""

    def score(numbers: Tensor) -> Tensor:
        return capsule_support(model, images, Frame.of_numbers(numbers)).amax(1)

    numbers = refine(score, find_frame(images).numbers, rounds)
    return capsule_support(model, images, Frame.of_numbers(numbers))


def refined_apart(model: PoE, images: Tensor, rounds: int) -> Tensor:
    """Support [b j], each in a frame that is refined for that capsule alone."""
    start = find_frame(images).numbers
    columns = []
    for j in range(model.capsules):

        def score(numbers: Tensor, j: int = j) -> Tensor:
            return capsule_support(model, images, Frame.of_numbers(numbers))[:, j]

        columns.append(score(refine(score, start, rounds)))
    return torch.stack(columns, 1)


WAYS: dict[str, Callable[[PoE, Tensor], Tensor]] = {
    "moments": moments,
    "refined, 1 round": lambda model, images: refined(model, images, 1),
    "refined, 3 rounds": lambda model, images: refined(model, images, 3),
    "refined for each capsule, 2 rounds": lambda model, images: refined_apart(model, images, 2),
}


def measure(data: HeldOut, way: Callable[[PoE, Tensor], Tensor]) -> dict[str, float]:
    """Group the held-out images and compare the groups with the classes."""
    support = torch.cat([way(data.model, chunk) for chunk in torch.split(data.images, CHUNK)])
    winners = support.argmax(1)
    return {
        "support": float(support.amax(1).mean()),
        "nmi": nmi(winners, data.labels),
        "purity": purity(winners, data.labels),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="runs of poe-mnist that hold out training images")
    given = parser.parse_args(words)
    data = [HeldOut.of_run(folder) for folder in given.runs]
    rows = [["frames", "support of the best", "nmi", "purity", "runs"]]
    for name, way in WAYS.items():
        found = [measure(one, way) for one in data]
        numbers = [f"{mean(row[key] for row in found):.4f}" for key in ("support", "nmi", "purity")]
        rows.append([name, *numbers, str(len(data))])
    write_rows("poe-refined-frames", rows, runs=len(data))


if __name__ == "__main__":
    main()
