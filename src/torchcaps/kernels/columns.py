"""Convolutions in bfloat16 with large kernels, as products of matrices over the columns of a few images at a time.

A column is what a kernel sees at one place, [t u c] numbers. With C the columns of all places of some images, one row
each, W the kernels and G the derivative of the result,

    y = C Wᵀ        dC = G W, whose columns are added where they came from        dW = Gᵀ C

torch's own convolution in bfloat16 is as fast forward, and several times slower backward if the kernel is large
(`python -m benchmarks.crossover --what bfloat16`). So many images are worked on at a time that their columns stay in
the cache.
Products are of bfloat16 numbers; dx and dW are added up in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.kernels.operators import GradContext, OperatorInputs
from torchcaps.kernels.threads import kernels_enabled

__all__ = ["column_conv2d", "is_faster"]

ROWS = 288
"""Columns of images that are worked on at a time, or as many as one image has, for each thread."""
LEAST_TAPS = 49
LEAST_CHANNELS = 16
MOST_PLACES = 64
"""Sizes from which, and up to which, columns were faster; smaller kernels and larger results torch does as fast."""


def column_conv2d(x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    """Convolve in bfloat16 as `torch.nn.functional.conv2d` without padding or bias; with first derivatives only.

    Args:
        x: Images [b c h w] of any precision.
        w: Kernels [o c t u] of any precision; their derivative has the same.
        stride: Of rows and columns.

    Returns:
        [b o h' w'] in bfloat16.
    """
    y: Tensor = _forward(x, w, stride)
    return y


def is_faster(x: Tensor, w: Tensor, stride: int) -> bool:
    """Return whether columns cost less than torch's convolution in bfloat16.

    Args:
        x: Images [b c h w].
        w: Kernels [o c t u].
        stride: Of rows and columns.
    """
    if not kernels_enabled() or x.device.type != "cpu" or x.ndim != 4 or x.shape[0] == 0:
        return False
    (_, c, t, u) = w.shape
    if x.shape[1] != c or x.shape[2] < t or x.shape[3] < u:
        return False
    (rows, columns) = _places(x, w, stride)
    return t * u >= LEAST_TAPS and c >= LEAST_CHANNELS and rows * columns <= MOST_PLACES


def _places(x: Tensor, w: Tensor, stride: int) -> tuple[int, int]:
    """Rows and columns of the result for images [b c h w]."""
    return (x.shape[2] - w.shape[2]) // stride + 1, (x.shape[3] - w.shape[3]) // stride + 1


def _last(x: Tensor) -> Tensor:
    """Images [b c h w] -> [b h w c] in bfloat16: no copy if they are so already, and channels_last."""
    return x.detach().permute(0, 2, 3, 1).to(torch.bfloat16).contiguous()


def _matrix(w: Tensor) -> Tensor:
    """Kernels [o c t u] -> [o (t u c)] in bfloat16."""
    return w.detach().permute(0, 2, 3, 1).flatten(1).to(torch.bfloat16).contiguous()


def _chunk(places: int) -> int:
    """How many images are worked on at a time."""
    return max(1, ROWS * torch.get_num_threads() // places)


def _columns(x: Tensor, w: Tensor, stride: int, room: Tensor) -> Tensor:
    """Copy the columns of images [n h w c] into `room` [n h' w' t (u c)]; return them as rows [(n h' w') (t u c)]."""
    (b, rows, columns, t, run) = (len(x), *room.shape[1:])
    (image, row, column, _) = x.stride()
    # A row of a kernel is a run of numbers in memory
    seen = x.as_strided((b, rows, columns, t, run), (image, stride * row, stride * column, row, 1), x.storage_offset())
    return room[:b].copy_(seen).view(b * rows * columns, t * run)


@torch.library.custom_op("torchcaps::column_conv", mutates_args=())
def _forward(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """[b o h' w'], channels_last."""
    (rows, columns) = _places(x, w, stride)
    (o, c, t, u) = w.shape
    images = _last(x)
    kernels = _matrix(w)
    n = _chunk(rows * columns)
    room = images.new_empty(min(n, len(x)), rows, columns, t, u * c)
    y = images.new_empty(len(x), rows, columns, o)
    for some, result in zip(torch.split(images, n), torch.split(y, n), strict=True):
        torch.mm(_columns(some, w, stride, room), kernels.T, out=result.view(-1, o))
    return y.permute(0, 3, 1, 2)


@_forward.register_fake
def _(x: Tensor, w: Tensor, stride: int) -> Tensor:
    return x.new_empty(x.shape[0], *_places(x, w, stride), w.shape[0], dtype=torch.bfloat16).permute(0, 3, 1, 2)


@torch.library.custom_op("torchcaps::column_conv_backward", mutates_args=())
def _backward(g: Tensor, x: Tensor, w: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """dx [b c h w] and dw [o c t u] for the derivative g [b o h' w'] of the result."""
    (rows, columns) = _places(x, w, stride)
    (o, c, t, u) = w.shape
    images = _last(x)
    above = _last(g)  # [b h' w' o]
    kernels = _matrix(w)
    n = _chunk(rows * columns)
    room = images.new_empty(min(n, len(x)), rows, columns, t, u * c)
    dx = torch.zeros(images.shape)
    dw = torch.zeros(kernels.shape)
    for some, slope, image_slope in zip(*(torch.split(part, n) for part in (images, above, dx)), strict=True):
        flat = slope.reshape(-1, o)
        dw += flat.T @ _columns(some, w, stride, room)
        # The columns of dx, back to where they came from; their room is that of the images' columns
        made = room[: len(some)]
        torch.mm(flat, kernels, out=made.view(-1, t * u * c))
        _add_columns(image_slope, made.view(len(some), rows, columns, t, u, c), stride)
    dx = dx.permute(0, 3, 1, 2).to(x.dtype)
    return dx, dw.view(o, t, u, c).permute(0, 3, 1, 2).to(w.dtype, memory_format=torch.contiguous_format)


def _add_columns(image: Tensor, columns: Tensor, stride: int) -> None:
    """Add columns [n h' w' t u c] to images [n h w c] in float32, at each place where they were seen."""
    (_, rows, across, t, u, _) = columns.shape
    for p in range(rows):
        for q in range(across):
            image[:, stride * p : stride * p + t, stride * q : stride * q + u] += columns[:, p, q]


@_backward.register_fake
def _(g: Tensor, x: Tensor, w: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    b, c, height, width = x.shape
    return x.new_empty(b, height, width, c).permute(0, 3, 1, 2), w.new_empty(w.shape)


def _setup(ctx: GradContext, inputs: OperatorInputs, output: Tensor) -> None:
    (x, w, stride) = inputs
    ctx.settings = (stride,)
    ctx.save_for_backward(x, w)


def _grads(ctx: GradContext, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = _backward(g, *ctx.saved_tensors, *ctx.settings)
    return dx, dw, None


_forward.register_autograd(_grads, setup_context=_setup)
