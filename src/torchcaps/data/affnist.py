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
from torchcaps.data.warp import linear_map, warp
from torchcaps.errors import DataError
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
    """How each image was made, each [b]; float32, but for the source.

    rotation         in radians, counter-clockwise as seen
    shear            how far the top leans to the right, in heights (to the left, when negative)
    scale_x scale_y  width and height over those of the source, before it is leant over and turned
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


def affnist(images: Tensor, seed: int, index: Tensor, size: int = 40) -> tuple[Tensor, Transforms]:
    """Images `index` [b] of the affNIST that `seed` makes of uint8 images [n 1 h w], and how they were made.

    They are uint8 [b 1 size size]. The source of an image is number index mod n, so that indices n apart are two
    variants of the same digit.
    """
    _check(images, size)
    check_index("affnist", index)
    drawn = [_draw(images, seed, index[b : b + _CHUNK], size) for b in range(0, max(1, len(index)), _CHUNK)]
    pixels = torch.cat([image for image, _ in drawn])
    return pixels, Transforms(*(torch.cat(column) for column in zip(*(t for _, t in drawn), strict=True)))


def _check(images: Tensor, size: int) -> None:
    """One line on what affNIST cannot be made of."""
    if images.ndim != 4 or images.shape[1] != 1 or images.dtype != torch.uint8 or not len(images):
        raise DataError(f"affnist of {images.dtype} {list(images.shape)}: uint8 [n 1 h w], n > 0, is wanted")
    if size < 1:
        raise DataError(f"affnist on {size}x{size} pixels: the recipe's canvas is 40x40")


def _draw(images: Tensor, seed: int, index: Tensor, size: int) -> tuple[Tensor, Transforms]:
    """Images and transforms of a part of the index."""
    source = index.long() % len(images)
    digits = images[source]  # [b 1 h w]
    u = uniform(seed, _STREAM, index, count=6)  # [b 6]
    bounds = zip(u.unbind(-1)[:4], RANGES.values(), strict=True)
    rotation, shear, scale_x, scale_y = (low + (high - low) * u_n for u_n, (low, high) in bounds)
    A = linear_map(rotation, shear, scale_x, scale_y)
    low, high = _room(digits, A, size, source)  # [b 2]
    t = low + (high - low) * u[:, 4:]
    drawn = warp(digits.float(), A, t, (size, size)).add_(0.5).to(torch.uint8)  # [b 1 size size]
    return drawn, Transforms(rotation, shear, scale_x, scale_y, t[:, 0], t[:, 1], source)


def _room(digits: Tensor, A: Tensor, size: int, source: Tensor) -> tuple[Tensor, Tensor]:  # [b 2] each
    """Least and greatest shift (x, y) that keep the digit on the canvas.

    A tent's corners stand (±1, ±1) from the center of its pixel, so that it reaches |A_x| + |A_y| beyond the
    mapped center, along each axis; the first centers beyond the canvas stand (size + 1) / 2 from its middle.
    """
    first, last = _extremes(digits, A)
    reach = A.abs().sum(-1)  # [b 2]
    edge = (size + 1) / 2
    low = reach - edge - first
    high = edge - reach - last
    bad = ~(low <= high).all(-1) | first.isinf().any(-1)
    if bad.any():
        n = int(bad.nonzero()[0])
        why = "has no ink" if first[n].isinf().any() else f"does not fit on {size}x{size} pixels; raise the size"
        raise DataError(f"affnist: source image {int(source[n])} {why}")
    return low, high


def _extremes(digits: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:  # [b 2] each
    """Least and greatest A p over the centers p of the pixels with ink: of a row, only its ends can be either."""
    h, w = digits.shape[-2:]
    ink = digits[:, 0] > 0  # [b h w]
    ends = torch.stack((ink.byte().argmax(-1), w - 1 - ink.flip(-1).byte().argmax(-1)), dim=1)  # [b end h]
    xs = ends.to(A.dtype) - (w - 1) / 2
    ys = torch.arange(h, dtype=A.dtype, device=A.device) - (h - 1) / 2
    q = A[:, :, 0, None, None] * xs[:, None] + A[:, :, 1, None, None] * ys  # [b 2 end h]
    empty = ~ink.any(-1)[:, None, None]  # [b 1 1 h]
    return q.masked_fill(empty, math.inf).amin((2, 3)), q.masked_fill(empty, -math.inf).amax((2, 3))
