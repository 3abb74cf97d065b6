"""Mixtures of Gaussians, fitted by expectation maximization, to draw new points like those of a cloud.

    p(x) = sum_c w_c N(x; mu_c, C_c)
    E:  r_nc = w_c N(x_n; mu_c, C_c) / sum_c' w_c' N(x_n; mu_c', C_c')
    M:  w_c = mean_n r_nc,  mu_c = sum_n r_nc x_n / sum_n r_nc,  C_c = sum_n r_nc (x_n - mu_c)(x_n - mu_c)ᵀ / sum_n r_nc

C_c also gets a small share of the variance of all points, so that a component with few points keeps a volume.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.math.gaussian import LOG_2PI
from torchcaps.utils.random import normal, permutation, uniform

__all__ = ["Mixture", "fit_mixture", "sample_mixture"]

RIDGE = 0.01
"""Share of each number's variance that is added to the covariance of every component."""
_POINTS = 2
"""A component has at least so many points for each number of a point, so that its covariance is measured."""
_GROUPING_ROUNDS = 10
_ROUNDS = 20


class Mixture(NamedTuple):
    """A mixture of Gaussians in k dimensions.

    Attributes:
        weight: w [c], sums to 1.
        mean: mu [c k].
        root: [c k k], lower triangular: C_c = root rootᵀ.
    """

    weight: Tensor
    mean: Tensor
    root: Tensor


def fit_mixture(points: Tensor, components: int = 8, seed: int = 0) -> Mixture:
    """Fit a mixture of Gaussians to points.

    Args:
        points: [n k], n at least 1.
        components: c, at most; fewer if there are fewer than 2 k points for each.
        seed: Of the points at which the components start.

    Returns:
        The mixture, in float64.
    """
    x = points.detach().double()
    n, k = x.shape
    count = max(1, min(components, n // (_POINTS * k)))
    # In units of each number's deviation; one that never varies does not in samples either
    center = x.mean(0)
    deviation = x.std(0, correction=0)
    x = (x - center) / torch.where(deviation > 0, deviation, 1.0)
    # Start from groups of near points, then share each point among the components
    mixture = _maximize(x, _group(x, count, seed))
    for _ in range(_ROUNDS if count > 1 else 0):
        mixture = _maximize(x, _log_joint(mixture, x).softmax(-1))
    return Mixture(mixture.weight, mixture.mean * deviation + center, mixture.root * deviation.unsqueeze(-1))


def sample_mixture(mixture: Mixture, seed: int, *counters: int | Tensor) -> Tensor:
    """Draw points [... k], one for each element of the counters; a point is a function of the seed and its counters."""
    chosen = uniform(seed, *counters, count=1, dtype=torch.float64)  # [... 1]
    edges = mixture.weight.cumsum(0)
    c = (chosen >= edges).sum(-1).clamp_max(len(edges) - 1)  # [...]
    noise = normal(seed, *counters, count=mixture.mean.shape[1], dtype=torch.float64).unsqueeze(-1)
    return mixture.mean[c] + (mixture.root[c] @ noise).squeeze(-1)


def _group(x: Tensor, count: int, seed: int) -> Tensor:
    """Assign each point to one of `count` groups around means, [n c] of 0 and 1: a few rounds of k-means."""
    centers = x[permutation(seed, 0, len(x))[:count]]
    for _ in range(_GROUPING_ROUNDS):
        nearest = torch.nn.functional.one_hot(torch.cdist(x, centers).argmin(-1), count).to(x.dtype)  # [n c]
        mass = nearest.sum(0).unsqueeze(-1)
        # A group without points stays where it is
        centers = torch.where(mass > 0, nearest.T @ x / mass.clamp_min(1), centers)
    return nearest


def _maximize(x: Tensor, r: Tensor) -> Mixture:
    """The M step, of points [n k] in units of their deviation and responsibilities [n c]."""
    n, k = x.shape
    # The floor gives a component that has lost all points a mean, and next to no weight
    mass = r.sum(0).clamp_min(1e-12)  # [c]
    mean = r.T @ x / mass.unsqueeze(-1)  # [c k]
    away = x - mean.unsqueeze(1)  # [c n k]
    covariance = (away * r.T.unsqueeze(-1)).transpose(1, 2) @ away / mass.view(-1, 1, 1)
    covariance = covariance + RIDGE * torch.eye(k, dtype=x.dtype)
    return Mixture(mass / n, mean, torch.linalg.cholesky(covariance))


def _log_joint(mixture: Mixture, x: Tensor) -> Tensor:
    """Return log w_c + log N(x_n; mu_c, C_c), [n c]."""
    away = (x - mixture.mean.unsqueeze(1)).transpose(1, 2)  # [c k n]
    unit = torch.linalg.solve_triangular(mixture.root, away, upper=False)
    log_volume = mixture.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [c]
    log_normal = -0.5 * unit.square().sum(1) - log_volume.unsqueeze(-1) - 0.5 * x.shape[1] * LOG_2PI  # [c n]
    joint: Tensor = mixture.weight.log().unsqueeze(-1) + log_normal
    return joint.T
