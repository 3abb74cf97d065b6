"""affNIST by its published recipe: MNIST digits under random affine maps, on a canvas of 40x40 pixels.

    rotation ~ U(-20, 20) degrees      shear ~ U(-.2, .2)      scale_x, scale_y ~ U(.8, 1.2)
    (x, y)   ~ U(all places that keep the whole digit on the canvas)

A point p of the source goes to (x, y) + R(rotation) · K(shear) · S(scale_x, scale_y) · p, both counted in pixels
from the center of their image (see `warp.linear_map`). Between pixels the source is read bilinearly, so a pixel of
ink is a tent that ends one pixel from its center; the whole digit is on the canvas when all of its tents, once
mapped, end before the first pixel center beyond it. What (seed, index) names is the same bytes in any batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data.augment import check_index
from torchcaps.errors import DataError
from torchcaps.math.warp import linear_map, warp
from torchcaps.utils.random import uniform

__all__ = ["RANGES", "Transforms", "affnist"]

RANGES = {
    "rotation": (-math.radians(20), math.radians(20)),
    "shear": (-0.2, 0.2),
    "scale_x": (0.8, 1.2),
    "scale_y": (0.8, 1.2),
}

_STREAM = int.from_bytes(b"affnist", "big")  # its numbers are shared with nothing else that has the same seed
_CHUNK = 128  # images drawn at once: the buffers then stay in the cache


class Transforms(NamedTuple):
    """How each image was made, each [b]; all but the source are float32.

    rotation         in radians, counter-clockwise as seen
    shear            how far the top is shifted to the right, in heights (to the left, when negative)
    scale_x scale_y  width and height over those of the source, before shear and rotation
    x y              place of the source's center relative to that of the canvas, in pixels to the right and down
    source           number of the source image, int64
    """

    rotation: Tensor
    shear: Tensor
    scale_x: Tensor
    scale_y: Tensor
    x: Tensor
    y: Tensor
    source: Tensor


class TransformedDigits(NamedTuple):
    """Images uint8 [b 1 size size] and how they were made."""

    images: Tensor
    transforms: Transforms


def affnist(images: Tensor, seed: int, index: Tensor, size: int = 40) -> TransformedDigits:
    """Generate affNIST images from digits.

    Args:
        images: Digits, uint8 [n 1 h w].
        seed: Names the set: another seed transforms the same digits in other ways.
        index: Numbers [b] of the images in that set. The source of an image is digit index mod n, so that indices n
            apart are two variants of the same digit.
        size: Side of the canvas in pixels.

    Returns:
        The images, uint8 [b 1 size size], and how they were made.

    Raises:
        DataError: if a digit has no ink or does not fit on the canvas.
    """
    _check_digits(images, size)
    check_index("affnist", index)
    chunks = range(0, max(1, len(index)), _CHUNK)
    generated = [_generate(images, seed, index[first : first + _CHUNK], size) for first in chunks]
    columns = zip(*(chunk.transforms for chunk in generated), strict=True)
    transforms = Transforms(*(torch.cat(column) for column in columns))
    return TransformedDigits(torch.cat([chunk.images for chunk in generated]), transforms)


def _check_digits(images: Tensor, size: int) -> None:
    """Refuse what affNIST cannot be made of."""
    if images.ndim != 4 or images.shape[1] != 1 or images.dtype != torch.uint8 or not len(images):
        raise DataError(f"affnist of {images.dtype} {list(images.shape)}: uint8 [n 1 h w], n > 0, is wanted")
    if size < 1:
        raise DataError(f"affnist on {size}x{size} pixels: the recipe's canvas is 40x40")


def _generate(images: Tensor, seed: int, index: Tensor, size: int) -> TransformedDigits:
    """Generate the images of an index [b] that is short enough for one pass."""
    # The digits and the linear part of their maps.
    source = index.long() % len(images)
    digits = images[source]  # [b 1 h w]
    u = uniform(seed, _STREAM, index, count=6)  # [b 6]
    bounds = zip(u.unbind(-1)[:4], RANGES.values(), strict=True)
    rotation, shear, scale_x, scale_y = (low + (high - low) * u_n for u_n, (low, high) in bounds)
    A = linear_map(rotation, shear, scale_x, scale_y)
    # A shift that keeps the digit on the canvas, uniform among all such shifts.
    low, high = _shift_bounds(digits, A, size, source)  # [b 2] each
    t = low + (high - low) * u[:, 4:]
    pixels = warp(digits.float(), A, t, (size, size)).add_(0.5).to(torch.uint8)  # [b 1 size size]
    return TransformedDigits(pixels, Transforms(rotation, shear, scale_x, scale_y, t[:, 0], t[:, 1], source))


def _shift_bounds(digits: Tensor, A: Tensor, size: int, source: Tensor) -> tuple[Tensor, Tensor]:  # [b 2] each
    """Return the least and the greatest shift (x, y) that keep each digit on the canvas.

    A tent's corners stand (±1, ±1) from the center of its pixel, so that it reaches |A_x| + |A_y| beyond the
    mapped center, along each axis; the first centers beyond the canvas stand (size + 1) / 2 from its middle.
    """
    first, last = _ink_bounds(digits, A)
    reach = A.abs().sum(-1)  # [b 2]
    edge = (size + 1) / 2
    low = reach - edge - first
    high = edge - reach - last
    # A digit without ink has infinite bounds; one that is too large has no shift between them.
    bad = ~(low <= high).all(-1) | first.isinf().any(-1)
    if bad.any():
        n = int(bad.nonzero()[0])
        why = "has no ink" if first[n].isinf().any() else f"does not fit on {size}x{size} pixels; raise the size"
        raise DataError(f"affnist: source image {int(source[n])} {why}")
    return low, high


def _ink_bounds(digits: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:  # [b 2] each
    """Return the least and the greatest A p over the centers p of the pixels with ink.

    Of a row of pixels only the first and the last with ink can be either, so that only these are mapped.
    """
    h, w = digits.shape[-2:]
    ink = digits[:, 0] > 0  # [b h w]
    ends = torch.stack((ink.byte().argmax(-1), w - 1 - ink.flip(-1).byte().argmax(-1)), dim=1)  # [b end h]
    xs = ends.to(A.dtype) - (w - 1) / 2
    ys = torch.arange(h, dtype=A.dtype, device=A.device) - (h - 1) / 2
    q = A[:, :, 0, None, None] * xs[:, None] + A[:, :, 1, None, None] * ys  # [b 2 end h]
    empty = ~ink.any(-1)[:, None, None]  # [b 1 1 h]
    return q.masked_fill(empty, math.inf).amin((2, 3)), q.masked_fill(empty, -math.inf).amax((2, 3))
