"""Changes to images, each a pure function of (seed, epoch, index)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.math.random import uniform

__all__ = ["shift"]


def shift(images: Tensor, most: int, seed: int, epoch: int, index: Tensor) -> Tensor:
    """Move each image [b c h w] by up to `most` whole pixels in each direction; what comes in is black."""
    if most == 0:
        return images
    moves = (uniform(seed, epoch, index, count=2) * (2 * most + 1)).long()  # [b 2], 0 ... 2 most
    b, c, h, w = images.shape
    padded = torch.nn.functional.pad(images, (most, most, most, most))
    rows = (moves[:, 0, None] + torch.arange(h)).view(b, 1, h, 1)
    columns = (moves[:, 1, None] + torch.arange(w)).view(b, 1, 1, w)
    samples = torch.arange(b).view(b, 1, 1, 1)
    channels = torch.arange(c).view(1, c, 1, 1)
    return padded[samples, channels, rows, columns]
