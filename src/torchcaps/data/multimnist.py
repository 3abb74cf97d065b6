"""MultiMNIST by the recipe of Sabour, Frosst and Hinton (2017, section 6): two digits, one laid over the other.

Each digit is put on a canvas of 36x36 pixels, shifted from its middle by a whole number of pixels, uniform in
-4 ... 4 along each axis; the two are added and cut off at 255. For boxes of side s whose shifts along an axis
differ by D the overlap is (1 - E|D| / s)²; with E|D| = 80/27 that is 80 % of the 28x28 image boxes, on average.

The first digit of image `index` is number index mod n. The second is uniform over all images of another class:
with the images in the order of their labels, those of its own class are one run, which a draw steps over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data.augment import check_index, windows
from torchcaps.data.base import RawBatch
from torchcaps.errors import DataError
from torchcaps.utils.random import uniform

__all__ = ["multimnist"]

_STREAM = int.from_bytes(b"multimnist", "big")  # its numbers are shared with nothing else that has the same seed


def multimnist(
    images: Tensor, labels: Tensor, seed: int, index: Tensor, size: int = 36, most_shift: int = 4
) -> RawBatch:
    """Images `index` [b] of the set that `seed` makes of uint8 images [n 1 h w] and their labels [n].

    Returns the images uint8 [b 1 size size], the labels [b 2] of the two digits, and the digits each by itself,
    uint8 [b 2 size size]: what a decoder should rebuild from one of them.
    """
    _check(images, labels, size, most_shift)
    check_index("multimnist", index)
    u = uniform(seed, _STREAM, index, count=5, dtype=torch.float64)  # [b 5]
    first = index.long() % len(images)
    pair = torch.stack((first, _partner(labels, first, u[:, 0])), dim=1)  # [b 2]
    moves = (u[:, 1:] * (2 * most_shift + 1)).long() - most_shift  # [b 4]
    parts = _place(images[pair.flatten()], moves.view(-1, 2), size).view(-1, 2, size, size)
    both = parts.sum(1, keepdim=True, dtype=torch.int16).clamp(max=255).to(torch.uint8)  # [b 1 size size]
    return RawBatch(both, labels[pair], parts)


def _partner(labels: Tensor, first: Tensor, u: Tensor) -> Tensor:  # [b]
    """For each of `first` [b] an image of another class, the one at u in [0, 1) of all such images."""
    ordered, order = labels.sort(stable=True)
    own = labels[first]
    begin = torch.searchsorted(ordered, own)
    others = len(labels) - (torch.searchsorted(ordered, own, right=True) - begin)  # [b]
    if bool((others == 0).any()):
        raise DataError(f"multimnist: all {len(labels)} images are of class {int(labels[0])}; two classes are wanted")
    drawn = (u * others).long()
    return order[drawn + (len(labels) - others) * (drawn >= begin)]


def _place(digits: Tensor, moves: Tensor, size: int) -> Tensor:  # [b 1 size size]
    """Digits [b 1 h w] in the middle of a canvas, but for moves (down, right) [b 2]."""
    h, w = digits.shape[-2:]
    down = size - h
    right = size - w
    padded = torch.nn.functional.pad(digits, (right, right, down, down))
    top = down - down // 2 - moves[:, 0]
    left = right - right // 2 - moves[:, 1]
    return windows(padded, top, left, (size, size))


def _check(images: Tensor, labels: Tensor, size: int, most_shift: int) -> None:
    """One line on what MultiMNIST cannot be made of."""
    if images.ndim != 4 or images.shape[1] != 1 or images.dtype != torch.uint8 or not len(images):
        raise DataError(f"multimnist of {images.dtype} {list(images.shape)}: uint8 [n 1 h w], n > 0, is wanted")
    if labels.shape != images.shape[:1]:
        raise DataError(f"multimnist: {len(images)} images but labels {list(labels.shape)}; one each is wanted")
    least = max(images.shape[-2:]) + 2 * most_shift
    if most_shift < 0 or size < least:
        raise DataError(f"multimnist: shifts of {most_shift} on {size}x{size} pixels; 0 or more and {least} are wanted")
