"""Digits drawn by code: a data set without a file, whose factors of variation are known exactly.

A digit is four Bezier curves in a box of height 1, cut into segments. Its points p are first bent a little
inside the box (the jitter, as handwriting varies) and then mapped by the factors,

    q = (x, y) + scale · R(rotation) · K(shear) · p

in a frame whose origin is the center of the image, with x to the right and y down, the side of the image being
1. The ink at a pixel follows from the distance of its center to the nearest segment, in pixels:

    ink = clip((thickness / 2 - distance) / softness + 1/2, 0, 1)

`paint` gives the ink of each digit a hue, on black.

Random numbers are hashes of (seed, index), and the arithmetic on pixels is of the kind that IEEE-754 rounds in
one way only: an image is the same bytes in any batch and on any number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.errors import DataError
from torchcaps.utils.random import hash_counters, uniform

__all__ = ["RANGES", "SEGMENTS", "Factors", "draw_factors", "draw_hue", "draw_jitter", "glyphs", "paint", "render"]

RANGES = {
    "x": (-0.08, 0.08),
    "y": (-0.05, 0.05),
    "rotation": (-0.3, 0.3),
    "scale": (0.45, 0.6),
    "shear": (-0.2, 0.2),
    "thickness": (0.06, 0.11),
}  # even the outermost draw stays inside of the image, and from 28 pixels on leaves its border black

_LABEL, _FACTORS, _JITTER, _HUE = range(4)  # the first counter: what is drawn
_WIDTH = 0.32
_HEIGHT = 0.5  # half the box of a digit
_BEND = 0.13  # size of the jitter; below 1/6 the bent box stays inside itself, without folds
_SOFTNESS = 1.0  # pixels over which the edge of a stroke fades
_SMALLEST = 12  # pixels a side; below, the loops of 6, 8 and 9 fill with ink
_CHUNK = 2**18  # pixels drawn at once: the buffers then stay in the cache

# Four curves a digit; x y x y ... in hundredths, y down; 2 points are a line, 3 a quadratic, 4 a cubic curve.
_CURVES = (
    "0 -50 -32 -50 -32 0 | -32 0 -32 50 0 50 | 0 50 32 50 32 0 | 32 0 32 -50 0 -50",
    "-20 -30 -4 -38 4 -50 | 4 -50 4 -16 | 4 -16 4 17 | 4 17 4 50",
    "-30 -28 -26 -50 0 -50 | 0 -50 31 -50 30 -23 | 30 -23 28 5 -30 48 | -30 48 30 48",
    "-28 -38 -15 -50 2 -50 | 2 -50 26 -50 26 -8 -9 -4 | -9 -4 16 -4 31 6 31 21 | 31 21 31 50 -15 60 -31 36",
    "9 -50 -9 -16 -30 14 | -30 14 30 14 | 13 -14 13 18 | 13 18 13 50",
    "28 -48 -22 -48 | -22 -48 -26 -8 | -26 -8 -7 -20 31 -16 31 16 | 31 16 31 52 -13 58 -31 38",
    "20 -50 -13 -38 -29 -8 -29 18 | -29 18 -29 60 31 60 31 20 | 31 20 31 0 15 -6 4 -6 | 4 -6 -11 -6 -26 4 -29 18",
    "-30 -48 0 -48 | 0 -48 30 -48 | 30 -48 13 -24 4 0 | 4 0 -4 24 -7 50",
    "0 -5 -37 -14 -31 -50 0 -50 | 0 -50 31 -50 37 -14 0 -5 | 0 -5 -44 6 -40 50 0 50 | 0 50 40 50 44 6 0 -5",
    "29 -24 24 2 -29 10 -29 -22 | -29 -22 -29 -40 -13 -50 2 -50 | "
    "2 -50 24 -50 31 -36 29 -24 | 29 -24 26 10 20 40 11 50",
)


class Factors(NamedTuple):
    """The factors of variation of images, each [b]; lengths are in sides of the image, angles in radians.

    label      the digit, 0 to 9, int64; all others are float32 and uniform in their `RANGES`
    x y        position of the digit's center relative to that of the image, to the right and down
    rotation   counter-clockwise, as displayed
    scale      height of the digit before it is rotated
    shear      how far the top is moved to the right, in heights (to the left, when negative)
    thickness  width of the pen, which neither scale nor shear changes
    """

    label: Tensor
    x: Tensor
    y: Tensor
    rotation: Tensor
    scale: Tensor
    shear: Tensor
    thickness: Tensor


class Glyphs(NamedTuple):
    """Images uint8 [b 1 size size] and the factors that they were drawn by."""

    images: Tensor
    factors: Factors


def glyphs(seed: int, index: Tensor, size: int = 28) -> Glyphs:
    """Draw images of digits.

    Args:
        seed: Names the set.
        index: Numbers [b] of the images in that set, from 0.
        size: Side of an image in pixels, 12 at least.

    Returns:
        The images, uint8 [b 1 size size], and the factors that they were drawn by.
    """
    factors = draw_factors(seed, index)
    ink = render(factors, size, draw_jitter(seed, index))  # [b 1 h w]
    return Glyphs(ink.mul_(255).add_(0.5).to(torch.uint8), factors)


def draw_factors(seed: int, index: Tensor) -> Factors:
    """Draw the factors of images `index` [b]: independent of each other, the label uniform over the ten digits.

    Raises:
        DataError: if the index is not [b] or holds a negative number.
    """
    _check_index(index)
    label = hash_counters(seed, _LABEL, index).remainder(10)
    u = uniform(seed, _FACTORS, index, count=len(RANGES)).unbind(-1)
    drawn = (low + (high - low) * u_n for u_n, (low, high) in zip(u, RANGES.values(), strict=True))
    return Factors(label, *drawn)


def draw_jitter(seed: int, index: Tensor) -> Tensor:  # [b 2 3]
    """Draw the jitter of images `index` [b]: coefficients in [-1, 1) that bend x and y, see `_bend`."""
    _check_index(index)
    return (2 * uniform(seed, _JITTER, index, count=6) - 1).view(len(index), 2, 3)


def draw_hue(seed: int, index: Tensor) -> Tensor:  # [b]
    """Draw the hue of images `index` [b] in radians, uniform from -π to π and independent of the factors."""
    _check_index(index)
    return (uniform(seed, _HUE, index, count=1).squeeze(-1) - 0.5) * (2 * math.pi)


def paint(images: Tensor, hue: Tensor) -> Tensor:
    """Give each gray image a color on black.

    Args:
        images: uint8 [b 1 h w].
        hue: [b] in radians; 0 is red, 2 π / 3 green and 4 π / 3 blue.

    Returns:
        Red, green and blue, uint8 [b 3 h w]; at every pixel at least one of them is 0, and the largest is the gray.
    """
    sixth = (hue / (math.pi / 3)).remainder(6)
    red, green, blue = (sixth - 3).abs() - 1, 2 - (sixth - 2).abs(), 2 - (sixth - 4).abs()
    color = torch.stack([red, green, blue], -1).clamp(0, 1)  # [b c]
    return (images * color[:, :, None, None]).add_(0.5).to(torch.uint8)


def render(factors: Factors, size: int = 28, jitter: Tensor | None = None) -> Tensor:
    """Draw digits by their factors.

    Args:
        factors: What to draw.
        size: Side of an image in pixels, 12 at least.
        jitter: Coefficients [b 2 3] of the bending; without them the strokes are as in `_CURVES`.

    Returns:
        float32 [b 1 size size] in [0, 1].

    Raises:
        DataError: if the size is too small, or a label is not a digit.
    """
    if size < _SMALLEST:
        raise DataError(f"glyphs of size {size}: a digit needs {_SMALLEST} pixels or more; raise the size")
    label = factors.label
    if label.numel() and not 0 <= int(label.min()) <= int(label.max()) <= 9:
        raise DataError(f"label {int(label.min())} to {int(label.max())}: glyphs are the digits 0 to 9")
    image = factors.x.new_empty(len(label), 1, size, size)
    step = max(16, _CHUNK // size**2)
    for b in range(0, len(label), step):
        f = Factors(*(factor[b : b + step] for factor in factors))
        # The strokes in pixels, then the ink from the distance of each pixel to them.
        q = size * _map_strokes(f, None if jitter is None else jitter[b : b + step])  # [2 end segment b]
        ink = _squared_distance(q, size).sqrt_().sub_(size / 2 * f.thickness).mul_(-1 / _SOFTNESS)
        image[b : b + step, 0] = ink.add_(0.5).clamp_(0, 1).permute(2, 0, 1)  # [h w b] -> [b h w]
    return image


def _check_index(index: Tensor) -> None:
    """Refuse an index that is not [b] or holds a negative number."""
    if index.ndim != 1:
        raise DataError(f"index of shape {list(index.shape)}: glyphs want [b]; pass index.reshape(-1)")
    if index.numel() and int(index.min()) < 0:
        raise DataError(f"index {int(index.min())}: images are counted from 0; pass no negative index")


def _bezier(curve: str, t: float) -> list[float]:
    """Return a point of a curve, p(t) = Σ_k C(n, k) t^k (1 - t)^(n - k) p_k."""
    c = [float(number) / 100 for number in curve.split()]  # x_0 y_0 x_1 y_1 ...
    n = len(c) // 2 - 1
    B = [math.comb(n, k) * t**k * (1 - t) ** (n - k) for k in range(n + 1)]
    return [sum(w * p for w, p in zip(B, c[axis::2], strict=True)) for axis in (0, 1)]


def _segments(pieces: int) -> Tensor:  # [label segment end 2]
    """Cut the curves of all digits into segments, `pieces` to a curve, and return their ends (x, y)."""
    cuts = [[[_bezier(c, k / pieces) for k in range(pieces + 1)] for c in d.split("|")] for d in _CURVES]
    points = torch.tensor(cuts, dtype=torch.float32)  # [label curve cut 2]
    return torch.stack((points[:, :, :-1], points[:, :, 1:]), dim=3).flatten(1, 2)


SEGMENTS = _segments(pieces=5)


def _bend(p: Tensor, jitter: Tensor) -> Tensor:  # [2 ... b]
    """Bend points by X + β (1 - X²) (j_0 + j_1 Y + j_2 (2 Y² - 1)), and Y alike; the border of the box stays."""
    X = p[0] / _WIDTH
    Y = p[1] / _HEIGHT  # [... b], in [-1, 1]
    (a_0, a_1, a_2), (b_0, b_1, b_2) = _BEND * jitter.permute(1, 2, 0)  # each [b]
    dX = (1 - X * X) * (a_0 + a_1 * Y + a_2 * (2 * Y * Y - 1))
    dY = (1 - Y * Y) * (b_0 + b_1 * X + b_2 * (2 * X * X - 1))
    return torch.stack((_WIDTH * (X + dX), _HEIGHT * (Y + dY)))


def _map_strokes(f: Factors, jitter: Tensor | None) -> Tensor:  # [2 end segment b]
    """Map the segments of the digits by q = (x, y) + scale · R · K · p, y down; sine and cosine are from float64."""
    p = SEGMENTS.to(f.x.device)[f.label].permute(3, 2, 1, 0)  # [2 end segment b]
    px, py = p if jitter is None else _bend(p, jitter)
    px = px - f.shear * py
    cos = f.rotation.double().cos().float()
    sin = f.rotation.double().sin().float()
    qx = f.x + f.scale * (cos * px + sin * py)
    qy = f.y + f.scale * (cos * py - sin * px)
    return torch.stack((qx, qy))


def _squared_distance(q: Tensor, size: int) -> Tensor:  # [h w b]
    """Return the squared distance from each pixel's center to the nearest segment, in pixels.

    In the frame of a segment of length 2h, its middle m the origin, the pixel is at u along and v across:
    distance² = (u - clip(u, -h, h))² + v². Both u and v are sums of a term in x and one in y, so that the work
    on all pixels is eight passes a segment, with the batch as the inner axis.
    """
    # The frame of each segment: its direction e and half its length h.
    a, z = q.unbind(1)  # start and end, [2 segment b]
    ex, ey = e = (z - a) / (z - a).square().sum(0).sqrt()
    h = (z - a).mul(e).sum(0) / 2
    # Coordinates along and across, each a term in x and one in y.
    grid = torch.arange(size, dtype=q.dtype, device=q.device) + (0.5 - size / 2)
    x, y = (grid[:, None] - m[:, None] for m in (a + z) / 2)  # [segment w b] and [segment h b]
    ux, vx = ((x * t[:, None])[:, None] for t in (ex, ey))  # [segment 1 w b]
    uy, vy = ((y * t[:, None])[:, :, None] for t in (ey, ex))  # [segment h 1 b]
    # The minimum over the segments, in buffers that are reused.
    nearest = q.new_full((size, size, q.shape[-1]), math.inf)
    u, v, w = (torch.empty_like(nearest) for _ in range(3))
    for s in range(len(h)):
        torch.add(ux[s], uy[s], out=u)
        torch.sub(vx[s], vy[s], out=v)
        u.sub_(torch.clamp(u, -h[s], h[s], out=w))
        v.mul_(v).add_(u.mul_(u))
        torch.minimum(nearest, v, out=nearest)
    return nearest
