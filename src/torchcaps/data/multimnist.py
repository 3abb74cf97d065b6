"""MultiMNIST by the recipe of Sabour, Frosst and Hinton (2017, section 6): two overlapping digits.

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
    """Generate images of two overlapping digits.

    Args:
        images: Digits, uint8 [n 1 h w].
        labels: Their classes [n], two at least.
        seed: Names the set: another seed makes other pairs.
        index: Numbers [b] of the pairs in that set.
        size: Side of the canvas in pixels.
        most_shift: How far each digit may be from the middle, in pixels.

    Returns:
        Images uint8 [b 1 size size], labels [b 2] of the two digits, and as components uint8 [b 2 size size] each digit
        by itself: what a decoder should reconstruct from one of them.

    Raises:
        DataError: if the digits do not fit on the canvas or are all of one class.
    """
    _check_digits(images, labels, size, most_shift)
    check_index("multimnist", index)
    # One number chooses the second digit, four the shifts of both.
    u = uniform(seed, _STREAM, index, count=5, dtype=torch.float64)  # [b 5]
    first = index.long() % len(images)
    pair = torch.stack((first, _partners(labels, first, u[:, 0])), dim=1)  # [b 2]
    moves = (u[:, 1:] * (2 * most_shift + 1)).long() - most_shift  # [b 4]
    digits = _on_canvas(images[pair.flatten()], moves.view(-1, 2), size).view(-1, 2, size, size)
    # Add in 16 bits: two bytes overflow one.
    both = digits.sum(1, keepdim=True, dtype=torch.int16).clamp(max=255).to(torch.uint8)  # [b 1 size size]
    return RawBatch(both, labels[pair], digits)


def _partners(labels: Tensor, first: Tensor, u: Tensor) -> Tensor:  # [b]
    """Choose for each of `first` [b] a digit of another class, the one at u [b] in [0, 1) of all such digits."""
    ordered, order = labels.sort(stable=True)
    own = labels[first]
    begin = torch.searchsorted(ordered, own)
    others = len(labels) - (torch.searchsorted(ordered, own, right=True) - begin)  # [b]
    if bool((others == 0).any()):
        raise DataError(f"multimnist: all {len(labels)} images are of class {int(labels[0])}; two classes are wanted")
    # Count among the digits of other classes, then step over the run of the digit's own class.
    number = (u * others).long()
    return order[number + (len(labels) - others) * (number >= begin)]


def _on_canvas(digits: Tensor, moves: Tensor, size: int) -> Tensor:  # [b 1 size size]
    """Put digits [b 1 h w] on a canvas, moved from its middle by (down, right) [b 2]."""
    h, w = digits.shape[-2:]
    down = size - h
    right = size - w
    padded = torch.nn.functional.pad(digits, (right, right, down, down))
    top = down - down // 2 - moves[:, 0]
    left = right - right // 2 - moves[:, 1]
    return windows(padded, top, left, (size, size))


def _check_digits(images: Tensor, labels: Tensor, size: int, most_shift: int) -> None:
    """Refuse what MultiMNIST cannot be made of."""
    if images.ndim != 4 or images.shape[1] != 1 or images.dtype != torch.uint8 or not len(images):
        raise DataError(f"multimnist of {images.dtype} {list(images.shape)}: uint8 [n 1 h w], n > 0, is wanted")
    if labels.shape != images.shape[:1]:
        raise DataError(f"multimnist: {len(images)} images but labels {list(labels.shape)}; one each is wanted")
    least = max(images.shape[-2:]) + 2 * most_shift
    if most_shift < 0 or size < least:
        raise DataError(f"multimnist: shifts of {most_shift} on {size}x{size} pixels; 0 or more and {least} are wanted")
