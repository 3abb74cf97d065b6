"""Attention routing in one pass (Mazzia 2021, "Efficient-CapsNet"): children attend to parents about which they agree.

    a_ij = sum_i' V_ij . V_i'j / sqrt(k) = V_ij . (sum_i' V_i'j) / sqrt(k)
    c_ij = softmax_j(a_ij) + prior_ij
    v_j = (1 - exp(-|s_j|)) s_j / |s_j|,  s_j = sum_i c_ij V_ij

The sum over the other children i' is taken first, so that no pair of children is ever formed. The prior is learned, one
number for each child and parent, and starts at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchcaps.config import PositiveFloat
from torchcaps.kernels.votes import Votes
from torchcaps.math.squash import norm, squash_exponential
from torchcaps.routing.base import Router, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ROUTER", "Attention", "route"]


@dataclass(frozen=True)
class Attention:
    """Settings of attention routing (Mazzia 2021): one pass without iterations.

    Attributes:
        sharpness: Factor of the agreement in the softmax; 1 is the paper's.
    """

    sharpness: PositiveFloat = 1.0


def route(votes: Votes, settings: Attention, trace: bool, prior: Tensor) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents by attention.

    Args:
        votes: V_ij; the children's activations are their lengths, which the votes carry.
        settings: Of the router.
        trace: Whether to record the parents.
        prior: [i j], added to the shares of all places.

    Returns:
        The parents (v_j [b p j k], |v_j| [b p j]) and the record; its coupling is the softmax, without the prior.
    """
    whole = votes.total(votes.new_pairs(1.0))  # sum_i V_ij [b p j k]
    agreement = votes.dot(whole) * (settings.sharpness / votes.dimension**0.5)  # [b p i j]
    share = votes.compete(agreement).exp()
    pose = squash_exponential(votes.total(share + prior))
    parents = Capsules(pose, norm(pose))
    return parents, stack_info([RoutingInfo(share, parents=parents if trace else None)])


ROUTER = Router(Attention, route, learned_pairs={"prior": 0.0}, activation_is_length=True)
