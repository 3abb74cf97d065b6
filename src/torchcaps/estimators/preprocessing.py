"""What both estimators share: parameters that are checked in `fit`, and the scaling of the columns of X."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torchcaps.config import check
from torchcaps.errors import DataError, ShapeError

__all__ = [
    "MAX_DEVIATIONS",
    "ColumnScaler",
    "FloatArray",
    "RandomState",
    "Rows",
    "check_settings",
    "flatten_images",
]

FloatArray = NDArray[np.float64]
Rows = NDArray[np.float64] | NDArray[np.float32]
RandomState = int | np.random.RandomState | None
S = TypeVar("S")

MAX_DEVIATIONS = 1e6
"""Standard deviations at which a value is clipped: squash is flat there."""


def check_settings(cls: type[S], estimator: object) -> S:
    """Copy the parameters of an estimator into a dataclass, and check them.

    Args:
        cls: dataclass whose fields are named like the parameters.
        estimator: the estimator; numpy's own numbers, as a grid search passes them, become Python's.

    Raises:
        RecipeError: a parameter has the wrong type or is out of range.
    """
    given = {f.name: getattr(estimator, f.name) for f in fields(cls)}  # type: ignore[arg-type]
    settings = cls(**{name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()})
    check(settings)
    return settings


def flatten_images(X: ArrayLike, shape: tuple[int, int, int] | None) -> ArrayLike:
    """Flatten images to rows; anything else is left to scikit-learn's own checks.

    Args:
        X: images [n c h w], or rows.
        shape: (c, h, w) that images must have; None if X are plain rows.

    Returns:
        Rows [n (c h w)], or X itself.

    Raises:
        ShapeError: the images have another shape.
    """
    # Rows, and whatever else is not a stack of images, are checked by scikit-learn with its own messages
    if shape is None or np.ndim(X) != 4:
        return X
    images = np.asarray(X)
    if images.shape[1:] != shape:
        expected = " ".join(map(str, shape))
        raise ShapeError(f"X has shape {list(images.shape)}; [n {expected}], as in image_shape, is wanted")
    return images.reshape(len(images), -1)


@dataclass(frozen=True)
class ColumnScaler:
    """Offset and scale of the columns of X.

    Attributes:
        mean: [p] subtracted from each column.
        scale: [p] by which it is then divided; 0 for a constant column, which becomes 0.
        child_dim: d, columns that make up a child.
    """

    mean: FloatArray
    scale: FloatArray
    child_dim: int = 1

    @classmethod
    def fit(cls, X: Rows, child_dim: int = 1) -> ColumnScaler:
        """Take mean and standard deviation of each column of X [n p].

        Raises:
            DataError: a column is too large for its deviation to be computed.
        """
        # Sums of huge values may overflow; that is found below and refused in one line
        with np.errstate(over="ignore", invalid="ignore"):
            mean = X.mean(0, dtype=np.float64)
            scale = X.std(0, dtype=np.float64)
        # Rounding may leave a constant column a tiny deviation
        scale[X.max(0) == X.min(0)] = 0
        wrong = np.flatnonzero(~np.isfinite(mean + scale))
        if len(wrong):
            raise DataError(f"column {wrong[0]} of X is too large for its deviation to be computed; scale it down")
        return cls(mean, scale, child_dim)

    @classmethod
    def fit_pixels(cls, X: Rows, shape: tuple[int, int, int]) -> ColumnScaler:
        """Take the smallest value and the range of all pixels of images, which map them to [0, 1].

        Args:
            X: images [n (c h w)].
            shape: (c, h, w).

        Raises:
            ShapeError: X has another number of columns.
            DataError: the range is too large.
        """
        if X.shape[1] != math.prod(shape):
            size = "x".join(map(str, shape))
            raise ShapeError(f"X has {X.shape[1]} columns; images of image_shape {size} have {math.prod(shape)}")
        # One range for all pixels: an image keeps its contrast
        low = float(X.min())
        high = float(X.max())
        if not math.isfinite(high - low):
            raise DataError(f"X runs from {low:.3g} to {high:.3g}, too far for pixels; scale it down")
        return cls(np.full(X.shape[1], low), np.full(X.shape[1], high - low))

    def transform(self, X: Rows) -> FloatArray:
        """Compute (X - mean) / scale [n p] in float64; 0 where a column is constant."""
        # `where` leaves constant columns at 0
        zero = np.zeros(X.shape)
        # A value far beyond the training rows may overflow to infinity, which the clipping turns into a number
        with np.errstate(over="ignore"):
            scaled = np.divide(X - self.mean, self.scale, out=zero, where=self.scale > 0)
        return np.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)

    def to_children(self, X: Rows) -> Tensor:
        """Cut scaled rows [n p] into children [n i d]; the last child is padded with zeros."""
        n, p = X.shape
        padded = np.pad(self.transform(X), ((0, 0), (0, -p % self.child_dim)))
        return torch.from_numpy(padded).view(n, -1, self.child_dim)  # [n i d]
