"""Frames: where and how an image stands, apart from what it shows.

The frame of an image comes from the moments of its brightness m(p), p = (x, y) in pixels from the image's center:

    c = mean of p                          where it stands
    k = cov(x, y) / var(y)                 its slant: how far x moves with y
    s = target / sqrt(var(y))              how much higher it is to become

and the map into the frame is p -> A (p - c), A = s (1 -k; 0 1). It brings the centroid to the center, removes the slant
and gives every image the same height. An image that was shifted, scaled, or sheared along its rows has the same image
in its frame. Drawing back uses the inverse, p -> A⁻¹ p + c. Neither needs a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

__all__ = ["NUMBERS", "Frame", "find_frame", "from_frame", "into_frame"]

NUMBERS = 4
"""How many numbers make a frame: log s, k and c."""

TARGET = 0.193
"""Deviation of the rows in a frame, relative to the image's height: what handwritten digits have on average."""

_MOST_SCALE = 2.0
_MOST_SLANT = 1.5
"""Limits of s and 1 / s, and of |k|: thin or tiny marks would ask for more."""


class Frame(NamedTuple):
    """The frames of b images.

    Attributes:
        scale: s [b], how many times larger the image is in the frame.
        slant: k [b].
        center: c [b 2], in pixels from the image's center, x to the right and y down.
    """

    scale: Tensor
    slant: Tensor
    center: Tensor

    @property
    def numbers(self) -> Tensor:
        """(log s, k, c) [b 4]: any four numbers are a frame."""
        return torch.cat([self.scale.log().unsqueeze(-1), self.slant.unsqueeze(-1), self.center], -1)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> Frame:
        """Make frames of numbers [b 4], the inverse of `numbers`."""
        return cls(numbers[:, 0].exp(), numbers[:, 1], numbers[:, 2:])

    def matrices(self) -> Tensor:
        """Return A [b 2 2]."""
        top = torch.stack([self.scale, -self.scale * self.slant], -1)
        bottom = torch.stack([torch.zeros_like(self.scale), self.scale], -1)
        return torch.stack([top, bottom], -2)

    def inverse_matrices(self) -> Tensor:
        """Return A⁻¹ [b 2 2]."""
        top = torch.stack([1 / self.scale, self.slant / self.scale], -1)
        bottom = torch.stack([torch.zeros_like(self.scale), 1 / self.scale], -1)
        return torch.stack([top, bottom], -2)


@torch.no_grad()
def find_frame(images: Tensor, target: float = TARGET) -> Frame:
    """Find the frames of images from their moments.

    Args:
        images: [b c h w], 0 = background.
        target: Deviation of the rows in the frame, relative to h.

    Returns:
        One frame an image; that of an image without brightness changes nothing.
    """
    m = images.double().sum(1)  # [b h w]
    h, w = m.shape[1:]
    y = (torch.arange(h, device=m.device).double() - (h - 1) / 2).view(1, h, 1)
    x = (torch.arange(w, device=m.device).double() - (w - 1) / 2).view(1, 1, w)
    # First moments, then second ones around them
    mass = m.sum((1, 2))
    some = mass > 0
    share = m / torch.where(some, mass, 1.0).view(-1, 1, 1)
    center = torch.stack([(share * x).sum((1, 2)), (share * y).sum((1, 2))], -1)  # [b 2]
    dx = x - center[:, 0].view(-1, 1, 1)
    dy = y - center[:, 1].view(-1, 1, 1)
    rows = (share * dy * dy).sum((1, 2))
    mixed = (share * dx * dy).sum((1, 2))
    # A single row of pixels has no slant and no height
    high = rows > 1e-6
    slant = torch.where(high, mixed / torch.where(high, rows, 1.0), 0.0).clamp(-_MOST_SLANT, _MOST_SLANT)
    scale = torch.where(high, target * h / torch.where(high, rows, 1.0).sqrt(), 1.0)
    dtype = images.dtype
    return Frame(scale.clamp(1 / _MOST_SCALE, _MOST_SCALE).to(dtype), slant.to(dtype), center.to(dtype))


@torch.no_grad()
def into_frame(images: Tensor, frame: Frame) -> Tensor:
    """Bring images [b c h w] into their frames, [b c h w]."""
    return _sample(images, frame.inverse_matrices(), frame.center)


@torch.no_grad()
def from_frame(images: Tensor, frame: Frame) -> Tensor:
    """Draw images [b c h w] of a frame back to where they stood, [b c h w]."""
    A = frame.matrices()
    return _sample(images, A, -(A @ frame.center.unsqueeze(-1)).squeeze(-1))


def _sample(images: Tensor, matrices: Tensor, shifts: Tensor) -> Tensor:
    """Return images whose pixel p is pixel B p + t of the given ones, by cubic interpolation, in the range of pixels.

    An image is interpolated twice, into its frame and back, and linear interpolation blurs thin strokes each time.

    Args:
        images: [b c h w].
        matrices: B [b 2 2].
        shifts: t [b 2].

    Returns:
        [b c h w] in [0, 1].
    """
    h, w = images.shape[-2:]
    # Pixels from the image's center, and where each one comes from
    y = torch.arange(h, device=images.device, dtype=images.dtype) - (h - 1) / 2
    x = torch.arange(w, device=images.device, dtype=images.dtype) - (w - 1) / 2
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 2)  # [(h w) 2]
    sources = places @ matrices.transpose(1, 2) + shifts.unsqueeze(1)  # [b (h w) 2]
    # In units of half an image, from its first pixel to its last
    units = sources.new_tensor([max(w - 1, 1) / 2, max(h - 1, 1) / 2])
    grid = (sources / units).view(-1, h, w, 2)
    return grid_sample(images, grid, mode="bicubic", padding_mode="zeros", align_corners=True).clamp(0, 1)
