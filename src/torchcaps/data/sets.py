"""The published data sets: each a frozen dataclass in a recipe's [data] table that loads its splits.

Files are found, never downloaded, by `load`: `torchcaps data fetch NAME` gets them.
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
from torchcaps.utils.memory import check_image_memory

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

_TRAIN_STREAM = 0
_TEST_STREAM = 1
"""Generated training and test images have seeds 2 · drawn + stream, so that no two of them share random numbers."""


@dataclass(frozen=True)
class MnistConfig:
    """MNIST: 60,000 + 10,000 handwritten digits, 28x28.

    Attributes:
        train: Number of training images, the first ones of the set.
        test: Number of test images, the first ones of the set.
        validation: Number of training images that are set aside for validation.
        deform: Strength of random rotation, stretch and shear in training: at 1 up to 10 degrees, a fifth and .17.
        data_dir: Folder that is searched before TORCHCAPS_DATA and the cache.
    """

    train: Count = 60_000
    test: Count = 10_000
    validation: NonNegativeInt = 0
    deform: Annotated[float, Range(0.0, 2.0)] = 0.0
    data_dir: str | None = None

    SET: ClassVar[str] = "mnist"
    NAMES: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def load(self) -> Splits:
        """Read the set from its files; a DataError says which are missing."""
        files = locate(self.SET, expanded(self.data_dir))
        train = self._read_split(files, "train", self.train)
        test = self._read_split(files, "t10k", self.test)
        return hold_out(Splits(train, test), self.validation)

    def _read_split(self, files: dict[str, Path], prefix: str, most: int) -> Dataset:
        """Read the first `most` images of the files with this prefix."""
        images = read_idx(files[f"{prefix}-images-idx3-ubyte.gz"])  # [n h w]
        labels = read_idx(files[f"{prefix}-labels-idx1-ubyte.gz"])  # [n]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(f"{self.SET}: images {images.shape} and labels {labels.shape} do not belong together")
        return Dataset(
            as_tensor(images[:most]).unsqueeze(1),
            as_tensor(labels[:most]).long(),
            len(self.NAMES),
            names=self.NAMES,
            augment=Augment(deform=self.deform),
        )


@dataclass(frozen=True)
class FashionMnistConfig(MnistConfig):
    """Fashion-MNIST: 60,000 + 10,000 garments, 28x28."""

    SET: ClassVar[str] = "fashion-mnist"
    NAMES: ClassVar[tuple[str, ...]] = FASHION_NAMES


@dataclass(frozen=True)
class AffnistConfig:
    """affNIST-style: train on MNIST digits placed in 40x40, test on affine transforms of the MNIST test digits.

    Attributes:
        train_on: "mnist" trains on digits in the middle of the canvas, "affnist" on transformed ones (for read-outs).
        size: Side of the canvas in pixels.
        train: Number of training images.
        test: Number of test images.
        drawn: Seed of the transforms.
        validation: Number of training images that are set aside for validation.
        placed_shift: Largest shift of the validation digits, which are moved once, as `train.max_shift` moves those of
            training: then validation tells when two models know shifted MNIST equally well, which is when affNIST
            compares them fairly.
        data_dir: Folder that is searched before TORCHCAPS_DATA and the cache.
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
        """Read MNIST and generate the set from it."""
        if self.placed_shift and self.train_on == "affnist":
            raise DataError("placed_shift moves placed digits; those of train_on = 'affnist' are moved, so leave it 0")
        check_image_memory(self.train + self.test, self.size**2)
        mnist = MnistConfig(data_dir=self.data_dir).load()
        if self.train_on == "mnist":
            train = self._on_canvas(mnist.train)
        else:
            train = self._transformed(mnist.train, self.train, _TRAIN_STREAM)
        test = self._transformed(mnist.test, self.test, _TEST_STREAM)
        splits = hold_out(Splits(train, test), self.validation)
        if splits.validation is None:
            return splits
        return splits._replace(validation=self._shifted(splits.validation, len(splits.train)))

    def _on_canvas(self, digits: Dataset) -> Dataset:
        """Put the digits as they are into the middle of the canvas; `train.max_shift` moves them in training."""
        before = (self.size - digits.spec.height) // 2
        after = self.size - digits.spec.height - before
        images = pad(digits.images[: self.train], (before, after, before, after))
        return Dataset(images, digits.labels[: self.train], digits.classes, names=digits.names)

    def _shifted(self, data: Dataset, first: int) -> Dataset:
        """Shift digits by up to `placed_shift` pixels; their indices follow those of training, from `first` on."""
        key = SampleKey(self.drawn, 0, first + torch.arange(len(data)))
        return replace(data, images=shift(data.images, self.placed_shift, key))

    def _transformed(self, digits: Dataset, count: int, stream: int) -> Dataset:
        """Generate `count` affine transforms of digits, whose parameters are the factors of the set."""
        images, transforms = affnist(digits.images, 2 * self.drawn + stream, torch.arange(count), self.size)
        factors = {name: value for name, value in transforms._asdict().items() if name != "source"}
        return Dataset(images, digits.labels[transforms.source], digits.classes, factors, digits.names)


@dataclass(frozen=True)
class MultiMnistConfig:
    """MultiMNIST: two overlapping digits of different class in 36x36; labels are pairs [n 2].

    Attributes:
        train: Number of pairs in an epoch.
        test: Number of test pairs.
        size: Side of the canvas in pixels.
        most_shift: How far each digit may be from the middle, in pixels.
        drawn: Seed of the pairs.
        fresh: Train on other pairs in each epoch; else on those of the first epoch again and again.
        validation: Number of validation pairs. They are made of as many digits, the last of MNIST's training set, and
            no digit of theirs is trained on.
        data_dir: Folder that is searched before TORCHCAPS_DATA and the cache.
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
        """Read MNIST and generate the set from it."""
        # A pair is stored three times: as it is, and each digit alone
        check_image_memory(self.train + self.test + self.validation, 3 * self.size**2)
        digits = MnistConfig(validation=self.validation, data_dir=self.data_dir).load()
        train = self._dataset(digits.train, 0, self.train, _TRAIN_STREAM)
        if self.fresh:
            # Epoch e has the pairs number e · train and on, which are generated as they are needed.
            train = replace(
                train,
                resample_fn=lambda epoch, index: self._pairs(digits.train, epoch * self.train + index, _TRAIN_STREAM),
            )
        test = self._dataset(digits.test, 0, self.test, _TEST_STREAM)
        if digits.validation is None:
            return Splits(train, test)
        return Splits(train, test, self._dataset(digits.validation, self.train, self.validation, _TRAIN_STREAM))

    def _dataset(self, digits: Dataset, first: int, count: int, stream: int) -> Dataset:
        """Generate the pairs number `first` to `first + count`, with their digits each alone."""
        raw = self._pairs(digits, first + torch.arange(count), stream)
        return Dataset(raw.images, raw.labels, digits.classes, names=digits.names, components=raw.components)

    def _pairs(self, digits: Dataset, index: Tensor, stream: int) -> RawBatch:
        """Generate the pairs of these numbers [b]."""
        seed = 2 * self.drawn + stream
        return multimnist(digits.images, digits.labels, seed, index, size=self.size, most_shift=self.most_shift)


@dataclass(frozen=True)
class Cifar10Config:
    """CIFAR-10: 50,000 + 10,000 color photographs, 32x32.

    Attributes:
        train: Number of training images, the first ones of the set.
        test: Number of test images, the first ones of the set.
        view: Side of the square that a model gets, 24 in Sabour (2017, section 7): cropped at a random place in
            training and from the center in a test.
        validation: Number of training images that are set aside for validation.
        data_dir: Folder that is searched before TORCHCAPS_DATA and the cache.
    """

    train: Count = 50_000
    test: Count = 10_000
    view: Annotated[int, Range(8, 32)] = 32
    validation: NonNegativeInt = 0
    data_dir: str | None = None

    def load(self) -> Splits:
        """Read the set from its archive; a DataError says if that is missing."""
        [path] = locate("cifar10", expanded(self.data_dir)).values()
        arrays = read_cifar_archive(path)
        train = self._dataset(arrays.images[: self.train], arrays.labels[: self.train])
        test = self._dataset(arrays.test_images[: self.test], arrays.test_labels[: self.test])
        return hold_out(Splits(train, test), self.validation)

    def _dataset(self, images: np.ndarray, labels: np.ndarray) -> Dataset:
        return Dataset(
            as_tensor(images),
            as_tensor(labels).long(),
            len(CIFAR10_NAMES),
            names=CIFAR10_NAMES,
            preprocess=Preprocess(self.view),
        )


def expanded(data_dir: str | None) -> Path | None:
    """Return a recipe's data_dir as a path, with ~ expanded."""
    return None if data_dir is None else Path(data_dir).expanduser()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor; memory is shared where it may be written, and memory maps stay on disk."""
    if array.flags.writeable or isinstance(array, np.memmap):
        return torch.from_numpy(array)
    return torch.from_numpy(array.copy())
