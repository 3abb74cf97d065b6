"""Pictures of a CapsNet and its test images, drawn with matplotlib (the `plot` extra), as PNG bytes by file name.

`picture(kind, ...)` is the front door, as in `capsule_figures`; `torchcaps generate` draws through it. Classes and the
dimensions of their capsules are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcaps.data import Dataset
from torchcaps.errors import DataError
from torchcaps.evaluate.figures import Rows, image_grid, pixels, reliability_diagram
from torchcaps.evaluate.multilabel import top
from torchcaps.math.pixels import to_float
from torchcaps.models.capsnet import CapsNet, CapsNetOutput
from torchcaps.systems.figure_context import FigureContext, draw_figure
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.types import Capsules

__all__ = ["FIGURES", "FROM_ALL", "coupling_maps", "kinds_of", "maps_of", "overlay", "perturbed", "picture"]

REACH = 0.25
STEPS = 11
"""How far a dimension is moved, and in how many steps: those of Sabour 2017, figure 4, .05 apart."""

_SCALE = 0.7
"""Inches an image."""


def picture(
    kind: str, model: CapsNet, wish: FigureOptions, data: Dataset, classes: Capsules | None = None
) -> dict[str, bytes]:
    """File name (without .png) -> PNG of one kind of figure.

    `classes` are the capsules of all images of the data, for the figures `FROM_ALL`; computed if they are not given.
    """
    return draw_figure(kind, FIGURES, kinds_of(data), FigureContext(model, wish, data, classes))


def kinds_of(data: Dataset) -> list[str]:
    """The figures that can be drawn of data with so many labels an image."""
    if data.labels.ndim == 1:
        return [kind for kind in FIGURES if kind != "multimnist"]
    several = ["perturbations", "routing"]
    return [*several, "multimnist"] if data.labels.shape[1] == 2 else several


def _reconstructions(scene: FigureContext[CapsNet]) -> dict[str, bytes]:
    """Some test images; those that are redrawn worst from their label's capsule; some that got a wrong answer."""
    labels = scene.data.labels
    answers = scene.classes.activation.argmax(-1)
    errors = _errors(scene)
    worst = errors.argsort(descending=True, stable=True)[: scene.wish.count]
    drawn = {
        "reconstructions": _redrawn(scene, scene.rows, answers),
        "reconstructions-worst": _redrawn(scene, worst, answers, [f"error {errors[n]:.0f}" for n in worst.tolist()]),
    }
    wrong = scene.pick((answers != labels).nonzero().flatten())
    if len(wrong):
        said = [f"said {name}" for name in scene.names(answers[wrong])]
        drawn["reconstructions-wrong"] = _redrawn(scene, wrong, answers, said)
    return drawn


def _redrawn(scene: FigureContext[CapsNet], rows: Tensor, answers: Tensor, more: Sequence[str] = ()) -> bytes:
    """The images of the rows, redrawn from the longest capsule and from that of the label."""
    names = scene.names(scene.data.labels[rows])
    notes = [f"{name}\n{text}" for name, text in zip(names, more, strict=True)] if more else names
    grid = [
        ("image", scene.images(rows)),
        ("from the\nlongest", pixels(_drawn_from(scene, rows, answers[rows]))),
        ("from the\nlabel's", pixels(_drawn_from(scene, rows, scene.data.labels[rows]))),
    ]
    return image_grid(grid, _SCALE, {0: notes})


def _drawn_from(scene: FigureContext[CapsNet], rows: Tensor, chosen: Tensor) -> Tensor:
    """[b c h w] the images of the rows, each from the capsule of its chosen class [b]."""
    return scene.model.reconstruct(Capsules(*(x[rows] for x in scene.classes)), chosen)


def _errors(scene: FigureContext[CapsNet]) -> Tensor:
    """[n] squared error, summed over the pixels, of each image redrawn from its label's capsule."""
    parts = torch.split(torch.arange(len(scene.data)), 500)
    return torch.cat(
        [
            (_drawn_from(scene, rows, scene.data.labels[rows]) - scene.data.model_input(rows))
            .square()
            .flatten(1)
            .sum(1)
            for rows in parts
        ]
    )


def _perturbations(scene: FigureContext[CapsNet]) -> dict[str, bytes]:
    """A sheet a class, one row a dimension; and one of all these classes, each with its most visible dimension."""
    found = _examples(scene)
    sheets = {}
    most = []
    poses = scene.model.encode(scene.data.model_input(torch.tensor(list(found.values())))).pose  # [n j k]
    moves = torch.linspace(-REACH, REACH, STEPS).tolist()
    notes = {0: [f"{round(move, 2) + 0.0:.2f}" for move in moves]}
    for j, pose in zip(found, poses, strict=True):
        strips = perturbed(scene.model, pose[j], j)  # [k n c h w]
        rows = [(f"dimension {k}", pixels(strip)) for k, strip in enumerate(strips)]
        sheets[f"perturbations-{j}"] = image_grid(rows, 0.5, notes)
        k = int(strips.var(1).flatten(1).mean(1).argmax())
        most.append((f"{scene.data.name_of(j)}\ndimension {k}", rows[k][1]))
    return {"perturbations": image_grid(most, 0.5, notes), **sheets}


def _examples(scene: FigureContext[CapsNet]) -> dict[int, int]:
    """Class -> the row of a test image that shows it, picked by the seed, for the classes that are wished."""
    wished = scene.wish.capsules or range(scene.data.classes)
    shows = {j: (scene.data.labels.view(len(scene.data), -1) == j).any(-1).nonzero().flatten() for j in wished}
    found = {j: int(scene.pick(rows)[0]) for j, rows in shows.items() if len(rows)}
    if not found:
        raise DataError(f"no test image shows class {', '.join(map(str, wished))}; wish for others")
    return found


def perturbed(model: CapsNet, pose: Tensor, label: int, reach: float = REACH, steps: int = STEPS) -> Tensor:
    """[k n c h w] what the capsule of a class draws when each number of its pose [k] is moved by -reach ... reach."""
    k = len(pose)
    j = model.spec.classes
    moves = torch.linspace(-reach, reach, steps).view(steps, 1) * torch.eye(k).unsqueeze(1)  # [k n k]
    all_poses = pose.new_zeros(k * steps, j, k)
    all_poses[:, label] = (pose + moves).flatten(0, 1)
    chosen = torch.full((k * steps,), label)
    drawn = model.reconstruct(Capsules(all_poses, all_poses.norm(dim=-1)), chosen)
    return drawn.view(k, steps, *drawn.shape[1:])


def _routing(scene: FigureContext[CapsNet]) -> dict[str, bytes]:
    """Where in the image the longest capsule, and the next longest, get their children from, by iteration."""
    rows = scene.rows
    maps, ranked = coupling_maps(scene.model, scene.data.model_input(rows))  # [b 2 t h w], [b 2]
    grid = [("image", scene.images(rows))]
    notes = {0: scene.names(scene.data.labels[rows])}
    for n, word in enumerate(("longest", "second\nlongest")[: ranked.shape[1]]):
        notes[len(grid)] = scene.names(ranked[:, n])
        grid += [(f"{word},\niteration {t + 1}", maps[:, n, t]) for t in range(maps.shape[2])]
    return {"routing": image_grid(grid, _SCALE, notes)}


def coupling_maps(model: CapsNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """For the two longest class capsules of each image [b 2]: coupling times activation of their children [b 2 t h w].

    Summed over the types of children at a place; the largest value of an image, in all of its maps, is 1.
    """
    out: CapsNetOutput = model(images, trace=True)
    return maps_of(out.classes, out.primary, out.info.coupling)


def maps_of(classes: Capsules, children: Capsules, coupling: Tensor) -> tuple[Tensor, Tensor]:
    """The same of any class capsules, their children [b h w i d], and the coupling [t b (h w i) j] between them."""
    b, h, w, i, _ = children.pose.shape
    ranked = top(classes.activation, 2)  # [b 2]
    mine = coupling.permute(1, 3, 0, 2)[torch.arange(b).unsqueeze(1), ranked]  # [b 2 t (h w i)]
    sent = mine * children.activation.reshape(b, 1, 1, h * w * i)
    maps = sent.view(*sent.shape[:3], h * w, i).sum(-1).view(*sent.shape[:3], h, w)
    return maps / maps.amax((1, 2, 3, 4), keepdim=True).clamp_min(1e-12), ranked


def _multimnist(scene: FigureContext[CapsNet]) -> dict[str, bytes]:
    """Two digits in red and green, as in figure 5 of Sabour 2017; and where the answer is another pair."""
    labels = scene.data.labels
    answers = top(scene.classes.activation, 2)
    drawn = {"multimnist": _pairs(scene, scene.rows)}
    wrong = scene.pick((answers.sort(-1).values != labels.sort(-1).values).any(-1).nonzero().flatten())
    if len(wrong):
        drawn["multimnist-wrong"] = _wrong_pairs(scene, wrong, _aligned(answers[wrong], labels[wrong]))
    return drawn


def _pairs(scene: FigureContext[CapsNet], rows: Tensor) -> bytes:
    """Image, its digits if they are known, both redrawn, each alone, and what a class that is not there draws."""
    labels = scene.data.labels[rows]
    first, second = (_drawn_from(scene, rows, labels[:, n]) for n in (0, 1))
    nothing = torch.zeros_like(first)
    present = one_hot(labels, scene.data.classes).sum(1)  # [b j]
    absent = (scene.classes.activation[rows] - 2 * present).argmax(-1)  # [b] the longest that is not there
    grid = [
        ("image", scene.images(rows)),
        *_digits(scene.data, rows),
        ("redrawn", overlay(first, second)),
        ("first", overlay(first, nothing)),
        ("second", overlay(nothing, second)),
        ("longest of\nthe others", pixels(_drawn_from(scene, rows, absent))),
    ]
    return image_grid(grid, _SCALE, {0: scene.names(labels), len(grid) - 1: scene.names(absent)})


def _digits(data: Dataset, rows: Tensor) -> Rows:
    if data.components is None:
        return []
    parts = to_float(data.preprocess.crop(data.components[rows]))  # [b 2 h w]
    return [("its digits", overlay(parts[:, :1], parts[:, 1:]))]


def _wrong_pairs(scene: FigureContext[CapsNet], rows: Tensor, answers: Tensor) -> bytes:
    """Redrawn from the labels, and from the two longest capsules; a digit that both name has the same color."""
    labels = scene.data.labels[rows]
    grid: list[tuple[str, Tensor]] = [("image", scene.images(rows)), *_digits(scene.data, rows)]
    notes: dict[int, Sequence[str]] = {}
    for word, pair in (("labels", labels), ("answers", answers)):
        notes[len(grid)] = scene.names(pair)
        first, second = (_drawn_from(scene, rows, pair[:, n]) for n in (0, 1))
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


def _calibration(scene: FigureContext[CapsNet]) -> dict[str, bytes]:
    """How often the longest capsule is right, by its length."""
    length, answers = scene.classes.activation.max(-1)
    return {"calibration": reliability_diagram(length.clamp(0, 1), answers == scene.data.labels)}


FIGURES: Mapping[str, Callable[[FigureContext[CapsNet]], dict[str, bytes]]] = {
    "reconstructions": _reconstructions,
    "perturbations": _perturbations,
    "routing": _routing,
    "multimnist": _multimnist,
    "calibration": _calibration,
}

FROM_ALL = ("reconstructions", "multimnist", "calibration")
"""The figures that look at all images, some to find the wrong answers; the others take a few."""
