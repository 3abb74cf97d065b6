"""Routing into the last layer of capsules, iteration by iteration: pure functions from children to what is shown.

The batch is one image, and its axis is left out: coupling is [t i j], votes are [i j k].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchcaps.math.pose import matrix_votes, vector_votes
from torchcaps.routing import EM, route
from torchcaps.systems.explorer_records import Histogram, RoutingReading
from torchcaps.systems.matrix.figures import histogram
from torchcaps.types import Capsules

__all__ = [
    "BINS",
    "CLOUD",
    "WITHIN",
    "RoutedLayer",
    "Trace",
    "compute_votes",
    "contributions",
    "figure_2",
    "maps_over",
    "most",
    "plane",
    "read_routing",
    "trace_routing",
]

CLOUD = 400
"""Children whose votes are shown, at most."""

BINS = 25
WITHIN = 0.9
"""Bars of a histogram of distances, and the share of all votes that it reaches."""


_AS_THEY_ARE = nn.Identity()


class RoutedLayer(NamedTuple):
    """What `route` is given beside the children.

    weights  [i j k d], or [i j 4 4] of matrix poses
    routing  the settings of its router
    how      the other keywords: pose, offset, learned scalars
    places   (h, w) at which the children stand, i = (h w types)
    norm     what the model does with the parents: Capsules -> Capsules
    """

    weights: Tensor
    routing: Any
    how: Mapping[str, Any]
    places: tuple[int, int]
    norm: nn.Module = _AS_THEY_ARE

    @property
    def matrix(self) -> bool:
        """True where poses are 4x4 matrices."""
        return bool(self.how.get("pose") == "matrix")

    @property
    def dimension(self) -> int:
        """K, the numbers of a parent's pose."""
        return int(self.weights.shape[2]) ** (2 if self.matrix else 1)


class Trace(NamedTuple):
    """Parents, pose [t j k] and activation [t j], as if routing had stopped after each iteration; and its record:
    coupling [t i j], agreement [t j], entropy [t], the mean over children in nats."""

    parents: Capsules
    coupling: Tensor
    agreement: Tensor
    entropy: Tensor


def trace_routing(children: Capsules, layer: RoutedLayer) -> Trace:
    """Route children [1 i d] so often that each iteration is the last one once."""
    found = [
        route(children, layer.weights, replace(layer.routing, iterations=n), trace=True, **layer.how)
        for n in range(1, layer.routing.iterations + 1)
    ]
    parents = Capsules(*(torch.cat(x) for x in zip(*(f[0] for f in found), strict=True)))
    info = found[-1][1]
    parents = layer.norm(parents)
    assert info.agreement is not None, "a trace has the agreement"
    return Trace(parents, info.coupling[:, 0], info.agreement[:, 0], info.entropy[:, 0].mean(-1))


def compute_votes(children: Capsules, layer: RoutedLayer) -> Tensor:
    """[i j k] the votes of children [1 i d]."""
    votes = (matrix_votes if layer.matrix else vector_votes)(children.pose, layer.weights)[0]
    offset: Tensor | None = layer.how.get("offset")
    return votes if offset is None else votes + offset.unsqueeze(1)


def contributions(children: Capsules, trace: Trace, parent: int) -> Tensor:
    """[t i] coupling times activation."""
    return trace.coupling[..., parent] * children.activation


def read_routing(
    trace: Trace, layer: RoutedLayer, votes: Tensor, sent: Tensor, parent: int, children: Sequence[int]
) -> RoutingReading:
    """The record of a parent from all votes [i j k], what each child sent to it [t i], and the chosen children."""
    distances = figure_2(trace, votes, parent) if isinstance(layer.routing, EM) else None
    mine = trace.coupling[..., parent]
    votes = votes[:, parent]  # [t i], [i k]
    maps = maps_over(layer.places, sent)
    peak = float(maps.max())
    index = most(sent[-1], CLOUD)
    picked = torch.tensor(children, dtype=torch.int64)
    center, axes = plane(votes)

    def shown(points: Tensor) -> Tensor:
        return ((points.double() - center) @ axes).to(points.dtype)

    return RoutingReading(
        maps / max(peak, 1e-12),
        peak,
        trace.parents.activation,
        trace.agreement,
        trace.entropy,
        mine.mean(-1),
        shown(votes[index]),
        index,
        mine[:, index],
        shown(votes[picked]),
        mine[:, picked],
        shown(_converged(trace, layer, votes, parent)),
        distances,
    )


def _converged(trace: Trace, layer: RoutedLayer, votes: Tensor, parent: int) -> Tensor:
    """[t k] the mean of the votes [i k] weighted by the coupling; of EM routing, the parent's own mean."""
    if isinstance(layer.routing, EM):
        return trace.parents.pose[:, parent]
    mine = trace.coupling[..., parent]  # [t i]
    return mine @ votes / mine.sum(-1, keepdim=True).clamp_min(1e-30)


def figure_2(trace: Trace, votes: Tensor, parent: int) -> Histogram:
    """The votes [i j k] for a parent by their distance to its mean, which is its pose, in every iteration.

    Of the votes for all parents, in all iterations, nine in ten lie inside: the histograms of an image have one scale.
    """
    distances = (votes - trace.parents.pose.unsqueeze(1)).norm(dim=-1)  # [t i j]
    reach = max(float(distances.quantile(WITHIN)), torch.finfo(distances.dtype).tiny)
    counts = histogram(distances, trace.coupling, reach, BINS)[:, parent]
    return Histogram(torch.linspace(0, reach, BINS + 1), counts)


def maps_over(places: tuple[int, int], sent: Tensor) -> Tensor:
    """[t h w] numbers of the children [t (h w types)], summed over the types at a place."""
    return sent.reshape(len(sent), *places, -1).sum(-1)


def most(values: Tensor, count: int) -> Tensor:
    """[m] where the largest values [i] are, the largest first, equal ones by index; `count` at most."""
    return values.argsort(descending=True, stable=True)[:count]


def plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """The mean [k] of points [i k] and their two principal axes as columns [k 2], the wider first, in float64.

    The largest number of an axis, in size, is positive; a second axis that there is not is 0.
    """
    center = points.double().mean(0)
    away = points.double() - center
    axes = torch.linalg.eigh(away.T @ away).eigenvectors.flip(-1)[:, :2]  # [k 2], or [1 1]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))  # [1 2]
    return center, pad(axes * torch.where(largest < 0, -1.0, 1.0), (0, 2 - axes.shape[1]))
