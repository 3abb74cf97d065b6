"""Randomness without state: every number is a pure function of (seed, counters, position).

A generator that is carried along makes each sample depend on all those drawn before it. Here counters, such
as the epoch and the index of an image, are hashed instead, so that any worker may compute any sample in any
order and a resumed run sees what it would have seen. The hash chains SplitMix64 (Steele, Lea, Flood 2014):

    h_0 = mix(seed + γ)        h_n = mix(h_{n-1} + (c_n + 1) γ)        (all modulo 2^64)

so each counter c_n picks an output of the SplitMix64 stream that starts at the hash of all before it.
`uniform`, `normal`, `permutation` and `seed_of` hash their own name first, so they never share numbers.

Only torch int64 arithmetic is used; it wraps around, and int64 is read as a word of 64 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcaps.errors import DataError

__all__ = ["hash_counters", "normal", "permutation", "resample", "resample_near", "seed_of", "uniform"]


def _word(value: int) -> int:
    """The int64 that is equal to `value` modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = _word(0x9E3779B97F4A7C15)  # γ: 2^64 over the golden ratio, made odd
_MIX_1 = _word(0xBF58476D1CE4E5B9)
_MIX_2 = _word(0x94D049BB133111EB)


def hash_counters(seed: int, *counters: int | Tensor) -> Tensor:
    """int64 hash of the seed and the counters in their order; tensors broadcast, and so does the result.

    All 64 bits are usable: a flip of any bit of the seed or of a counter flips each with probability 1/2.
    Integers outside of int64 count modulo 2^64.
    """
    # Counters are shifted by one, so that a counter of 0 changes the hash
    h = _mix(torch.tensor(_word(seed)) + _GAMMA)
    for counter in counters:
        h = _mix(h + (_counter(counter) + 1) * _GAMMA)
    return h


def uniform(
    seed: int, *counters: int | Tensor, count: int, dtype: torch.dtype = torch.float32
) -> Tensor:  # [... count]
    """Numbers m / 2^p in [0, 1), m uniform in 0 ... 2^p - 1, p the precision of `dtype`: 1 is never met."""
    # Only as many bits as `dtype` holds: with more, rounding could give 1
    p = 1 - int(math.log2(torch.finfo(dtype).eps))
    h = _positions("uniform", seed, counters, count)  # [... count]
    return _shift_right(h, 64 - p).to(dtype) * 2.0**-p


def normal(seed: int, *counters: int | Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:  # [... count]
    """Standard normal numbers Φ⁻¹(u), u = (m + 1/2) / 2^52 in float64: finite, none beyond 8.3 in size."""
    h = _positions("normal", seed, counters, count)  # [... count]
    # The half keeps u away from 0 and 1, where the inverse of Φ is infinite
    u = (_shift_right(h, 12).double() + 0.5) * 2.0**-52
    z: Tensor = torch.special.ndtri(u)
    return z.to(dtype)


def resample(points: Tensor, seed: int, *counters: int | Tensor, breadth: float = 0.5) -> Tensor:  # [... k]
    """New points like those of `points` [n k], one for each element of the counters: a smoothed bootstrap.

        mean + sqrt(1 - h²) (point - mean) + h C^(1/2) noise        h = breadth, C the covariance (divisor n)

    so that mean and covariance are kept for any h in [0, 1]: 0 draws the points themselves, 1 a Gaussian.
    """
    n, k = points.shape
    one = _one_of(n, seed, counters)  # [...]
    # Shrink it towards the mean by as much as the noise widens the cloud again
    mean = points.double().mean(0)
    away = points.double() - mean  # [n k]
    noise = normal(seed, *counters, count=k, dtype=torch.float64) @ _root(away.T @ away / n)
    drawn: Tensor = mean + (1 - breadth * breadth) ** 0.5 * away[one] + breadth * noise
    return drawn.to(points.dtype)


def resample_near(points: Tensor, seed: int, *counters: int | Tensor, neighbors: int = 16) -> Tensor:  # [... k]
    """New points like those of `points` [n k], one for each element of the counters: a mixture of local Gaussians.

        m + sum_i noise_i (q_i - m) / sqrt(K)        q_i the K points nearest to a drawn one, itself too; m their mean

    a normal distribution with the mean and the covariance (divisor K) of these neighbors. Distances are in deviations
    of each number. A cloud that is bent is followed, where noise with the covariance of all points would leave it.
    The outermost points have neighbors on one side only, so that the new ones are somewhat narrower than all points.
    """
    one = _one_of(len(points), seed, counters)  # [...]
    K = min(neighbors, len(points))
    all_points = points.double()
    # Numbers in units of their own; one that never varies says nothing
    deviation = all_points.std(0, correction=0)
    unit = all_points / torch.where(deviation > 0, deviation, 1.0)
    near = all_points[torch.cdist(unit[one], unit).topk(K, largest=False).indices]  # [... K k]
    mean = near.mean(-2)
    noise = normal(seed, *counters, count=K, dtype=torch.float64).unsqueeze(-2) @ (near - mean.unsqueeze(-2))
    return (mean + noise.squeeze(-2) / math.sqrt(K)).to(points.dtype)


def _one_of(n: int, seed: int, counters: tuple[int | Tensor, ...]) -> Tensor:  # [...]
    """A number from 0 to n - 1 for each element of the counters."""
    drawn = uniform(seed, *counters, count=1, dtype=torch.float64).squeeze(-1)
    return torch.minimum((drawn * n).long(), torch.tensor(n - 1))


def _root(covariance: Tensor) -> Tensor:
    """The symmetric square root of a covariance matrix; what rounding made negative is 0."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root


def permutation(seed: int, epoch: int, n: int) -> Tensor:  # [n]
    """The order of n samples in an epoch: the indices sorted by their hash, equal hashes by index."""
    if n < 0:
        raise DataError(f"permutation of n={n} samples: n must be 0 or more; pass the size of the data set")
    return _positions("permutation", seed, (epoch,), n).argsort(stable=True)


def seed_of(seed: int, *counters: int) -> int:
    """A seed in 0 ... 2^63 - 1 for `torch.Generator.manual_seed` and others that want one number."""
    return int(_shift_right(hash_counters(seed, _tag("seed_of"), *counters), 1))


def _positions(name: str, seed: int, counters: tuple[int | Tensor, ...], count: int) -> Tensor:  # [... count]
    """Hashes of (seed, name, counters, position), the position running over a new last axis."""
    h = hash_counters(seed, _tag(name), *counters)[..., None]  # [... 1]
    return _mix(h + (torch.arange(count, device=h.device) + 1) * _GAMMA)  # [... count]


def _tag(name: str) -> int:
    """The letters of a name as a number, to be hashed as a counter."""
    return int.from_bytes(name.encode(), "big")


def _counter(counter: int | Tensor) -> Tensor:
    """A counter as int64; one with a fraction is refused, since cutting it off would repeat numbers."""
    if not isinstance(counter, Tensor):
        return torch.tensor(_word(counter))
    if counter.is_floating_point() or counter.is_complex():
        raise DataError(f"counter of dtype {counter.dtype}: whole numbers are wanted; pass an int64 tensor")
    return counter.long()


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, a bijection of the 64-bit words."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift x >>> bits: the arithmetic one copies the sign into the upper bits, which are masked."""
    return torch.bitwise_and(x >> bits, 2 ** (64 - bits) - 1)
