"""The data set that needs no file: digits drawn by code, each factor of variation known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from torchcaps.config import Count, NonNegativeInt, Range
from torchcaps.data.base import Dataset, Splits
from torchcaps.data.glyphs import glyphs

__all__ = ["GlyphsConfig"]

_TEST = 1 << 40
"""First index of the test images, beyond any training set."""


@dataclass(frozen=True)
class GlyphsConfig:
    """`train` and `test` images of `size` x `size` pixels; `drawn` is the seed that draws them."""

    train: Count = 10_000
    test: Count = 2_000
    size: Annotated[int, Range(12, 256)] = 28
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        return Splits(self._draw(0, self.train), self._draw(_TEST, self.test))

    def _draw(self, first: int, count: int) -> Dataset:
        images, factors = glyphs(self.drawn, first + torch.arange(count), self.size)
        named = {name: value for name, value in factors._asdict().items() if name != "label"}
        return Dataset(images, factors.label, classes=10, factors=named)
