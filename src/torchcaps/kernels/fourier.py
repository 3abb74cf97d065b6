"""Convolutions with large kernels and many channels, by way of their spectra.

A convolution is a product of spectra, at each frequency one matrix product over the channels, and there are far fewer
frequencies than pairs of a tap and a place: 9x9 taps at 12x12 places with stride 2 are 11,664 pairs, or 144 complex
frequencies of four phases. The result is the same but for rounding.

A stride s makes s x s phases of image and kernel, x_pq[a, b] = x[s a + p, s b + q]; each pair of phases is a
correlation with stride 1, and they add up. With X, W and Y the spectra of images, kernels and results:

    y[a, b] = sum_pq sum_uv x_pq[a + u, b + v] w_pq[u, v]        Y = X conj(W), over (p q c)
    dx_pq   = what every place that saw a value says of it       conj(dX) = conj(dY) conj(W)
    dw_pq   = what all places say of a tap                       dW = X conj(dY), over the samples

Spectra of N = ceil(side / s) values a side hold every place that the kernel fits, and nothing wraps around. A few
column frequencies are worked on at a time, so that no whole spectrum ever exists.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.kernels.fft_planes import Planes
from torchcaps.kernels.operators import GradContext, OperatorInputs
from torchcaps.kernels.simd_layout import block_size, has_loops
from torchcaps.kernels.threads import kernels_enabled

__all__ = ["fourier_conv2d", "is_faster"]

ROOM = 2**23
"""Complex numbers of the kernels' spectra at a time, or as many as one column frequency has."""
FFT_COST = 175
"""Multiplications that take as long as one number of a spectrum takes to be made (benchmarks/crossover.py).

So on one thread. Transforms wait for memory, which threads share, where products gain from each thread: on n threads a
number of a spectrum costs sqrt(n) times as many multiplications.
"""


def fourier_conv2d(x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    """Convolve as `torch.nn.functional.conv2d` without padding or bias; with first derivatives only.

    Args:
        x: Images [b c h w]; c is a multiple of the numbers of a SIMD vector (`simd_layout.block_size`).
        w: Kernels [o c t t]; so is o.
        stride: Of rows and columns.

    Returns:
        [b o h' w'].
    """
    y: Tensor = _forward(x, w, stride)
    return y


def is_faster(x: Tensor, w: Tensor, stride: int) -> bool:
    """Return whether spectra can be used and cost less than a direct convolution.

    Args:
        x: Images [b c h w].
        w: Kernels [o c t t].
        stride: Of rows and columns.
    """
    if not (kernels_enabled() and has_loops(x, w) and _fit(x, w)) or any(n % block_size(x.dtype) for n in w.shape[:2]):
        return False
    z = _Sizes.of(x, w, stride)
    b = len(x)
    (o, c, t, u) = w.shape
    # Multiplications of the products and of the transforms, against those of a direct convolution.
    deep = c * stride * stride
    products = 4 * b * deep * o
    numbers = deep * o + b * deep + b * o
    direct = z.M[0] * z.M[1] * t * u * b * c * o
    # A compiled graph cannot ask for the threads; its sizes are symbols, which want whole numbers.
    threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
    transforms = round(FFT_COST * math.sqrt(threads)) * numbers
    return z.N[0] * len(z.columns) * (products + transforms) < direct


def _fit(x: Tensor, w: Tensor) -> bool:
    """Whether there are images [b c h w], of the kernels' channels and no smaller; else torch says what is wrong."""
    if x.ndim != 4 or x.shape[0] == 0:
        return False
    return x.shape[1] == w.shape[1] and x.shape[2] >= w.shape[2] and x.shape[3] >= w.shape[3]


# --- Sizes and planes -------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Of rows and columns: N frequencies, M places of the result, T taps of a phase of the kernel; the stride s.

    Column frequencies are worked on so many `at_once`; half of them are enough, conjugates of the others.
    """

    N: tuple[int, int]
    M: tuple[int, int]
    T: tuple[int, int]
    s: int
    at_once: int

    @classmethod
    def of(cls, x: Tensor, w: Tensor, s: int) -> _Sizes:
        sides = (x.shape[2], x.shape[3])
        taps = (w.shape[2], w.shape[3])
        # A phase has every s-th row and column
        N, T = ((-(-n // s), -(-m // s)) for n, m in (sides, taps))
        M = ((sides[0] - taps[0]) // s + 1, (sides[1] - taps[1]) // s + 1)
        # As many column frequencies at once as ROOM holds of the kernels' spectra
        room = max(1, ROOM // (N[0] * s * s * w.shape[0] * w.shape[1]))
        return cls(N, M, T, s, min(room, N[1] // 2 + 1))

    @property
    def columns(self) -> range:
        return range(self.N[1] // 2 + 1)

    @property
    def groups(self) -> list[range]:
        """The column frequencies, a few at a time."""
        return [self.columns[k : k + self.at_once] for k in self.columns[:: self.at_once]]


def _planes(x: Tensor, s: int, z: _Sizes, places: tuple[int, int], sign: int = 1, room: Tensor | None = None) -> Planes:
    """Planes of a convolution of these sizes."""
    return Planes(x, s, z.N, places, sign, x.new_empty(Planes.shape(x, s, z.N, z.at_once)) if room is None else room)


def _last(x: Tensor) -> Tensor:
    """Images [b c h w] -> [b h w c]: no copy if they are channels_last."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _taps(w: Tensor) -> Tensor:
    """Kernels [o c t t] -> one plane of kernels [1 t t (c o)]."""
    return w.detach().permute(2, 3, 1, 0).flatten(2).contiguous().unsqueeze(0)


# --- The operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::fourier_conv", mutates_args=())
def _forward(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """[b o h' w'], channels_last."""
    # Planes and room for the spectra of images, kernels and results
    z = _Sizes.of(x, w, stride)
    o = len(w)
    images = _planes(_last(x), stride, z, z.N)
    kernels = _planes(_taps(w), stride, z, z.T, -1)
    results = _planes(x.new_zeros(len(x), *z.M, o), 1, z, z.M)
    # A few column frequencies at a time: spectra, their product, and back.
    for ks in z.groups:
        W = torch.unflatten(kernels.spectra(ks)[:, 0], 1, (-1, o))  # conj(W) [(k n) (p q c) o]
        torch.bmm(images.spectra(ks), W, out=results.some(ks))
        results.add(ks)
    return results.x.permute(0, 3, 1, 2)


@_forward.register_fake
def _(x: Tensor, w: Tensor, stride: int) -> Tensor:
    return x.new_empty(x.shape[0], *_Sizes.of(x, w, stride).M, w.shape[0]).permute(0, 3, 1, 2)


@torch.library.custom_op("torchcaps::fourier_conv_backward", mutates_args=())
def _backward(g: Tensor, x: Tensor, w: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """dx [b c h w] and dw [o c t t] for the derivative g [b o h' w'] of the result."""
    # Planes of what is given, then of both derivatives
    z = _Sizes.of(x, w, stride)
    (o, c, t, u) = w.shape
    above = _planes(_last(g), 1, z, z.M, -1)
    images = _planes(_last(x), stride, z, z.N)
    kernels = _planes(_taps(w), stride, z, z.T, -1)
    dx = _planes(torch.zeros_like(images.x), stride, z, z.N, -1, images.D)
    dw = _planes(torch.zeros_like(kernels.x), stride, z, z.T, 1, kernels.D)
    # The same for both derivatives; their spectra take the room of those that they come from.
    for ks in z.groups:
        G = above.spectra(ks)
        W = torch.unflatten(kernels.spectra(ks)[:, 0], 1, (-1, o))  # conj(dY), conj(W)
        torch.bmm(G, W.transpose(1, 2), out=dx.some(ks))
        dx.add(ks)
        torch.bmm(images.spectra(ks).transpose(1, 2), G, out=torch.unflatten(dw.some(ks)[:, 0], 1, (-1, o)))
        dw.add(ks)
    return dx.x.permute(0, 3, 1, 2), dw.x.view(t, u, c, o).permute(3, 2, 0, 1).contiguous()


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
