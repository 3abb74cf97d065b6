"""A data set in memory, and how training takes batches from it.

Which images are in a batch, and how each is changed, depends only on (seed, epoch, index): so a run can be stopped
anywhere, and go on with any number of processes, and see exactly what it would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.data.augment import shift
from torchcaps.errors import DataError
from torchcaps.math.random import permutation
from torchcaps.types import Batch, ImageSpec

__all__ = [
    "DataConfig",
    "Dataset",
    "Place",
    "Splits",
    "check_splits",
    "epoch_order",
    "hold_out",
    "place_of",
    "subset",
    "take",
]


@dataclass(frozen=True)
class Dataset:
    """Images [n c h w] as bytes, labels [n] ([n m] where an image shows m things), named factors [n], class names."""

    images: Tensor
    labels: Tensor
    classes: int
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(f"images are {self.images.dtype} {list(self.images.shape)}; uint8 [n c h w] is wanted")
        if self.images.numel() == 0:
            raise DataError(f"a data set of shape {list(self.images.shape)} holds no images")
        for name, values in {"labels": self.labels, **self.factors}.items():
            if values.shape[:1] != self.images.shape[:1] or (values.ndim != 1 and name != "labels"):
                raise DataError(f"{len(self)} images but {name} of shape {list(values.shape)}; one each is wanted")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise DataError(f"labels run from {low} to {high}; 0 to {self.classes - 1} is wanted")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def spec(self) -> ImageSpec:
        channels, height, width = self.images.shape[1:]
        return ImageSpec(channels, height, width, self.classes)

    def name_of(self, label: int) -> str:
        """The class's name, or its number where it has none."""
        return self.names[label] if label < len(self.names) else str(label)


class Splits(NamedTuple):
    """What to learn from, what to be judged by, and what to choose settings by, where that was set aside."""

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


def subset(data: Dataset, rows: Tensor) -> Dataset:
    """The images of the given rows [m], with their labels and factors."""
    factors = {name: values[rows] for name, values in data.factors.items()}
    return replace(data, images=data.images[rows], labels=data.labels[rows], factors=factors)


def hold_out(splits: Splits, count: int) -> Splits:
    """Set the last `count` training images aside for validation."""
    n = len(splits.train)
    if count >= n:
        raise DataError(f"{count} validation images of {n} training images leave none; set fewer aside")
    if count == 0:
        return splits
    rows = torch.arange(n)
    return Splits(subset(splits.train, rows[: n - count]), splits.test, subset(splits.train, rows[n - count :]))


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
    """Counts, class balance, and that no two splits share an image; one line, or DataError."""
    present = {name: split for name, split in splits._asdict().items() if split is not None}
    seen: dict[bytes, str] = {}
    for name, split in present.items():
        hashes = {sha256(image.numpy().tobytes()).digest() for image in split.images}
        shared = [h for h in hashes if h in seen]
        if shared:
            raise DataError(f"{len(shared)} images of the {name} set are also in the {seen[shared[0]]} set")
        seen |= dict.fromkeys(hashes, name)
    train = splits.train
    counts = torch.bincount(train.labels.flatten(), minlength=train.classes)
    sizes = " + ".join(f"{len(split)} {name}" for name, split in present.items())
    shape = "x".join(str(side) for side in train.spec[:3])
    balance = f"{train.classes} classes of {int(counts.min())} to {int(counts.max())}"
    return f"{sizes} images {shape}, {balance}, no image in two splits"
