"""Pictures of products of expert capsules, drawn with matplotlib (the `plot` extra), as PNG bytes by file name.

`picture(kind, ...)` is the front door: `torchcaps generate` and the report draw through it. The figures that need
images take some (`images`, one a column) and for `wins` a whole set; the others come from the model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.evaluate.figures import Rows, image_grid, pixels
from torchcaps.models.poe import PoE
from torchcaps.systems.poe import generation
from torchcaps.systems.poe.generation import HALVES, Domain

__all__ = ["FIGURES", "FROM_IMAGES", "FigureOptions", "picture"]

_PAIRED = 4
"""Of so many capsules, the most used ones, all pairs are drawn unless capsules are named."""

_SHOWN_STEPS = (0, 1, 2, 4, 10)
"""Steps of the completion's chain that are drawn; the last is where it ends."""


@dataclass(frozen=True)
class FigureOptions:
    """What a picture shall show: which capsules (none = the figure's own choice), how many images, from where."""

    capsules: tuple[int, ...] = ()
    count: int = 8
    domain: Domain = "empirical"
    seed: int = 0


def picture(kind: str, model: PoE, wish: FigureOptions, images: Tensor | None = None) -> dict[str, bytes]:
    """File name (without .png) -> PNG of one kind of figure; `images` [b c h w] in [0, 1] for those that need them."""
    if kind not in FIGURES:
        raise RecipeError(f"unknown figure '{kind}'{suggestion(kind, FIGURES)}")
    for j in wish.capsules:
        if not 0 <= j < model.capsules:
            raise ShapeError(f"capsule {j} is wanted; there are 0 to {model.capsules - 1}")
    if images is None:
        if kind in FROM_IMAGES:
            raise ShapeError(f"figure '{kind}' is drawn from images [b c h w]; none came")
        images = torch.empty(0)
    return {name: image_grid(rows) for name, rows in FIGURES[kind](model, wish, images).items()}


def _samples(model: PoE, wish: FigureOptions, _: Tensor) -> dict[str, Rows]:
    """Figure 2 of the paper: a column a capsule."""
    grid = generation.capsule_samples(model, wish.count, wish.domain, wish.seed, wish.capsules or None)
    rows = [(f"sample {n + 1}", pixels(row)) for n, row in enumerate(grid)]
    return {f"samples-{wish.domain}": rows}


def _pairs(model: PoE, wish: FigureOptions, _: Tensor) -> dict[str, Rows]:
    """Two capsules at once."""
    chosen = wish.capsules or sorted(generation.most_used(model, _PAIRED))
    if len(chosen) < 2:
        raise RecipeError(f"pairs need two capsules, {len(chosen)} came; name two or more, or none")
    pairs = generation.pair_samples(model, chosen, wish.count, wish.domain, wish.seed)
    return {f"pairs-{wish.domain}": [(f"{i} + {j}", pixels(drawn)) for (i, j), drawn in pairs.items()]}


def _sweeps(model: PoE, wish: FigureOptions, _: Tensor) -> dict[str, Rows]:
    """Two pictures a capsule, a row a dimension of its pose: its principal axes, and its numbers as they are.

    Of the most used one unless capsules are named.
    """
    drawn: dict[str, Rows] = {}
    for j in wish.capsules or generation.most_used(model, 1):
        for kind, word in (("axes", "axis"), ("numbers", "number")):
            rows = generation.sweeps(model, j, reach=2.0, principal=kind == "axes")
            drawn[f"sweeps-{j}-{kind}"] = [(f"{word} {k + 1}", pixels(row)) for k, row in enumerate(rows)]
    return drawn


def _interpolation(model: PoE, wish: FigureOptions, images: Tensor) -> dict[str, Rows]:
    """Between each image and the next: image, code ... code, image."""
    if len(images) < 2:
        raise ShapeError(f"an interpolation needs 2 images, {len(images)} came; ask for more")
    won = generation.winners(model, images)
    rows = []
    for n in range(0, len(images) - 1, 2):
        way = generation.interpolation(model, images[n], images[n + 1])
        strip = torch.cat([images[n : n + 1], way, images[n + 1 : n + 2]])
        rows.append((f"capsule {won[n]} to {won[n + 1]}", pixels(strip)))
    return {"interpolation": rows}


def _completion(model: PoE, wish: FigureOptions, images: Tensor) -> dict[str, Rows]:
    """Each half hidden and completed; and for the right half the way there."""
    chains = {half: generation.completion(model, images, half, _SHOWN_STEPS[-1]) for half in HALVES}
    rows = [("image", pixels(images))]
    for half, chain in chains.items():
        rows += [(f"{half} hidden", pixels(_without(images, half))), ("completed", pixels(chain[-1]))]
    steps = [(f"step {t}", pixels(chains["right"][t])) for t in _SHOWN_STEPS]
    return {"completion": rows, "completion-steps": [("image", pixels(images)), *steps]}


def _without(images: Tensor, half: generation.Half) -> Tensor:
    """The images as a viewer sees them: gray where they are hidden."""
    hidden = generation.hidden_half(images.shape[2], images.shape[3], half)
    return images.masked_fill(hidden, 0.5)


def _reconstructions(model: PoE, wish: FigureOptions, images: Tensor) -> dict[str, Rows]:
    """Through the bottleneck, and through W in reverse: which, if the coupling was routed, knows more of the image."""
    drawn = generation.redraw(model, images)
    numbers = model.capsules * model.dimension
    tied = "tied" if model.config.energy.couples_uniformly else "tied (leaks\nthe coupling)"
    return {
        "reconstructions": [
            ("image", pixels(drawn.images)),
            (f"from {numbers}\nnumbers", pixels(drawn.bottleneck)),
            (tied, pixels(drawn.tied)),
        ]
    }


def _wins(model: PoE, wish: FigureOptions, images: Tensor) -> dict[str, Rows]:
    """A row a capsule: the mean of the images that it wins, then its samples."""
    counts, means = generation.wins(model, images)
    chosen = wish.capsules or tuple(range(model.capsules))
    drawn = generation.capsule_samples(model, wish.count, wish.domain, wish.seed, chosen)  # [n j c h w]
    rows = [
        (f"capsule {j}\nwins {counts[j]}", pixels(torch.cat([means[j : j + 1], drawn[:, column]])))
        for column, j in enumerate(chosen)
    ]
    return {f"wins-{wish.domain}": rows}


def _routing(model: PoE, wish: FigureOptions, images: Tensor) -> dict[str, Rows]:
    """Where each image's winner gets its evidence from; every map has its largest value white."""
    maps = generation.routing(model, images)
    rows = [("image", pixels(images)), ("contribution\nto the winner", _bright(maps.contribution))]
    if maps.coupling is not None:
        rows.append(("coupling\nto the winner", _bright(maps.coupling)))
    return {"routing": rows}


def _bright(maps: Tensor) -> Tensor:
    """[b h w] scaled so that the largest value of each map is 1."""
    return maps / maps.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)


FIGURES: dict[str, Callable[[PoE, FigureOptions, Tensor], dict[str, Rows]]] = {
    "samples": _samples,
    "pairs": _pairs,
    "sweeps": _sweeps,
    "wins": _wins,
    "reconstructions": _reconstructions,
    "interpolation": _interpolation,
    "completion": _completion,
    "routing": _routing,
}

FROM_IMAGES = ("wins", "reconstructions", "interpolation", "completion", "routing")
"""The figures that are drawn from images; the others come from the model alone."""
