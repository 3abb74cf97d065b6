"""The data set that needs no file: digits drawn by code, each factor of variation known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from torchcaps.config import Count, NonNegativeInt, Range
from torchcaps.data.base import Dataset, Splits
from torchcaps.data.glyphs import draw_hue, glyphs, paint
from torchcaps.utils.memory import check_image_memory

__all__ = ["GlyphsConfig"]

_FIRST_TEST_INDEX = 1 << 40
"""Index of the first test image, beyond any training set."""


@dataclass(frozen=True)
class GlyphsConfig:
    """Digits drawn by code: class, position, rotation, scale, shear and thickness of each are known.

    Attributes:
        train: Number of training images.
        test: Number of test images.
        size: Side of an image in pixels.
        color: Every digit has a hue of its own, which is known, too.
        drawn: Seed of the images.
    """

    train: Count = 10_000
    test: Count = 2_000
    size: Annotated[int, Range(12, 256)] = 28
    color: bool = False
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        """Draw the training and test images."""
        check_image_memory(self.train + self.test, (3 if self.color else 1) * self.size**2)
        return Splits(self._draw(0, self.train), self._draw(_FIRST_TEST_INDEX, self.test))

    def _draw(self, first: int, count: int) -> Dataset:
        """Draw `count` images from index `first` on."""
        index = first + torch.arange(count)
        images, factors = glyphs(self.drawn, index, self.size)
        named = {name: value for name, value in factors._asdict().items() if name != "label"}
        if self.color:
            named["hue"] = draw_hue(self.drawn, index)
            images = paint(images, named["hue"])
        return Dataset(images, factors.label, classes=10, factors=named)
