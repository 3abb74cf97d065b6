"""The user's own images: a folder of class folders, or an npz file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from torchcaps.config import NonNegativeInt, Range, Size
from torchcaps.data.base import Dataset, Splits, hold_out, split_rows, spread_classes, subset
from torchcaps.data.fitting import Fit, PictureFormat
from torchcaps.data.picture_folder import prepare_folder
from torchcaps.data.preprocess import Preprocess
from torchcaps.data.readers.labeled_arrays import read_labeled_arrays
from torchcaps.data.readers.pictures import MOST_PIXELS
from torchcaps.data.sets import as_tensor
from torchcaps.errors import DataError
from torchcaps.utils.notices import notice

__all__ = ["FolderConfig", "GivenConfig", "NpzConfig"]

TestShare = Annotated[float, Range(0.001, 0.999)]

MARGIN = 8 / 7
"""Side of a stored picture over that of the view that a random crop takes of it."""


@dataclass(frozen=True)
class FolderConfig:
    """Your own pictures: `path`/CLASS/*.jpg (or PNG, GIF, WebP, BMP), any sizes, a folder for each class.

    Pictures are decoded and resized once, into the cache (`data.prepared`).

    Attributes:
        path: The folder that holds the class folders; or `train` and `test` (and `validation`), which hold them.
        test: Share of the pictures of each class that is set aside for testing; of no use with a folder `test`.
        validation: Number of training images that are set aside for validation.
        drawn: Seed of the split.
        size: Side of the images, or [height, width]. None takes the size of the pictures or, where they differ, their
            median height and width, scaled so that no side is beyond 64 pixels.
        fit: How pictures of another size are treated. "crop" scales them until they cover the size and cuts the center,
            "letterbox" shows them whole with bars, "random-crop" is "crop" with another place in each epoch.
        color: "gray" or "color" for all; "auto" is gray if every picture is.
        background: The gray, 0 to 255, behind what is transparent.
        strict: Refuse the folder if a file in it cannot be read; otherwise it is named and skipped.
    """

    path: str = ""
    test: TestShare = 0.2
    validation: NonNegativeInt = 0
    drawn: NonNegativeInt = 0
    size: Size | tuple[Size, Size] | None = None
    fit: Fit = "crop"
    color: Literal["auto", "gray", "color"] = "auto"
    background: Annotated[int, Range(0, 255)] = 255
    strict: bool = False

    def load(self) -> Splits:
        """Prepare the pictures, or find them prepared, and split them; what was resized or skipped is said aloud.

        Raises:
            DataError: if there are no class folders, or no picture of a class can be read; with `strict`, if any
                cannot be.
        """
        found = prepare_folder(_given_path(self.path, _FOLDER_WANTED, "pictures"), self)
        for line in found.report.remarks():
            notice(line)
        data = Dataset(
            found.images,
            torch.tensor(found.labels),
            len(found.names),
            names=found.names,
            preprocess=Preprocess(view=self.view_of(found.images.shape[-2])),
            digest=found.digest,
        )
        # The rows of each split stand together, so that the images stay in their file.
        first, second = found.counts
        train = subset(data, slice(0, first))
        test = subset(data, slice(first + second, len(data)))
        if second == 0:
            return _held_out(Splits(train, test), self.validation)
        if self.validation:
            raise DataError("the pictures have a folder 'validation'; leave data.validation at 0, or remove the folder")
        return Splits(train, test, subset(data, slice(first, first + second)))

    def view_of(self, side: int) -> int | None:
        """Return the side of the view that a random crop takes of stored pictures of a side; None for other fits."""
        return round(side / MARGIN) if self.fit == "random-crop" else None

    def picture_format(self, channels: int, height: int, width: int) -> PictureFormat:
        """Return how a picture is stored so that a model gets images of a shape.

        Raises:
            DataError: if random crops are asked for and the shape is not a square, or an image has more pixels than a
                picture may have.
        """
        if height * width > MOST_PIXELS:
            raise DataError(f"images of {height}x{width} have more than {MOST_PIXELS:,} pixels; lower data.size")
        if self.fit == "random-crop":
            if height != width:
                raise DataError(
                    f"data.fit = 'random-crop' with images of {height}x{width}; set data.size to one number"
                )
            side = next(s for s in range(height, 2 * height + 2) if self.view_of(s) == height)
            return PictureFormat(channels, side, side, self.fit, self.background)
        return PictureFormat(channels, height, width, self.fit, self.background)


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
        """Read the arrays and split them.

        Raises:
            DataError: if the file cannot be read, or an array is not what its name says; see `labeled_arrays`.
        """
        found = read_labeled_arrays(_given_path(self.path, _NPZ_WANTED, "digits.npz"))
        train = Dataset(as_tensor(found.images), as_tensor(found.labels), found.classes)
        if found.test_images is not None and found.test_labels is not None:
            test = Dataset(as_tensor(found.test_images), as_tensor(found.test_labels), found.classes)
        else:
            rows = split_rows(train.labels, (), self.test, self.drawn)
            test = subset(train, rows.test)
            train = subset(train, rows.train)
        if self.validation:
            train = subset(train, spread_classes(train.labels))
        return _held_out(Splits(train, test), self.validation)


@dataclass(frozen=True)
class GivenConfig:
    """Data that a Python program gave to `torchcaps.fit`, which alone can load them."""

    def load(self) -> Splits:
        """Refuse: there is nothing to load from.

        Raises:
            DataError: always; the text says what to do.
        """
        raise DataError(
            "this run was trained by torchcaps.fit on data of a Python program; use its model there, or train on files "
            "with --data.name folder --data.path FOLDER"
        )


_FOLDER_WANTED = "a folder with a folder for each class, such as pictures/cat/1.png"
_NPZ_WANTED = "an npz file with the arrays 'images' and 'labels'"


def _held_out(splits: Splits, count: int) -> Splits:
    """Hold out the last training images for validation; every class must keep one to train on."""
    found = hold_out(splits, count)
    lost = set(splits.train.labels.tolist()) - set(found.train.labels.tolist())
    if lost:
        name = splits.train.name_of(min(lost))
        raise DataError(f"{count} validation images leave none of the class {name} to train on; set fewer aside")
    return found


def _given_path(path: str, wanted: str, example: str) -> Path:
    """Return a path that the user gave; one that was forgotten is a DataError with an example."""
    if not path:
        raise DataError(f"data.path is not set: {wanted}, is wanted; add --data.path {example}")
    return Path(path).expanduser()
