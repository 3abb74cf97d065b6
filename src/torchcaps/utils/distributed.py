"""Means over the processes of a team, which see a part of every batch each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["mean_over_processes", "world_size"]


def world_size() -> int:
    """How many processes train together; 1 without a team."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_processes(x: Tensor) -> Tensor:
    """The mean of x over the processes of a team, x itself without one.

    Of equal parts of a batch, the mean of the parts' means is the mean of the batch. Gradients pass: what every
    process's loss owes to x counts in all of them, so that their mean is the gradient of the mean loss.
    """
    if world_size() == 1:
        return x
    mean: Tensor = _Mean.apply(x)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """The mean over the team, and its derivative, which is the same mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _mean(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return _mean(g[0])


def _mean(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / world_size()
