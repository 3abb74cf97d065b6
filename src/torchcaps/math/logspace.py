"""Probabilities in log space: a logarithm that is finite at 0."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOG_ZERO", "log_floor"]

LOG_ZERO = -1e4
"""The logarithm of 0: finite, so that a layer whose children are all off has a pose, and so low that a child that is
off never outweighs one that is on."""


def log_floor(p: Tensor) -> Tensor:
    """Return log p, finite everywhere: LOG_ZERO at p = 0, and at least the log of a floor elsewhere.

    The floor, the square root of the smallest normal number (about 1e-19 in float32), is one whose inverse, the
    slope of the logarithm there, can still be multiplied without overflow. Below it the gradient is 0.

    Args:
        p: Numbers in [0, 1], of any shape.

    Returns:
        The same shape.
    """
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny ** 0.5).log()
    return torch.where(p > 0, log_p, torch.full_like(log_p, LOG_ZERO))
