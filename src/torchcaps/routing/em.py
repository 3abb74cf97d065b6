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
from torchcaps.kernels.votes import Votes
from torchcaps.math.gaussian import LOG_2PI
from torchcaps.math.logspace import log_floor
from torchcaps.routing.base import Router, stack_info
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
    """Settings of EM routing (Hinton 2018): a Gaussian for each parent is fitted to the votes.

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
        votes: V_ij, with the children's activations a_i.
        beta_a: [j], cost of a parent that is off.
        beta_u: [j], cost of a vote that no parent describes.
        settings: Of the router.
    """

    votes: Votes
    beta_a: Tensor
    beta_u: Tensor
    settings: EM

    @property
    def across_parents(self) -> bool:
        """Whether parent types compete for a child, or only the positions of one type."""
        return self.settings.competition == "all"


class State(NamedTuple):
    """Gaussians and activations after an M-step, and the assignment it used.

    Attributes:
        log_share: log R_ij [b p i j].
        mean: mu [b p j k].
        variance: sigma^2 [b p j k].
        logit: Of a_j [b p j].
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
    equal = problem.votes.uniform_log_share(across_parents=problem.across_parents)
    return m_step(problem, equal, 0.0, inverse_temperature(problem.settings, 0))


def step(problem: Problem, state: State, t: int) -> State:
    """Take iteration t: reassign the children (E-step), refit the parents (M-step)."""
    return m_step(problem, e_step(problem, state), state.mean, inverse_temperature(problem.settings, t))


def m_step(problem: Problem, log_share: Tensor, previous: Tensor | float, lam: float) -> State:
    """M-STEP: fit mu and sigma to the votes weighted by R_ij a_i, then the activation.

        a_j = logistic(lambda (beta_a - sum_h (beta_u + log sigma_h) sum_i R_ij a_i)), or its mixing proportion

    Args:
        problem: What is given.
        log_share: log R_ij [b p i j].
        previous: mu [b p j k] of the iteration before, for the damping; at first the origin.
        lam: lambda.
    """
    moments = problem.votes.moments(log_share)  # lines 2 to 4
    mean = moments.mean
    variance = moments.variance + problem.settings.min_variance
    if problem.settings.damping > 0:
        # About the damped mean: the variance about the votes' own mean, and the square of the step between the two.
        step = problem.settings.damping * (previous - mean)
        mean = mean + step
        variance = variance + step.square()
    if problem.settings.switch == "mixing":
        return State(log_share, mean, variance, _proportion(moments.log_mass))
    mass = (moments.log_mass + problem.votes.log_scale).exp()  # [b p j]
    cost = (problem.votes.dimension * problem.beta_u + 0.5 * variance.log().sum(-1)) * mass  # line 5, summed over h
    return State(log_share, mean, variance, lam * (problem.beta_a - cost))  # line 6, before the logistic


def _proportion(log_mass: Tensor) -> Tensor:
    """The logit [b p j] of a_j = sum_i R_ij a_i / sum_j sum_i R_ij a_i, where j runs over the parents of all places.

    Args:
        log_mass: log sum_i R_ij a_i [b p j], up to a constant of each sample.
    """
    log_a = log_mass - log_mass.logsumexp((-2, -1), keepdim=True)
    return log_a - log_floor(-log_a.expm1())


def e_step(problem: Problem, state: State) -> Tensor:
    """E-STEP: log R_ij [b p i j], with R_ij proportional to a_j N(V_ij; mu_j, sigma_j^2).

    The paper says that all its steps lower one free energy. This one does not: `free_energy` is least, over R, at
    R_ij proportional to exp(-a_j energy_ij), which is what `assignment="descent"` computes. With it no step can
    raise the free energy; with the paper's, some do.
    """
    if problem.settings.assignment == "descent":
        logits = _log_descent(problem, state, logsigmoid(state.logit))
    else:
        logits = _log_density(problem, state, logsigmoid(state.logit))  # lines 2 and 3
    return problem.votes.compete(logits, across_parents=problem.across_parents)


def _log_density(problem: Problem, state: State, bias: Tensor | float = 0.0) -> Tensor:
    """bias_j + log N(V_ij; mu_j, sigma_j^2) [b p i j], for a bias [b p j]."""
    log_volume = state.variance.log().sum(-1) + problem.votes.dimension * LOG_2PI
    return problem.votes.log_likelihood(state.mean, state.variance.rsqrt(), bias - 0.5 * log_volume)


def energy(problem: Problem, state: State) -> Tensor:
    """[b p i j] cost of describing vote V_ij by parent j:

        sum_h ((V - mu)^2 + m) / (2 sigma^2) + log sigma + beta_u - 1/2

    With m = min_variance its weighted sum over i is the M-step's cost exactly, since sigma^2 = mean square + m.
    """
    return -_log_descent(problem, state, torch.zeros_like(state.logit))


def _log_descent(problem: Problem, state: State, log_factor: Tensor) -> Tensor:
    """-exp(log_factor_j) energy_ij [b p i j], for the logarithm of a factor [b p j]."""
    scale = state.variance.rsqrt()  # 1 / sigma [b p j k]
    each = 0.5 * (problem.settings.min_variance * scale.square() + state.variance.log())
    constant = each.sum(-1) + problem.votes.dimension * (problem.beta_u - 0.5)  # [b p j]
    root = (0.5 * log_factor).exp().unsqueeze(-1)
    return problem.votes.log_likelihood(state.mean, root * scale, -log_factor.exp() * constant)


def free_energy(problem: Problem, state: State, lam: float) -> Tensor:
    """Eq. (4) [b p], with the two factors its text asks for and its print lacks: the cost of parent j counts a_j times
    (appendix A.3), and the entropy of the activations is at the temperature 1 / lambda at which they are set:

        sum_j a_j (cost_j - beta_a) - H(a_j) / lambda  +  sum_ij a_i R_ij log R_ij

    Each place has its own parents; the free energy of an image is the sum over places.
    """
    weight = (_log_weight(problem, state) + problem.votes.log_scale.unsqueeze(-1)).exp()  # R_ij a_i [b p i j]
    on = state.logit.sigmoid()  # [b p j]
    cost = (weight * energy(problem, state)).sum(-2)
    negative_entropy = on * logsigmoid(state.logit) + (1 - on) * logsigmoid(-state.logit)  # -H(a_j)
    choice = (weight * state.log_share).sum((-2, -1))
    return (on * (cost - problem.beta_a) + negative_entropy / lam).sum(-1) + choice


def _log_weight(problem: Problem, state: State) -> Tensor:
    """log R_ij a_i [b p i j], less the sample's `log_scale`."""
    return state.log_share + problem.votes.log_activation.unsqueeze(-1)


def route(votes: Votes, settings: EM, trace: bool, beta_a: Tensor, beta_u: Tensor) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents by EM routing.

    Args:
        votes: V_ij, with the children's activations a_i in [0, 1].
        settings: Of the router.
        trace: Whether to record every iteration.
        beta_a: [j].
        beta_u: [j].

    Returns:
        The parents (mu_j [b p j k], a_j [b p j]) and the record.
    """
    problem = Problem(votes, beta_a, beta_u, settings)
    states = [init(problem)]
    for t in range(1, settings.iterations):
        states = [*(states if trace else []), step(problem, states[-1], t)]
    infos = [_record(problem, s, t) if trace else RoutingInfo(s.log_share.detach().exp()) for t, s in enumerate(states)]
    return _parents(states[-1]), stack_info(infos)


def _parents(state: State) -> Capsules:
    """The parents (mu_j [b p j k], a_j [b p j]) of a state."""
    return Capsules(state.mean, state.logit.sigmoid())


@torch.no_grad()
def _record(problem: Problem, state: State, t: int) -> RoutingInfo:
    """One iteration's record: assignment, mean log density of the votes a parent holds, free energy, parents."""
    # Relative to the largest weight of a parent, so that children which are all off still have a mean
    share = _log_weight(problem, state).softmax(-2)  # [b p i j]
    agreement = (share * _log_density(problem, state)).sum(-2)  # [b p j]
    if problem.settings.switch == "mixing":
        return RoutingInfo(state.log_share.exp(), agreement, parents=_parents(state))
    free = free_energy(problem, state, inverse_temperature(problem.settings, t))
    return RoutingInfo(state.log_share.exp(), agreement, free, _parents(state))


ROUTER = Router(EM, route, learned={"beta_a": 0.0, "beta_u": 0.0})
