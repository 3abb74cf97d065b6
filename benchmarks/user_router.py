"""Dynamic routing as a user would write it on `Votes`, to compare with the fused kernel of the same algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from torchcaps.config import Count
from torchcaps.kernels.votes import Votes
from torchcaps.math.squash import norm, squash
from torchcaps.routing import Router, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ROUTER", "UserDynamic"]


@dataclass(frozen=True)
class UserDynamic:
    """Settings of the router."""

    iterations: Count = 3


def route(votes: Votes, settings: UserDynamic, trace: bool) -> tuple[Capsules, RoutingInfo]:
    """Route by agreement: b_ij += V_ij . v_j, c_ij = softmax_j(b_ij), v_j = squash(sum_i c_ij V_ij)."""
    logits = votes.new_pairs(0.0)  # b_ij [b p i j]
    infos: list[RoutingInfo] = []
    for t in range(settings.iterations):
        coupling = votes.compete(logits).exp()
        pose = squash(votes.total(coupling))  # v_j [b p j k]
        infos = [*(infos if trace else []), RoutingInfo(coupling)]
        if t + 1 < settings.iterations:
            logits = logits + votes.dot(pose)
    return Capsules(pose, norm(pose)), stack_info(infos)


ROUTER = Router(UserDynamic, route, activation_is_length=True)
