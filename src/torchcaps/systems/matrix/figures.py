"""Figures of matrix capsules and their test images, drawn with matplotlib (the `plot` extra), as PNG bytes.

The `draw_...` functions belong to the figures that `MatrixSystem` lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.evaluate.figures import image_grid, png, pyplot, reliability_diagram
from torchcaps.models.matrix import MatrixCaps, MatrixOutput
from torchcaps.systems.capsnet.figures import maps_of
from torchcaps.systems.figure_context import ClassFigureContext

__all__ = [
    "MatrixFigureContext",
    "VoteDistances",
    "draw_calibration",
    "draw_routing",
    "draw_votes",
    "histogram",
    "reaches",
    "vote_distances",
]

NEAR = 0.25
"""Share of the votes that figure 2 shows in the first iteration, the nearest ones. Hinton 2018 shows distances up to
.05, and in figure B.2 up to 60: those are in units of one network's poses and say nothing about another's."""

NEAR_BINS = 25
FAR_BINS = 120
"""Bars of the two figures."""

LEAST = 1e-3
"""The least sum of assignments that is worth a bar on a logarithmic scale."""


@dataclass(frozen=True)
class MatrixFigureContext(ClassFigureContext[MatrixCaps]):
    """What the figures of matrix capsules are drawn from."""

    @cached_property
    def traced(self) -> MatrixOutput:
        """The network's output for the picked test images, with the record of every iteration of routing."""
        output: MatrixOutput = self.model(self.data.model_input(self.rows), trace=True)
        return output


def draw_votes(context: MatrixFigureContext) -> dict[str, bytes]:
    """Figures 2 and B.2: two pictures an image, one of the votes that are near, one of all on a logarithmic scale.

    Votes are counted by their assignment: at first all classes get the same, at last those that found a cluster.
    """
    chosen = context.options.capsules or tuple(range(context.model.spec.classes))
    distances, share = vote_distances(context.model, context.traced)  # [t b i j] each
    drawn = {}
    titles = context.names(torch.tensor(chosen))
    rows = context.rows
    labels = context.names(context.data.labels[rows])
    # Two histograms an image: near votes on a linear scale, all of them on a logarithmic one.
    for n, (row, label) in enumerate(zip(rows.tolist(), labels, strict=True)):
        for reach, bins, end in zip(reaches(distances[:, n]), (NEAR_BINS, FAR_BINS), ("", "-all"), strict=True):
            bars = histogram(distances[:, n], share[:, n], reach, bins)  # [t j n]
            drawn[f"votes-{row}{end}"] = _sheet(bars[:, list(chosen)], reach, titles, label, log=end == "-all")
    return drawn


def reaches(distances: Tensor) -> tuple[float, float]:
    """Of one image's distances [t i j]: what a share of `NEAR` is below in the first iteration, and what all are."""
    far = float(distances.max())
    near = float(distances[0].flatten().quantile(NEAR))
    # Never 0, even if all votes agree; the farthest vote is inside, since bins leave out their upper end.
    return max(near, 1e-6), max(far * (1 + 1e-6), 2e-6)


class VoteDistances(NamedTuple):
    """How far votes are from what they vote for, after every iteration of routing.

    Attributes:
        distances: [t b i j], |V_ij - mu_j|, from child i's vote to the mean of class capsule j.
        assignment: [t b i j], the R_ij of which that mean was made.
    """

    distances: Tensor
    assignment: Tensor


def vote_distances(model: MatrixCaps, output: MatrixOutput) -> VoteDistances:
    """Measure the distance of every vote for a class capsule from the capsule's mean.

    Args:
        model: The network.
        output: What it returned for images [b c h w] with `trace=True`.
    """
    info = output.infos[-1]
    assert info.parents is not None, "a trace records the parents"
    votes = model.classes.votes(output.below[-1])  # [b i j k]
    # Iteration by iteration: differences [t b i j k] of all at once may not fit into memory.
    distances = [(votes - mean.unsqueeze(1)).norm(dim=-1) for mean in info.parents.pose]  # [b i j] each
    return VoteDistances(torch.stack(distances), info.coupling)


def histogram(distances: Tensor, weights: Tensor, reach: float, bins: int) -> Tensor:
    """[t j n] the sum of the weights [t i j] of the votes whose distance [t i j] falls into each of the bins.

    Bins are equal parts of 0 ... reach; a vote at `reach` or beyond is in none.
    """
    bin_of = (distances / reach * bins).long()  # [t i j]
    inside = torch.where(distances < reach, weights, 0.0)
    # Votes beyond the reach go into the last bin with weight 0.
    found = weights.new_zeros(*weights.transpose(1, 2).shape[:2], bins)
    return found.scatter_add(2, bin_of.clamp(0, bins - 1).transpose(1, 2), inside.transpose(1, 2))


def _sheet(bars: Tensor, reach: float, titles: list[str], label: str, *, log: bool) -> bytes:
    """Bars [t j n] as a grid: a row an iteration, a column a class capsule; all of one scale unless it is `log`."""
    t, j, n = bars.shape
    figure, axes = pyplot().subplots(
        t, j, squeeze=False, sharex=True, sharey=not log, figsize=(1.6 * j + 0.6, 1.1 * t + 0.6)
    )
    # A row for each iteration, a column for each class.
    edges = torch.linspace(0, reach, n + 1).numpy()
    for row in range(t):
        axes[row, 0].set_ylabel(f"iteration {row + 1}", fontsize=7)
        for column in range(j):
            ax = axes[row, column]
            # One outline a histogram: a patch for every bar takes matplotlib ten times as long.
            ax.stairs(bars[row, column].numpy(), edges, baseline=LEAST if log else 0.0, fill=True)
            # A logarithmic axis needs a lower end above 0; panels this small have no room for ticks within decades.
            if log:
                ax.set_yscale("log", nonpositive="clip")
                ax.minorticks_off()
                ax.set_ylim(bottom=LEAST)
            ax.tick_params(labelsize=6)
    # Titles and labels once for the whole grid.
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=8)
    axes[0, 0].set_xlim(0, reach)
    figure.supxlabel(f"an image of class {label}: distance of votes to the capsule's mean", fontsize=8)
    figure.tight_layout()
    return png(figure)


def draw_routing(context: MatrixFigureContext) -> dict[str, bytes]:
    """Where in the image the most active class capsule, and the next, get their children from, by iteration."""
    out = context.traced
    maps, ranked = maps_of(out.classes, out.below[-1], out.infos[-1].coupling)  # [b 2 t h w], [b 2]
    grid = [("image", context.images(context.rows))]
    notes = {0: context.names(context.data.labels[context.rows])}
    # Below the images, the maps of each capsule, a row for each iteration.
    for n, word in enumerate(("most active", "second")[: ranked.shape[1]]):
        notes[len(grid)] = context.names(ranked[:, n])
        grid += [(f"{word},\niteration {t + 1}", maps[:, n, t]) for t in range(maps.shape[2])]
    return {"routing": image_grid(grid, 0.7, notes)}


def draw_calibration(context: MatrixFigureContext) -> dict[str, bytes]:
    """How often the most active capsule is right, by its activation."""
    activation, answers = context.classes.activation.max(-1)
    return {"calibration": reliability_diagram(activation, answers == context.data.labels)}
