"""The user's own images: a folder of class folders, or an npz file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from torchcaps.config import NonNegativeInt, Range
from torchcaps.data.base import Dataset, Splits, hold_out, subset
from torchcaps.data.readers import read_npz, read_pictures
from torchcaps.data.sets import as_tensor
from torchcaps.errors import DataError
from torchcaps.utils.random import permutation

__all__ = ["FolderConfig", "NpzConfig"]

TestShare = Annotated[float, Range(0.001, 0.999)]


@dataclass(frozen=True)
class FolderConfig:
    """Your own pictures: `path`/CLASS/*.png (or JPEG, GIF, WebP), all of one size, a folder for each class.

    Attributes:
        path: The folder that holds the class folders.
        test: Share of the pictures of each class that is set aside for testing.
        validation: Number of training images that are set aside for validation.
        drawn: Seed of the split.
    """

    path: str = ""
    test: TestShare = 0.2
    validation: NonNegativeInt = 0
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        """Read the pictures and split them; see `read_pictures` for what is refused."""
        folder = _given_path(self.path, "a folder with a folder for each class, such as pictures/cat/1.png", "pictures")
        images, labels, names = read_pictures(folder)
        data = Dataset(as_tensor(images), as_tensor(labels).long(), len(names), names=tuple(names))
        return hold_out(_split(data, self.test, self.drawn), self.validation)


@dataclass(frozen=True)
class NpzConfig:
    """Your own arrays: an npz file with `images` uint8 [n c h w] (or [n h w]) and `labels` [n].

    With `test_images` and `test_labels` in the file these are the test set, else a share is set aside.

    Attributes:
        path: The file.
        test: Share of the images of each class that is set aside for testing.
        validation: Number of training images that are set aside for validation.
        drawn: Seed of the split.
    """

    path: str = ""
    test: TestShare = 0.2
    validation: NonNegativeInt = 0
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        """Read the arrays and split them; see `read_npz` for what is refused."""
        path = _given_path(self.path, "an npz file with the arrays 'images' and 'labels'", "digits.npz")
        arrays = {name: as_tensor(array) for name, array in read_npz(path).items()}
        for name in ("images", "labels"):
            if name not in arrays:
                raise DataError(f"'{path}' has no array '{name}'; it holds {', '.join(sorted(arrays)) or 'nothing'}")
        # A class may be in the test labels only.
        classes = 1 + max(int(v.max()) for k, v in arrays.items() if k.endswith("labels") and v.numel())
        train = _labeled(arrays["images"], arrays["labels"], classes)
        if "test_images" in arrays and "test_labels" in arrays:
            splits = Splits(train, _labeled(arrays["test_images"], arrays["test_labels"], classes))
        else:
            splits = _split(train, self.test, self.drawn)
        return hold_out(splits, self.validation)


def _given_path(path: str, wanted: str, example: str) -> Path:
    """Return a path that the user gave; one that was forgotten is a DataError with an example."""
    if not path:
        raise DataError(f"data.path is not set: {wanted}, is wanted; add --data.path {example}")
    return Path(path).expanduser()


def _labeled(images: Tensor, labels: Tensor, classes: int) -> Dataset:
    """Make a data set of images [n c h w] or [n h w]."""
    return Dataset(images.unsqueeze(1) if images.ndim == 3 else images, labels.long(), classes)


def _split(data: Dataset, share: float, seed: int) -> Splits:
    """Set a share of the images of every class, at least one, aside for testing; the seed decides which."""
    order = permutation(seed, 0, len(data))
    chosen: list[Tensor] = []
    for label in sorted(set(data.labels.tolist())):
        rows = order[data.labels[order] == label]
        if len(rows) == 1:
            raise DataError(f"class {data.name_of(label)} has one image; two are wanted, one of them to test")
        chosen.append(rows[: max(1, round(share * len(rows)))])
    test = torch.cat(chosen).sort().values
    is_train = torch.ones(len(data), dtype=torch.bool)
    is_train[test] = False
    return Splits(subset(data, is_train.nonzero().flatten()), subset(data, test))
