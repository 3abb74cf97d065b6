"""Axis-aligned Gaussians fitted to weighted votes, in log space throughout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LOG_2PI", "diagonal_log_density", "weighted_mean", "weighted_variance"]

LOG_2PI = math.log(2 * math.pi)


def weighted_mean(votes: Tensor, share: Tensor) -> Tensor:
    """Return mu_j = sum_i share_ij V_ij.

    Args:
        votes: V [b i j k].
        share: [b i j], which sums to 1 over i.

    Returns:
        [b j k].
    """
    return torch.einsum("bij,bijk->bjk", share, votes)


def weighted_variance(votes: Tensor, share: Tensor, mean: Tensor) -> Tensor:
    """Return sigma_j^2 = sum_i share_ij (V_ij - mu_j)^2, element by element.

    Args:
        votes: V [b i j k].
        share: [b i j], which sums to 1 over i.
        mean: mu [b j k].

    Returns:
        [b j k].
    """
    # About the mean, not E[V²] - mu²: votes that agree would lose all digits
    residual = votes - mean.unsqueeze(1)  # [b i j k]
    return torch.einsum("bij,bijk->bjk", share, residual * residual)


def diagonal_log_density(votes: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of each vote under the Gaussian of its parent, log N(V_ij; mu_j, sigma_j^2).

        -1/2 sum_k [ (V - mu)^2 / sigma^2 + log sigma^2 + log 2 pi ]     (Procedure 1, E-step, line 2, as a log)

    Args:
        votes: V [b i j k].
        mean: mu [b j k].
        variance: sigma^2 [b j k].

    Returns:
        [b i j].
    """
    residual = votes - mean.unsqueeze(1)
    quadratic = (residual * residual / variance.unsqueeze(1)).sum(-1)  # [b i j]
    normalizer = (variance.log() + LOG_2PI).sum(-1)  # [b j]
    return -0.5 * (quadratic + normalizer.unsqueeze(1))
