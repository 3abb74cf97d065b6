"""Pictures of sparse capsules, or their dense control, and test images: figures 2 to 5 of Rawlinson 2018, as PNG bytes.

    parts          2  an image redrawn from each capsule alone, from all but each, and what leaving it out changes
    ranked         3  the support of an image's capsules from the largest down, also of other runs
    frequencies    4  how often each capsule has each rank
    equivariances  5  each number of the first capsule's pose from -1 to 1

`picture(kind, scene)` is the front door; `torchcaps generate` draws through it. Capsules and the numbers of their poses
are counted from 0, and the first capsule of an image is that of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcaps.data import Dataset
from torchcaps.errors import DataError, RecipeError, ShapeError, suggestion
from torchcaps.evaluate.figures import image_grid, pixels, png, pyplot
from torchcaps.layers import FrameDecoder
from torchcaps.layers.rank_mask import rank
from torchcaps.math.squash import norm
from torchcaps.models import CapsNet
from torchcaps.models.capsnet import CapsNetOutput
from torchcaps.models.sparse import SparseModel, SparseOutput, support
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.utils.progress import progress
from torchcaps.utils.random import permutation

__all__ = [
    "FIGURES",
    "CapsuleDrawings",
    "Ranking",
    "SparseFigureContext",
    "draw_capsules",
    "picture",
    "rank_frequency",
    "ranked_support",
    "ranking",
    "swept",
]

STEPS = 11
"""From -1 to 1, .2 apart, as in figure 5."""

_SCALE = 0.6
"""Inches an image."""


class Ranking(NamedTuple):
    """Of every image: the support [n j] that routing gave the capsules, and the ranks [n j] that the mask gave them."""

    support: Tensor
    ranks: Tensor


@dataclass(frozen=True)
class SparseFigureContext:
    """What is drawn: a model, what is wished, test images; and the runs beside it, each with test images of its own."""

    model: SparseModel
    wish: FigureOptions
    data: Dataset
    name: str = "this run"
    beside: Mapping[str, tuple[CapsNet | SparseModel, Dataset]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for j in self.wish.capsules:
            if not 0 <= j < self.capsules:
                raise ShapeError(f"capsule {j} is wanted; there are 0 to {self.capsules - 1}")

    @property
    def capsules(self) -> int:
        """How many there are."""
        return self.model.config.capsules

    @property
    def chosen(self) -> list[int]:
        """The capsules that are wished, or all."""
        return list(self.wish.capsules or range(self.capsules))

    @cached_property
    def ranking(self) -> Ranking:
        """Of all images."""
        return ranking(self.model, self.data)

    def pick(self, rows: Tensor) -> Tensor:
        """As many of the rows as are wished, picked by the seed."""
        return rows[permutation(self.wish.seed, 0, len(rows))[: self.wish.count]]

    def image(self, row: int) -> Tensor:
        """[1 c h w] in [0, 1], as it is, whatever the model is shown of it."""
        return self.data.pixels(slice(row, row + 1))

    def levels(self, drawn: Tensor, row: int) -> Tensor:
        """What was drawn of an image [n c h w], in [0, 1]: if the model sees it standardized, with its light again."""
        if self.data.preprocess.standardize:
            x = self.image(row)
            drawn = drawn * x.std(correction=0).clamp_min(x.numel() ** -0.5) + x.mean()
        return drawn.clamp(0, 1)


@torch.inference_mode()
def picture(kind: str, scene: SparseFigureContext) -> dict[str, bytes]:
    """File name (without .png) -> PNG of one kind of figure."""
    if kind not in FIGURES:
        raise RecipeError(f"unknown figure '{kind}'{suggestion(kind, FIGURES)}")
    scene.model.eval()
    return FIGURES[kind](scene)


@torch.inference_mode()
def ranking(model: CapsNet | SparseModel, data: Dataset, batch: int = 100) -> Ranking:
    """Of every image, a bounded batch at a time; the class capsules of a CapsNet are ranked by their support alone."""
    model.eval()
    batches = progress(torch.split(torch.arange(len(data)), batch), "looking at images")
    seen = [_ranking(model, data.model_input(rows)) for rows in batches]
    return Ranking(torch.cat([one.support for one in seen]), torch.cat([one.ranks for one in seen]))


def _ranking(model: CapsNet | SparseModel, images: Tensor) -> Ranking:
    if isinstance(model, CapsNet):
        supervised: CapsNetOutput = model(images)
        psi = support(supervised.info.coupling[-1], model.config.types)
        return Ranking(psi, rank(psi))
    out = model(images)
    return Ranking(out.support, out.ranks)


def _parts(scene: SparseFigureContext) -> dict[str, bytes]:
    """A picture an image: above each capsule its rank, and the largest change of a pixel when it is left out."""
    rows = scene.pick(torch.arange(len(scene.data)))
    out = scene.model(scene.data.model_input(rows))
    return {
        f"parts-{row}": _sheet(scene, row, draw_capsules(scene.model, pose), ranks)
        for row, pose, ranks in zip(rows.tolist(), out.masked.pose, out.ranks.tolist(), strict=True)
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
    alone = pose * torch.eye(j).unsqueeze(-1)  # [j j k]
    poses = torch.cat([pose.unsqueeze(0), pose.new_zeros(1, j, k), alone, pose - alone])
    return CapsuleDrawings(*torch.split(model.decode(poses), [1, 1, j, j]))


def _sheet(scene: SparseFigureContext, row: int, drawn: CapsuleDrawings, ranks: list[int]) -> bytes:
    """What is left as it is is gray in the last row; a pixel that leaving out makes brighter is bright there."""
    together, none, alone, without = (scene.levels(x, row) for x in drawn)
    change = (without - together)[scene.chosen]  # [j c h w]
    grid = [
        ("", pixels(torch.cat([scene.image(row), together, none]))),
        ("alone", pixels(alone[scene.chosen])),
        ("left out", pixels(without[scene.chosen])),
        ("change", pixels((1 + change) / 2)),
    ]
    notes = {
        0: ["image", "redrawn", "of none"],
        1: [f"capsule {j}\nrank {ranks[j]}" for j in scene.chosen],
        3: [f"{most:.2f}" for most in change.abs().flatten(1).amax(1).tolist()],
    }
    return image_grid(grid, _SCALE, notes)


def _ranked(scene: SparseFigureContext) -> dict[str, bytes]:
    """A curve a run."""
    figure, ax = pyplot().subplots(figsize=(5.6, 3.2))
    runs = {scene.name: scene.ranking} | {name: ranking(*one) for name, one in scene.beside.items()}
    for name, one in runs.items():
        ax.plot(ranked_support(one.support), "o-", markersize=3, linewidth=1, label=f"{name}, {len(one.ranks)} images")
    ranks = range(max(one.ranks.shape[1] for one in runs.values()))
    ax.set(xlabel="rank", ylabel="support / that of the first", ylim=(0, 1.05), xticks=ranks)
    ax.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return {"ranked": png(figure)}


def ranked_support(psi: Tensor) -> Tensor:
    """[j] the support [n j] of an image's capsules from the largest down, in units of the largest; mean over images."""
    falling = psi.sort(dim=-1, descending=True).values
    return (falling / falling[:, :1].clamp_min(torch.finfo(psi.dtype).tiny)).mean(0)


def _frequencies(scene: SparseFigureContext) -> dict[str, bytes]:
    """A curve a capsule; the band in which training keeps how often one is first is gray."""
    share = rank_frequency(scene.ranking.ranks)
    mask = scene.model.mask
    inside = int(mask.count_in_band(share[:, 0]))
    figure, ax = pyplot().subplots(figsize=(6.4, 3.4))
    colors = pyplot().get_cmap("tab20")
    ax.axhspan(mask.low, mask.high, color="0.9")
    for j in scene.chosen:
        ax.plot(share[j], "o-", markersize=2, linewidth=1, color=colors(j % 20), label=f"capsule {j}")
    ax.set(xlabel="rank", ylabel="share of images", ylim=(0, None), xticks=range(len(share)))
    said = f"{inside} of {len(share)} capsules are first in {mask.low:.3g} to {mask.high:.3g}"
    ax.set_title(f"{said} of {len(scene.data)} images", fontsize=9)
    ax.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    return {"frequencies": png(figure)}


def rank_frequency(ranks: Tensor) -> Tensor:
    """[j r] the share of the images, whose ranks are [n j], in which capsule j has rank r."""
    return one_hot(ranks, ranks.shape[1]).float().mean(0)


def _equivariances(scene: SparseFigureContext) -> dict[str, bytes]:
    """A sheet a capsule, of an image in which it is first; and one of all, each with its most visible number."""
    sheets = {}
    most = []
    notes = {0: [f"{round(move, 1) + 0.0:.1f}" for move in torch.linspace(-1, 1, STEPS).tolist()]}
    for j, row in _examples(scene).items():
        out = scene.model(scene.data.model_input(slice(row, row + 1)))
        strips = [scene.levels(strip, row) for strip in swept(scene.model, out.masked.pose[0], j)]  # k of [n c h w]
        rows = [(f"number {k}", pixels(strip)) for k, strip in enumerate(strips)]
        sheets[f"equivariances-{j}"] = image_grid(
            [("image, redrawn", _pair(scene, row, out)), *rows], 0.5, {1: notes[0]}
        )
        k = int(torch.stack(strips).var(1).flatten(1).mean(1).argmax())
        most.append((f"capsule {j}\nnumber {k}", rows[k][1]))
    return {"equivariances": image_grid(most, 0.5, notes), **sheets}


def _pair(scene: SparseFigureContext, row: int, out: SparseOutput) -> Tensor:
    """[2 h w] an image, and that redrawn from its capsules as they are."""
    return pixels(torch.cat([scene.image(row), scene.levels(scene.model.decode(out.masked.pose), row)]))


def _examples(scene: SparseFigureContext) -> dict[int, int]:
    """Capsule -> the row of an image in which it is first, picked by the seed, for the capsules that are wished."""
    first = {j: (scene.ranking.ranks[:, j] == 0).nonzero().flatten() for j in scene.chosen}
    found = {j: int(scene.pick(rows)[0]) for j, rows in first.items() if len(rows)}
    if not found:
        raise DataError(f"capsule {', '.join(map(str, first))} is first in no test image; wish for others")
    return found


def swept(model: SparseModel, pose: Tensor, j: int) -> Tensor:
    """[k n c h w] what the masked pose [j k] of an image draws when each number of capsule j is set to -1 ... 1.

    Where length is ink, the capsule keeps its length: the number turns it towards or away from an axis.
    """
    k = pose.shape[-1]
    number = torch.arange(k)
    poses = pose.repeat(k, STEPS, 1, 1)  # [k n j k]
    poses[number, :, j, number] = torch.linspace(-1, 1, STEPS).to(pose)
    if isinstance(model.decoder, FrameDecoder):
        poses[:, :, j] *= norm(pose[j]) / norm(poses[:, :, j], keepdim=True)
    return torch.unflatten(model.decode(poses.flatten(0, 1)), 0, (k, STEPS))


FIGURES: Mapping[str, Callable[[SparseFigureContext], dict[str, bytes]]] = {
    "parts": _parts,
    "ranked": _ranked,
    "frequencies": _frequencies,
    "equivariances": _equivariances,
}
