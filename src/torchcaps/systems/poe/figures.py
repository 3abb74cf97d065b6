"""Figures of products of expert capsules, drawn with matplotlib (the `plot` extra), as PNG bytes by file name.

The `draw_...` functions belong to the figures that `PoESystem` lists. Some come from the model alone and load no data;
the others show a few test images, one a column, and `wins` counts over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from torchcaps.evaluate.figures import image_grid, pixels
from torchcaps.models.poe import PoE
from torchcaps.models.poe.encoder import CapsuleState
from torchcaps.models.poe.frames import into_frame
from torchcaps.models.poe.pose_sampling import check_domain
from torchcaps.systems.figure_context import FigureContext
from torchcaps.systems.poe import generation
from torchcaps.systems.poe.generation import HALVES, Domain

__all__ = [
    "PoEFigureContext",
    "draw_completion",
    "draw_interpolation",
    "draw_pairs",
    "draw_reconstructions",
    "draw_routing",
    "draw_samples",
    "draw_sweeps",
    "draw_wins",
    "needs_two_capsules",
    "needs_two_images",
]

_PAIRED = 4
"""Number of capsules, the most used ones, of which all pairs are drawn unless capsules are named."""

_SHOWN_STEPS = (0, 1, 2, 4, 10)
"""Steps of the completion's chain that are drawn; the last is where it ends."""


@dataclass(frozen=True)
class PoEFigureContext(FigureContext[PoE]):
    """What the figures of products of experts are drawn from; each inference is made once for all figures."""

    @property
    def capsule_count(self) -> int:
        return self.model.capsules

    @property
    def domain(self) -> Domain:
        """Where poses are sampled: as the options say, or from the poses of training images."""
        domain = self.options.domain or "empirical"
        check_domain(domain)
        return cast(Domain, domain)

    @cached_property
    def all_images(self) -> Tensor:
        """[n c h w] all test images in [0, 1]."""
        return self.data.model_input()

    @cached_property
    def picked_images(self) -> Tensor:
        """[b c h w] as many test images as the options ask for."""
        return self.all_images[self.rows]

    @cached_property
    def state(self) -> CapsuleState:
        """What the capsules infer from `picked_images`."""
        return self.model.infer(self.picked_images)

    def samples(self, capsules: Sequence[int] | None) -> Tensor:
        """[n j c h w] samples of each of the capsules, or of all, as many as the options ask for."""
        options = self.options
        return generation.capsule_samples(self.model, options.count, self.domain, options.seed, capsules)


def needs_two_capsules(context: PoEFigureContext) -> str | None:
    """Why pairs cannot be drawn."""
    chosen = context.options.capsules or range(context.capsule_count)
    return None if len(chosen) > 1 else f"needs two capsules, {len(chosen)} came: name two or more, or none"


def needs_two_images(context: PoEFigureContext) -> str | None:
    """Why an interpolation cannot be drawn."""
    count = min(context.options.count, len(context.data))
    return None if count > 1 else f"needs 2 images, {count} came: ask for more"


def draw_samples(context: PoEFigureContext) -> dict[str, bytes]:
    """Figure 2 of the paper: a column a capsule."""
    grid = context.samples(context.options.capsules or None)
    rows = [(f"sample {n + 1}", pixels(row)) for n, row in enumerate(grid)]
    return {f"samples-{context.domain}": image_grid(rows)}


def draw_pairs(context: PoEFigureContext) -> dict[str, bytes]:
    """Two capsules at once."""
    options = context.options
    chosen = options.capsules or sorted(generation.most_used(context.model, _PAIRED))
    pairs = generation.pair_samples(context.model, chosen, options.count, context.domain, options.seed)
    rows = [(f"{i} + {j}", pixels(drawn)) for (i, j), drawn in pairs.items()]
    return {f"pairs-{context.domain}": image_grid(rows)}


def draw_sweeps(context: PoEFigureContext) -> dict[str, bytes]:
    """Two pictures a capsule, a row a dimension of its pose: its principal axes, and its numbers as they are.

    Of the most used one unless capsules are named.
    """
    drawn = {}
    for j in context.options.capsules or generation.most_used(context.model, 1):
        for kind, word in (("axes", "axis"), ("numbers", "number")):
            strips = generation.sweeps(context.model, j, reach=2.0, principal=kind == "axes")
            rows = [(f"{word} {k + 1}", pixels(strip)) for k, strip in enumerate(strips)]
            drawn[f"sweeps-{j}-{kind}"] = image_grid(rows)
    return drawn


def draw_interpolation(context: PoEFigureContext) -> dict[str, bytes]:
    """From one image of a pair to the other: image, code ... code, image."""
    # Pairs of neighbors: the first with the second, the third with the fourth.
    images = context.picked_images
    codes = context.state.hidden  # [b j k]
    winners = context.model.energy.winners(context.state)  # [b]
    rows = []
    for n in range(0, len(images) - 1, 2):
        way = generation.interpolate_codes(context.model, codes[n], codes[n + 1])
        # The image itself at both ends, what is drawn from codes between.
        strip = torch.cat([images[n : n + 1], way, images[n + 1 : n + 2]])
        rows.append((f"capsule {winners[n]} to {winners[n + 1]}", pixels(strip)))
    return {"interpolation": image_grid(rows)}


def draw_completion(context: PoEFigureContext) -> dict[str, bytes]:
    """Each half hidden and completed; and for the right half the way there."""
    # Every half is hidden and completed; the last state of each chain is drawn.
    images = context.picked_images
    chains = {half: generation.completion(context.model, images, half, _SHOWN_STEPS[-1]) for half in HALVES}
    rows = [("image", pixels(images))]
    for half, chain in chains.items():
        rows += [(f"{half} hidden", pixels(_without(images, half))), ("completed", pixels(chain[-1]))]
    # The right half step by step, as an example of the way there.
    steps = [(f"step {t}", pixels(chains["right"][t])) for t in _SHOWN_STEPS]
    return {"completion": image_grid(rows), "completion-steps": image_grid([("image", pixels(images)), *steps])}


def _without(images: Tensor, half: generation.Half) -> Tensor:
    """The images as a viewer sees them: gray where they are hidden."""
    hidden = generation.hidden_half(images.shape[2], images.shape[3], half)
    return images.masked_fill(hidden, 0.5)


def draw_reconstructions(context: PoEFigureContext) -> dict[str, bytes]:
    """Through the bottleneck, and through W in reverse: which, if the coupling was routed, knows more of the image.

    Where the model has frames, the images in their frames, which are what it learns from, are a row of their own.
    """
    model = context.model
    drawn = generation.redraw(model, context.picked_images, context.state)
    # Routed coupling is computed from the image: the tied way knows more than the code.
    tied = "tied" if model.config.energy.couples_uniformly else "tied (leaks\nthe coupling)"
    frame = model.find_frame(drawn.images)
    rows = [
        ("image", pixels(drawn.images)),
        *([] if frame is None else [("in its frame", pixels(into_frame(drawn.images, frame)))]),
        (f"from {model.capsules * model.dimension}\nnumbers", pixels(drawn.bottleneck)),
        (tied, pixels(drawn.tied)),
    ]
    return {"reconstructions": image_grid(rows)}


def draw_wins(context: PoEFigureContext) -> dict[str, bytes]:
    """A row a capsule: the mean of the images that it wins, then its samples."""
    counts, means = generation.wins(context.model, context.all_images)
    chosen = context.options.capsules or tuple(range(context.capsule_count))
    drawn = context.samples(chosen)  # [n j c h w]
    rows = [
        (f"capsule {j}\nwins {counts[j]}", pixels(torch.cat([means[j : j + 1], drawn[:, column]])))
        for column, j in enumerate(chosen)
    ]
    return {f"wins-{context.domain}": image_grid(rows)}


def draw_routing(context: PoEFigureContext) -> dict[str, bytes]:
    """Where each image's winner gets its evidence from; every map has its largest value white."""
    images = context.picked_images
    maps = generation.routing(context.model, images, context.state)
    rows = [("image", pixels(images)), ("contribution\nto the winner", _bright(maps.contribution))]
    # Uniform coupling has no map.
    if maps.coupling is not None:
        rows.append(("coupling\nto the winner", _bright(maps.coupling)))
    return {"routing": image_grid(rows)}


def _bright(maps: Tensor) -> Tensor:
    """[b h w] scaled so that the largest value of each map is 1."""
    return maps / maps.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
