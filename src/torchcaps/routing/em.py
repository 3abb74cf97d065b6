"""EM routing (Hinton 2018, procedure 1): parents are Gaussians over votes, each with a switch.

The procedure's letters: R_ij assignment, a_i activation of child i, mu_j and sigma_j the Gaussian of parent j, a_j
its activation, beta_u the cost of describing a vote without it, beta_a of switching it on, lambda an inverse
temperature that rises over the iterations. Everything is kept as a logarithm; the only exponentials are softmax
weights and masses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcaps.config import Iterations, PositiveFloat, Range, Share
from torchcaps.math.gaussian import LOG_2PI, diagonal_log_density, weighted_mean, weighted_variance
from torchcaps.math.logspace import log_floor
from torchcaps.routing.base import Compete, Router, places_of, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "EM",
    "ROUTER",
    "Problem",
    "State",
    "e_step",
    "energy",
    "free_energy",
    "init",
    "inverse_temperature",
    "m_step",
    "route",
    "step",
]


@dataclass(frozen=True)
class EM:
    """Settings of EM routing.

    Attributes:
        iterations: M-steps.
        final_inverse_temperature: lambda_t = final (1 - decay^(t+1)) for iteration t = 0, 1 ...
        decay: Of that schedule.
        min_variance: Added to every variance; the paper has none, and a lone vote would have infinite density.
        damping: mu <- (1 - damping) mean + damping * previous mu (the authors' code: .1, with mu = 0 at first).
        assignment: R_ij proportional to a_j N_ij ("paper") or to what minimizes the free energy ("descent").
        competition: A child is shared among parent types and positions ("all", the paper) or, type by type, among
            "positions" only (the default of the authors' code).
        switch: a_j is the logistic of what parent j saves ("cost", eq. 2) or its "mixing" proportion (section 5): the
            activation assigned to it, as a share of that of all parents of the layer; it learns nothing.
    """

    iterations: Iterations = 3
    final_inverse_temperature: PositiveFloat = 0.01
    decay: Annotated[float, Range(0, 0.999)] = 0.95  # 1 would leave lambda at 0
    min_variance: Annotated[float, Range(1e-9)] = 5e-4
    damping: Share = 0.0
    assignment: Literal["paper", "descent"] = "paper"
    competition: Literal["all", "positions"] = "all"
    switch: Literal["cost", "mixing"] = "cost"


class Problem(NamedTuple):
    """What routing is given and never changes.

    Attributes:
        votes: V [b i j k].
        activation: a_i [b i].
        beta_a: [j], cost of a parent that is off.
        beta_u: [j], cost of a vote that no parent describes.
        settings: Of the router.
        compete: Who shares a child.
    """

    votes: Tensor
    activation: Tensor
    beta_a: Tensor
    beta_u: Tensor
    settings: EM
    compete: Compete

    def share(self, logits: Tensor) -> Tensor:
        """log R_ij [b i j]: log-softmax over the parents that compete for child i."""
        return self.compete(logits, across_parents=self.settings.competition == "all")


class State(NamedTuple):
    """Gaussians and activations after an M-step, and the assignment it used.

    Attributes:
        log_share: log R_ij [b i j].
        mean: mu [b j k].
        variance: sigma^2 [b j k].
        logit: Of a_j [b j].
    """

    log_share: Tensor
    mean: Tensor
    variance: Tensor
    logit: Tensor


def inverse_temperature(settings: EM, t: int) -> float:
    """Return lambda of iteration t, from 0."""
    return settings.final_inverse_temperature * (1 - settings.decay ** (t + 1))


def init(problem: Problem) -> State:
    """Take the first iteration: every parent that can have a child gets an equal share of it."""
    equal = torch.zeros_like(problem.votes[..., 0])  # [b i j]
    origin = torch.zeros_like(problem.votes[:, 0])  # [b j k], mu_0 of the damping
    return m_step(problem, problem.share(equal), origin, inverse_temperature(problem.settings, 0))


def step(problem: Problem, state: State, t: int) -> State:
    """Take iteration t: reassign the children (E-step), refit the parents (M-step)."""
    return m_step(problem, e_step(problem, state), state.mean, inverse_temperature(problem.settings, t))


def m_step(problem: Problem, log_share: Tensor, previous: Tensor, lam: float) -> State:
    """M-STEP: fit mu and sigma to the votes weighted by R_ij a_i, then the activation.

        a_j = logistic(lambda (beta_a - sum_h (beta_u + log sigma_h) sum_i R_ij a_i)), or its mixing proportion

    Args:
        problem: What is given.
        log_share: log R_ij [b i j].
        previous: mu [b j k] of the iteration before, for the damping.
        lam: lambda.
    """
    share = _weights(problem, log_share)  # line 2
    mean = weighted_mean(problem.votes, share)  # line 3
    mean = mean + problem.settings.damping * (previous - mean)
    variance = weighted_variance(problem.votes, share, mean) + problem.settings.min_variance  # line 4
    if problem.settings.switch == "mixing":
        return State(log_share, mean, variance, _proportion(problem, log_share))
    mass = _assigned(problem, log_share).sum(1)  # [b j]
    cost = (problem.beta_u.unsqueeze(-1) + 0.5 * variance.log()).sum(-1) * mass  # line 5, summed over h
    return State(log_share, mean, variance, lam * (problem.beta_a - cost))  # line 6, before the logistic


def _assigned(problem: Problem, log_share: Tensor) -> Tensor:
    """R_ij a_i [b i j]."""
    return (log_share + log_floor(problem.activation).unsqueeze(-1)).exp()


def _proportion(problem: Problem, log_share: Tensor) -> Tensor:
    """The logit [b j] of a_j = sum_i R_ij a_i / sum_j sum_i R_ij a_i, where j runs over the parents of all places.

    Activations count relative to the largest of an image, as in `_weights`.
    """
    p = places_of(problem.compete)
    log_i = log_floor(problem.activation)  # [(b p) i]
    relative = log_i.reshape(-1, p * log_i.shape[1])  # [b (p i)]
    relative = (relative - relative.detach().amax(1, keepdim=True)).view_as(log_i)
    mass = (log_share + relative.unsqueeze(-1)).logsumexp(1).view(-1, p * log_share.shape[-1])  # [b (p j)], a logarithm
    log_a = (mass - mass.logsumexp(1, keepdim=True)).view(len(log_share), -1)  # [(b p) j]
    return log_a - log_floor(-log_a.expm1())


def _weights(problem: Problem, log_share: Tensor) -> Tensor:
    """R_ij a_i / sum_i R_ij a_i [b i j], by a softmax over i.

    Activations count relative to the largest of them, so that children which are all off still have a mean.
    """
    log_a = log_floor(problem.activation)
    relative = log_a - log_a.detach().amax(1, keepdim=True)  # [b i]
    return (log_share + relative.unsqueeze(-1)).softmax(1)


def e_step(problem: Problem, state: State) -> Tensor:
    """E-STEP: log R_ij [b i j], with R_ij proportional to a_j N(V_ij; mu_j, sigma_j^2).

    The paper says that all its steps lower one free energy. This one does not: `free_energy` is least, over R, at
    R_ij proportional to exp(-a_j energy_ij), which is what `assignment="descent"` computes. With it no step can
    raise the free energy; with the paper's, some do.
    """
    if problem.settings.assignment == "descent":
        return problem.share(-state.logit.sigmoid().unsqueeze(1) * energy(problem, state))
    log_p = diagonal_log_density(problem.votes, state.mean, state.variance)  # line 2
    return problem.share(logsigmoid(state.logit).unsqueeze(1) + log_p)  # line 3


def energy(problem: Problem, state: State) -> Tensor:
    """[b i j] cost of describing vote V_ij by parent j:

        sum_h ((V - mu)^2 + m) / (2 sigma^2) + log sigma + beta_u - 1/2

    With m = min_variance its weighted sum over i is the M-step's cost exactly, since sigma^2 = mean square + m.
    """
    log_p = diagonal_log_density(problem.votes, state.mean, state.variance)
    floor = 0.5 * problem.settings.min_variance * state.variance.reciprocal().sum(-1)  # [b j]
    each = problem.beta_u - 0.5 * (1 + LOG_2PI)  # [j], what separates the cost from a log density, per dimension h
    return (floor + problem.votes.shape[-1] * each).unsqueeze(1) - log_p


def free_energy(problem: Problem, state: State, lam: float) -> Tensor:
    """Eq. (4) [b], with the two factors its text asks for and its print lacks: the cost of parent j counts a_j times
    (appendix A.3), and the entropy of the switches is at the temperature 1 / lambda at which they are set:

        sum_j a_j (cost_j - beta_a) - H(a_j) / lambda  +  sum_ij a_i R_ij log R_ij
    """
    weight = _assigned(problem, state.log_share)  # [b i j]
    on = state.logit.sigmoid()  # [b j]
    cost = (weight * energy(problem, state)).sum(1)
    switch = on * logsigmoid(state.logit) + (1 - on) * logsigmoid(-state.logit)  # -H(a_j)
    choice = (weight * state.log_share).sum((1, 2))
    return (on * (cost - problem.beta_a) + switch / lam).sum(-1) + choice


def route(
    votes: Tensor, activation: Tensor, settings: EM, compete: Compete, trace: bool, beta_a: Tensor, beta_u: Tensor
) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents by EM routing.

    Args:
        votes: V [b i j k].
        activation: a_i [b i] in [0, 1].
        settings: Of the router.
        compete: Who shares a child.
        trace: Whether to record every iteration.
        beta_a: [j].
        beta_u: [j].

    Returns:
        The parents (mu_j [b j k], a_j [b j]) and the record.
    """
    problem = Problem(votes, activation, beta_a, beta_u, settings, compete)
    states = [init(problem)]
    for t in range(1, settings.iterations):
        states = [*(states if trace else []), step(problem, states[-1], t)]
    infos = [_record(problem, s, t) if trace else RoutingInfo(s.log_share.exp()) for t, s in enumerate(states)]
    return _parents(states[-1]), stack_info(infos)


def _parents(state: State) -> Capsules:
    """The parents (mu_j [b j k], a_j [b j]) of a state."""
    return Capsules(state.mean, state.logit.sigmoid())


@torch.no_grad()
def _record(problem: Problem, state: State, t: int) -> RoutingInfo:
    """One iteration's record: assignment, mean log density of the votes a parent holds, free energy, parents."""
    share = _weights(problem, state.log_share)  # [b i j]
    agreement = (share * diagonal_log_density(problem.votes, state.mean, state.variance)).sum(1)  # [b j]
    if problem.settings.switch == "mixing":
        return RoutingInfo(state.log_share.exp(), agreement, parents=_parents(state))
    free = free_energy(problem, state, inverse_temperature(problem.settings, t))
    return RoutingInfo(state.log_share.exp(), agreement, free, _parents(state))


ROUTER = Router(EM, route, learned={"beta_a": 0.0, "beta_u": 0.0})
