"""Images and labels in an npz file: every array is compared with what its name promises before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchcaps.data.readers.arrays import read_npz
from torchcaps.data.readers.safe_io import bad

__all__ = ["MOST_CLASSES", "LabeledArrays", "read_labeled_arrays"]

MOST_CLASSES = 10_000
"""Labels at or above this are taken for something else than class numbers: each class costs a capsule's weights."""

_NAMES = ("images", "labels", "test_images", "test_labels")


class LabeledArrays(NamedTuple):
    """The content of an npz file.

    Attributes:
        images: uint8 [n c h w].
        labels: int64 [n].
        classes: Number of classes, those of the test labels included.
        test_images: uint8 [m c h w], if the file has them.
        test_labels: int64 [m], if the file has them.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: int
    test_images: np.ndarray | None = None
    test_labels: np.ndarray | None = None


def read_labeled_arrays(path: Path) -> LabeledArrays:
    """Read the arrays `images` and `labels`, and `test_images` and `test_labels` if they are there.

    Args:
        path: The file.

    Raises:
        DataError: if an array is missing, has another type or shape than its name promises, or holds values that are
            no class numbers.
    """
    arrays = read_npz(path)
    for name in _NAMES[:2]:
        if name not in arrays:
            raise bad(path, f"has no array '{name}'; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    # One of the two alone would be ignored in silence.
    tests = [name for name in _NAMES[2:] if name in arrays]
    if len(tests) == 1:
        other = _NAMES[2] if tests[0] == _NAMES[3] else _NAMES[3]
        raise bad(path, f"has the array '{tests[0]}' without '{other}'; add it, or remove the other")
    images = _images(path, "images", arrays["images"])
    labels = _labels(path, "labels", arrays["labels"], len(images))
    if not tests:
        return LabeledArrays(images, labels, 1 + int(labels.max()))
    test_images = _images(path, "test_images", arrays["test_images"])
    if test_images.shape[1:] != images.shape[1:]:
        came = f"{list(test_images.shape[1:])} in 'test_images' and {list(images.shape[1:])} in 'images'"
        raise bad(path, f"has images of {came}; one shape is wanted")
    test_labels = _labels(path, "test_labels", arrays["test_labels"], len(test_images))
    # A class may be in the test labels only.
    classes = 1 + int(max(labels.max(), test_labels.max()))
    return LabeledArrays(images, labels, classes, test_images, test_labels)


def _images(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Return images [n c h w]; anything but bytes is refused."""
    if array.dtype != np.uint8:
        hint = "bytes from 0 to 255 (uint8)"
        raise bad(path, f"its array '{name}' is {array.dtype}; {hint} are wanted, so scale and convert it")
    if array.ndim not in (3, 4):
        raise bad(path, f"its array '{name}' has shape {list(array.shape)}; [n c h w] or [n h w] is wanted")
    if array.size == 0:
        raise bad(path, f"its array '{name}' has shape {list(array.shape)}, which holds no images; add some")
    return array[:, None] if array.ndim == 3 else array


def _labels(path: Path, name: str, array: np.ndarray, count: int) -> np.ndarray:
    """Return class numbers [n] of `count` images; fractions, text and numbers that no class has are refused."""
    if array.dtype.kind not in "biuf":
        raise bad(path, f"its array '{name}' is {array.dtype}; class numbers 0, 1, 2 ... are wanted")
    if array.shape != (count,):
        raise bad(path, f"its array '{name}' has shape {list(array.shape)}; [{count}], one for each image, is wanted")
    if array.dtype.kind == "f" and not bool((np.isfinite(array) & (array == np.floor(array))).all()):
        raise bad(path, f"its array '{name}' holds fractions, NaN or infinity; whole class numbers are wanted")
    low = array.min()
    high = array.max()
    if low < 0 or high >= MOST_CLASSES:
        raise bad(
            path, f"its array '{name}' runs from {low} to {high}; class numbers 0 to {MOST_CLASSES - 1} are wanted"
        )
    return array.astype(np.int64)
