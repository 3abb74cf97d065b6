"""The published data sets: each a frozen dataclass in a recipe's [data] table that loads its splits.

Files are found, never fetched, by `load`: `torchcaps data fetch NAME` gets them. `data_dir` is a folder to look in
first; then come the environment variable TORCHCAPS_DATA and the user's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.config import Count, NonNegativeInt, Range
from torchcaps.data.affnist import affnist
from torchcaps.data.augment import Augment, SampleKey, shift
from torchcaps.data.base import Dataset, RawBatch, Splits, hold_out
from torchcaps.data.cache import locate
from torchcaps.data.multimnist import multimnist
from torchcaps.data.preprocess import Preprocess
from torchcaps.data.readers import read_cifar_archive, read_idx
from torchcaps.errors import DataError

__all__ = ["AffnistConfig", "Cifar10Config", "FashionMnistConfig", "MnistConfig", "MultiMnistConfig"]

FASHION_NAMES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class MnistConfig:
    """MNIST: 60,000 + 10,000 handwritten digits, 28x28; `train` and `test` take only the first so many.

    `deform` turns, stretches and shears the images of training: at 1 by up to 10 degrees, a fifth and .17.
    """

    train: Count = 60_000
    test: Count = 10_000
    validation: NonNegativeInt = 0
    deform: Annotated[float, Range(0.0, 2.0)] = 0.0
    data_dir: str | None = None

    SET: ClassVar[str] = "mnist"
    NAMES: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def load(self) -> Splits:
        files = locate(self.SET, folder(self.data_dir))
        train = self._part(files, "train", self.train)
        test = self._part(files, "t10k", self.test)
        return hold_out(Splits(train, test), self.validation)

    def _part(self, files: dict[str, Path], prefix: str, most: int) -> Dataset:
        images = read_idx(files[f"{prefix}-images-idx3-ubyte.gz"])  # [n h w]
        labels = read_idx(files[f"{prefix}-labels-idx1-ubyte.gz"])  # [n]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(f"{self.SET}: images {images.shape} and labels {labels.shape} do not belong together")
        pixels = as_tensor(images[:most]).unsqueeze(1)
        classes = as_tensor(labels[:most]).long()
        return Dataset(pixels, classes, len(self.NAMES), names=self.NAMES, augment=Augment(deform=self.deform))


@dataclass(frozen=True)
class FashionMnistConfig(MnistConfig):
    """Fashion-MNIST: 60,000 + 10,000 garments, 28x28."""

    SET: ClassVar[str] = "fashion-mnist"
    NAMES: ClassVar[tuple[str, ...]] = FASHION_NAMES


@dataclass(frozen=True)
class AffnistConfig:
    """affNIST-style: train on MNIST digits placed in 40x40, test on affine transforms of the MNIST test digits.

    `train_on` = "affnist" transforms the training digits too (for read-outs). `drawn` is the seed of the transforms.
    `placed_shift` moves the validation digits once and for all, as far as `train.max_shift` moves those of training:
    then validation tells when two models know shifted MNIST equally well, which is when affNIST compares them fairly.
    """

    train_on: Literal["mnist", "affnist"] = "mnist"
    size: Annotated[int, Range(28, 128)] = 40
    train: Annotated[int, Range(1, 1_000_000)] = 60_000
    test: Annotated[int, Range(1, 1_000_000)] = 10_000
    drawn: NonNegativeInt = 0
    validation: NonNegativeInt = 0
    placed_shift: NonNegativeInt = 0
    data_dir: str | None = None

    def load(self) -> Splits:
        if self.placed_shift and self.train_on == "affnist":
            raise DataError("placed_shift moves placed digits; those of train_on = 'affnist' are moved, so leave it 0")
        mnist = MnistConfig(data_dir=self.data_dir).load()
        train = self._placed(mnist.train) if self.train_on == "mnist" else self._moved(mnist.train, self.train, 0)
        test = self._moved(mnist.test, self.test, 1)
        splits = hold_out(Splits(train, test), self.validation)
        return splits._replace(validation=splits.validation and self._shifted(splits.validation, len(splits.train)))

    def _placed(self, digits: Dataset) -> Dataset:
        """The digits untouched, in the middle of a larger canvas; `train.max_shift` moves them while training."""
        before = (self.size - digits.spec.height) // 2
        after = self.size - digits.spec.height - before
        images = pad(digits.images[: self.train], (before, after, before, after))
        return Dataset(images, digits.labels[: self.train], digits.classes, names=digits.names)

    def _shifted(self, data: Dataset, first: int) -> Dataset:
        """The digits moved by up to `placed_shift` whole pixels; numbered from `first` on, after those of training."""
        index = first + torch.arange(len(data))
        return replace(data, images=shift(data.images, self.placed_shift, SampleKey(self.drawn, 0, index)))

    def _moved(self, digits: Dataset, count: int, stream: int) -> Dataset:
        index = torch.arange(count)
        images, moves = affnist(digits.images, 2 * self.drawn + stream, index, self.size)
        factors = {name: value for name, value in moves._asdict().items() if name != "source"}
        return Dataset(images, digits.labels[moves.source], digits.classes, factors, digits.names)


@dataclass(frozen=True)
class MultiMnistConfig:
    """MultiMNIST: two overlapping digits of different class in 36x36; labels are pairs [n 2].

    `most_shift` is how far each digit may be from the middle, `drawn` the seed of the pairs. `train` is how many pairs
    an epoch has: other pairs each epoch, or the first epoch's again and again unless `fresh`. `validation` so many
    pairs are made of as many digits, the last of MNIST's training set: no digit of theirs is trained on.
    """

    train: Count = 120_000
    test: Count = 10_000
    size: Annotated[int, Range(28, 128)] = 36
    most_shift: NonNegativeInt = 4
    drawn: NonNegativeInt = 0
    fresh: bool = True
    validation: NonNegativeInt = 0
    data_dir: str | None = None

    def load(self) -> Splits:
        train, test, aside = MnistConfig(validation=self.validation, data_dir=self.data_dir).load()
        validation = aside and self._pairs(aside, self.train, self.validation, 0)
        learned = self._pairs(train, 0, self.train, 0)
        if self.fresh:
            learned = replace(
                learned, resample_fn=lambda epoch, index: self._drawn(train, epoch * self.train + index, 0)
            )
        return Splits(learned, self._pairs(test, 0, self.test, 1), validation)

    def _pairs(self, digits: Dataset, first: int, count: int, stream: int) -> Dataset:
        """Pairs number `first` and on, and their digits each alone."""
        raw = self._drawn(digits, first + torch.arange(count), stream)
        return Dataset(raw.images, raw.labels, digits.classes, names=digits.names, components=raw.components)

    def _drawn(self, digits: Dataset, index: Tensor, stream: int) -> RawBatch:
        """Generate the pairs of these numbers [b]."""
        seed = 2 * self.drawn + stream
        return multimnist(digits.images, digits.labels, seed, index, self.size, self.most_shift)


@dataclass(frozen=True)
class Cifar10Config:
    """CIFAR-10: 50,000 + 10,000 color photographs, 32x32; `train` and `test` take only the first so many.

    Sabour (2017, section 7) shows squares of `view` = 24 pixels: at random places while training, the middle in tests.
    """

    train: Count = 50_000
    test: Count = 10_000
    view: Annotated[int, Range(8, 32)] = 32
    validation: NonNegativeInt = 0
    data_dir: str | None = None

    def load(self) -> Splits:
        [path] = locate("cifar10", folder(self.data_dir)).values()
        images, labels, test_images, test_labels = (as_tensor(a) for a in read_cifar_archive(path))
        train = self._part(images, labels, self.train)
        test = self._part(test_images, test_labels, self.test)
        return hold_out(Splits(train, test), self.validation)

    def _part(self, images: Tensor, labels: Tensor, most: int) -> Dataset:
        return Dataset(
            images[:most],
            labels[:most].long(),
            len(CIFAR10_NAMES),
            names=CIFAR10_NAMES,
            preprocess=Preprocess(self.view),
        )


def folder(data_dir: str | None) -> Path | None:
    """A recipe's data_dir as a path."""
    return None if data_dir is None else Path(data_dir).expanduser()


def as_tensor(array: np.ndarray) -> Tensor:
    """The array as a tensor; memory is shared where it may be written, and memory maps stay on disk."""
    if array.flags.writeable or isinstance(array, np.memmap):
        return torch.from_numpy(array)
    return torch.from_numpy(array.copy())
