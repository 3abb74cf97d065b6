"""Images to look at: those a checkpoint brings along, the run's test data, or digits drawn by code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import DataConfig, Dataset, FolderConfig, GlyphsConfig, NpzConfig, subset
from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.math.pixels import standardize
from torchcaps.systems.predict import class_names
from torchcaps.train import Recipe
from torchcaps.train.weights_export import EXAMPLES
from torchcaps.types import ImageSpec

__all__ = ["COUNT", "Examples", "examples_of"]

COUNT = 200
"""Images of a run that can be chosen from, at most."""

FEWER: Mapping[str, int] = {"train": 1, "test": COUNT, "validation": 0}
"""What need not be read, or drawn by code, of sets whose settings count images."""


@dataclass(frozen=True)
class Examples:
    """Images of a run, if there are any, and how those on the wire, in [0, 1], become what its model is shown."""

    data: Dataset | None
    source: str  # own, data, glyphs or none
    names: tuple[str, ...]
    standardized: bool = False

    def __len__(self) -> int:
        return 0 if self.data is None else len(self.data)

    def image(self, n: int) -> Tensor:
        """[c h w] the bytes of an image."""
        return self._there(n).cropped[n]

    def label(self, n: int) -> int | None:
        """The class of an image that shows one thing of a known class."""
        labels = self._there(n).labels[n]
        return int(labels) if labels.ndim == 0 and self._is_labeled else None

    def name(self, n: int) -> str:
        """What an image shows, in words."""
        labels = self._there(n).labels[n].reshape(-1).tolist()
        if not self._is_labeled:
            return f"digit {labels[0]}, drawn by code"
        return " and ".join(self.names[label] for label in labels)

    @property
    def shown(self) -> Tensor | None:
        """[n c h w] what the model is shown of them."""
        return None if self.data is None else self.prepared(self.data.pixels())

    def prepared(self, images: Tensor) -> Tensor:
        """Images [b c h w] in [0, 1] -> what the model is shown of them."""
        return standardize(images) if self.standardized else images

    def levels(self, drawn: Tensor, image: Tensor | None = None) -> Tensor:
        """What a model drew [... c h w], in [0, 1]: if it sees standardized images, with the light of one [c h w], or
        of all examples."""
        if not self.standardized:
            return drawn
        mean, spread = self._light(image)
        return drawn * spread + mean

    def _light(self, image: Tensor | None) -> tuple[float, float]:
        if image is None:
            if self.data is None:
                return 0.5, 0.2
            image = self.data.pixels()
        return float(image.mean()), max(float(image.std(correction=0)), image.numel() ** -0.5)

    @property
    def _is_labeled(self) -> bool:
        """Digits drawn by code are of the model's classes if those are digits too."""
        return self.source != "glyphs" or self.names == tuple("0123456789")

    def _there(self, n: int) -> Dataset:
        if self.data is None or not 0 <= n < len(self.data):
            raise ShapeError(f"example {n} is wanted; there are {len(self)}, counted from 0")
        return self.data


def examples_of(
    recipe: Recipe, spec: ImageSpec, tensors: Mapping[str, Tensor], data_dir: Path | None = None
) -> Examples:
    """Those among the tensors of a checkpoint, else those of the recipe's data, else digits if they can stand in."""
    names = class_names(recipe.data, spec.classes)
    standardized = bool(getattr(recipe.data, "standardize", False))
    data = _own(tensors, spec)
    source = "own"
    if data is None:
        data = _tested(recipe.data, spec, data_dir)
        source = "data"
    if data is None:
        data = _drawn(spec)
        source = "glyphs"
    return Examples(data, "none" if data is None else source, names, standardized)


def _own(tensors: Mapping[str, Tensor], spec: ImageSpec) -> Dataset | None:
    """Images [n c h w], bytes as the model is tested on them, and labels [n] that were given along with the weights."""
    if not all(name in tensors for name in EXAMPLES):
        return None
    images, labels = (tensors[name] for name in EXAMPLES)
    return _fitting(Dataset(images, labels, spec.classes), spec)


def _tested(config: DataConfig, spec: ImageSpec, data_dir: Path | None) -> Dataset | None:
    """Images from all over the test set, if it is here."""
    try:
        test = _fewer(config, data_dir).load().test
    except (TorchcapsError, OSError):
        return None
    step = max(1, len(test) // COUNT)
    return _fitting(subset(test, torch.arange(0, len(test), step)[:COUNT]), spec)


def _fewer(config: DataConfig, data_dir: Path | None) -> DataConfig:
    """The same data, no more of it than is looked at."""
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]
    counted = () if isinstance(config, FolderConfig | NpzConfig) else known & FEWER.keys()
    less: dict[str, Any] = {key: min(getattr(config, key), FEWER[key]) for key in counted}
    if data_dir is not None and "data_dir" in known:
        less["data_dir"] = str(data_dir)
    fewer: DataConfig = replace(config, **less)  # type: ignore[type-var]
    return fewer


def _drawn(spec: ImageSpec) -> Dataset | None:
    """Digits, where images are gray squares of a size that they can be drawn in."""
    if spec.channels != 1 or spec.height != spec.width or not 12 <= spec.height <= 256:
        return None
    return GlyphsConfig(train=1, test=COUNT, size=spec.height).load().test


def _fitting(data: Dataset, spec: ImageSpec) -> Dataset | None:
    """The images, if they are of the size that the model was built for."""
    return data if tuple(data.spec[:3]) == tuple(spec[:3]) else None
