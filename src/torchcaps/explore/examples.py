"""Test images of a run: those stored with its weights, those of its data, or digits drawn by code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import DataConfig, Dataset, FolderConfig, GlyphsConfig, NpzConfig, subset
from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.math.pixels import standardize
from torchcaps.systems.prediction import class_names
from torchcaps.train import Recipe
from torchcaps.train.weights_export import EXAMPLES, FACTOR_PREFIX
from torchcaps.types import ImageSpec

__all__ = ["COUNT", "Examples", "load_examples"]

COUNT = 200
"""Test images that the page offers, at most."""

IMAGE_COUNTS: Mapping[str, int] = {"train": 1, "test": COUNT, "validation": 0}
"""Images to load of each split of a data set whose configuration counts them: fewer are faster to read or to draw."""


class _Brightness(NamedTuple):
    """Mean and standard deviation of pixels in [0, 1]."""

    mean: float
    std: float


@dataclass(frozen=True)
class Examples:
    """Test images of a run, and the conversion between pixels in [0, 1] and the model's input.

    Attributes:
        data: the images, or None if there are none.
        source: "own" (stored with the weights), "data", "glyphs" or "none".
        names: names of the model's classes.
        standardized: whether the model's input has mean 0 and deviation 1 in each image.
        per_channel: whether it has them in each channel.
    """

    data: Dataset | None
    source: str
    names: tuple[str, ...]
    standardized: bool = False
    per_channel: bool = False

    def __len__(self) -> int:
        return 0 if self.data is None else len(self.data)

    def image(self, n: int) -> Tensor:
        """Return the bytes [c h w] of image `n`."""
        return self._dataset(n).cropped[n]

    def label(self, n: int) -> int | None:
        """Return the class of image `n`, or None if it shows several things or a class is not known."""
        labels = self._dataset(n).labels[n]
        return int(labels) if labels.ndim == 0 and self._is_labeled else None

    def name(self, n: int) -> str:
        """Describe what image `n` shows."""
        labels = self._dataset(n).labels[n].reshape(-1).tolist()
        if not self._is_labeled:
            return f"digit {labels[0]}, drawn by code"
        return " and ".join(self.names[label] for label in labels)

    @property
    def things(self) -> int:
        """How many things an image shows."""
        return 1 if self.data is None or self.data.labels.ndim == 1 else self.data.labels.shape[1]

    @property
    def factors(self) -> dict[str, list[int]]:
        """Further facts about each image by name, such as its azimuth; empty where nothing is known."""
        # Of stored images only: those of a data set are a sample, among which nothing can be turned
        if self.data is None or self.source != "own" or not self.data.factors:
            return {}
        known = {**self.data.factors, "category": self.data.labels}
        return {name: values.tolist() for name, values in known.items()}

    @property
    def inputs(self) -> Tensor | None:
        """All images as the model's input [n c h w]."""
        return None if self.data is None else self.to_input(self.data.pixels())

    def to_input(self, images: Tensor) -> Tensor:
        """Convert images [b c h w] in [0, 1] to the model's input [b c h w]."""
        return standardize(images, per_channel=self.per_channel) if self.standardized else images

    def to_display(self, decoded: Tensor, image: Tensor | None = None) -> Tensor:
        """Convert a decoder's output to pixels in [0, 1], the inverse of `to_input`.

        Args:
            decoded: [... c h w] in the units of the model's input.
            image: [c h w] whose brightness a standardized output gets back; None takes that of all examples.

        Returns:
            [... c h w]
        """
        if not self.standardized:
            return decoded
        # Standardizing forgot the brightness; it is put back so that images look as they were
        brightness = self._brightness(image)
        return decoded * brightness.std + brightness.mean

    def _brightness(self, image: Tensor | None) -> _Brightness:
        if image is None:
            # Nothing to measure: a medium gray and a usual contrast
            if self.data is None:
                return _Brightness(0.5, 0.2)
            image = self.data.pixels()
        smallest = image.numel() ** -0.5  # as `standardize` has it
        return _Brightness(float(image.mean()), max(float(image.std(correction=0)), smallest))

    @property
    def _is_labeled(self) -> bool:
        """Digits drawn by code are of the model's classes only if those are digits too."""
        return self.source != "glyphs" or self.names == tuple("0123456789")

    def _dataset(self, n: int) -> Dataset:
        if self.data is None or not 0 <= n < len(self.data):
            raise ShapeError(f"there is no example {n}; there are {len(self)}, counted from 0")
        return self.data


def load_examples(
    recipe: Recipe, spec: ImageSpec, tensors: Mapping[str, Tensor], data_dir: Path | None = None
) -> Examples:
    """Find test images of a run: stored with its weights, else of the recipe's data, else digits drawn by code.

    Args:
        recipe: the run's recipe.
        spec: image shape and classes of its model; images of another shape are left out.
        tensors: tensors of the checkpoint beside the state.
        data_dir: folder to search for data sets first.
    """
    # Names and standardization are the recipe's, wherever the images come from
    names = class_names(recipe.data, spec.classes)
    standardized = bool(getattr(recipe.data, "standardize", False))
    per_channel = getattr(recipe.data, "standardize_per", "image") == "channel"
    # The first source that has images of the right shape
    data = _stored_images(tensors, spec)
    source = "own"
    if data is None:
        data = _test_images(recipe.data, spec, data_dir)
        source = "data"
    if data is None:
        data = _drawn_digits(spec)
        source = "glyphs"
    return Examples(data, "none" if data is None else source, names, standardized, per_channel)


def _stored_images(tensors: Mapping[str, Tensor], spec: ImageSpec) -> Dataset | None:
    """Return the images [n c h w] and labels [n] that are stored with the weights."""
    # Only exported weights carry images; the checkpoint of a run has none
    if not all(name in tensors for name in EXAMPLES):
        return None
    images, labels = (tensors[name] for name in EXAMPLES)
    factors = {
        name.removeprefix(FACTOR_PREFIX): values for name, values in tensors.items() if name.startswith(FACTOR_PREFIX)
    }
    return _if_fitting(Dataset(images, labels, spec.classes, factors), spec)


def _test_images(config: DataConfig, spec: ImageSpec, data_dir: Path | None) -> Dataset | None:
    """Return images evenly spaced over the test set, if it is on this machine."""
    try:
        test = _with_fewer_images(config, data_dir).load().test
    except (TorchcapsError, OSError):
        return None  # data that is not here is no error: digits may stand in
    # Files often sort by class: evenly spaced images show all of them
    step = max(1, len(test) // COUNT)
    return _if_fitting(subset(test, torch.arange(0, len(test), step)[:COUNT]), spec)


def _with_fewer_images(config: DataConfig, data_dir: Path | None) -> DataConfig:
    """Return the same data, with no more images than the page offers."""
    # Folders and npz files are read whole in any case: their counts are no sizes
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]
    counted = () if isinstance(config, FolderConfig | NpzConfig) else known & IMAGE_COUNTS.keys()
    changes: dict[str, int | str] = {key: min(getattr(config, key), IMAGE_COUNTS[key]) for key in counted}
    if data_dir is not None and "data_dir" in known:
        changes["data_dir"] = str(data_dir)
    changed: DataConfig = replace(config, **changes)  # type: ignore[type-var]
    return changed


def _drawn_digits(spec: ImageSpec) -> Dataset | None:
    """Return digits drawn by code, if the model takes gray squares of a size that they can be drawn in."""
    # Digits are drawn in squares of 12 to 256 pixels, as `GlyphsConfig` allows
    if spec.channels != 1 or spec.height != spec.width or not 12 <= spec.height <= 256:
        return None
    return GlyphsConfig(train=1, test=COUNT, size=spec.height).load().test


def _if_fitting(data: Dataset, spec: ImageSpec) -> Dataset | None:
    """Return the images if they have the shape that the model was built for."""
    return data if tuple(data.spec[:3]) == tuple(spec[:3]) else None
