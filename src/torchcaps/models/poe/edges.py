"""Oriented edges as children: how much contrast of each direction there is around each place, whatever drew it.

    g(p) = gradient of the brightness at pixel p, |g| its length and phi its angle
    e_k(p) = |g(p)| max(0, 1 - |phi(p) - phi_k|)       angles in units of the distance between neighbors, phi_k = k
    x_k(place) = sqrt(sum_p w(p - place) e_k(p))        w a Gaussian around the place

A child is the d numbers of one place. Two strokes of the same form that lie a pixel apart, or are of different
thickness, share hardly a pixel but most of these numbers; the features of an autoencoder, which must redraw the
image, keep them apart. Nothing here is learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

__all__ = ["STEP", "edge_children", "edge_grid"]

STEP = 4
"""Pixels from one place to the next."""
_WIDTH = 2.0
"""Deviation of the Gaussian window, in pixels."""
_REACH = 7
"""Pixels on either side of a place that its window holds."""


def edge_grid(height: int, width: int) -> tuple[int, int]:
    """Return how many places there are down and across an image."""
    return max(1, height // STEP), max(1, width // STEP)


@torch.no_grad()
def edge_children(images: Tensor, directions: int) -> Tensor:
    """Compute the oriented edges of images.

    Args:
        images: [b c h w]; the mean over channels counts.
        directions: d, on the full circle: a dark and a bright side of a stroke are two edges.

    Returns:
        [b i d], i counting the places row by row.
    """
    brightness = images.mean(1)  # [b h w]
    h, w = brightness.shape[1:]
    across = pad(brightness, (1, 1, 0, 0))
    down = pad(brightness, (0, 0, 1, 1))
    gx = across[:, :, 2:] - across[:, :, :-2]  # [b h w]
    gy = down[:, 2:] - down[:, :-2]
    # Share each gradient between the two directions next to it
    angle = torch.atan2(gy, gx) * (directions / (2 * math.pi))  # [b h w], a direction is a whole number
    k = torch.arange(directions, device=images.device, dtype=images.dtype).view(1, -1, 1, 1)
    away = (angle.unsqueeze(1) - k).remainder(directions)  # [b d h w]
    away = torch.minimum(away, directions - away)
    edges = (1 - away).clamp_min(0) * (gx.square() + gy.square()).sqrt().unsqueeze(1)
    # Sum in the window of each place; the first place is half a step from the border
    before = _REACH - STEP // 2
    padded = pad(edges.flatten(0, 1).unsqueeze(1), (before, _REACH, before, _REACH))
    pooled = conv2d(padded, _window(images), stride=STEP)
    rows, columns = edge_grid(h, w)
    pooled = pooled.view(len(images), directions, *pooled.shape[-2:])[..., :rows, :columns]
    # The root compresses contrast: a faint edge is an edge
    return pooled.clamp_min(0).sqrt().flatten(2).transpose(1, 2).contiguous()  # [b i d]


def _window(like: Tensor) -> Tensor:
    """Gaussian weights [1 1 n n] with sum 1, in the type of an image."""
    distance = torch.arange(-_REACH, _REACH + 1, device=like.device, dtype=like.dtype)
    line = torch.exp(-distance.square() / (2 * _WIDTH**2))
    line = line / line.sum()
    return (line.unsqueeze(1) * line).view(1, 1, len(line), len(line))
