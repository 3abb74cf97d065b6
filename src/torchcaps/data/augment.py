"""Random changes of training images [b c h w], each a pure function of (seed, epoch, index).

The index of an image, not its place in a batch, names it, so a change is the same in any batch and after any
resumption. Every change hashes its own name with (seed, epoch, index), so that no two share random numbers: where a
crop falls says nothing about the brightness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data.preprocess import crop_margins
from torchcaps.errors import DataError, ShapeError
from torchcaps.math.warp import linear_map, warp
from torchcaps.utils.random import permutation, seed_of, uniform

__all__ = [
    "AUTHORS_CONTRAST",
    "BRIGHTNESS",
    "STANDARD_BRIGHTNESS",
    "Augment",
    "SampleKey",
    "affine",
    "brightness_contrast",
    "check_index",
    "crop",
    "deform",
    "mirror",
    "mixup_partners",
    "mixup_shares",
    "shift",
    "windows",
]

BRIGHTNESS = 63 / 255
"""Largest change of brightness of images in [0, 1]."""
STANDARD_BRIGHTNESS = 1.0
"""Largest change of brightness of images of unit variance."""
AUTHORS_CONTRAST = (0.2, 1.8)
"""Range of the contrast in the authors' code of Hinton 2018, which changes it before standardizing."""

_MIXUP_TRIES = 32
"""Pairs of numbers that `mixup_shares` draws; one is accepted with probability 1/2 or more."""

_ROTATION = 0.17
_STRETCH = 0.2
_SHEAR = 0.17
"""How far `deform` goes at strength 1: radians (10 degrees), a share of the size, a slope."""


class SampleKey(NamedTuple):
    """What the random numbers of a batch of images are hashed from.

    Attributes:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        indices: int64 [b], the numbers of the images in their data set.
    """

    seed: int
    epoch: int
    indices: Tensor

    def uniform(self, change: str, count: int) -> Tensor:
        """Draw `count` numbers in [0, 1) for each image, [b count]; each `change` has numbers of its own."""
        return uniform(self.seed, _stream(change), self.epoch, self.indices, count=count)


@dataclass(frozen=True)
class Augment:
    """How training images are changed at random; a test sees none of it.

    Attributes:
        mirror: Order of the channels of a mirrored image, see `mirror`; half of the images are mirrored. None mirrors
            no image.
        deform: Strength of random rotation, stretch and shear, see `deform`; 0 is none.
        jitter: Change brightness and contrast.
        jitter_before: Change them before images are standardized, as the authors' code of Hinton 2018 does, instead of
            after, as its text says.
    """

    mirror: tuple[int, ...] | None = None
    deform: float = 0.0
    jitter: bool = False
    jitter_before: bool = False

    def geometry(self, pixels: Tensor, key: SampleKey, *, components: bool = False) -> Tensor:
        """Mirror and deform images, in this order.

        Args:
            pixels: floats [b c h w].
            key: Seed, epoch and indices [b] of the images.
            components: The channels are the objects of an image, each alone: mirrored with it, in their own order.

        Returns:
            Floats [b c h w].
        """
        if self.mirror is not None:
            order = tuple(range(pixels.shape[1])) if components else self.mirror
            pixels = mirror(pixels, order, key)
        return deform(pixels, self.deform, key)

    def pixel_brightness(self, pixels: Tensor, key: SampleKey) -> Tensor:
        """Change brightness and contrast of cropped pixels [b c h w] in [0, 1] if that comes before standardizing."""
        if not (self.jitter and self.jitter_before):
            return pixels
        return brightness_contrast(pixels, key, contrast=AUTHORS_CONTRAST)

    def brightness(self, images: Tensor, key: SampleKey, *, standardized: bool) -> Tensor:
        """Change brightness and contrast of model input [b c h w] if that comes last, on the scale of its values."""
        if not self.jitter or self.jitter_before:
            return images
        largest = STANDARD_BRIGHTNESS if standardized else BRIGHTNESS
        return brightness_contrast(images, key, brightness=largest)


def shift(images: Tensor, most: int, key: SampleKey) -> Tensor:
    """Move each image by whole pixels, uniform in -most ... most along each axis; what comes in is black.

    Args:
        images: Tensor [b c h w].
        most: Largest move in pixels; 0 returns the images as they are.
        key: Seed, epoch and indices [b] of the images.

    Returns:
        Tensor [b c h w].
    """
    if most == 0:
        return images
    check_index("shift", key.indices, len(images))
    top, left = (key.uniform("shift", 2) * (2 * most + 1)).long().unbind(-1)  # [b] each, 0 ... 2 most
    padded = torch.nn.functional.pad(images, (most, most, most, most))
    return windows(padded, top, left, (images.shape[-2], images.shape[-1]))


def crop(images: Tensor, size: int, key: SampleKey) -> Tensor:
    """Crop a square at a random place of each image, all places inside the image equally likely.

    Args:
        images: Tensor [b c h w].
        size: Side of the square.
        key: Seed, epoch and indices [b] of the images.

    Returns:
        Tensor [b c size size].
    """
    margins = torch.tensor(crop_margins("crop", images, size), device=key.indices.device)  # (down, right)
    check_index("crop", key.indices, len(images))
    top, left = (key.uniform("crop", 2) * (margins + 1)).long().unbind(-1)
    return windows(images, top, left, (size, size))


def brightness_contrast(
    images: Tensor, key: SampleKey, *, brightness: float = BRIGHTNESS, contrast: tuple[float, float] = (0.5, 1.5)
) -> Tensor:
    """Change brightness by δ and contrast by κ: x' = (x + δ - m) κ + m, with m the mean of x + δ.

    The mean is that of one channel of one image, as in TensorFlow's random_contrast. Images in [0, 1] may leave
    that range: nothing is clipped, so that no detail is lost and a change could be undone.

    Args:
        images: floats [b c h w].
        key: Seed, epoch and indices [b] of the images.
        brightness: δ is uniform in ±brightness.
        contrast: κ is uniform between these two.

    Returns:
        Floats [b c h w].

    Raises:
        ShapeError: if the images are not floats [b c h w], or the key does not name one index for each.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ShapeError(f"brightness_contrast of {images.dtype} {list(images.shape)}: floats [b c h w] are wanted")
    check_index("brightness_contrast", key.indices, len(images))
    u = key.uniform("brightness_contrast", 2).to(images)[..., None, None, None]
    delta = brightness * (2 * u[:, 0] - 1)
    kappa = contrast[0] + (contrast[1] - contrast[0]) * u[:, 1]  # [b 1 1 1]
    m = images.mean((2, 3), keepdim=True, dtype=torch.float64).to(images)  # [b c 1 1]
    return (images - m) * kappa + (m + delta)


def affine(
    images: Tensor,
    key: SampleKey,
    *,
    rotation: float = 0.0,
    scale: tuple[float, float] = (1.0, 1.0),
    shear: float = 0.0,
    translate: float = 0.0,
) -> Tensor:
    """Rotate, scale, shear and move each image about its center by `warp`; what comes in is black.

    Args:
        images: floats [b c h w].
        key: Seed, epoch and indices [b] of the images.
        rotation: The angle is uniform in ±rotation radians.
        scale: The scale of each axis by itself is uniform between these two.
        shear: The shear is uniform in ±shear.
        translate: The move along each axis is uniform in ±translate pixels.

    Returns:
        Floats [b c h w]; see `warp.linear_map` for the order and the directions of the changes.
    """
    check_index("affine", key.indices, len(images))
    largest = (rotation, shear, translate, translate)
    u = key.uniform("affine", 6).to(images).unbind(-1)
    angle, slope, right, down = (m * (2 * u_n - 1) for m, u_n in zip(largest, u[:4], strict=True))
    scale_x, scale_y = (scale[0] + (scale[1] - scale[0]) * u_n for u_n in u[4:])
    size = (images.shape[-2], images.shape[-1])
    return warp(images, linear_map(angle, slope, scale_x, scale_y), torch.stack((right, down), dim=-1), size)


def deform(images: Tensor, strength: float, key: SampleKey) -> Tensor:
    """Rotate, stretch and shear each image, at strength 1 by up to 10 degrees, a fifth of its size and .17.

    What comes in has the median brightness of the image's border, so that an object keeps its background.

    Args:
        images: floats [b c h w].
        strength: Factor of all three ranges; 0 returns the images as they are.
        key: Seed, epoch and indices [b] of the images.

    Returns:
        Floats [b c h w].
    """
    if strength == 0:
        return images
    # The median over the border: outliers, such as an object that touches it, do not count.
    rows = images[..., (0, -1), :].flatten(2)
    columns = images[..., :, (0, -1)].flatten(2)
    background = torch.cat((rows, columns), dim=-1).median(-1).values[..., None, None]  # [b c 1 1]
    deformed = affine(
        images - background,
        key,
        rotation=_ROTATION * strength,
        scale=(1 - _STRETCH * strength, 1 + _STRETCH * strength),
        shear=_SHEAR * strength,
    )
    return deformed + background


def mirror(images: Tensor, order: tuple[int, ...], key: SampleKey) -> Tensor:
    """Mirror half of the images left to right, with their channels in another order.

    Of a stereo pair the order is (1, 0): in a mirror, the left camera's image is the one that the right camera would
    have taken.

    Args:
        images: Tensor [b c h w].
        order: The numbers of the c channels in the order that a mirrored image has.
        key: Seed, epoch and indices [b] of the images.

    Returns:
        Tensor [b c h w].

    Raises:
        ShapeError: if the order does not name each channel once.
    """
    if sorted(order) != list(range(images.shape[1])):
        raise ShapeError(f"mirror: channels in the order {list(order)} of images {list(images.shape)}; name each once")
    check_index("mirror", key.indices, len(images))
    # One coin for each image.
    is_mirrored = key.uniform("mirror", 1).to(images.device) < 0.5  # [b 1]
    return torch.where(is_mirrored[..., None, None], images[:, list(order)].flip(-1), images)


def mixup_partners(key: SampleKey, images: int) -> Tensor:
    """Name the image that each image of a batch is mixed with: every image of a set is the partner of one.

    Args:
        key: Seed, epoch and indices [b] of the images.
        images: Number of images of the set.

    Returns:
        int64 [b], numbers of images.
    """
    check_index("mixup_partners", key.indices)
    return permutation(seed_of(key.seed, _stream("mixup_partners")), key.epoch, images)[key.indices]


def mixup_shares(key: SampleKey, alpha: float) -> Tensor:
    """Draw max(λ, 1 - λ) with λ from Beta(alpha, alpha), the share that an image keeps in mixup (Zhang 2018).

    The larger share is the image's own, so that its label stays the most likely one; since partners are drawn alike,
    pairs are mixed as often in each proportion as with λ itself.

    Args:
        key: Seed, epoch and indices [b] of the images.
        alpha: In (0, 1]; the smaller, the closer to 1 most shares are.

    Returns:
        Floats [b] from 1/2 to 1.

    Raises:
        DataError: if alpha is not in (0, 1].
    """
    if not 0 < alpha <= 1:
        raise DataError(f"mixup_shares with alpha={alpha}: more than 0 and at most 1 is wanted")
    check_index("mixup_shares", key.indices)
    # Jöhnk's way to a beta variable: x^(1/a) / (x^(1/a) + y^(1/a)) of the first pair whose sum is at most 1.
    u = key.uniform("mixup_shares", 2 * _MIXUP_TRIES).double().clamp_min(2.0**-25).log() / alpha  # [b tries*2]
    (log_x, log_y) = u.chunk(2, dim=-1)
    first = (torch.logaddexp(log_x, log_y) <= 0).int().argmax(-1, keepdim=True)  # [b 1]
    share = torch.sigmoid(log_x - log_y).gather(-1, first).squeeze(-1)  # [b]
    return torch.maximum(share, 1 - share).float()


def windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a window out of each image, at a place of its own.

    Args:
        images: Tensor [b c h w].
        top: First row of each window, int64 [b].
        left: First column of each window, int64 [b].
        size: Height H and width W of the windows.

    Returns:
        Tensor [b c H W].
    """
    b, c = images.shape[:2]
    H, W = size
    device = images.device
    rows = (top.to(device)[:, None] + torch.arange(H, device=device)).view(b, 1, H, 1)
    columns = (left.to(device)[:, None] + torch.arange(W, device=device)).view(b, 1, 1, W)
    samples = torch.arange(b, device=device).view(b, 1, 1, 1)
    channels = torch.arange(c, device=device).view(1, c, 1, 1)
    return images[samples, channels, rows, columns]


def check_index(caller: str, index: Tensor, count: int | None = None) -> None:
    """Refuse an index of images that is not [b], holds a negative number or is not of `count` numbers.

    Raises:
        ShapeError: if the shape is wrong; the text begins with the name of the `caller`.
        DataError: if a number is negative.
    """
    if index.ndim != 1 or (count is not None and len(index) != count):
        wanted = "[b]" if count is None else f"[{count}], one number an image,"
        raise ShapeError(f"{caller}: an index of shape {list(index.shape)} came; {wanted} is wanted")
    if index.numel() and int(index.min()) < 0:
        raise DataError(f"{caller}: index {int(index.min())} came; images are counted from 0, so pass none below")


def _stream(name: str) -> int:
    """Return the letters of a name as a number, to be hashed as a counter."""
    return int.from_bytes(name.encode(), "big")
