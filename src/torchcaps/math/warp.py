"""Affine maps of images: a pixel of the result is the image at the point that the map takes to it.

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


def warp(images: Tensor, matrices: Tensor, shifts: Tensor, size: tuple[int, int]) -> Tensor:
    """Map each image by y = A x + t.

    Args:
        images: floats [b c h w].
        matrices: A of each image, [b 2 2].
        shifts: t of each image, [b 2], in pixels.
        size: Height H and width W of the result.

    Returns:
        Floats [b c H W].

    Raises:
        ShapeError: if the shapes do not fit together.
        DataError: if a matrix has no inverse or a shift is not finite.
    """
    _check_arguments(images, matrices, shifts, size)
    h, w = images.shape[-2:]
    x, y = _source_points(_inverse(matrices), shifts, size)  # [b H W] each
    return _bilinear(images, x + (w - 1) / 2, y + (h - 1) / 2)


def linear_map(rotation: Tensor, shear: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:
    """Compose A = R(rotation) · K(shear) · S(scale): scale along the axes, then shear, then rotate.

    The rotation, in radians, is counter-clockwise as displayed, and a positive shear moves the top to the right:

        R = ( cos  sin)    K = (1 -shear)    S = (scale_x    0   )
            (-sin  cos)        (0    1  )        (   0    scale_y)

    K S has a zero below its diagonal, so that a matrix of positive scales is composed in one way only.

    Args:
        rotation: Angles [b].
        shear: Shears [b].
        scale_x: Scales of the width [b].
        scale_y: Scales of the height [b].

    Returns:
        Matrices [b 2 2].
    """
    cos = rotation.double().cos().to(rotation)
    sin = rotation.double().sin().to(rotation)
    slope = shear * scale_y
    top = torch.stack((cos * scale_x, sin * scale_y - cos * slope), dim=-1)
    bottom = torch.stack((-sin * scale_x, cos * scale_y + sin * slope), dim=-1)
    return torch.stack((top, bottom), dim=-2)


def _check_arguments(images: Tensor, matrices: Tensor, shifts: Tensor, size: tuple[int, int]) -> None:
    """Refuse what cannot be warped."""
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
        raise DataError("warp by a shift that is not finite; check how the shifts were computed")


def _inverse(A: Tensor) -> Tensor:  # [b 2 2]
    """Return A⁻¹ by its formula, (d -b; -c a) / (ad - bc)."""
    a, b, c, d = A.flatten(1).unbind(-1)
    inverse = torch.stack((d, -b, -c, a), dim=-1) / (a * d - b * c)[:, None]
    bad = ~inverse.isfinite().all(-1)
    if bad.any():
        n = int(bad.nonzero()[0])
        raise DataError(f"matrix {n} of a warp, {A[n].tolist()}, has no inverse; keep every scale away from 0")
    return inverse.view(-1, 2, 2)


def _source_points(inverse: Tensor, shifts: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:  # [b H W] each
    """Return x = A⁻¹ (y - t) for every pixel center y of the result."""
    H, W = size
    ys = torch.arange(H, dtype=inverse.dtype, device=inverse.device) - (H - 1) / 2 - shifts[:, 1, None]  # [b H]
    xs = torch.arange(W, dtype=inverse.dtype, device=inverse.device) - (W - 1) / 2 - shifts[:, 0, None]  # [b W]
    along = inverse[:, :, 0, None] * xs[:, None]  # [b 2 W]
    down = inverse[:, :, 1, None] * ys[:, None]  # [b 2 H]
    x, y = (down[..., None] + along[..., None, :]).unbind(1)  # [b 2 H W] -> [b H W]
    return x, y


def _bilinear(images: Tensor, x: Tensor, y: Tensor) -> Tensor:  # [b c H W]
    """Interpolate images at columns x and rows y [b H W], counted from the first pixel's center; zero outside."""
    b, c, h, w = images.shape
    # A border of zeros, so that points outside need no case of their own.
    flat = torch.nn.functional.pad(images, (1, 1, 1, 1)).flatten(2)  # [b c (h+2)(w+2)]
    column, u = _whole_and_fraction(x, w)
    row, v = _whole_and_fraction(y, h)
    index = (row * (w + 2) + column).long().flatten(1)[:, None].expand(b, c, -1)  # [b c HW]
    corners = (flat.gather(2, index + step) for step in (0, 1, w + 2, w + 3))
    # Top left, top right, bottom left, bottom right.
    a, r, d, z = (corner.view(b, c, *x.shape[1:]) for corner in corners)  # [b c H W]
    u = u[:, None]
    v = v[:, None]
    return (a * (1 - u) + r * u) * (1 - v) + (d * (1 - u) + z * u) * v


def _whole_and_fraction(x: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Split a coordinate into the whole pixel at or before it, counted from the border's, and the rest."""
    x = x.clamp(-1, extent)
    whole = x.floor().clamp(max=extent - 1)
    return whole + 1, x - whole
