"""Conversion between bytes and pixels in [0, 1], and standardizing: the only place where either is written down."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.errors import ShapeError

__all__ = ["standardize", "to_bytes", "to_float"]


def to_float(images: Tensor) -> Tensor:
    """Convert bytes to pixels in [0, 1], x / 255.

    Args:
        images: uint8, of any shape.

    Returns:
        Floats of torch's default type, of the same shape.
    """
    return images.to(torch.get_default_dtype()) / 255


def to_bytes(pixels: Tensor) -> Tensor:
    """Convert pixels to the nearest bytes; numbers outside [0, 1] are clipped and NaN becomes 0.

    Args:
        pixels: floats of any shape.

    Returns:
        uint8 of the same shape, detached.
    """
    return pixels.detach().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)


def standardize(images: Tensor, *, per_channel: bool = False) -> Tensor:
    """Give each image zero mean and unit variance, (x - mean) / max(σ, 1/√N) over its N values.

    The floor under σ is that of TensorFlow's `per_image_standardization`; an image of one value becomes zero.

    Args:
        images: floats [b c h w].
        per_channel: Standardize each channel by itself: N is then the number of values of a channel.

    Returns:
        Floats [b c h w]; the statistics are computed in float64.

    Raises:
        ShapeError: if the images are not floats or have other than four axes.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ShapeError(f"standardize of {images.dtype} {list(images.shape)}: floats [b c h w] are wanted")
    axes = (2, 3) if per_channel else (1, 2, 3)
    centered = images - images.mean(axes, keepdim=True, dtype=torch.float64).to(images)
    variance = centered.square().mean(axes, keepdim=True, dtype=torch.float64)  # [b 1 1 1], or [b c 1 1]
    N = max(1, images.shape[axes[0] :].numel())
    return centered / variance.clamp_min(1 / N).sqrt().to(images)
