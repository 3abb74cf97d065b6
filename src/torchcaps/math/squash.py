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
    """Euclidean length over the last axis; value and gradient are finite at 0 (where the gradient is 0)."""
    return torch.sqrt((x * x).sum(-1, keepdim=keepdim) + _floor(x.dtype))


def squash(z: Tensor) -> Tensor:
    """z |z| / (1 + |z|^2) over the last axis: direction kept, length sigmoid(log |z|^2)."""
    length = norm(z, keepdim=True)
    return z * (length / (1 + length * length))


def unsquash(x: Tensor) -> Tensor:
    """x / sqrt(|x| (1 - |x|)) over the last axis, the inverse of `squash`.

    Lengths of 1 and more, which squash makes by rounding alone, are read as the longest length below 1.
    """
    length = norm(x, keepdim=True)
    last = torch.finfo(x.dtype).eps / 2
    room = (1 - length).clamp_min(last)
    return x / (length.clamp_min(1) * torch.sqrt(length.clamp_max(1 - last) * room))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between x and y over the last axis; 0 where either has no direction."""
    x = x / norm(x, keepdim=True)
    y = y / norm(y, keepdim=True)
    return (x * y).sum(-1)
