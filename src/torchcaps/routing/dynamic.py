"""Dynamic routing between capsules (Sabour 2017, procedure 1) and its cosine form (Hauser 2019, section 2.2).

    c_ij = softmax(b_ij)      s_j = sum_i c_ij V_ij      v_j = squash(s_j)      b_ij <- b_ij + V_ij . v_j

The softmax runs over the parents j of each child ("each child can only make so many predictions") or, as Hauser
2019 prints it, over the children i of each parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps.config import Iterations
from torchcaps.kernels.votes import Votes
from torchcaps.math.squash import norm, squash
from torchcaps.routing.base import Router, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ROUTER", "Dynamic", "State", "init", "route", "step"]


@dataclass(frozen=True)
class Dynamic:
    """Settings of dynamic routing; the defaults are Sabour 2017.

    Attributes:
        iterations: How often the coupling is used; 1 = uniform coupling.
        agreement: V . v ("dot") or the cosine of their angle ("cosine").
        over: Which side's coupling sums to 1: over "parents" for each child, over "children" for each parent.
        logits: Agreements are "accumulated" over iterations or each iteration's are "replaced".
        gradient: Through "all" iterations or only the "last" one, the coupling then counting as a constant.
    """

    iterations: Iterations = 3
    agreement: Literal["dot", "cosine"] = "dot"
    over: Literal["parents", "children"] = "parents"
    logits: Literal["accumulated", "replaced"] = "accumulated"
    gradient: Literal["all", "last"] = "all"


class State(NamedTuple):
    """What one iteration hands to the next.

    Attributes:
        logits: b_ij [b p i j].
        coupling: c_ij [b p i j].
        total: s_j [b p j k].
    """

    logits: Tensor
    coupling: Tensor
    total: Tensor


def init(votes: Votes, settings: Dynamic) -> State:
    """Take the first iteration: b = 0, so that the coupling is uniform."""
    return _gather(votes.new_pairs(0.0), votes, settings)


def step(state: State, votes: Votes, settings: Dynamic) -> State:
    """Take one more iteration: raise b where vote and parent agree, then couple and sum anew."""
    agreed = agreement(votes, state.total, settings)
    logits = agreed if settings.logits == "replaced" else state.logits + agreed
    return _gather(logits, votes, settings)


def route(votes: Votes, settings: Dynamic, trace: bool) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents by dynamic routing.

    Args:
        votes: V_ij. The children's activations are not read: they are their lengths, which the votes carry.
        settings: Of the router.
        trace: Whether to record every iteration.

    Returns:
        The parents (v_j [b p j k], |v_j| [b p j]) and the record.
    """
    constant = votes.detach() if settings.gradient == "last" else votes
    states = [init(constant, settings)]
    for _ in range(settings.iterations - 1):
        states = [*(states if trace else []), step(states[-1], constant, settings)]
    total = votes.total(states[-1].coupling) if settings.gradient == "last" else states[-1].total
    return _parents(total), stack_info([_record(s, constant, settings, trace) for s in states])


def agreement(votes: Votes, total: Tensor, settings: Dynamic) -> Tensor:
    """Return how well each vote agrees with its parent: V_ij . v_j, or their cosine.

    Args:
        votes: V_ij.
        total: s_j [b p j k], of which the parent is made.
        settings: Of the router.

    Returns:
        [b p i j].
    """
    if settings.agreement == "cosine":
        direction = total / norm(total, keepdim=True)
        return votes.dot(direction) / votes.lengths()
    return votes.dot(squash(total))


def _gather(logits: Tensor, votes: Votes, settings: Dynamic) -> State:
    """Couple by the logits b [b p i j], and sum the votes."""
    coupling = logits.softmax(-2) if settings.over == "children" else votes.compete(logits).exp()  # [b p i j]
    return State(logits, coupling, votes.total(coupling))


def _parents(total: Tensor) -> Capsules:
    """The parents v_j = squash(s_j) [b p j k] of the totals s_j [b p j k], and their lengths [b p j]."""
    pose = squash(total)
    return Capsules(pose, norm(pose))


def _record(state: State, votes: Votes, settings: Dynamic, trace: bool) -> RoutingInfo:
    """One iteration's record; the mean agreement, weighted by the coupling, costs a pass and comes with `trace`."""
    if not trace:
        return RoutingInfo(state.coupling)
    with torch.no_grad():
        agreed = agreement(votes, state.total, settings)
        mean = (state.coupling * agreed).sum(-2) / state.coupling.sum(-2).clamp_min(1e-30)  # [b p j]
        return RoutingInfo(state.coupling, mean, parents=_parents(state.total))


ROUTER = Router(Dynamic, route, activation_is_length=True)
