"""Uniform routing: one pass without agreement, the control that says what routing is worth.

v_j = squash(sum_i c V_ij), with the same share c of a child for every parent that can have it
"""

from __future__ import annotations

from dataclasses import dataclass

from torchcaps.kernels.votes import Votes
from torchcaps.math.squash import norm, squash
from torchcaps.routing.base import Router, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ROUTER", "Uniform", "route"]


@dataclass(frozen=True)
class Uniform:
    """Settings of uniform routing, the control that shares children equally: there are none."""


def route(votes: Votes, settings: Uniform, trace: bool) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents, each with the same share of a child.

    Args:
        votes: V_ij; the children's activations are their lengths, which the votes carry.
        settings: Of the router.
        trace: Whether to record the parents.

    Returns:
        The parents (v_j [b p j k], |v_j| [b p j]) and the record of the only iteration.
    """
    coupling = votes.uniform_log_share().exp()  # [b p i j]
    pose = squash(votes.total(coupling))
    parents = Capsules(pose, norm(pose))
    return parents, stack_info([RoutingInfo(coupling, parents=parents if trace else None)])


ROUTER = Router(Uniform, route, activation_is_length=True)
