"""Lengths as probabilities: squash, its inverse, and norms that have a gradient everywhere.

squash maps R^d onto the open unit ball and keeps the direction (Sabour 2017, eq. 1; Hauser 2019, eq. 4):

    squash(z) = |z|^2 / (1 + |z|^2)  z / |z|  =  z |z| / (1 + |z|^2)

so the length of its value is sigmoid(log |z|^2), the probability that the capsule is on. Its inverse
(Hauser 2019, eq. 6) is

    unsquash(x) = sqrt(|x| / (1 - |x|))  x / |x|  =  x / sqrt(|x| (1 - |x|)).

Near |x| = 1 the inverse is as ill-conditioned as the representation is: in float32 a capsule of length
1 - 6e-8 is the last one before 1, so |z| beyond a few thousand cannot come back.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cosine", "norm", "squash", "unsquash"]


def _floor(dtype: torch.dtype) -> float:
    """Added to a squared norm before the root: far below any length that matters, yet the third inverse power
    of its root, which second derivatives need, is still finite."""
    return {torch.float64: 1e-200, torch.float16: 1e-7}.get(dtype, 1e-24)


def norm(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the Euclidean length over the last axis; value and gradient are finite at 0, where the gradient is 0.

    Args:
        x: [... k].
        keepdim: Whether the last axis stays, with one number.

    Returns:
        [...], or [... 1] with `keepdim`.
    """
    return torch.sqrt((x * x).sum(-1, keepdim=keepdim) + _floor(x.dtype))


def squash(z: Tensor) -> Tensor:
    """Return z |z| / (1 + |z|^2): the direction of z with a length of sigmoid(log |z|^2).

    Args:
        z: [... k], any numbers.

    Returns:
        [... k] of length below 1.
    """
    length = norm(z, keepdim=True)
    return z * (length / (1 + length * length))


def unsquash(x: Tensor) -> Tensor:
    """Return x / sqrt(|x| (1 - |x|)), the inverse of `squash`.

    Args:
        x: [... k]. Lengths of 1 and more, which squash makes by rounding alone, are read as the longest below 1.

    Returns:
        [... k].
    """
    length = norm(x, keepdim=True)
    # 1 - |x| may be 0 by rounding: at least the gap to the last number below 1
    last = torch.finfo(x.dtype).eps / 2
    room = (1 - length).clamp_min(last)
    # Longer ones are first brought to length 1
    return x / (length.clamp_min(1) * torch.sqrt(length.clamp_max(1 - last) * room))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of the angle between x and y; 0 where either has no direction.

    Args:
        x: [... k].
        y: [... k], or what broadcasts with x.

    Returns:
        [...] in [-1, 1].
    """
    x = x / norm(x, keepdim=True)
    y = y / norm(y, keepdim=True)
    return (x * y).sum(-1)
