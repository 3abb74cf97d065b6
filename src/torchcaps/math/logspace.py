"""Probabilities in log space: floors, entropies, and the weights that a set of them gives an average."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOG_ZERO", "entropy", "log_floor"]

LOG_ZERO = -1e4
"""The logarithm of 0: finite, so that a layer whose children are all off has a pose, and so low that a child that is
off never outweighs one that is on."""


def log_floor(p: Tensor) -> Tensor:
    """log p for p in [0, 1], finite everywhere: NOTHING at p = 0, and at least the log of a floor elsewhere.

    The floor, the square root of the smallest normal number (about 1e-19 in float32), is one whose inverse, the
    slope of the logarithm there, can still be multiplied without overflow. Below it the gradient is 0.
    """
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny ** 0.5).log()
    return torch.where(p > 0, log_p, torch.full_like(log_p, LOG_ZERO))


def entropy(log_p: Tensor, dim: int = -1) -> Tensor:
    """-sum p log p in nats along `dim`; an impossible outcome (log p = -inf) contributes 0."""
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, torch.zeros_like(log_p))).sum(dim)
