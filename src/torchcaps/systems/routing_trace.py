"""Reading the record of a routing: pure functions from a `RoutingInfo` and votes to what the explorer shows.

The batch is one image, and its axis is left out: coupling is [t i j], votes are [i j k].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.math.pose import matrix_votes, vector_votes
from torchcaps.systems.explorer_records import Histogram, RoutingReading, RoutingTrace
from torchcaps.systems.matrix.figures import histogram
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "BINS",
    "MAX_VOTES",
    "WITHIN",
    "Projection",
    "RoutedLayer",
    "compute_votes",
    "contributions",
    "distance_histogram",
    "largest",
    "principal_axes",
    "read_routing",
    "read_trace",
    "sum_over_types",
]

MAX_VOTES = 400
"""Children whose votes are returned, at most."""

BINS = 25
WITHIN = 0.9
"""Bins of a histogram of distances, and the share of all votes that it reaches."""


class RoutedLayer(NamedTuple):
    """The last routed layer of a model.

    Attributes:
        weights: [i j k d], or [i j 4 4] for matrix poses.
        places: (h, w) of the grid of children, i = (h w types).
        iterations: of its router.
        is_matrix: whether poses are 4x4 matrices.
        is_em: whether the router is EM, whose parents' poses are means of votes.
        offset: [i k] added to the votes (coordinate addition).
    """

    weights: Tensor
    places: tuple[int, int]
    iterations: int
    is_matrix: bool = False
    is_em: bool = False
    offset: Tensor | None = None

    @property
    def dimension(self) -> int:
        """K, the numbers of a parent's pose."""
        return int(self.weights.shape[2]) ** (2 if self.is_matrix else 1)


class Projection(NamedTuple):
    """A plane through points: their mean [k] and their two principal axes as columns [k 2], in float64."""

    center: Tensor
    axes: Tensor

    def apply(self, points: Tensor) -> Tensor:
        """Project points [... k] to coordinates [... 2] of the same type."""
        return ((points.double() - self.center) @ self.axes).to(points.dtype)


def read_trace(children: Capsules, info: RoutingInfo) -> RoutingTrace:
    """Take the record of one image out of a batch of one.

    Args:
        children: pose [1 i d] and activation [1 i] as they were routed.
        info: the router's record, made with `trace=True`.
    """
    assert info.parents is not None, "a record made with trace=True has the parents"
    return RoutingTrace(
        Capsules(children.pose[0], children.activation[0]),
        Capsules(info.parents.pose[:, 0], info.parents.activation[:, 0]),
        info.coupling[:, 0],
        None if info.agreement is None else info.agreement[:, 0],
        info.entropy[:, 0].mean(-1),
    )


def compute_votes(children: Capsules, layer: RoutedLayer) -> Tensor:
    """Compute the votes [i j k] of children [i d]."""
    votes = (matrix_votes if layer.is_matrix else vector_votes)(children.pose.unsqueeze(0), layer.weights)[0]
    return votes if layer.offset is None else votes + layer.offset.unsqueeze(1)


def contributions(trace: RoutingTrace, parent: int) -> Tensor:
    """Compute what each child contributes to a parent in each iteration [t i]: coupling times activation."""
    return trace.coupling[..., parent] * trace.children.activation


def read_routing(
    trace: RoutingTrace, layer: RoutedLayer, contribution: Tensor, parent: int, chosen: Sequence[int] = ()
) -> RoutingReading:
    """Summarize how one parent got its children.

    Args:
        trace: record of the routing.
        layer: where it took place.
        contribution: [t i] of each child to the parent, 0 or more.
        parent: index of the parent.
        chosen: indices of children whose votes are returned in any case.
    """
    all_votes = compute_votes(trace.children, layer)  # [i j k]
    votes = all_votes[:, parent]  # [i k]
    coupling = trace.coupling[..., parent]  # [t i]
    # Where the contributions come from, on one scale for all iterations
    maps = sum_over_types(contribution, layer.places)
    peak = float(maps.max())
    # The votes that count most at the end, in the plane in which all votes differ most
    strongest = largest(contribution[-1], MAX_VOTES)
    picked = torch.tensor(chosen, dtype=torch.int64)
    plane = principal_axes(votes)
    return RoutingReading(
        maps=maps / max(peak, 1e-12),
        peak=peak,
        activation=trace.parents.activation,
        agreement=trace.agreement,
        entropy=trace.entropy,
        coupling=coupling.mean(-1),
        votes=plane.apply(votes[strongest]),
        vote_children=strongest,
        vote_coupling=coupling[:, strongest],
        chosen_votes=plane.apply(votes[picked]),
        chosen_coupling=coupling[:, picked],
        mean=plane.apply(_weighted_mean(trace, layer, votes, parent)),
        histogram=distance_histogram(trace, all_votes, parent) if layer.is_em else None,
    )


def _weighted_mean(trace: RoutingTrace, layer: RoutedLayer, votes: Tensor, parent: int) -> Tensor:
    """Average the votes [i k] for a parent by their coupling [t k]; EM routing has that mean as the parent's pose."""
    if layer.is_em:
        return trace.parents.pose[:, parent]
    coupling = trace.coupling[..., parent]  # [t i]
    return coupling @ votes / coupling.sum(-1, keepdim=True).clamp_min(1e-30)


def distance_histogram(trace: RoutingTrace, votes: Tensor, parent: int) -> Histogram:
    """Count the votes [i j k] for a parent by their distance to its mean, which is its pose, in every iteration.

    Nine in ten of the votes for all parents, in all iterations, lie inside: all histograms of an image share one scale.
    """
    distances = (votes - trace.parents.pose.unsqueeze(1)).norm(dim=-1)  # [t i j]
    reach = max(float(distances.quantile(WITHIN)), torch.finfo(distances.dtype).tiny)
    counts = histogram(distances, trace.coupling, reach, BINS)[:, parent]
    return Histogram(torch.linspace(0, reach, BINS + 1), counts)


def sum_over_types(values: Tensor, places: tuple[int, int]) -> Tensor:
    """Sum values of the children [t (h w types)] over the types at each place [t h w]."""
    return values.reshape(len(values), *places, -1).sum(-1)


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices [m] of the `count` largest values [i], the largest first, equal ones by index."""
    return values.argsort(descending=True, stable=True)[:count]


def principal_axes(points: Tensor) -> Projection:
    """Find the plane in which points [i k] differ most.

    The axis of larger variance comes first. The entry of an axis that is largest in size is positive, so that the
    sign is a function of the points; where k is 1, the second axis is 0.
    """
    center = points.double().mean(0)
    centered = points.double() - center
    axes = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(-1)[:, :2]  # [k 2], or [1 1]
    dominant = axes.gather(0, axes.abs().argmax(0, keepdim=True))  # [1 2]
    return Projection(center, pad(axes * torch.where(dominant < 0, -1.0, 1.0), (0, 2 - axes.shape[1])))
