"""Affine maps of images: a pixel of the result shows what stood where the map took it from.

Points are (x, y) in pixels, x to the right and y down, counted from the center of the image they are in. The map

    y = A x + t        so the result at y is the image at  x = A⁻¹ (y - t)

reads the image between its pixels bilinearly, and as zero outside. Only products and sums of single elements are
used, which IEEE-754 rounds in one way: a result is the same in any batch, and where A⁻¹ (y - t) meets the center
of a pixel it is that pixel, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.errors import DataError, ShapeError

__all__ = ["linear_map", "warp"]


def warp(images: Tensor, matrices: Tensor, shifts: Tensor, size: tuple[int, int]) -> Tensor:  # [b c H W]
    """The images [b c h w] under y = A x + t, A of `matrices` [b 2 2] and t of `shifts` [b 2], on size (H, W)."""
    _check(images, matrices, shifts, size)
    h, w = images.shape[-2:]
    x, y = _origins(_inverse(matrices), shifts, size)  # [b H W] each
    return _bilinear(images, x + (w - 1) / 2, y + (h - 1) / 2)


def linear_map(rotation: Tensor, shear: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:  # [b 2 2]
    """A = R(rotation) · K(shear) · S(scale), each [b]: scaled along its axes, then leant over, then turned.

    The turn, in radians, is counter-clockwise as seen, and a positive shear leans the top to the right:

        R = ( cos  sin)    K = (1 -shear)    S = (scale_x    0   )
            (-sin  cos)        (0    1  )        (   0    scale_y)

    K S has a zero below its diagonal, so that a matrix of positive scales has one reading only.
    """
    cos = rotation.double().cos().to(rotation)
    sin = rotation.double().sin().to(rotation)
    lean = shear * scale_y
    top = torch.stack((cos * scale_x, sin * scale_y - cos * lean), dim=-1)
    bottom = torch.stack((-sin * scale_x, cos * scale_y + sin * lean), dim=-1)
    return torch.stack((top, bottom), dim=-2)


def _check(images: Tensor, matrices: Tensor, shifts: Tensor, size: tuple[int, int]) -> None:
    """One line on what cannot be warped."""
    if images.ndim != 4 or not images.is_floating_point() or (images.numel() == 0 and len(images)):
        raise ShapeError(f"warp of {images.dtype} {list(images.shape)}: floats [b c h w] are wanted")
    b = len(images)
    if matrices.shape != (b, 2, 2) or shifts.shape != (b, 2):
        raise ShapeError(
            f"warp of {b} images by matrices {list(matrices.shape)} and shifts {list(shifts.shape)}; "
            f"[{b}, 2, 2] and [{b}, 2] are wanted"
        )
    if min(size) < 1:
        raise ShapeError(f"warp onto {size[0]}x{size[1]} pixels; 1x1 is the least")
    if not shifts.isfinite().all():
        raise DataError("warp by a shift that is not finite; look at what made the shifts")


def _inverse(A: Tensor) -> Tensor:  # [b 2 2]
    """A⁻¹ by its formula, (d -b; -c a) / (ad - bc)."""
    a, b, c, d = A.flatten(1).unbind(-1)
    inverse = torch.stack((d, -b, -c, a), dim=-1) / (a * d - b * c)[:, None]
    bad = ~inverse.isfinite().all(-1)
    if bad.any():
        n = int(bad.nonzero()[0])
        raise DataError(f"matrix {n} of a warp, {A[n].tolist()}, has no inverse; keep every scale away from 0")
    return inverse.view(-1, 2, 2)


def _origins(inverse: Tensor, shifts: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:  # [b H W] each
    """x = A⁻¹ (y - t) for every pixel center y of the result."""
    H, W = size
    ys = torch.arange(H, dtype=inverse.dtype, device=inverse.device) - (H - 1) / 2 - shifts[:, 1, None]  # [b H]
    xs = torch.arange(W, dtype=inverse.dtype, device=inverse.device) - (W - 1) / 2 - shifts[:, 0, None]  # [b W]
    along = inverse[:, :, 0, None] * xs[:, None]  # [b 2 W]
    down = inverse[:, :, 1, None] * ys[:, None]  # [b 2 H]
    x, y = (down[..., None] + along[..., None, :]).unbind(1)  # [b 2 H W] -> [b H W]
    return x, y


def _bilinear(images: Tensor, x: Tensor, y: Tensor) -> Tensor:  # [b c H W]
    """The images at columns x and rows y [b H W], in pixels from the first one's center; zero outside."""
    b, c, h, w = images.shape
    flat = torch.nn.functional.pad(images, (1, 1, 1, 1)).flatten(2)  # [b c (h+2)(w+2)], a border of zeros
    (column, u) = _split(x, w)
    (row, v) = _split(y, h)
    place = (row * (w + 2) + column).long().flatten(1)[:, None].expand(b, c, -1)  # [b c HW]
    corners = (flat.gather(2, place + step) for step in (0, 1, w + 2, w + 3))
    a, r, d, z = (corner.view(b, c, *x.shape[1:]) for corner in corners)  # [b c H W]
    u = u[:, None]
    v = v[:, None]
    return (a * (1 - u) + r * u) * (1 - v) + (d * (1 - u) + z * u) * v


def _split(x: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """A coordinate as the whole pixel at or before it, counted from the border's, and how far it is beyond."""
    x = x.clamp(-1, extent)
    whole = x.floor().clamp(max=extent - 1)
    return whole + 1, x - whole
