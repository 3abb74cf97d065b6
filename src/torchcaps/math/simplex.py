"""Probabilities in log space: floors, entropies, and the weights that a set of them gives an average."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy", "log_floor"]


def log_floor(p: Tensor) -> Tensor:
    """log p for p in [0, 1], with p = 0 read as the square root of the smallest normal number.

    The floor (about 1e-19 in float32) is below any share that can matter, and its inverse, the slope of the
    logarithm there, can still be multiplied without overflow. Below the floor the gradient is 0.
    """
    return p.clamp_min(torch.finfo(p.dtype).tiny ** 0.5).log()


def entropy(log_p: Tensor, dim: int = -1) -> Tensor:
    """-sum p log p in nats along `dim`; an impossible outcome (log p = -inf) contributes 0."""
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, torch.zeros_like(log_p))).sum(dim)
