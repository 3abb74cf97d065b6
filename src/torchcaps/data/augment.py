"""Changes to images [b c h w], each a pure function of (seed, epoch, index), and the views a test looks at.

`index` [b] names the images, so a change is the same in any batch and after any resumption. Every change hashes
its own name with (seed, epoch, index): where the crop falls says nothing about the brightness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data.warp import linear_map, warp
from torchcaps.errors import DataError, ShapeError
from torchcaps.utils.random import uniform

__all__ = [
    "BRIGHTNESS",
    "STANDARD_BRIGHTNESS",
    "affine",
    "brightness_contrast",
    "center_crop",
    "check_index",
    "crop",
    "crops",
    "deform",
    "mirror",
    "shift",
    "standardize",
    "windows",
]

BRIGHTNESS = 63 / 255
STANDARD_BRIGHTNESS = 1.0
"""By how much light may change at most: of images in [0, 1], and of images of unit variance."""

_QUARTERS = (
    (2, 2),  # the center
    *((0, 0), (0, 4), (4, 0), (4, 4)),  # the corners
    *((0, 2), (2, 0), (2, 4), (4, 2)),  # the middles of the edges
    *((1, 1), (1, 3), (3, 1), (3, 3)),  # half-way from the center to the corners
)  # where the 13 test views start, (down, right), in quarters of what a view leaves out


def shift(images: Tensor, most: int, seed: int, epoch: int, index: Tensor) -> Tensor:
    """Move each image [b c h w] by up to `most` whole pixels in each direction; what comes in is black."""
    if most == 0:
        return images
    check_index("shift", index, len(images))
    u = uniform(seed, _stream("shift"), epoch, index, count=2)  # [b 2]
    top, left = (u * (2 * most + 1)).long().unbind(-1)  # [b], 0 ... 2 most
    padded = torch.nn.functional.pad(images, (most, most, most, most))
    return windows(padded, top, left, (images.shape[-2], images.shape[-1]))


def crop(images: Tensor, size: int, seed: int, epoch: int, index: Tensor) -> Tensor:  # [b c size size]
    """A square of each image [b c h w], all of its places inside the image equally likely."""
    room = torch.tensor(_room("crop", images, size), device=index.device)  # (down, right)
    check_index("crop", index, len(images))
    top, left = (uniform(seed, _stream("crop"), epoch, index, count=2) * (room + 1)).long().unbind(-1)
    return windows(images, top, left, (size, size))


def center_crop(images: Tensor, size: int) -> Tensor:  # [b c size size]
    """The square in the middle of each image; of an odd rest, the larger half is cut from below and the right."""
    down, right = _room("center_crop", images, size)
    return images[..., down // 2 : down // 2 + size, right // 2 : right // 2 + size]


def crops(images: Tensor, size: int, count: int = 13) -> Tensor:  # [count b c size size]
    """The first `count` of 13 views of each image: a test may average what a model says of them.

    In order: the center (that of `center_crop`), the four corners, the middles of the four edges, and the four
    places half-way between the center and the corners; each four from the top left, row by row.
    """
    if not 1 <= count <= len(_QUARTERS):
        raise ShapeError(f"crops with count={count}: there are {len(_QUARTERS)} views; ask for 1 to {len(_QUARTERS)}")
    down, right = _room("crops", images, size)
    starts = ((down * y // 4, right * x // 4) for y, x in _QUARTERS[:count])
    return torch.stack([images[..., y : y + size, x : x + size] for y, x in starts])


def brightness_contrast(
    images: Tensor,
    seed: int,
    epoch: int,
    index: Tensor,
    *,
    brightness: float = BRIGHTNESS,
    contrast: tuple[float, float] = (0.5, 1.5),
) -> Tensor:
    """x' = (x + δ - m) κ + m, δ ~ U(-brightness, brightness), κ ~ U(contrast), m the mean of x + δ.

    The mean is that of one channel of one image, as in TensorFlow's random_contrast. Images in [0, 1] may leave
    that range: nothing is clipped, so that no detail is lost and a change could be undone.
    """
    _check_floats("brightness_contrast", images)
    check_index("brightness_contrast", index, len(images))
    u = uniform(seed, _stream("brightness_contrast"), epoch, index, count=2).to(images)[..., None, None, None]
    delta = brightness * (2 * u[:, 0] - 1)
    kappa = contrast[0] + (contrast[1] - contrast[0]) * u[:, 1]  # [b 1 1 1]
    m = images.mean((2, 3), keepdim=True, dtype=torch.float64).to(images)  # [b c 1 1]
    return (images - m) * kappa + (m + delta)


def affine(
    images: Tensor,
    seed: int,
    epoch: int,
    index: Tensor,
    *,
    rotation: float = 0.0,
    scale: tuple[float, float] = (1.0, 1.0),
    shear: float = 0.0,
    translate: float = 0.0,
) -> Tensor:
    """Each image turned, stretched, leant over and moved about its center by `warp`; what comes in is black.

    The angle is uniform in ±rotation radians, the shear in ±shear, the scale of each axis by itself in `scale`, and
    the move along each axis in ±translate pixels; see `warp.linear_map` for their order and directions.
    """
    check_index("affine", index, len(images))
    most = (rotation, shear, translate, translate)
    u = uniform(seed, _stream("affine"), epoch, index, count=6).to(images).unbind(-1)
    turn, lean, right, down = (m * (2 * u_n - 1) for m, u_n in zip(most, u[:4], strict=True))
    wide, high = (scale[0] + (scale[1] - scale[0]) * u_n for u_n in u[4:])
    size = (images.shape[-2], images.shape[-1])
    return warp(images, linear_map(turn, lean, wide, high), torch.stack((right, down), dim=-1), size)


def deform(images: Tensor, strength: float, seed: int, epoch: int, index: Tensor) -> Tensor:
    """`affine` in all its ways at once, up to `strength` times 10 degrees, a fifth of the size and a shear of .17.

    What comes in is as bright as the rim of the image, in the median: a toy keeps its table.
    """
    if strength == 0:
        return images
    rim = torch.cat((images[..., (0, -1), :].flatten(2), images[..., :, (0, -1)].flatten(2)), dim=-1)  # [b c r]
    ground = rim.median(-1).values[..., None, None]
    scale = (1 - 0.2 * strength, 1 + 0.2 * strength)
    turned = affine(images - ground, seed, epoch, index, rotation=0.17 * strength, scale=scale, shear=0.17 * strength)
    return turned + ground


def mirror(images: Tensor, order: tuple[int, ...], seed: int, epoch: int, index: Tensor) -> Tensor:
    """One image [c h w] in two as a mirror beside it shows it, its channels in the given order.

    Of a stereo pair the order is (1, 0): in a mirror, what the left eye sees is what the right eye would have seen.
    """
    if sorted(order) != list(range(images.shape[1])):
        raise ShapeError(f"mirror: channels in the order {list(order)} of images {list(images.shape)}; name each once")
    check_index("mirror", index, len(images))
    turned = uniform(seed, _stream("mirror"), epoch, index, count=1).to(images.device) < 0.5  # [b 1]
    return torch.where(turned[..., None, None], images[:, list(order)].flip(-1), images)


def standardize(images: Tensor) -> Tensor:
    """(x - mean) / max(σ, 1/√N) over the N values of each image: zero mean, unit variance, an even image zero."""
    _check_floats("standardize", images)
    centerd = images - images.mean((1, 2, 3), keepdim=True, dtype=torch.float64).to(images)
    variance = centerd.square().mean((1, 2, 3), keepdim=True, dtype=torch.float64)  # [b 1 1 1]
    N = max(1, images.shape[1:].numel())
    return centerd / variance.clamp_min(1 / N).sqrt().to(images)


def windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:  # [b c H W]
    """Of each image [b c h w] the H x W pixels that start at its own row and column, `top` and `left` [b]."""
    b, c = images.shape[:2]
    H, W = size
    device = images.device
    rows = (top.to(device)[:, None] + torch.arange(H, device=device)).view(b, 1, H, 1)
    columns = (left.to(device)[:, None] + torch.arange(W, device=device)).view(b, 1, 1, W)
    samples = torch.arange(b, device=device).view(b, 1, 1, 1)
    channels = torch.arange(c, device=device).view(1, c, 1, 1)
    return images[samples, channels, rows, columns]


def check_index(what: str, index: Tensor, count: int | None = None) -> None:
    """One line, unless the index is [b] with no number below 0, and of `count` numbers if that is given."""
    if index.ndim != 1 or (count is not None and len(index) != count):
        wanted = "[b]" if count is None else f"[{count}], one number an image,"
        raise ShapeError(f"{what}: an index of shape {list(index.shape)} came; {wanted} is wanted")
    if index.numel() and int(index.min()) < 0:
        raise DataError(f"{what}: index {int(index.min())} came; images are counted from 0, so pass none below")


def _stream(name: str) -> int:
    """The letters of a name as a number, to be hashed as a counter."""
    return int.from_bytes(name.encode(), "big")


def _room(what: str, images: Tensor, size: int) -> tuple[int, int]:
    """How many pixels (down, right) a square of `size` may move inside the images."""
    h, w = images.shape[-2:]
    if not 1 <= size <= min(h, w):
        raise ShapeError(f"{what} of size {size} from images of {h}x{w}; ask for 1 to {min(h, w)} pixels")
    return h - size, w - size


def _check_floats(what: str, images: Tensor) -> None:
    """One line, unless the images are floats [b c h w]."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ShapeError(f"{what} of {images.dtype} {list(images.shape)}: floats [b c h w] are wanted")
