"""Variational Bayes routing (De Sousa Ribeiro 2020): parents are Gaussians whose parameters have priors.

With the mass R_j = sum_i R_ij a_i, the mean vbar_j and the scatter of the votes that parent j holds, the posteriors are

    alpha_j = alpha_0 + R_j      kappa_j = kappa_0 + R_j      nu_j = nu_0 + R_j      m_j = R_j vbar_j / kappa_j
    B_jd = B_0 + sum_i R_ij a_i (V_ijd - vbar_jd)^2 + kappa_0 R_j / kappa_j vbar_jd^2

so that a parent with little support has a short pose and a wide variance. Expectations under them give

    L_j = E log |Lambda_j|       P_j = E log pi_j = digamma(alpha_j) - digamma(sum_j alpha_j)
    Q_ij = D / kappa_j + nu_j sum_d (V_ijd - m_jd)^2 / B_jd
    log rho_ij = P_j + (L_j - D log 2 pi - Q_ij) / 2

and the assignment R_ij is rho_ij over its sum over all parents that compete for child i and a background class. The
activation is the logistic of beta - exp(P_j) H_j, with H_j the entropy of the parent's Gaussian. Here beta is the
beta_a - beta_u of the paper, which do not occur apart from each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from torchcaps.config import Iterations, PositiveFloat, Range
from torchcaps.kernels.votes import Votes
from torchcaps.math.gaussian import LOG_2PI
from torchcaps.math.special import digamma, sum_of_digammas
from torchcaps.routing.base import Router, stack_info
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ROUTER", "VB", "State", "e_step", "init", "m_step", "route", "step"]


@dataclass(frozen=True)
class VB:
    """Settings of variational Bayes routing (De Sousa Ribeiro 2020): EM with priors.

    Attributes:
        iterations: M-steps; there is no E-step after the last.
        alpha: Prior count alpha_0 of each parent's share of the children.
        kappa: Prior count kappa_0 of votes at the origin.
        scatter: Prior scatter B_0 of the votes, 1 in the paper; smaller where votes are short.
        background: Logarithm of the density of the background class, which takes what fits no parent.
        precision: Prior of the precisions: "wishart" with the constants of a full matrix, of which only the diagonal is
            used (the public code), or "gamma", one gamma distribution for each dimension (exact for a diagonal).
    """

    iterations: Iterations = 3
    alpha: Annotated[float, Range(0.01)] = 1.0
    kappa: PositiveFloat = 1.0
    scatter: Annotated[float, Range(1e-9)] = 1.0
    background: Annotated[float, Range(-1e4, 0.0)] = math.log(1e-11)
    precision: Literal["wishart", "gamma"] = "wishart"


class State(NamedTuple):
    """Posteriors after an M-step, and the assignment that it used.

    Attributes:
        log_share: log R_ij [b p i j].
        mean: m_j [b p j k].
        scale: sqrt(nu_j / B_j), the root of the expected precision [b p j k].
        log_volume: L_j, the expected logarithm of the determinant of the precision [b p j].
        log_prior: P_j, the expected logarithm of the mixing proportion [b p j].
        kappa: kappa_j [b p j].
    """

    log_share: Tensor
    mean: Tensor
    scale: Tensor
    log_volume: Tensor
    log_prior: Tensor
    kappa: Tensor


def init(votes: Votes, settings: VB) -> State:
    """Take the first iteration: every parent type has an equal share of a child, at each place (1 / J)."""
    return m_step(votes, settings, votes.new_pairs(-math.log(votes.parents)))


def step(votes: Votes, settings: VB, state: State) -> State:
    """Take one more iteration: reassign the children, refit the parents."""
    return m_step(votes, settings, e_step(votes, settings, state))


def m_step(votes: Votes, settings: VB, log_share: Tensor) -> State:
    """Return the posteriors under an assignment log R_ij [b p i j]."""
    moments = votes.moments(log_share)
    D = votes.dimension
    mass = (moments.log_mass + votes.log_scale).exp()  # R_j [b p j]
    # Mean and scatter, with the prior's votes at the origin
    kappa = settings.kappa + mass
    shrink = (mass / kappa).unsqueeze(-1)
    scatter = mass.unsqueeze(-1) * moments.variance + settings.kappa * shrink * moments.mean.square()
    B = settings.scatter + scatter  # [b p j k]
    # Precisions and mixing proportions
    if settings.precision == "wishart":
        nu = D + 1 + mass
        digammas = sum_of_digammas(nu, D)
    else:
        nu = 2 + mass
        digammas = D * digamma(nu / 2)
    log_volume = digammas + D * math.log(2) - B.log().sum(-1)
    alpha = settings.alpha + mass
    log_prior = digamma(alpha) - digamma(alpha.sum(-1, keepdim=True))
    scale = nu.sqrt().unsqueeze(-1) / B.sqrt()
    return State(log_share, shrink * moments.mean, scale, log_volume, log_prior, kappa)


def e_step(votes: Votes, settings: VB, state: State) -> Tensor:
    """Return log R_ij [b p i j], which leaves a share to the background class."""
    D = votes.dimension
    bias = state.log_prior + 0.5 * (state.log_volume - D * LOG_2PI - D / state.kappa)
    logits = votes.log_likelihood(state.mean, state.scale, bias)
    return votes.compete(logits, background=settings.background)


def route(votes: Votes, settings: VB, trace: bool, beta: Tensor) -> tuple[Capsules, RoutingInfo]:
    """Route votes to parents by variational Bayes routing.

    Args:
        votes: V_ij, with the children's activations a_i in [0, 1].
        settings: Of the router.
        trace: Whether to record every iteration.
        beta: [j].

    Returns:
        The parents (m_j [b p j k], a_j [b p j]) and the record.
    """
    states = [init(votes, settings)]
    for _ in range(1, settings.iterations):
        states = [*(states if trace else []), step(votes, settings, states[-1])]
    infos = [
        RoutingInfo(state.log_share.detach().exp(), parents=_parents(votes, state, beta) if trace else None)
        for state in states
    ]
    return _parents(votes, states[-1], beta), stack_info(infos)


def _parents(votes: Votes, state: State, beta: Tensor) -> Capsules:
    """The parents (m_j [b p j k], a_j [b p j]) of a state: a_j = logistic(beta - exp(P_j) H_j)."""
    entropy = 0.5 * (votes.dimension * (LOG_2PI + 1) - state.log_volume)  # [b p j]
    return Capsules(state.mean, (beta - state.log_prior.exp() * entropy).sigmoid())


ROUTER = Router(VB, route, learned={"beta": 0.0})
