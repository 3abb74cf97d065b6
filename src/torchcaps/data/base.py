"""A data set in memory, and how training takes batches from it.

Which images are in a batch, and how each is changed, depends only on (seed, epoch, index): so a run can be stopped
anywhere, and go on with any number of processes, and see exactly what it would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.data.augment import shift
from torchcaps.errors import DataError
from torchcaps.math.random import permutation
from torchcaps.types import Batch, ImageSpec

__all__ = ["DataConfig", "Dataset", "Place", "Splits", "check_splits", "epoch_order", "place_of", "take"]


@dataclass(frozen=True)
class Dataset:
    """Images [n c h w] as bytes, labels [n], and named factors [n] where the set knows them."""

    images: Tensor
    labels: Tensor
    classes: int
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(f"images are {self.images.dtype} {list(self.images.shape)}; uint8 [n c h w] is wanted")
        if self.images.numel() == 0:
            raise DataError(f"a data set of shape {list(self.images.shape)} holds no images")
        for name, values in {"labels": self.labels, **self.factors}.items():
            if values.shape != self.images.shape[:1]:
                raise DataError(
                    f"{len(self.images)} images but {name} of shape {list(values.shape)}; one each is wanted"
                )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise DataError(f"labels run from {low} to {high}; 0 to {self.classes - 1} is wanted")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def spec(self) -> ImageSpec:
        channels, height, width = self.images.shape[1:]
        return ImageSpec(channels, height, width, self.classes)


class Splits(NamedTuple):
    """What to learn from and what to be judged by."""

    train: Dataset
    test: Dataset


class DataConfig(Protocol):
    """A frozen dataclass that names a data set and loads it."""

    def load(self) -> Splits: ...


class Place(NamedTuple):
    """A position in training: the epoch, and the number of the batch in it."""

    epoch: int
    number: int


def place_of(step: int, images: int, batch: int) -> Place:
    """Where step number `step` stands; what is left over at the end of an epoch waits for another order."""
    per_epoch = images // batch
    if per_epoch == 0:
        raise DataError(f"a batch of {batch} is more than the {images} training images; make it smaller")
    return Place(*divmod(step, per_epoch))


def epoch_order(seed: int, epoch: int, images: int) -> Tensor:
    """[n] the order of the images in an epoch."""
    return permutation(seed, epoch, images)


def take(
    data: Dataset, order: Tensor, place: Place, batch: int, *, seed: int, max_shift: int = 0,
    part: int = 0, parts: int = 1,
) -> Batch:  # fmt: skip
    """The batch at a place as floats in [0, 1]; of `parts` processes each takes its own `part` of it."""
    share = batch // parts
    first = place.number * batch + part * share
    index = order[first : first + share]
    images = data.images[index].float() / 255
    return Batch(shift(images, max_shift, seed, place.epoch, index), data.labels[index], index)


def check_splits(splits: Splits) -> str:
    """Counts, class balance and that no test image is also a training image; one line, or DataError."""
    seen = {bytes(image) for image in splits.train.images.flatten(1).numpy()}
    twice = sum(bytes(image) in seen for image in splits.test.images.flatten(1).numpy())
    if twice:
        raise DataError(f"{twice} test images are also training images")
    counts = torch.bincount(splits.train.labels, minlength=splits.train.classes)
    spec = splits.train.spec
    return (
        f"{len(splits.train)} + {len(splits.test)} images {spec.channels}x{spec.height}x{spec.width}, "
        f"{spec.classes} classes of {int(counts.min())} to {int(counts.max())}, no test image in training"
    )
