"""The one place that chooses how a layer is routed: by a fused kernel, or by its router on one kind of votes.

    a fused kernel    dynamic routing of vectors at one place, EM of 4x4 poses: the CPU, float32 and float64
    CompiledVotes     every other router: the CPU, float32 and float64
    ChunkedVotes      every router on other devices
    DenseVotes        few votes, other types, offsets that learn, and wherever TORCHCAPS_KERNELS=plain

All but the last have first derivatives only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.kernels.dynamic import dynamic_routing
from torchcaps.kernels.em import em_routing
from torchcaps.kernels.threads import kernels_enabled
from torchcaps.kernels.votes import ChunkedVotes, CompiledVotes, DenseVotes, Slots, Votes, VotesInput
from torchcaps.math.grid import Grid, Window
from torchcaps.math.squash import norm, squash
from torchcaps.routing.base import Router, RouterSettings, run_router
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["FEWEST", "WORTH", "RoutedLayer", "make_votes", "route_layer"]

WORTH = 2**10
"""So many votes and more, a kernel is faster than the plain path (benchmarks/crossover.py)."""
FEWEST = 4
"""Loops take a vector of samples at a time: for fewer than so many, most of it would be idle."""


class RoutedLayer(NamedTuple):
    """Children and weights of one call of `route`, checked.

    Attributes:
        children: Pose [b i d] and activation [b i]; with a window [b h w i d] and [b h w i].
        weights: [i j k d], or [i j 4 4] of matrix poses.
        matrix: True for 4x4 poses.
        window: The positions at which parents stand, or None.
        offset: [i k] or None.
    """

    children: Capsules
    weights: Tensor
    matrix: bool
    window: Window | None
    offset: Tensor | None

    @property
    def votes(self) -> int:
        """How many votes there are: samples, times window positions, times children, times parents."""
        places = 1 if self.window is None else self.window.out.places
        return self.children.pose.shape[0] * places * self.weights.shape[0] * self.weights.shape[1]

    @property
    def wants_kernel(self) -> bool:
        """Whether fast paths are switched on, and worth it."""
        return kernels_enabled() and self.votes >= WORTH

    @property
    def has_loops(self) -> bool:
        """Whether there are compiled loops for the device and type, and for what wants a gradient."""
        known = self.weights.device.type == "cpu" and self.weights.dtype in (torch.float32, torch.float64)
        return known and not self.offset_learns

    @property
    def offset_learns(self) -> bool:
        """Whether the offset wants a gradient, which only stored votes have."""
        return self.offset is not None and self.offset.requires_grad


def route_layer(
    layer: RoutedLayer, router: Router, settings: RouterSettings, learned: Mapping[str, Tensor], *, trace: bool
) -> tuple[Capsules, RoutingInfo]:
    """Route a layer the fastest way there is; with `trace`, by the router itself.

    Returns:
        parents: Pose [b j k] and activation [b j]; with a window [b h w j k] and [b h w j].
        info: The record; with a window its batch axis is (b h w).
    """
    found = None if trace else _route_fused(layer, settings, learned)
    if found is not None:
        return found
    parents, info = run_router(router, make_votes(layer), settings, learned, trace=trace)
    if layer.window is None:
        return Capsules(parents.pose.squeeze(1), parents.activation.squeeze(1)), info
    return _at_places(parents, layer.window), info


def make_votes(layer: RoutedLayer) -> Votes:
    """Return the votes of a layer as an object, of the kind that is fastest for it."""
    # Children of all places in one row
    pose = layer.children.pose  # [b (h w) i d]
    device = pose.device
    if layer.window is None:
        slots = Slots.at_one_place(pose.shape[1], device)
    else:
        slots = Slots.of_window(layer.window, pose.shape[3], device)
    flat = layer.children.flat()
    given = VotesInput(flat.pose, flat.activation, layer.weights, slots=slots, matrix=layer.matrix, offset=layer.offset)
    # Stored where that is faster, or where no other kind has the gradient
    if layer.wants_kernel and layer.has_loops and len(pose) >= FEWEST:
        return CompiledVotes(given)
    if layer.wants_kernel and device.type != "cpu" and not layer.offset_learns:
        return ChunkedVotes(given)
    return DenseVotes.cast(given)


def _route_fused(
    layer: RoutedLayer, settings: RouterSettings, learned: Mapping[str, Tensor]
) -> tuple[Capsules, RoutingInfo] | None:
    """Parents and the last iteration's coupling, shaped as `route_layer` returns them; None if there is no kernel."""
    if not layer.wants_kernel or layer.weights.dtype not in (torch.float32, torch.float64):
        return None
    if isinstance(settings, Dynamic) and not layer.matrix and layer.window is None and layer.offset is None:
        if len(layer.children.pose) < FEWEST:
            return None
        return _fused_dynamic(layer, settings)
    if isinstance(settings, EM) and layer.matrix and settings.switch == "cost" and not layer.offset_learns:
        return _fused_em(layer, settings, learned)
    return None


def _fused_dynamic(layer: RoutedLayer, settings: Dynamic) -> tuple[Capsules, RoutingInfo]:
    total, coupling = dynamic_routing(layer.children.pose, layer.weights, **vars(settings))
    parent = squash(total)  # [b j k]
    return Capsules(parent, norm(parent)), RoutingInfo(coupling.unsqueeze(0))


def _fused_em(layer: RoutedLayer, settings: EM, learned: Mapping[str, Tensor]) -> tuple[Capsules, RoutingInfo]:
    # A layer without places stands at a single one, which a single position sees.
    children = layer.children
    window = layer.window or Grid(1, 1).window(1, 1)
    if layer.window is None:
        children = Capsules(children.pose[:, None, None], children.activation[:, None, None])
    mean, logit, R = em_routing(
        children.pose.flatten(1, 2),
        children.activation.flatten(1, 2),
        layer.weights,
        layer.offset,
        learned["beta_a"],
        learned["beta_u"],
        window.covered(layer.weights.device),
        **{name: value for name, value in vars(settings).items() if name != "switch"},
    )
    info = RoutingInfo(R.flatten(0, 1).unsqueeze(0))  # [1 (b p) (n i) j]
    parents = Capsules(mean, logit.sigmoid())  # [b p j 16]
    if layer.window is None:
        return Capsules(parents.pose.squeeze(1), parents.activation.squeeze(1)), info
    return _at_places(parents, window), info


def _at_places(parents: Capsules, window: Window) -> Capsules:
    """[b p j k] -> [b h w j k]."""
    places = (window.out.height, window.out.width)
    return Capsules(torch.unflatten(parents.pose, 1, places), torch.unflatten(parents.activation, 1, places))
