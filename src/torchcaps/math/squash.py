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

__all__ = ["cosine", "length_from_square", "norm", "squash", "squash_exponential", "unsquash"]


def _floor(dtype: torch.dtype) -> float:
    """Added to a squared norm before the root: far below any length that matters, yet the third inverse power
    of its root, which second derivatives need, is still finite."""
    return {torch.float64: 1e-200, torch.float16: 1e-7}.get(dtype, 1e-24)


def _largest_squarable(dtype: torch.dtype) -> float:
    """Up to this size, numbers can be squared and added up without overflow."""
    return {torch.float64: 1e150, torch.float16: 64.0}.get(dtype, 1e15)


def _all_squarable(x: Tensor) -> bool:
    """True if all numbers can be squared; False if not, or if asking would break a graph or wait for a device."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if traced or x.device.type != "cpu" or x.numel() == 0:
        return False
    low, high = torch.aminmax(x.detach())
    most = _largest_squarable(x.dtype)
    return bool(-most <= low) and bool(high <= most)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x / m, m [... 1]): m is the largest element where squares would overflow, and exactly 1 elsewhere."""
    # Ordinary numbers stay as they are, which one pass over them finds out
    if _all_squarable(x):
        return x, x.new_ones((*x.shape[:-1], 1))
    largest = x.detach().abs().amax(-1, keepdim=True)
    overflows = (largest > _largest_squarable(x.dtype)) & (largest < torch.inf)
    m = torch.where(overflows, largest, torch.ones_like(largest))
    return x / m, m


def _length(x: Tensor, *, keepdim: bool) -> Tensor:
    """Return the length of vectors whose squares do not overflow."""
    return torch.sqrt((x * x).sum(-1, keepdim=keepdim) + _floor(x.dtype))


def norm(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the Euclidean length over the last axis; value and gradient are finite at 0, where the gradient is 0.

    Long vectors are scaled before they are squared, as `math.hypot` does: no length that the type holds overflows.

    Args:
        x: [... k].
        keepdim: Whether the last axis stays, with one number.

    Returns:
        [...], or [... 1] with `keepdim`.
    """
    u, m = _scaled(x)
    return _length(u, keepdim=keepdim) * (m if keepdim else m.squeeze(-1))


def length_from_square(square: Tensor) -> Tensor:
    """Return the length of vectors from its square; value and gradient are finite at 0.

    Args:
        square: Squared lengths, of any shape.

    Returns:
        The same shape.
    """
    return torch.sqrt(square + _floor(square.dtype))


def squash(z: Tensor) -> Tensor:
    """Return z |z| / (1 + |z|^2): the direction of z with a length of sigmoid(log |z|^2).

    Args:
        z: [... k], any numbers.

    Returns:
        [... k] of length below 1.
    """
    u, m = _scaled(z)
    length = _length(u, keepdim=True)
    # Where z was scaled, its squash is its direction to the last digit, and u is at least 1 long
    return u * torch.where(m > 1, 1 / length.clamp_min(1), length / (1 + length * length))


def squash_exponential(z: Tensor) -> Tensor:
    """Return (1 - exp(-|z|)) z / |z|, which, unlike `squash`, has the gradient 1 at 0 (Mazzia 2021, eq. 8).

    Args:
        z: [... k], any numbers.

    Returns:
        [... k] of length below 1.
    """
    length = norm(z, keepdim=True)
    return z * (-torch.expm1(-length) / length)


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
    x = _direction(x)
    y = _direction(y)
    return (x * y).sum(-1)


def _direction(x: Tensor) -> Tensor:
    u, _ = _scaled(x)
    return u / _length(u, keepdim=True)
