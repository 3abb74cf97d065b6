"""Figures of a CapsNet and its test images, drawn with matplotlib (the `plot` extra), as PNG bytes by file name.

The `draw_...` functions belong to the figures that `CapsNetSystem` lists. Classes and the dimensions of their capsules
are counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcaps.data import Dataset
from torchcaps.errors import DataError
from torchcaps.evaluate.figures import Rows, image_grid, pixels, reliability_diagram
from torchcaps.evaluate.multilabel import top
from torchcaps.math.pixels import to_float
from torchcaps.models import MatrixCaps
from torchcaps.models.capsnet import CapsNet, CapsNetOutput
from torchcaps.systems.figure_context import ClassFigureContext
from torchcaps.systems.prediction import Prediction
from torchcaps.types import Capsules

__all__ = [
    "REACH",
    "CouplingMaps",
    "coupling_maps",
    "draw_calibration",
    "draw_multimnist",
    "draw_perturbations",
    "draw_reconstructions",
    "draw_redrawn",
    "draw_routing",
    "maps_of",
    "needs_one_label",
    "needs_two_labels",
    "overlay",
    "perturbed",
]

REACH = 0.25
STEPS = 11
"""How far a dimension is moved, and in how many steps: as in Sabour 2017, figure 4, .05 apart."""

_SCALE = 0.7
"""Inches an image."""


def needs_one_label(context: ClassFigureContext[CapsNet] | ClassFigureContext[MatrixCaps]) -> str | None:
    """Why a figure of answers that are right or wrong cannot be drawn: images that show several classes."""
    return None if context.data.labels.ndim == 1 else "needs a run on images that have one label each"


def needs_two_labels(context: ClassFigureContext[CapsNet]) -> str | None:
    """Why a figure of two overlapping digits cannot be drawn: images that do not show exactly two."""
    labels = context.data.labels
    return None if labels.ndim == 2 and labels.shape[1] == 2 else "needs a run on images of two digits, as MultiMNIST"


def draw_reconstructions(context: ClassFigureContext[CapsNet]) -> dict[str, bytes]:
    """Some test images; those that are redrawn worst from their label's capsule; some that got a wrong answer."""
    labels = context.data.labels
    answers = context.classes.activation.argmax(-1)
    # The images with the largest error when the label is known.
    errors = _errors(context)
    worst = errors.argsort(descending=True, stable=True)[: context.options.count]
    drawn = {
        "reconstructions": _redrawn(context, context.rows, answers),
        "reconstructions-worst": _redrawn(context, worst, answers, [f"error {errors[n]:.0f}" for n in worst.tolist()]),
    }
    # There may be no wrong answer to draw.
    wrong = context.pick((answers != labels).nonzero().flatten())
    if len(wrong):
        said = [f"said {name}" for name in context.names(answers[wrong])]
        drawn["reconstructions-wrong"] = _redrawn(context, wrong, answers, said)
    return drawn


def _redrawn(context: ClassFigureContext[CapsNet], rows: Tensor, answers: Tensor, more: Sequence[str] = ()) -> bytes:
    """The images of the rows, redrawn from the longest capsule and from that of the label."""
    names = context.names(context.data.labels[rows])
    notes = [f"{name}\n{text}" for name, text in zip(names, more, strict=True)] if more else names
    grid = [
        ("image", context.images(rows)),
        ("from the\nlongest", pixels(_drawn_from(context, rows, answers[rows]))),
        ("from the\nlabel's", pixels(_drawn_from(context, rows, context.data.labels[rows]))),
    ]
    return image_grid(grid, _SCALE, {0: notes})


def _drawn_from(context: ClassFigureContext[CapsNet], rows: Tensor, chosen: Tensor) -> Tensor:
    """[b c h w] the images of the rows, each from the capsule of its chosen class [b]."""
    return context.model.reconstruct(Capsules(*(x[rows] for x in context.classes)), chosen)


def _errors(context: ClassFigureContext[CapsNet]) -> Tensor:
    """[n] squared error, summed over the pixels, of each image redrawn from its label's capsule."""
    # In chunks: all images at once may not fit into memory.
    chunks = torch.split(torch.arange(len(context.data)), 500)
    return torch.cat(
        [
            (_drawn_from(context, rows, context.data.labels[rows]) - context.data.model_input(rows))
            .square()
            .flatten(1)
            .sum(1)
            for rows in chunks
        ]
    )


def draw_perturbations(context: ClassFigureContext[CapsNet]) -> dict[str, bytes]:
    """A sheet a class, one row a dimension; and one of all these classes, each with its most visible dimension."""
    # One example of each class, whose pose is moved one dimension at a time.
    found = _examples(context)
    sheets = {}
    most = []
    poses = context.encode(torch.tensor(list(found.values()))).pose  # [n j k]
    moves = torch.linspace(-REACH, REACH, STEPS).tolist()
    # Adding 0.0 turns -0.0 into 0.0.
    notes = {0: [f"{round(move, 2) + 0.0:.2f}" for move in moves]}
    for j, pose in zip(found, poses, strict=True):
        strips = perturbed(context.model, pose[j], j)  # [k n c h w]
        rows = [(f"dimension {k}", pixels(strip)) for k, strip in enumerate(strips)]
        sheets[f"perturbations-{j}"] = image_grid(rows, 0.5, notes)
        # The dimension over which pixels vary most, for the overview.
        k = int(strips.var(1).flatten(1).mean(1).argmax())
        most.append((f"{context.data.name_of(j)}\ndimension {k}", rows[k][1]))
    return {"perturbations": image_grid(most, 0.5, notes), **sheets}


def _examples(context: ClassFigureContext[CapsNet]) -> dict[int, int]:
    """Class -> the row of a test image that shows it, picked by the seed, for the classes that the options name."""
    chosen = context.options.capsules or range(context.data.classes)
    # Labels are [n] or [n m]; an image with several shows each of its classes.
    shows = {j: (context.data.labels.view(len(context.data), -1) == j).any(-1).nonzero().flatten() for j in chosen}
    found = {j: int(context.pick(rows)[0]) for j, rows in shows.items() if len(rows)}
    if not found:
        raise DataError(f"no test image shows class {', '.join(map(str, chosen))}; choose others")
    return found


def perturbed(model: CapsNet, pose: Tensor, label: int, reach: float = REACH, steps: int = STEPS) -> Tensor:
    """[k n c h w] what the capsule of a class draws when each number of its pose [k] is moved by -reach ... reach."""
    k = len(pose)
    j = model.spec.classes
    moves = torch.linspace(-reach, reach, steps).view(steps, 1) * torch.eye(k).unsqueeze(1)  # [k n k]
    # The decoder gets one capsule, all others being 0, as in training.
    all_poses = pose.new_zeros(k * steps, j, k)
    all_poses[:, label] = (pose + moves).flatten(0, 1)
    chosen = torch.full((k * steps,), label)
    drawn = model.reconstruct(Capsules(all_poses, all_poses.norm(dim=-1)), chosen)  # [(k n) c h w]
    return drawn.view(k, steps, *drawn.shape[1:])


def draw_routing(context: ClassFigureContext[CapsNet]) -> dict[str, bytes]:
    """Where in the image the longest capsule, and the next longest, get their children from, by iteration."""
    rows = context.rows
    maps, ranked = coupling_maps(context.model, context.data.model_input(rows))  # [b 2 t h w], [b 2]
    grid = [("image", context.images(rows))]
    notes = {0: context.names(context.data.labels[rows])}
    # Below the images, the maps of each capsule, a row for each iteration.
    for n, word in enumerate(("longest", "second\nlongest")[: ranked.shape[1]]):
        notes[len(grid)] = context.names(ranked[:, n])
        grid += [(f"{word},\niteration {t + 1}", maps[:, n, t]) for t in range(maps.shape[2])]
    return {"routing": image_grid(grid, _SCALE, notes)}


class CouplingMaps(NamedTuple):
    """Where in the image the two most active class capsules get their children from.

    Attributes:
        maps: [b 2 t h w], coupling times activation of the children, summed over the types of children at a place; the
            largest value of an image, in all of its maps, is 1.
        classes: [b 2], the two classes, the more active one first.
    """

    maps: Tensor
    classes: Tensor


def coupling_maps(model: CapsNet, images: Tensor) -> CouplingMaps:
    """Run a CapsNet over images [b c h w] and map the coupling of its class capsules, iteration by iteration."""
    out: CapsNetOutput = model(images, trace=True)
    return maps_of(out.classes, out.primary, out.info.coupling)


def maps_of(classes: Capsules, children: Capsules, coupling: Tensor) -> CouplingMaps:
    """Map the coupling between class capsules and the children below them.

    Args:
        classes: [b j k].
        children: [b h w i d].
        coupling: [t b (h w i) j].
    """
    b, h, w, i, _ = children.pose.shape
    ranked = top(classes.activation, 2)  # [b 2]
    # What each child sent to the two classes: its coupling times its activation.
    mine = coupling.permute(1, 3, 0, 2)[torch.arange(b).unsqueeze(1), ranked]  # [b 2 t (h w i)]
    sent = mine * children.activation.reshape(b, 1, 1, h * w * i)
    # Sum over the types of children at each place.
    maps = sent.view(*sent.shape[:3], h * w, i).sum(-1).view(*sent.shape[:3], h, w)
    # One scale for all maps of an image, so that iterations can be compared.
    return CouplingMaps(maps / maps.amax((1, 2, 3, 4), keepdim=True).clamp_min(1e-12), ranked)


def draw_multimnist(context: ClassFigureContext[CapsNet]) -> dict[str, bytes]:
    """Two digits in red and green, as in figure 5 of Sabour 2017; and where the answer is another pair."""
    # An answer is right if it names both digits, in any order.
    labels = context.data.labels
    answers = top(context.classes.activation, 2)
    drawn = {"multimnist": _pairs(context, context.rows)}
    wrong = context.pick((answers.sort(-1).values != labels.sort(-1).values).any(-1).nonzero().flatten())
    if len(wrong):
        drawn["multimnist-wrong"] = _wrong_pairs(context, wrong, _aligned(answers[wrong], labels[wrong]))
    return drawn


def _pairs(context: ClassFigureContext[CapsNet], rows: Tensor) -> bytes:
    """Image, its digits if they are known, both redrawn, each alone, and what a class that is not there draws."""
    labels = context.data.labels[rows]
    # Each digit from its own capsule.
    first, second = (_drawn_from(context, rows, labels[:, n]) for n in (0, 1))
    nothing = torch.zeros_like(first)
    # Lengths are at most 1: less 2, no class that is present can be the longest.
    present = one_hot(labels, context.data.classes).sum(1)  # [b j]
    absent = (context.classes.activation[rows] - 2 * present).argmax(-1)  # [b] the longest that is not there
    grid = [
        ("image", context.images(rows)),
        *_digits(context.data, rows),
        ("redrawn", overlay(first, second)),
        ("first", overlay(first, nothing)),
        ("second", overlay(nothing, second)),
        ("longest of\nthe others", pixels(_drawn_from(context, rows, absent))),
    ]
    return image_grid(grid, _SCALE, {0: context.names(labels), len(grid) - 1: context.names(absent)})


def _digits(data: Dataset, rows: Tensor) -> Rows:
    if data.components is None:
        return []
    digits = to_float(data.preprocess.crop(data.components[rows]))  # [b 2 h w]
    return [("its digits", overlay(digits[:, :1], digits[:, 1:]))]


def _wrong_pairs(context: ClassFigureContext[CapsNet], rows: Tensor, answers: Tensor) -> bytes:
    """Redrawn from the labels, and from the two longest capsules; a digit that both name has the same color."""
    labels = context.data.labels[rows]
    grid: list[tuple[str, Tensor]] = [("image", context.images(rows)), *_digits(context.data, rows)]
    notes: dict[int, Sequence[str]] = {}
    for word, pair in (("labels", labels), ("answers", answers)):
        notes[len(grid)] = context.names(pair)
        first, second = (_drawn_from(context, rows, pair[:, n]) for n in (0, 1))
        grid.append((f"from the\n{word}", overlay(first, second)))
    return image_grid(grid, _SCALE, notes)


def _aligned(answers: Tensor, labels: Tensor) -> Tensor:
    """The answers [b 2] turned round where that puts one that is right in the place of its label."""
    turned = answers.flip(-1)
    return torch.where((turned == labels).any(-1, keepdim=True), turned, answers)


def overlay(first: Tensor, second: Tensor) -> Tensor:
    """[b h w 3] images [b c h w] over others: the first red, the second green, and where both are yellow."""
    red = first.mean(1)
    green = second.mean(1)
    return torch.stack([red, green, torch.zeros_like(red)], dim=-1)


def draw_calibration(context: ClassFigureContext[CapsNet]) -> dict[str, bytes]:
    """How often the longest capsule is right, by its length."""
    length, answers = context.classes.activation.max(-1)
    return {"calibration": reliability_diagram(length.clamp(0, 1), answers == context.data.labels)}


@torch.inference_mode()
def draw_redrawn(model: CapsNet, data: Dataset, row: int, prediction: Prediction) -> bytes:
    """Draw one picture beside what the decoder draws from each class that was named, or from the longest capsule.

    Args:
        model: The network.
        data: Pictures in its input format.
        row: Which of them.
        prediction: What the network said about it.

    Returns:
        A PNG.
    """
    chosen = torch.tensor(prediction.named or (int(prediction.scores.argmax()),))
    # Encode once, and decode the capsule of each class.
    pose, activation = model.encode(data.model_input(slice(row, row + 1)))
    repeated = Capsules(pose.expand(len(chosen), -1, -1), activation.expand(len(chosen), -1))
    drawn = model.reconstruct(repeated, chosen).clamp(0, 1)
    images = torch.cat([data.pixels(slice(row, row + 1)), drawn])  # [1+m c h w]
    names = [f"{data.name_of(j)} {prediction.scores[j]:.2f}" for j in chosen.tolist()]
    # A dollar sign would begin a formula.
    notes = ["picture", *(name.replace("$", r"\$") for name in names)]
    return image_grid([("", pixels(images))], scale=1.6, notes={0: notes})
