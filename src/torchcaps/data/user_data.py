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
    """Your own pictures: `path`/CLASS/*.png or .jpg, all of one size; a share of them is set aside for testing."""

    path: str
    test: TestShare = 0.2
    validation: NonNegativeInt = 0
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        images, labels, names = read_pictures(Path(self.path).expanduser())
        data = Dataset(as_tensor(images), as_tensor(labels).long(), len(names), names=tuple(names))
        return hold_out(_split(data, self.test, self.drawn), self.validation)


@dataclass(frozen=True)
class NpzConfig:
    """Your own arrays: an npz file with `images` uint8 [n c h w] (or [n h w]) and `labels` [n].

    With `test_images` and `test_labels` in the file these are the test set, else a share is set aside.
    """

    path: str
    test: TestShare = 0.2
    validation: NonNegativeInt = 0
    drawn: NonNegativeInt = 0

    def load(self) -> Splits:
        path = Path(self.path).expanduser()
        arrays = {name: as_tensor(array) for name, array in read_npz(path).items()}
        for name in ("images", "labels"):
            if name not in arrays:
                raise DataError(f"'{path}' has no array '{name}'; it holds {', '.join(sorted(arrays)) or 'nothing'}")
        classes = 1 + max(int(v.max()) for k, v in arrays.items() if k.endswith("labels") and v.numel())
        train = _labeled(arrays["images"], arrays["labels"], classes)
        if "test_images" in arrays and "test_labels" in arrays:
            splits = Splits(train, _labeled(arrays["test_images"], arrays["test_labels"], classes))
        else:
            splits = _split(train, self.test, self.drawn)
        return hold_out(splits, self.validation)


def _labeled(images: Tensor, labels: Tensor, classes: int) -> Dataset:
    return Dataset(images.unsqueeze(1) if images.ndim == 3 else images, labels.long(), classes)


def _split(data: Dataset, share: float, seed: int) -> Splits:
    """A share of every class for testing, the rest for training, by the seed."""
    order = permutation(seed, 0, len(data))
    chosen: list[Tensor] = []
    for label in range(data.classes):
        mine = order[data.labels[order] == label]
        if len(mine) == 1:
            raise DataError(f"class {data.name_of(label)} has one image; two are wanted, one of them to test")
        chosen.append(mine[: max(1, round(share * len(mine)))] if len(mine) else mine)
    test = torch.cat(chosen).sort().values
    kept = torch.ones(len(data), dtype=torch.bool)
    kept[test] = False
    return Splits(subset(data, kept.nonzero().flatten()), subset(data, test))
