"""Batch normalization of features and of capsules.

    x' = s (x - m) / sqrt(v + eps) + t        m, v: mean and variance of one type over the batch and all else

In training m and v are those of the whole batch, over all processes of the group, so that many processes still do what
one would do; in evaluation they are running statistics, which are part of every checkpoint. These lag behind the
weights by some ten steps: before a learning rate has come down, evaluation may be much worse than training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.errors import ShapeError
from torchcaps.layers.capsules import check_positive
from torchcaps.types import Capsules
from torchcaps.utils.distributed import mean_over_processes, world_size

__all__ = ["CapsuleBatchNorm", "PerTypeBatchNorm"]


class PerTypeBatchNorm(nn.Module):
    """Normalize any x with `types` along one of its axes: each type then has mean t and standard deviation s.

    Args:
        types: How many there are.
        axis: The axis of x along which they lie.
        momentum: Share of a new batch in the running statistics.
        eps: Added to the variance.

    Raises:
        ShapeError: If there is no type.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, types: int, axis: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        check_positive(types=types)
        self.axis = axis
        self.momentum = momentum
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(types))
        self.shift = nn.Parameter(torch.zeros(types))
        self.register_buffer("mean", torch.zeros(types))
        self.register_buffer("variance", torch.ones(types))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x; the result has its shape.

        Raises:
            ShapeError: If x has another number of types, or in training a single value of each.
        """
        if x.ndim < 2 or x.shape[self.axis] != len(self.scale):
            raise ShapeError(f"{len(self.scale)} types along axis {self.axis} are wanted; x has shape {list(x.shape)}")
        x = x.to(self.scale.dtype)  # whatever mixed precision is around: means need the digits
        # Shape that broadcasts a value for each type
        along = [-1 if n == self.axis % x.ndim else 1 for n in range(x.ndim)]  # [1 .. types .. 1]
        m, v = self._batch_statistics(x, along) if self.training else (self.mean, self.variance)
        slope = self.scale * (v + self.eps).rsqrt()  # [types]
        return (x - m.view(along)) * slope.view(along) + self.shift.view(along)

    def _batch_statistics(self, x: Tensor, along: list[int]) -> tuple[Tensor, Tensor]:
        """Mean and variance of this batch, which update the running statistics."""
        others = [n for n, size in enumerate(along) if size == 1]
        # One value a type has no variance: the result would be 0 whatever the input
        if x.numel() * world_size() == len(self.scale):
            raise ShapeError("a norm in training needs more than one value a type; use batches of two images or more")
        # Statistics over all processes
        m = mean_over_processes(x.mean(others))
        v = mean_over_processes((x - m.view(along)).square().mean(others))
        # Running statistics
        with torch.no_grad():
            fresh = (self.mean == 0).all() & (self.variance == 1).all()
            share = torch.where(fresh, 1.0, self.momentum).to(m)  # the first batch counts in full
            self.mean.lerp_(m, share)
            self.variance.lerp_(v, share)
        return m, v

    def extra_repr(self) -> str:
        return f"{len(self.scale)}, axis={self.axis}"


class CapsuleBatchNorm(nn.Module):
    """Normalize the log-odds of activations and, if wanted, the poses of capsules, type by type.

    An activation then says how much more, or less, than usual speaks for its capsule, whatever the scale of that: in a
    fresh network every capsule is on for half of the images. Without it capsules start on or off for all.

    Args:
        types: Capsules at one place.
        poses: Whether poses are normalized too.
    """

    TINY = 1e-6
    """Activations closer than this to 0 or 1 count as this close: no float says how close they are."""

    def __init__(self, types: int, *, poses: bool = True) -> None:
        super().__init__()
        # The log-odds of a fresh capsule hardly vary, so that eps must be small
        self.odds = PerTypeBatchNorm(types, -1, eps=1e-9)
        self.pose = PerTypeBatchNorm(types, -2) if poses else nn.Identity()

    def forward(self, capsules: Capsules) -> Capsules:
        """Normalize capsules, pose [b ... i d] and activation [b ... i]; the result has the same shapes."""
        odds = torch.logit(capsules.activation.to(self.odds.scale.dtype), self.TINY)
        return Capsules(self.pose(capsules.pose), self.odds(odds).sigmoid())
