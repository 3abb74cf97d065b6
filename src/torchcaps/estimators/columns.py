"""What the estimators share: settings that are checked in `fit`, and what becomes of the columns of X."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.config import check
from torchcaps.errors import DataError, ShapeError

__all__ = ["FAR", "Array", "Columns", "flat", "settings_of"]

Array = NDArray[Any]
S = TypeVar("S")

FAR = 1e6
"""Standard deviations beyond which one value is as good as another: squash is flat there."""


def settings_of(cls: type[S], estimator: Any) -> S:
    """The parameters of an estimator as a dataclass, checked; numpy's own numbers, of a grid search, are Python's."""
    given = {f.name: getattr(estimator, f.name) for f in fields(cls)}  # type: ignore[arg-type]
    settings = cls(**{name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()})
    check(settings)
    return settings


def flat(X: Any, shape: tuple[int, int, int] | None) -> Any:
    """Images [n c h w] of a shape -> rows [n (c h w)]; anything else is left to sklearn's own checks."""
    if shape is None or np.ndim(X) != 4:
        return X
    if np.shape(X)[1:] != shape:
        wanted = " ".join(map(str, shape))
        raise ShapeError(f"X has shape {list(np.shape(X))}; [n {wanted}], as in image_shape, is wanted")
    return np.reshape(X, (len(X), -1))


@dataclass(frozen=True)
class Columns:
    """What is taken from each column, and what it is then divided by, both [p]; the dimension d of a child."""

    mean: Array
    scale: Array
    d: int = 1

    @classmethod
    def of(cls, X: Array, d: int = 1) -> Columns:
        """By mean and deviation; a constant column has the deviation 0."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = X.mean(0, dtype=np.float64)
            scale = X.std(0, dtype=np.float64)
        scale[X.max(0) == X.min(0)] = 0
        wrong = np.flatnonzero(~np.isfinite(mean + scale))
        if len(wrong):
            raise DataError(f"column {wrong[0]} of X is too large for its deviation to be computed; scale it down")
        return cls(mean, scale, d)

    @classmethod
    def of_pixels(cls, X: Array, shape: tuple[int, int, int]) -> Columns:
        """Images [n (c h w)], all of whose pixels come to lie in [0, 1]: the least value and the range of all."""
        if X.shape[1] != math.prod(shape):
            size = "x".join(map(str, shape))
            raise ShapeError(f"X has {X.shape[1]} columns; images of image_shape {size} have {math.prod(shape)}")
        low = float(X.min())
        high = float(X.max())
        if not math.isfinite(high - low):
            raise DataError(f"X runs from {low:.3g} to {high:.3g}, too far for pixels; scale it down")
        return cls(np.full(X.shape[1], low), np.full(X.shape[1], high - low))

    def standardize(self, X: Array) -> Array:
        """(X - mean) / scale [n p] in float64; 0 where a column is constant."""
        zero = np.zeros(X.shape)
        with np.errstate(over="ignore"):
            away = np.divide(X - self.mean, self.scale, out=zero, where=self.scale > 0)
        clipped: Array = np.clip(away, -FAR, FAR)
        return clipped

    def children(self, X: Array) -> Tensor:
        """X [n p] -> features [n i d], the last child filled up with zeros."""
        n, p = X.shape
        padded = np.pad(self.standardize(X), ((0, 0), (0, -p % self.d)))
        return torch.from_numpy(padded).view(n, -1, self.d)  # [n i d]
