"""Reading the record of a routing: pure functions from a `RoutingInfo` and votes to what the explorer shows.

The batch is one image, and its axis is left out: coupling is [t i j], votes are [i j k].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.layers import DenseCapsules
from torchcaps.math.grid import Grid
from torchcaps.routing import EM, RouterSettings, iterations_of, route, router_of
from torchcaps.systems.explorer_records import Histogram, LayerSummary, RoutingReading, RoutingTrace
from torchcaps.systems.matrix.figures import histogram
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "BINS",
    "MAX_VOTES",
    "WITHIN",
    "Projection",
    "contributions",
    "describe_layer",
    "distance_histogram",
    "largest",
    "principal_axes",
    "read_routing",
    "read_trace",
    "route_again",
    "sum_over_types",
    "trace_layer",
]

MAX_VOTES = 400
"""Children whose votes are returned, at most."""

BINS = 25
WITHIN = 0.9
"""Bins of a histogram of distances, and the share of all votes that it reaches."""


class Projection(NamedTuple):
    """A plane through points: their mean [k] and their two principal axes as columns [k 2], in float64."""

    center: Tensor
    axes: Tensor

    def apply(self, points: Tensor) -> Tensor:
        """Project points [... k] to coordinates [... 2] of the same type."""
        return ((points.double() - self.center) @ self.axes).to(points.dtype)


def describe_layer(layer: DenseCapsules, grid: Grid) -> LayerSummary:
    """Describe a layer in which every child votes for every parent.

    Args:
        layer: the layer.
        grid: the grid of its children.
    """
    children, capsules, rows, _ = layer.expanded_weights().shape
    return LayerSummary(
        children,
        capsules,
        dimension=rows**2 if layer.pose == "matrix" else rows,
        places=(grid.height, grid.width),
        iterations=iterations_of(layer.routing),
        is_em=isinstance(layer.routing, EM),
    )


def trace_layer(layer: DenseCapsules, children: Capsules, info: RoutingInfo) -> RoutingTrace:
    """Read the record of one image's routing into a layer.

    Args:
        layer: the layer.
        children: pose [1 h w i d] and activation [1 h w i] of the layer below.
        info: the record that the layer returned with `trace=True`.
    """
    return read_trace(children.flat().activation[0], layer.votes(children)[0], info)


def read_trace(child_activation: Tensor, votes: Tensor, info: RoutingInfo) -> RoutingTrace:
    """Take the record of one image out of a batch of one.

    Args:
        child_activation: [i]
        votes: [i j k]
        info: a router's record, made with `trace=True`.
    """
    assert info.parents is not None, "a record made with trace=True has the parents"
    # Drop the batch axis; entropy is averaged over the children.
    return RoutingTrace(
        child_activation,
        votes,
        Capsules(info.parents.pose[:, 0], info.parents.activation[:, 0]),
        info.coupling[:, 0],
        None if info.agreement is None else info.agreement[:, 0],
        info.entropy[:, 0].mean(-1),
    )


def route_again(layer: DenseCapsules, children: Capsules, routing: RouterSettings) -> RoutingInfo:
    """Route children into a layer by another router than its own, with the same weights.

    What the other router would have learned has its initial value, so this shows how it meets votes that it was not
    trained for.

    Args:
        layer: the layer.
        children: pose [1 h w i d] and activation [1 h w i] of the layer below.
        routing: settings of the other router.

    Returns:
        The record of all iterations.
    """
    flat = layer.with_coordinates(children)
    # A router that reads lengths would not see activations that are numbers of their own
    if router_of(routing).activation_is_length and not router_of(layer.routing).activation_is_length:
        flat = Capsules(flat.pose * flat.activation.unsqueeze(-1), flat.activation)
    weights = layer.expanded_weights()
    return route(flat, weights, routing, pose=layer.pose, offset=layer.offset, trace=True)[1]


def contributions(trace: RoutingTrace, parent: int) -> Tensor:
    """Compute what each child contributes to a parent in each iteration [t i]: coupling times activation."""
    return trace.coupling[..., parent] * trace.child_activation


def read_routing(
    trace: RoutingTrace, layer: LayerSummary, contribution: Tensor, parent: int, chosen: Sequence[int] = ()
) -> RoutingReading:
    """Summarize how one parent got its children.

    Args:
        trace: record of the routing.
        layer: where it took place.
        contribution: [t i] of each child to the parent, 0 or more.
        parent: index of the parent.
        chosen: indices of children whose votes are returned in any case.
    """
    votes = trace.votes[:, parent]  # [i k]
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
        mean=plane.apply(_weighted_mean(trace, layer, parent)),
        histogram=distance_histogram(trace, parent) if layer.is_em else None,
    )


def _weighted_mean(trace: RoutingTrace, layer: LayerSummary, parent: int) -> Tensor:
    """Average the votes for a parent by their coupling [t k]; EM routing has that mean as the parent's pose."""
    if layer.is_em:
        return trace.parents.pose[:, parent]
    coupling = trace.coupling[..., parent]  # [t i]
    return coupling @ trace.votes[:, parent] / coupling.sum(-1, keepdim=True).clamp_min(1e-30)


def distance_histogram(trace: RoutingTrace, parent: int) -> Histogram:
    """Count the votes for a parent by their distance to its mean, which is its pose, in every iteration.

    Nine in ten of the votes for all parents, in all iterations, lie inside: all histograms of an image share one scale.
    """
    # One scale for all parents and iterations
    distances = (trace.votes - trace.parents.pose.unsqueeze(1)).norm(dim=-1)  # [t i j]
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
    # In float64: votes may be large and close together
    center = points.double().mean(0)
    centered = points.double() - center
    # Eigenvalues rise, so the two last columns are wanted, the last one first.
    axes = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(-1)[:, :2]  # [k 2], or [1 1]
    # An eigenvector may have either sign: take the one whose largest entry is positive.
    dominant = axes.gather(0, axes.abs().argmax(0, keepdim=True))  # [1 2]
    return Projection(center, pad(axes * torch.where(dominant < 0, -1.0, 1.0), (0, 2 - axes.shape[1])))
