"""Functions of the gamma family, in operations that every dtype, device and export has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["digamma", "sum_of_digammas"]

_SHIFT = 8
"""Steps of the recurrence before the series: from x >= 8 on, its terms give all digits of float64."""
_BERNOULLI = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12)
"""-B_2n / 2n of the asymptotic series."""


def digamma(x: Tensor) -> Tensor:
    """Return the digamma function, the derivative of log gamma, of positive numbers.

        digamma(x) = digamma(x + n) - sum_{m<n} 1 / (x + m)      digamma(x) ~ log x - 1 / 2x - sum_n B_2n / (2n x^2n)

    torch has one, too, but not for ONNX and not for every dtype.

    Args:
        x: Positive numbers, of any shape.

    Returns:
        The same shape.
    """
    # The recurrence, up to where the series converges
    below = torch.zeros_like(x)
    for m in range(_SHIFT):
        below = below + 1 / (x + m)
    # The asymptotic series, by Horner's rule in 1 / x^2
    large = x + _SHIFT
    inverse_square = 1 / (large * large)
    series = torch.zeros_like(x)
    for coefficient in reversed(_BERNOULLI):
        series = (series + coefficient) * inverse_square
    return large.log() - 0.5 / large + series - below


def sum_of_digammas(nu: Tensor, count: int) -> Tensor:
    """Return sum_{d=0}^{D-1} digamma((nu - d) / 2), for nu > D - 1, by one or two digammas.

    The duplication formula, digamma(z) + digamma(z + 1/2) = 2 digamma(2 z) - 2 log 2, makes digamma(nu - 1 - 2 m) of
    neighbors, and the recurrence digamma(x + 1) = digamma(x) + 1 / x relates these to the lowest.

    Args:
        nu: Degrees of freedom, of any shape.
        count: D.

    Returns:
        The same shape.
    """
    pairs = count // 2
    total = torch.zeros_like(nu)
    if pairs:
        lowest = nu - 1 - 2 * (pairs - 1)
        total = pairs * digamma(lowest)
        for m in range(1, pairs):
            x = lowest + 2 * (m - 1)
            total = total + (pairs - m) * (1 / x + 1 / (x + 1))
        total = 2 * total - 2 * pairs * math.log(2)
    # An odd number leaves the last one over
    return total + digamma((nu - count + 1) / 2) if count % 2 else total
