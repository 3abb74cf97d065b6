"""Planes of a tensor and their spectra, on a CPU: the two sides of `kernels.fourier`, with the loops between them."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from torchcaps.kernels.records import Waves
from torchcaps.kernels.simd_layout import block_size, loops
from torchcaps.kernels.threads import in_threads

__all__ = ["Planes"]


@cache
def _waves(N: int, frequencies: range, places: int, dtype: torch.dtype, sign: int) -> Tensor:
    """[2 n a] cos and sign * sin of 2 pi n a / N."""
    # n a modulo N in whole numbers: the angle stays small, and its cosine exact to the last digits
    turns = torch.outer(torch.tensor(frequencies, device="cpu"), torch.arange(places, device="cpu")) % N
    angle = 2 * math.pi * turns.double() / N
    return torch.stack([angle.cos(), sign * angle.sin()]).to(dtype)


class Planes:
    """Planes x [o h w i] of s x s phases, each so many places of a grid of N, and room D for some of their spectra.

    A sign of -1 stands for conjugate spectra.
    """

    def __init__(self, x: Tensor, s: int, N: tuple[int, int], places: tuple[int, int], sign: int, room: Tensor) -> None:
        self.x = x
        self.s = s
        self.N = N
        self.places = places
        self.sign = sign
        self.D = room

    @staticmethod
    def shape(x: Tensor, s: int, N: tuple[int, int], at_once: int) -> tuple[int, ...]:
        """Of the room for so many column frequencies at once, [k n o (p q) (i 2)]."""
        return at_once, N[0], x.shape[0], s * s, 2 * x.shape[3]

    def some(self, ks: range) -> Tensor:
        """The room of these column frequencies, [(k n) o (p q i)], complex."""
        _, n, o, phases, twice = self.D.shape
        return torch.view_as_complex(self.D[: len(ks)].view(len(ks) * n, o, phases * twice // 2, 2))

    def spectra(self, ks: range) -> Tensor:
        """The same, filled."""
        x = self.x.numpy()
        D = self.D[: len(ks)].numpy()
        waves = self._waves(ks, back=False)

        def work(_: int, start: int, stop: int) -> None:
            loops("fourier").to_spectra(x, D, self.s, waves, start, stop)

        in_threads(work, self._vectors)
        return self.some(ks)

    def add(self, ks: range) -> None:
        """What the room holds of these column frequencies goes back to the places and is added there."""
        x = self.x.numpy()
        D = self.D[: len(ks)].numpy()
        waves = self._waves(ks, back=True)

        def work(_: int, start: int, stop: int) -> None:
            loops("fourier").from_spectra(D, x, self.s, waves, start, stop)

        in_threads(work, self._vectors)

    @property
    def _vectors(self) -> int:
        return self.x.shape[0] * self.x.shape[3] // block_size(self.x.dtype)

    def _waves(self, ks: range, *, back: bool) -> Waves:
        """Tables of the rows, half of whose frequencies are enough, and of the columns.

        On the way back these have the weight of a frequency: twice that where one also stands for its conjugate.
        """
        (n, m) = self.N
        (a, b) = self.places
        dtype = self.x.dtype
        rows = _waves(n, range(n // 2 + 1), a, dtype, self.sign)
        columns = _waves(m, ks, b, dtype, self.sign)
        # On the way back each frequency has a weight, and one that stands for its conjugate counts twice.
        if back:
            columns = columns * columns.new_tensor([(1 + (0 < k < m - k)) / (n * m) for k in ks])[:, None]
        return Waves(rows.numpy(), columns.numpy())
