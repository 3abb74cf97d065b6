"""Bring pictures of any size to one: scaled as a whole with bars, or so that they fill it and are cropped."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from torchcaps.data.readers.pictures import read_picture

__all__ = ["Fit", "PictureFormat", "fill", "letterbox", "read_fitted"]

Fit = Literal["crop", "letterbox", "random-crop"]
"""How a picture of another size is brought to the wanted one."""


class PictureFormat(NamedTuple):
    """What every picture of a set is brought to.

    Attributes:
        channels: 1 for gray, 3 for color.
        height: In pixels.
        width: In pixels.
        fit: How pictures of another size are treated; a random crop is stored as a crop that is larger than the view.
        background: The gray, 0 to 255, behind what is transparent.
    """

    channels: int
    height: int
    width: int
    fit: Fit = "crop"
    background: int = 255


def read_fitted(path: Path, wanted: PictureFormat) -> Tensor:
    """Read a picture and bring it to a format; the pixels of one that has its size already stay as they are.

    Args:
        path: The file.
        wanted: The format.

    Returns:
        uint8 [c h w].

    Raises:
        DataError: if the file is not a picture that can be read.
    """
    size = (wanted.height, wanted.width)
    array = read_picture(path, wanted.channels, background=wanted.background, least=size)
    picture = torch.from_numpy(array.copy())
    return letterbox(picture, *size) if wanted.fit == "letterbox" else fill(picture, *size)


def letterbox(picture: Tensor, height: int, width: int) -> Tensor:  # [c height width]
    """Scale a picture, bytes [c h w], into the middle of another size, its sides in proportion.

    It is shrunk by means over areas or enlarged bilinearly. The rest gets the median of the border of each channel.
    """
    h, w = picture.shape[1:]
    if (h, w) == (height, width):
        return picture
    # The largest size that fits, its sides in proportion.
    scale = min(height / h, width / w)
    scaled = _scaled(picture, max(1, round(scale * h)), max(1, round(scale * w)), scale)
    # Bars in the color of the border; black ones could pass for part of an object.
    border = torch.cat([picture[:, 0], picture[:, -1], picture[:, :, 0], picture[:, :, -1]], 1)  # [c 2(h + w)]
    whole = border.median(1).values[:, None, None].repeat(1, height, width)
    # The picture goes into the middle.
    down = (height - scaled.shape[1]) // 2
    right = (width - scaled.shape[2]) // 2
    whole[:, down : down + scaled.shape[1], right : right + scaled.shape[2]] = scaled
    return whole


def fill(picture: Tensor, height: int, width: int) -> Tensor:  # [c height width]
    """Scale a picture, bytes [c h w], until it just covers another size, and cut away what is outside its middle.

    It is shrunk by means over areas or enlarged bilinearly, its sides in proportion.
    """
    h, w = picture.shape[1:]
    if (h, w) == (height, width):
        return picture
    # Cropped first, to the proportions of the result, so that no pixel is scaled in vain.
    scale = max(height / h, width / w)
    inner_h = min(h, max(1, round(height / scale)))
    inner_w = min(w, max(1, round(width / scale)))
    down = (h - inner_h) // 2
    right = (w - inner_w) // 2
    return _scaled(picture[:, down : down + inner_h, right : right + inner_w], height, width, scale)


def _scaled(picture: Tensor, height: int, width: int, scale: float) -> Tensor:
    """Shrink a picture by means over areas, or enlarge it bilinearly."""
    how = {"mode": "area"} if scale < 1 else {"mode": "bilinear", "align_corners": False}
    scaled = interpolate(picture.float().unsqueeze(0), (height, width), **how)  # [1 c height width]
    return scaled.squeeze(0).round().to(torch.uint8)
