"""Routing without votes: from children and weights straight to parents, where a kernel does the same for less."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from torchcaps.kernels.dynamic import dynamic_routing
from torchcaps.kernels.em import em_routing
from torchcaps.kernels.threads import kernels_enabled
from torchcaps.math.grid import Grid, Window
from torchcaps.math.squash import norm, squash
from torchcaps.routing.base import RouterSettings
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["FEWEST", "WORTH", "route_without_votes"]

WORTH = 2**10
"""So many votes and more, a kernel is faster than the plain path (benchmarks/crossover.py)."""
FEWEST = 4
"""Dynamic routing takes a vector of samples at a time: for fewer than so many, most of it would be idle."""


def route_without_votes(
    children: Capsules,
    weights: Tensor,
    settings: RouterSettings,
    pose: str,
    window: Window | None,
    offset: Tensor | None,
    learned: dict[str, Tensor],
) -> tuple[Capsules, RoutingInfo] | None:
    """Parents and the last iteration's coupling, shaped as `route` returns them; None where the votes are needed.

    There are kernels for vector poses with dynamic routing at one place, and for matrix poses with EM routing whose
    switches go by cost. They have first derivatives only.
    """
    if (
        not kernels_enabled()
        or weights.dtype not in (torch.float32, torch.float64)
        or _votes(children, weights, window) < WORTH
    ):
        return None
    if isinstance(settings, Dynamic) and pose == "vector" and window is None and offset is None:
        if len(children.pose) < FEWEST:
            return None
        return _dynamic(children, weights, settings)
    if isinstance(settings, EM) and pose == "matrix" and (offset is None or not offset.requires_grad):
        if settings.switch != "cost":
            return None
        return _em(children, weights, settings, window, offset, learned)
    return None


def _votes(children: Capsules, weights: Tensor, window: Window | None) -> int:
    """How many votes there are: samples, times window positions, times children, times parents."""
    return len(children.pose) * (1 if window is None else window.out.places) * weights.shape[0] * weights.shape[1]


def _dynamic(children: Capsules, W: Tensor, settings: Dynamic) -> tuple[Capsules, RoutingInfo]:
    total, coupling = dynamic_routing(children.pose, W, **asdict(settings))
    parent = squash(total)  # [b j k]
    return Capsules(parent, norm(parent)), RoutingInfo(coupling.unsqueeze(0))


def _em(
    children: Capsules,
    W: Tensor,
    settings: EM,
    window: Window | None,
    offset: Tensor | None,
    learned: dict[str, Tensor],
) -> tuple[Capsules, RoutingInfo]:
    """A layer without places stands at a single one, which a single position sees."""
    if window is None:
        one = Capsules(children.pose[:, None, None], children.activation[:, None, None])
        parents, info = _em(one, W, settings, Grid(1, 1).window(1, 1), offset, learned)
        return Capsules(parents.pose[:, 0, 0], parents.activation[:, 0, 0]), info
    mean, logit, R = em_routing(
        children.pose.flatten(1, 2),
        children.activation.flatten(1, 2),
        W,
        offset,
        learned["beta_a"],
        learned["beta_u"],
        window.covered(W.device),
        **{name: value for name, value in asdict(settings).items() if name != "switch"},
    )
    out = (window.out.height, window.out.width)
    info = RoutingInfo(R.flatten(0, 1).unsqueeze(0))  # [1 (b p) (n i) j]
    return Capsules(torch.unflatten(mean, 1, out), torch.unflatten(logit, 1, out).sigmoid()), info
