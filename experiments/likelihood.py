"""Compute the likelihood of products of expert capsules, exactly or by annealed importance sampling.

The energy model (Hauser 2019, eq. 7-10, with a bias) over children x = (x_1 ... x_I), each in the unit ball of R^d:

    z_j = sum_i c_ij W_ij x_i + b_j        F(x) = -sum_j log(1 + |z_j|^2)        p(x) = exp(-F(x)) / Z

with Z the integral of exp(-F) over the product of the balls. Three things to know before printing such a number:

- It is defined for a FIXED coupling c only, one and the same for every x. Routing finds another c for each image, and
  competition another mask; the update (eq. 18) holds both fixed, so it follows the gradient of no density of x, and a
  routed model has no likelihood of its own. Say which c was fixed. A visible offset o belongs into the bias:
  b_j - sum_i c_ij W_ij o_i.
- -F grows only like a logarithm, so p is broad: an expert weighs x by 1 + |z_j|^2, no more than the square of a
  length, and nothing makes it sharper than that. Likelihoods of real data are poor, whatever the samples look like.
- The reverse pass of Algorithm 1 is a heuristic, not the Gibbs step p(x | h) of this model. The Markov kernel here is
  another one, which does leave p invariant.

All is computed in float64. Axes: x [b i d], W [i j k d], c [i j], b [j k]; s runs over the 2^J hidden states.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.utils.progress import progress
from torchcaps.utils.random import seed_of

__all__ = ["AIS", "ais", "free_energy", "log_hidden_exact", "log_likelihood", "log_partition_exact", "log_volume"]

_LARGEST = 1e50
"""Weights beyond this, whose squares would overflow, are refused together with NaN and infinity."""

_TERMS = 2**22
"""Most points times hidden states that exact integration takes on: some 100 MB, a second or less."""

_SHRINKS = 200
"""Most tries of a slice step. A miss cuts the arc by a quarter or more on average: at the end it is below rounding."""

_ROUNDING = 1e-6
"""A length of 1 squashed in float32 may come out this much above 1; it still counts as inside the ball."""


class AIS(NamedTuple):
    """An estimate of log Z, its standard error, and how many independent exact samples the chains are worth."""

    log_partition: float
    standard_error: float
    effective_sample_size: float


class _Experts(NamedTuple):
    """The model with the coupling folded in: z = x A + b, A [i d j k] = c_ij W_ij transposed, b [j k]."""

    A: Tensor
    b: Tensor


class _Chains(NamedTuple):
    """State of the sampler: g [b i d+2], whose directions carry x, and log_f [b] = -F(x)."""

    g: Tensor
    log_f: Tensor


def log_volume(I: int, d: int) -> float:
    """Return the log of the volume (π^(d/2) / Γ(d/2 + 1))^I of a product of I unit balls of R^d.

    Raises:
        ShapeError: If I or d is below 1.

    >>> round(log_volume(1, 2), 6) == round(math.log(math.pi), 6)
    True
    """
    if I < 1 or d < 1:
        raise ShapeError(f"{I} balls of dimension {d}: both must be 1 or more")
    return I * (d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1))


def free_energy(x: Tensor, W: Tensor, c: Tensor, b: Tensor) -> Tensor:  # [b]
    """Compute F(x) = -sum_j log(1 + |sum_i c_ij W_ij x_i + b_j|^2), differentiable in all arguments.

    Args:
        x: Children [b i d], each of length 1 or less.
        W: Weights [i j k d].
        c: Coupling [i j], one for all images.
        b: Bias [j k].

    Returns:
        Free energies [b] in float64.
    """
    experts = _fold(W, c, b)
    return _free_energy(_children(x, experts), experts)


def log_likelihood(x: Tensor, W: Tensor, c: Tensor, b: Tensor, log_Z: float) -> Tensor:  # [b]
    """Compute log p(x) = -F(x) - log Z in nats, a density over the product of balls.

    Args:
        x: Children [b i d].
        W: Weights [i j k d].
        c: Coupling [i j], one for all images.
        b: Bias [j k].
        log_Z: The log of the partition function, by `log_partition_exact` or `ais`.

    Returns:
        Log-likelihoods [b]; -inf where some child is longer than 1.
    """
    experts = _fold(W, c, b)
    x = _children(x, experts)
    inside = (x.square().sum(-1).sqrt() <= 1 + _ROUNDING).all(-1)  # [b]
    return torch.where(inside, -_free_energy(x, experts) - log_Z, -torch.inf)


def log_partition_exact(W: Tensor, c: Tensor, b: Tensor) -> float:
    """Compute log Z to rounding, for few children of d = 1 or 2: the sum over all hidden states.

    With W = 0 it is log volume + sum_j log(1 + |b_j|^2).

    Raises:
        ShapeError: If the children have more than two dimensions, or there are too many of them or of their parents.
    """
    return float(log_hidden_exact(W, c, b).logsumexp(0))


@torch.no_grad()
def log_hidden_exact(W: Tensor, c: Tensor, b: Tensor) -> Tensor:  # [s]
    """Compute log Z_s of each hidden state h in {0, 1}^J, h_j being bit j of s, so that log P(h) = log Z_s - log Z.

    exp(-F) = prod_j (1 + |z_j|^2) = sum_h prod_j |z_j|^(2 h_j) is a polynomial in x, of degree 2J in each child, and
    Z_s is the integral of one term. A rule that is exact to that degree on each ball gives Z_s without any error but
    rounding; all its weights are positive, so nothing cancels.
    """
    experts = _fold(W, c, b)
    x, log_w = _product_rule(experts)  # [n i d], [n]
    # Each expert doubles the number of terms: it is off (factor 1) or on (factor |z_j|^2).
    log_term = log_w[:, None]  # [n 1]
    for log_z2 in _poses(x, experts).square().sum(-1).log().unbind(-1):  # [n], for each j
        log_term = torch.cat([log_term, log_term + log_z2[:, None]], 1)  # [n 2^(j+1)]
    return log_term.logsumexp(0)


@torch.no_grad()
def ais(W: Tensor, c: Tensor, b: Tensor, *, chains: int, steps: int, seed: int) -> AIS:
    """Estimate log Z by annealed importance sampling (Neal 2001), from uniform on the balls to p through exp(-β F).

    With β_t = t / T for t = 0 ... T and x_t made from x_{t-1} by a step that leaves exp(-β_t F) invariant, a chain
    weighs

        w = volume * prod_t exp(-(β_t - β_{t-1}) F(x_{t-1})),    so that    E w = Z.

    The standard error is that of the mean of w, to first order in its logarithm; the effective sample size is
    (sum w)^2 / sum w^2. Trust neither where that size is not many times 10: take more steps. By Jensen's inequality
    log Z comes out too low on average, and a likelihood too high. steps = 1 is plain Monte Carlo.

    Raises:
        RecipeError: If there are fewer than two chains, or no step.
    """
    if chains < 2 or steps < 1:
        raise RecipeError(f"ais with {chains} chains and {steps} steps: at least 2 chains and 1 step are needed")
    experts = _fold(W, c, b)
    I, d = experts.A.shape[:2]
    # β = 0: normal numbers, whose directions are uniform in the balls.
    make = torch.Generator(experts.A.device).manual_seed(seed_of(seed))
    g = torch.randn(chains, I, d + 2, dtype=torch.float64, device=experts.A.device, generator=make)
    state = _Chains(g, -_free_energy(_ball(g), experts))
    # β rises by 1 / T a step: weigh the present point, then move it at the new β.
    log_w = state.log_f / steps
    for t in progress(range(1, steps), "annealing"):
        state = _slice_step(state, t / steps, experts, make)
        log_w = log_w + state.log_f / steps
    return _estimate(log_w, log_volume(I, d))


def _estimate(log_w: Tensor, offset: float) -> AIS:
    """Take the mean of the weights in log space, its relative standard error, and (sum w)^2 / sum w^2."""
    n = len(log_w)
    share = (log_w - log_w.max()).exp()  # [b]
    share = share / share.mean()
    log_Z = float(log_w.logsumexp(0)) - math.log(n) + offset
    return AIS(log_Z, float(share.std()) / math.sqrt(n), n / float(share.square().mean()))


def _slice_step(state: _Chains, beta: float, experts: _Experts, make: torch.Generator) -> _Chains:
    """Move every chain by elliptical slice sampling (Murray, Adams, MacKay 2010) of N(g; 0, 1) exp(-β F(x(g))).

    A level is drawn below the present height; then points g cos θ + ν sin θ, ν ~ N(0, 1), are tried on an arc that
    shrinks towards θ = 0 until one lies above it. No step size, no rejection, and the boundary of the balls is never
    met; θ = π carries g to -g, from one of two opposite modes to the other.
    """
    g = state.g.clone()
    log_f = state.log_f.clone()
    # A level below the present height, an ellipse through the present point, and an arc of it.
    level = beta * log_f + _uniform(log_f, make).log()  # [b]
    nu = torch.empty_like(g).normal_(generator=make)
    theta = 2 * math.pi * _uniform(log_f, make)  # [b]
    low = theta - 2 * math.pi
    high = theta
    live = torch.arange(len(g), device=g.device)  # chains that have not yet moved
    for _ in range(_SHRINKS):
        angle = theta[:, None, None]
        trial = state.g[live] * angle.cos() + nu[live] * angle.sin()  # [live i d+2]
        height = -_free_energy(_ball(trial), experts)  # [live]
        # Chains that found a point above their level take it and are done.
        above = beta * height >= level[live]
        g[live[above]] = trial[above]
        log_f[live[above]] = height[above]
        live, theta, low, high = (v[~above] for v in (live, theta, low, high))
        if len(live) == 0:
            break
        # The others shrink their arc towards the present point and try again.
        low = torch.where(theta < 0, theta, low)
        high = torch.where(theta < 0, high, theta)
        theta = low + (high - low) * _uniform(theta, make)
    return _Chains(g, log_f)


def _ball(g: Tensor) -> Tensor:
    """Map g [... d+2] ~ N(0, 1) to x [... d], uniform in the unit ball.

    The first d coordinates of a uniform point of the sphere in R^(d+2) are uniform in the ball of R^d (Archimedes).
    """
    return g[..., :-2] / g.square().sum(-1, keepdim=True).sqrt()


def _uniform(like: Tensor, make: torch.Generator) -> Tensor:
    return torch.empty_like(like).uniform_(generator=make)


def _poses(x: Tensor, experts: _Experts) -> Tensor:  # [b j k]
    A, b = experts
    z = x.flatten(1) @ A.flatten(2).flatten(0, 1)  # [b (j k)]
    return z.view(-1, *b.shape) + b


def _free_energy(x: Tensor, experts: _Experts) -> Tensor:  # [b]
    return -_poses(x, experts).square().sum(-1).log1p().sum(-1)


def _product_rule(experts: _Experts) -> tuple[Tensor, Tensor]:  # [n i d], [n]
    """Build points and log weights on the product of balls, exact for polynomials of degree 2J in each child."""
    I, d, J, _ = experts.A.shape
    if d > 2:
        raise ShapeError(f"exact integration over children of dimension {d}: only 1 and 2 are known; use ais")
    size = J + 1 if d == 1 else (J // 2 + 1) * (2 * J + 1)
    if size**I * 2**J > _TERMS:
        raise ShapeError(f"exact integration over {I} children and {J} parents is too large; use fewer, or ais")
    points, w = _interval_rule(J) if d == 1 else _disc_rule(J)  # [m d], [m]
    each = torch.cartesian_prod(*[torch.arange(size)] * I).reshape(-1, I)  # [n i]
    device = experts.A.device
    return points[each].to(device), w.log()[each].sum(-1).to(device)


def _interval_rule(J: int) -> tuple[Tensor, Tensor]:  # [m 1], [m]
    """Gauss-Legendre on [-1, 1] with J + 1 points: exact to degree 2J + 1."""
    x, w = np.polynomial.legendre.leggauss(J + 1)
    return torch.from_numpy(x)[:, None], torch.from_numpy(w)


def _disc_rule(J: int) -> tuple[Tensor, Tensor]:  # [m 2], [m]
    """Polar rule on the unit disc, exact to degree 2J.

    2J + 1 equal angles integrate every frequency up to 2J, which removes the odd powers of r. What is left is a
    polynomial of degree J in u = r^2, and r dr = du / 2: Gauss-Legendre on [0, 1] with J // 2 + 1 points.
    """
    u, w = np.polynomial.legendre.leggauss(J // 2 + 1)
    r = np.sqrt((u + 1) / 2)[:, None]
    angle = 2 * np.pi * np.arange(2 * J + 1) / (2 * J + 1)
    points = np.stack([r * np.cos(angle), r * np.sin(angle)], -1).reshape(-1, 2)
    weights = np.repeat(w / 4 * 2 * np.pi / (2 * J + 1), 2 * J + 1)
    return torch.from_numpy(points), torch.from_numpy(weights)


def _fold(W: Tensor, c: Tensor, b: Tensor) -> _Experts:
    """Check shapes and values, and multiply the coupling into the weights, in float64."""
    if W.ndim != 4 or 0 in W.shape:
        raise ShapeError(f"W is {list(W.shape)}, wanted [i j k d] with no empty axis: one matrix W_ij a pair")
    I, J, K, _ = W.shape
    for name, tensor, shape in (("c", c, [I, J]), ("b", b, [J, K])):
        if list(tensor.shape) != shape:
            hint = "; freeze one coupling for all images" if name == "c" else ""
            raise ShapeError(f"{name} is {list(tensor.shape)}, wanted {shape} for W {list(W.shape)}{hint}")
    for name, tensor in (("W", W), ("c", c), ("b", b)):
        if not bool((tensor.abs() < _LARGEST).all()):
            raise DataError(f"{name} holds NaN, infinity or values beyond {_LARGEST:g}: look for what diverged")
    return _Experts((c.double()[..., None, None] * W.double()).permute(0, 3, 1, 2), b.double())


def _children(x: Tensor, experts: _Experts) -> Tensor:
    """Return x [b i d] in float64 if it fits the experts.

    Raises:
        ShapeError: If it does not.
        DataError: If it is not finite.
    """
    I, d = experts.A.shape[:2]
    if x.ndim != 3 or x.shape[1:] != (I, d):
        raise ShapeError(f"x is {list(x.shape)}, wanted [b {I} {d}]: squashed children, one row an image")
    if not bool(x.isfinite().all()):
        raise DataError("x holds NaN or infinity: look for what diverged before measuring it")
    return x.double()
