"""Pictures of matrix capsules and their test images, drawn with matplotlib (the `plot` extra), as PNG bytes.

`picture(kind, ...)` is the front door, as in `capsnet_figures`; `torchcaps generate` draws through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.evaluate.figures import image_grid, png, pyplot, reliability_diagram
from torchcaps.models.matrix import MatrixCaps, MatrixOutput
from torchcaps.systems.capsnet.figures import maps_of
from torchcaps.systems.figure_context import FigureContext, draw_figure
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.types import Capsules

__all__ = ["FIGURES", "FROM_ALL", "histogram", "kinds_of", "picture", "reaches", "vote_distances"]

NEAR = 0.25
"""Figure 2 looks as far as this share of the votes is at first. Hinton 2018 looks up to .05, and in figure B.2 up to
60: distances in the poses of one network, which say nothing of another's."""

NEAR_BINS = 25
FAR_BINS = 120
"""Bars of the two figures."""

LEAST = 1e-3
"""The least sum of assignments that is worth a bar on a logarithmic scale."""


def picture(
    kind: str, model: MatrixCaps, wish: FigureOptions, data: Dataset, classes: Capsules | None = None
) -> dict[str, bytes]:
    """File name (without .png) -> PNG of one kind of figure.

    `classes` are the capsules of all images of the data, for the figures `FROM_ALL`; computed if they are not given.
    """
    return draw_figure(kind, FIGURES, kinds_of(data), FigureContext(model, wish, data, classes))


def kinds_of(data: Dataset) -> list[str]:
    """The figures that can be drawn of data with so many labels an image: calibration asks for a single one."""
    return [kind for kind in FIGURES if kind != "calibration" or data.labels.ndim == 1]


def _votes(scene: FigureContext[MatrixCaps]) -> dict[str, bytes]:
    """Figures 2 and B.2: two pictures an image, one of the votes that are near, one of all on a logarithmic scale.

    Votes are counted by their assignment: at first all classes get the same, at last those that found a cluster.
    """
    chosen = scene.wish.capsules or tuple(range(scene.model.spec.classes))
    distances, share = vote_distances(scene.model, scene.data.model_input(scene.rows))  # [t b i j] each
    drawn = {}
    titles = scene.names(torch.tensor(chosen))
    for n, (row, label) in enumerate(zip(scene.rows.tolist(), scene.names(scene.data.labels[scene.rows]), strict=True)):
        for reach, bins, end in zip(reaches(distances[:, n]), (NEAR_BINS, FAR_BINS), ("", "-all"), strict=True):
            bars = histogram(distances[:, n], share[:, n], reach, bins)  # [t j n]
            drawn[f"votes-{row}{end}"] = _sheet(bars[:, list(chosen)], reach, titles, label, log=end == "-all")
    return drawn


def reaches(distances: Tensor) -> tuple[float, float]:
    """Of one image's distances [t i j]: what a share of `NEAR` is below in the first iteration, and what all are."""
    far = float(distances.max())
    near = float(distances[0].flatten().quantile(NEAR))
    return max(near, 1e-6), max(far * (1 + 1e-6), 2e-6)


def vote_distances(model: MatrixCaps, images: Tensor) -> tuple[Tensor, Tensor]:
    """[t b i j] after every iteration: how far child i's vote is from the mean of class capsule j, |V_ij - mu_j|, and
    the assignment R_ij of which that mean was made."""
    out: MatrixOutput = model(images, trace=True)
    votes = model.classes.votes(out.below[-1])  # [b i j k]
    info = out.infos[-1]
    assert info.parents is not None, "a trace has the parents of every iteration"
    distances = [(votes - mean.unsqueeze(1)).norm(dim=-1) for mean in info.parents.pose]  # [b i j] each
    return torch.stack(distances), info.coupling


def histogram(distances: Tensor, weights: Tensor, reach: float, bins: int) -> Tensor:
    """[t j n] the sum of the weights [t i j] of the votes whose distance [t i j] falls into each of the bins.

    Bins are equal parts of 0 ... reach; a vote at `reach` or beyond is in none.
    """
    bin_of = (distances / reach * bins).long()  # [t i j]
    inside = torch.where(distances < reach, weights, 0.0)
    found = weights.new_zeros(*weights.transpose(1, 2).shape[:2], bins)
    return found.scatter_add(2, bin_of.clamp(0, bins - 1).transpose(1, 2), inside.transpose(1, 2))


def _sheet(bars: Tensor, reach: float, titles: list[str], label: str, *, log: bool) -> bytes:
    """Bars [t j n] as a grid: a row an iteration, a column a class capsule; all of one scale unless it is `log`."""
    t, j, n = bars.shape
    figure, axes = pyplot().subplots(
        t, j, squeeze=False, sharex=True, sharey=not log, figsize=(1.6 * j + 0.6, 1.1 * t + 0.6)
    )
    left = torch.arange(n) * (reach / n)
    for row in range(t):
        axes[row, 0].set_ylabel(f"iteration {row + 1}", fontsize=7)
        for column in range(j):
            ax = axes[row, column]
            ax.bar(left, bars[row, column], reach / n, align="edge", log=log)
            if log:
                ax.set_ylim(bottom=LEAST)
            ax.tick_params(labelsize=6)
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=8)
    axes[0, 0].set_xlim(0, reach)
    figure.supxlabel(f"an image of class {label}: distance of votes to the capsule's mean", fontsize=8)
    figure.tight_layout()
    return png(figure)


def _routing(scene: FigureContext[MatrixCaps]) -> dict[str, bytes]:
    """Where in the image the most active class capsule, and the next, get their children from, by iteration."""
    out: MatrixOutput = scene.model(scene.data.model_input(scene.rows), trace=True)
    maps, ranked = maps_of(out.classes, out.below[-1], out.infos[-1].coupling)  # [b 2 t h w], [b 2]
    grid = [("image", scene.images(scene.rows))]
    notes = {0: scene.names(scene.data.labels[scene.rows])}
    for n, word in enumerate(("most active", "second")[: ranked.shape[1]]):
        notes[len(grid)] = scene.names(ranked[:, n])
        grid += [(f"{word},\niteration {t + 1}", maps[:, n, t]) for t in range(maps.shape[2])]
    return {"routing": image_grid(grid, 0.7, notes)}


def _calibration(scene: FigureContext[MatrixCaps]) -> dict[str, bytes]:
    """How often the most active capsule is right, by its activation."""
    activation, answers = scene.classes.activation.max(-1)
    return {"calibration": reliability_diagram(activation, answers == scene.data.labels)}


FIGURES: Mapping[str, Callable[[FigureContext[MatrixCaps]], dict[str, bytes]]] = {
    "votes": _votes,
    "routing": _routing,
    "calibration": _calibration,
}

FROM_ALL = ("calibration",)
"""The figures that look at all images; the others take a few."""
