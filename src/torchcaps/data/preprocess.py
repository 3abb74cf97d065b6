"""What every image goes through before a model: cropping, bytes to floats, standardizing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.errors import DataError, ShapeError
from torchcaps.math.pixels import standardize, to_float

__all__ = ["TEST_VIEWS", "Preprocess", "center_crop", "crop_margins", "crops"]

# Where the test views start, (down, right), in pixels from the start of the center crop. Those of the authors' code of
# Hinton 2018, whose crop of 32 from 48 starts at 8: both coordinates of {8, 7}, then of {9, 7}, then of {9, 6}.
_CENTER = ((0, 0),)
_HALF_PIXEL = ((0, 0), (0, -1), (-1, 0), (-1, -1))
_ONE_PIXEL = ((1, 1), (1, -1), (-1, 1), (-1, -1))
_TWO_PIXELS = ((1, 1), (1, -2), (-2, 1), (-2, -2))
_OFFSETS = (*_CENTER, *_HALF_PIXEL, *_ONE_PIXEL, *_TWO_PIXELS)

TEST_VIEWS = len(_OFFSETS)
"""Number of crops that `crops` can cut from an image."""


@dataclass(frozen=True)
class Preprocess:
    """How images become model input, the same in training and in a test.

    Attributes:
        view: Side in pixels of the square that is cropped from each image; None leaves images whole. A test crops
            the center (or several places, see `views`), training a random place.
        standardize: Give each image zero mean and unit variance after it was cropped.
        per_channel: Standardize each channel of an image by itself.
    """

    view: int | None = None
    standardize: bool = False
    per_channel: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """Crop the center of images, convert them to floats and standardize them if wanted.

        Args:
            images: uint8 [b c h w].

        Returns:
            Floats [b c s s], s the view; [b c h w] without one.
        """
        return self.to_input(to_float(self.crop(images)))

    def crop(self, images: Tensor) -> Tensor:
        """Crop the center of images [... h w] to the view, [... s s]; without a view they stay as they are."""
        return images if self.view is None else center_crop(images, self.view)

    def to_input(self, pixels: Tensor) -> Tensor:
        """Turn cropped pixels [b c s s] in [0, 1] into model input: standardized if wanted, else unchanged."""
        return standardize(pixels, per_channel=self.per_channel) if self.standardize else pixels

    def views(self, images: Tensor, count: int = TEST_VIEWS) -> Tensor:
        """Prepare several crops of each image, the center first; a test may average what a model says of them.

        Args:
            images: uint8 [b c h w].
            count: Number of crops, 1 to 13; see `crops` for their places.

        Returns:
            Floats [count b c s s], each crop standardized by itself if wanted.

        Raises:
            DataError: without a view, since all crops would be the same.
        """
        if self.view is None:
            raise DataError(f"{count} views of whole images would all be the same; give the data set a view")
        return torch.stack([self.to_input(to_float(cropped)) for cropped in crops(images, self.view, count)])


def center_crop(images: Tensor, size: int) -> Tensor:
    """Crop the square in the center; of an odd margin, the larger half is cut from below and from the right.

    Args:
        images: Tensor [... h w].
        size: Side of the square.

    Returns:
        Tensor [... size size].
    """
    down, right = crop_margins("center_crop", images, size)
    return images[..., down // 2 : down // 2 + size, right // 2 : right // 2 + size]


def crops(images: Tensor, size: int, count: int = TEST_VIEWS) -> Tensor:
    """Crop the first `count` of 13 fixed places of each image.

    They are those of the authors' code of Hinton 2018: the center (that of `center_crop`), and three squares of four
    around it, none more than two pixels away; the first square has the center as one of its corners, which therefore
    counts twice. A place that would lie outside the image moves to its border.

    Args:
        images: Tensor [b c h w].
        size: Side of the squares.
        count: Number of places, 1 to 13.

    Returns:
        Tensor [count b c size size].

    Raises:
        ShapeError: if the count is not 1 to 13, or the square does not fit into the images.
    """
    if not 1 <= count <= TEST_VIEWS:
        raise ShapeError(f"crops with count={count}: there are {TEST_VIEWS} views; ask for 1 to {TEST_VIEWS}")
    down, right = crop_margins("crops", images, size)
    starts = [
        (min(max(down // 2 + y, 0), down), min(max(right // 2 + x, 0), right))  # inside the image
        for y, x in _OFFSETS[:count]
    ]
    return torch.stack([images[..., y : y + size, x : x + size] for y, x in starts])


def crop_margins(caller: str, images: Tensor, size: int) -> tuple[int, int]:
    """Return by how many pixels (down, right) a square of `size` may move inside images [... h w].

    Raises:
        ShapeError: if the square does not fit; the text begins with the name of the `caller`.
    """
    h, w = images.shape[-2:]
    if not 1 <= size <= min(h, w):
        raise ShapeError(f"{caller} of size {size} from images of {h}x{w}; ask for 1 to {min(h, w)} pixels")
    return h - size, w - size
