"""Figures of sparse capsules, or their dense control, and test images: figures 2 to 5 of Rawlinson 2018, as PNG bytes.

    parts          2  an image redrawn from each capsule alone, from all but each, and what leaving it out changes
    ranked         3  the support of an image's capsules from the largest down, also of other runs
    frequencies    4  how often each capsule has each rank
    equivariances  5  each number of the first capsule's pose from -1 to 1
    winners        -  images in which each capsule is first, each above what is redrawn from its masked capsules

The `draw_...` functions belong to the figures that `SparseSystem` lists. Capsules and the numbers of their poses
are counted from 0, and the first capsule of an image is that of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcaps.data import Dataset, subset
from torchcaps.errors import DataError
from torchcaps.evaluate.figures import image_grid, pixels, png, pyplot
from torchcaps.layers import FrameDecoder, PrototypeDecoder
from torchcaps.layers.rank_mask import rank
from torchcaps.math.squash import norm
from torchcaps.models import CapsNet, Model
from torchcaps.models.capsnet import CapsNetOutput
from torchcaps.models.sparse import SparseModel, SparseOutput, support
from torchcaps.systems.figure_context import FigureContext
from torchcaps.utils.progress import progress

__all__ = [
    "RANKINGS",
    "CapsuleDrawings",
    "Ranking",
    "SparseFigureContext",
    "draw_capsules",
    "draw_equivariances",
    "draw_frequencies",
    "draw_parts",
    "draw_ranked",
    "draw_winners",
    "rank_classes",
    "rank_frequency",
    "rank_sparse",
    "ranked_support",
    "swept",
]

STEPS = 11
"""From -1 to 1, .2 apart, as in figure 5."""

_SCALE = 0.6
"""Inches an image."""


class Ranking(NamedTuple):
    """How the capsules of n images compete.

    Attributes:
        support: [n j] what routing gave each capsule.
        ranks: [n j] what the mask made of it; 0 is the first.
        pose: [n j k] masked poses, None of a network without a mask.
    """

    support: Tensor
    ranks: Tensor
    pose: Tensor | None


@dataclass(frozen=True)
class SparseFigureContext(FigureContext[SparseModel]):
    """What the figures of sparse capsules are drawn from."""

    @property
    def capsule_count(self) -> int:
        return self.model.config.capsules

    @property
    def chosen(self) -> list[int]:
        """The capsules that the options name, or all."""
        return list(self.options.capsules or range(self.capsule_count))

    @cached_property
    def ranking(self) -> Ranking:
        """The ranking of the capsules in all test images."""
        return rank_sparse(self.model, self.data)

    def encode(self, rows: Tensor) -> Ranking:
        """Rank the capsules of some test images [b], by what is known already if all images have been ranked."""
        # A cached property is in __dict__ once it was computed; asking for it here would rank all images.
        if "ranking" in self.__dict__:
            pose = self.ranking.pose
            return Ranking(self.ranking.support[rows], self.ranking.ranks[rows], None if pose is None else pose[rows])
        return rank_sparse(self.model, subset(self.data, rows))

    def stored_image(self, row: int) -> Tensor:
        """[1 c h w] a test image in [0, 1] as it is stored, whatever the model's input format is."""
        return self.data.pixels(slice(row, row + 1))

    def to_pixels(self, drawn: Tensor, row: int) -> Tensor:
        """Map drawings [n c h w] of a test image to [0, 1], with its own mean and deviation if it was standardized."""
        if self.data.preprocess.standardize:
            # The reverse of standardization, with the same lower bound of the deviation.
            x = self.stored_image(row)
            drawn = drawn * x.std(correction=0).clamp_min(x.numel() ** -0.5) + x.mean()
        return drawn.clamp(0, 1)


@torch.inference_mode()
def rank_sparse(model: Model, data: Dataset, batch: int = 100) -> Ranking:
    """Rank the capsules of a sparse network in every image, a bounded batch at a time."""
    network = cast(SparseModel, model.eval())
    outputs: list[SparseOutput] = [network(images) for images in _batches(data, batch)]
    return Ranking(
        torch.cat([out.support for out in outputs]),
        torch.cat([out.ranks for out in outputs]),
        torch.cat([out.masked.pose for out in outputs]),
    )


@torch.inference_mode()
def rank_classes(model: Model, data: Dataset, batch: int = 100) -> Ranking:
    """Rank the class capsules of a CapsNet in every image, by their support alone: it has no mask."""
    network = cast(CapsNet, model.eval())
    outputs: list[CapsNetOutput] = [network(images) for images in _batches(data, batch)]
    # The support after the last iteration, the one that the network used.
    psi = torch.cat([support(out.info.coupling[-1], network.primary.types) for out in outputs])
    return Ranking(psi, rank(psi), None)


def _batches(data: Dataset, batch: int) -> Iterator[Tensor]:
    """Yield the images [b c h w] of a data set in the model's input format."""
    for rows in progress(torch.split(torch.arange(len(data)), batch), "encoding images"):
        yield data.model_input(rows)


RANKINGS: dict[str, Callable[[Model, Dataset], Ranking]] = {"sparse": rank_sparse, "capsnet": rank_classes}
"""Name of a system -> what ranks the capsules of its models, for the figure `ranked`."""


def draw_parts(context: SparseFigureContext) -> dict[str, bytes]:
    """A picture an image: above each capsule its rank, and the largest change of a pixel when it is left out."""
    rows = context.rows
    encoded = context.encode(rows)
    assert encoded.pose is not None, "a sparse network has masked poses"
    return {
        f"parts-{row}": _sheet(context, row, draw_capsules(context.model, pose), ranks)
        for row, pose, ranks in zip(rows.tolist(), encoded.pose, encoded.ranks.tolist(), strict=True)
    }


class CapsuleDrawings(NamedTuple):
    """What capsules draw: all of them and none [1 c h w], each alone and all but each [j c h w]."""

    together: Tensor
    none: Tensor
    alone: Tensor
    without: Tensor


def draw_capsules(model: SparseModel, pose: Tensor) -> CapsuleDrawings:
    """Of the capsules of an image, the masked pose [j k]."""
    j, k = pose.shape
    # One batch for the decoder: all capsules, none, each alone, all but each.
    alone = pose * torch.eye(j).unsqueeze(-1)  # [j j k]
    poses = torch.cat([pose.unsqueeze(0), pose.new_zeros(1, j, k), alone, pose - alone])  # [2+2j j k]
    return CapsuleDrawings(*torch.split(model.decode(poses), [1, 1, j, j]))


def _sheet(context: SparseFigureContext, row: int, drawn: CapsuleDrawings, ranks: list[int]) -> bytes:
    """What is left as it is is gray in the last row; a pixel that leaving out makes brighter is bright there."""
    # Differences are of what is displayed, not of the decoder's output.
    together, none, alone, without = (context.to_pixels(x, row) for x in drawn)
    change = (without - together)[context.chosen]  # [j c h w]
    # Changes are in [-1, 1]; halved and raised, no change is gray.
    grid = [
        ("", pixels(torch.cat([context.stored_image(row), together, none]))),
        ("alone", pixels(alone[context.chosen])),
        ("left out", pixels(without[context.chosen])),
        ("change", pixels((1 + change) / 2)),
    ]
    notes = {
        0: ["image", "redrawn", "of none"],
        1: [f"capsule {j}\nrank {ranks[j]}" for j in context.chosen],
        3: [f"{most:.2f}" for most in change.abs().flatten(1).amax(1).tolist()],
    }
    return image_grid(grid, _SCALE, notes)


def draw_ranked(context: SparseFigureContext) -> dict[str, bytes]:
    """A curve a run."""
    figure, ax = pyplot().subplots(figsize=(5.6, 3.2))
    # This run, then those beside it, each on its own images.
    runs = {context.name: context.ranking}
    runs |= {other.name: RANKINGS[other.system](other.model, other.data) for other in context.compared}
    for name, one in runs.items():
        ax.plot(ranked_support(one.support), "o-", markersize=3, linewidth=1, label=f"{name}, {len(one.ranks)} images")
    # Runs may differ in their number of capsules.
    ranks = range(max(one.ranks.shape[1] for one in runs.values()))
    ax.set(xlabel="rank", ylabel="support / that of the first", ylim=(0, 1.05), xticks=ranks)
    ax.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return {"ranked": png(figure)}


def ranked_support(psi: Tensor) -> Tensor:
    """[j] the support [n j] of an image's capsules from the largest down, in units of the largest; mean over images."""
    falling = psi.sort(dim=-1, descending=True).values  # [n j]
    return (falling / falling[:, :1].clamp_min(torch.finfo(psi.dtype).tiny)).mean(0)


def draw_frequencies(context: SparseFigureContext) -> dict[str, bytes]:
    """A curve a capsule; the band in which training keeps how often one is first is gray."""
    # The band in which the mask keeps how often a capsule is first.
    share = rank_frequency(context.ranking.ranks)  # [j r]
    mask = context.model.mask
    inside = int(mask.count_in_band(share[:, 0]))
    figure, ax = pyplot().subplots(figsize=(6.4, 3.4))
    colors = pyplot().get_cmap("tab20")
    ax.axhspan(mask.low, mask.high, color="0.9")
    # A line for each capsule; the palette has 20 colors, so more capsules repeat them.
    for j in context.chosen:
        ax.plot(share[j], "o-", markersize=2, linewidth=1, color=colors(j % 20), label=f"capsule {j}")
    ax.set(xlabel="rank", ylabel="share of images", ylim=(0, None), xticks=range(len(share)))
    said = f"{inside} of {len(share)} capsules are first in {mask.low:.3g} to {mask.high:.3g}"
    ax.set_title(f"{said} of {len(context.data)} images", fontsize=9)
    ax.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return {"frequencies": png(figure)}


def rank_frequency(ranks: Tensor) -> Tensor:
    """[j r] the share of the images, whose ranks are [n j], in which capsule j has rank r."""
    return one_hot(ranks, ranks.shape[1]).float().mean(0)


def draw_equivariances(context: SparseFigureContext) -> dict[str, bytes]:
    """A sheet a capsule, of an image in which it is first; and one of all, each with its most visible number."""
    sheets = {}
    most = []
    # Adding 0.0 turns -0.0 into 0.0.
    notes = {0: [f"{round(move, 1) + 0.0:.1f}" for move in torch.linspace(-1, 1, STEPS).tolist()]}
    for j, row in _examples(context).items():
        # All capsules of the image draw; each number of the first one is moved in turn.
        pose = context.encode(torch.tensor([row])).pose
        assert pose is not None, "a sparse network has masked poses"
        strips = [context.to_pixels(strip, row) for strip in swept(context.model, pose[0], j)]  # k of [n c h w]
        rows = [(f"number {k}", pixels(strip)) for k, strip in enumerate(strips)]
        # One sheet a capsule, and its most visible number for the overview.
        sheets[f"equivariances-{j}"] = image_grid(
            [("image, redrawn", _pair(context, row, pose)), *rows], 0.5, {1: notes[0]}
        )
        k = int(torch.stack(strips).var(1).flatten(1).mean(1).argmax())
        most.append((f"capsule {j}\nnumber {k}", rows[k][1]))
    return {"equivariances": image_grid(most, 0.5, notes), **sheets}


def draw_winners(context: SparseFigureContext) -> dict[str, bytes]:
    """One sheet, a column a capsule: images in which it is first, picked by the seed, each above its redrawing."""
    first = [context.pick((context.ranking.ranks[:, j] == 0).nonzero().flatten()) for j in context.chosen]
    rows = []
    for n in range(max(1, max(map(len, first)))):
        # A capsule that is first in fewer images leaves its places black.
        pairs = [_winner(context, own[n] if n < len(own) else None) for own in first]
        rows += [
            ("image", pixels(torch.cat([image for image, _ in pairs]))),
            ("redrawn", pixels(torch.cat([d for _, d in pairs]))),
        ]
    return {"winners": image_grid(rows, 0.5, {0: [f"capsule {j}" for j in context.chosen]})}


def _winner(context: SparseFigureContext, row: Tensor | None) -> tuple[Tensor, Tensor]:
    """A test image [1 c h w] and its redrawing, or black for none."""
    if row is None:
        blank = torch.zeros_like(context.stored_image(0))
        return blank, blank
    pose = context.encode(row.view(1)).pose
    assert pose is not None, "a sparse network has masked poses"
    n = int(row)
    return context.stored_image(n), context.to_pixels(context.model.decode(pose), n)


def _pair(context: SparseFigureContext, row: int, pose: Tensor) -> Tensor:
    """[2 h w] a test image, and the image redrawn from its capsules [1 j k] as they are."""
    return pixels(torch.cat([context.stored_image(row), context.to_pixels(context.model.decode(pose), row)]))


def _examples(context: SparseFigureContext) -> dict[int, int]:
    """Find for each chosen capsule the row of a test image in which it is first, picked by the seed."""
    first = {j: (context.ranking.ranks[:, j] == 0).nonzero().flatten() for j in context.chosen}
    found = {j: int(context.pick(rows)[0]) for j, rows in first.items() if len(rows)}
    if not found:
        raise DataError(f"capsule {', '.join(map(str, first))} is first in no test image; choose others")
    return found


def swept(model: SparseModel, pose: Tensor, j: int) -> Tensor:
    """[k n c h w] what the masked pose [j k] of an image draws when each number of capsule j is set to -1 ... 1.

    Where length is ink, the capsule keeps its length: the number turns it towards or away from an axis.
    """
    k = pose.shape[-1]
    number = torch.arange(k)
    poses = pose.repeat(k, STEPS, 1, 1)  # [k n j k]
    poses[number, :, j, number] = torch.linspace(-1, 1, STEPS).to(pose)
    # A longer pose would add ink, and hide what its direction changes.
    if isinstance(model.decoder, FrameDecoder | PrototypeDecoder):
        poses[:, :, j] *= norm(pose[j]) / norm(poses[:, :, j], keepdim=True)
    return torch.unflatten(model.decode(poses.flatten(0, 1)), 0, (k, STEPS))
