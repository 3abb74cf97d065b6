"""Which number of a class capsule's pose says what: known factors of the images against the dimensions of the pose.

For each class and factor the dimension of that class's capsule that tracks the factor best, by Spearman's rank
correlation. The best of 16 is good by luck too, so it is chosen, sign and all, on one half of the class's images and
measured on the other: what only chance chose then gives 0 on average. Beside it stand codes that learned nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import DataError
from torchcaps.metrics import spearman
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.matrix import MatrixCaps
from torchcaps.types import Capsules
from torchcaps.utils.progress import progress
from torchcaps.utils.random import normal, permutation

__all__ = [
    "PIXEL_CONTROLS",
    "Factor",
    "class_capsules",
    "factor_controls",
    "factor_correlation",
    "factor_metrics",
    "factor_tracking",
    "has_factors",
]

PIXEL_CONTROLS = ("pixel components", "pixel directions")
"""Codes that know nothing of the factors, see `factor_controls`."""

LEAST = 8
"""A class with fewer images is left out."""

_PERIODS = {"rotation": 2 * math.pi, "hue": 2 * math.pi, "azimuth": 36.0}
"""Angles and their full turn: of glyphs and affNIST in radians, smallNORB's azimuth in tens of degrees."""

_UNORDERED = ("instance", "lighting", "familiar")
"""Factors that are names, not quantities: smallNORB's object instances and lamps, and what was trained on."""


class Factor(NamedTuple):
    """How well one factor is tracked.

    Attributes:
        rho: Mean of `by_class`.
        by_class: Class -> correlation of the chosen dimension with the factor, on images that did not choose it.
        dimensions: Class -> the chosen dimension of its capsule, counted from 0.
    """

    rho: float
    by_class: dict[int, float]
    dimensions: dict[int, int]


@torch.inference_mode()
def class_capsules(model: CapsNet | MatrixCaps, data: Dataset, batch: int = 250) -> Capsules:
    """Encode every image as class capsules [n j k] with activations [n j], a bounded batch at a time."""
    model.eval()
    batches = progress(torch.split(torch.arange(len(data)), batch), "encoding images")
    encoded = [model.encode(data.model_input(rows)) for rows in batches]
    return Capsules(torch.cat([c.pose for c in encoded]), torch.cat([c.activation for c in encoded]))


def has_factors(data: Dataset) -> bool:
    """Return True if there is something to measure: known factors, one label an image, a class with enough images."""
    return data.labels.ndim == 1 and bool(_ordered(data)) and bool(_rows_by_class(data))


def factor_correlation(model: CapsNet, data: Dataset) -> dict[str, Factor]:
    """Measure for each known factor of the data how well the capsule of the true class tracks it."""
    _check(data)
    poses = class_capsules(model, data).pose  # [n j k]
    return factor_tracking(poses[torch.arange(len(data)), data.labels], data)


def factor_metrics(factors: Mapping[str, Factor]) -> dict[str, float]:
    """Return plain numbers: `factor_correlation`, the mean over factors, and `factor_correlation_NAME` of each."""
    each = {f"factor_correlation_{name}": factor.rho for name, factor in factors.items()}
    return {"factor_correlation": sum(each.values()) / len(each), **each}


def factor_controls(data: Dataset, dimension: int, seed: int = 0) -> dict[str, dict[str, Factor]]:
    """Measure codes that know nothing of the factors in the same way.

    Args:
        data: Images with known factors.
        dimension: How many numbers an image has, as many as the poses that the codes are compared with.
        seed: Of the random directions.

    Returns:
        "pixel components": the first principal components of the pixels of the image's class. "pixel directions":
        random directions in pixel space. Each with its factors by name.
    """
    _check(data)
    codes = {"pixel components": _components(data, dimension), "pixel directions": _directions(data, dimension, seed)}
    return {name: factor_tracking(codes[name], data) for name in PIXEL_CONTROLS}


def factor_tracking(codes: Tensor, data: Dataset) -> dict[str, Factor]:
    """Measure how well codes [n k] of images track each factor, within each class."""
    found: dict[str, Factor] = {}
    for name, values in _ordered(data).items():
        # Class by class: a dimension has a meaning within its own capsule only.
        chosen = {j: _best(codes, _targets(name, values), *_halves(rows)) for j, rows in _rows_by_class(data).items()}
        by_class = {j: rho for j, (_, rho) in chosen.items()}
        found[name] = Factor(sum(by_class.values()) / len(by_class), by_class, {j: k for j, (k, _) in chosen.items()})
    return found


def _best(codes: Tensor, targets: list[Tensor], first: Tensor, second: Tensor) -> tuple[int, float]:
    """The dimension that correlates most with a target on the rows `first`, and its correlation on `second`."""
    # The sign is chosen with the dimension: taking the size on both halves would turn luck into correlation.
    tried = [(spearman(codes[first, k], target[first]), k, target) for k in range(codes.shape[1]) for target in targets]
    rho, k, target = max(tried, key=lambda one: abs(one[0]))
    return k, math.copysign(1.0, rho) * spearman(codes[second, k], target[second])


def _targets(name: str, values: Tensor) -> list[Tensor]:
    """The factor as it is; an angle that goes further than half a turn as its sine and cosine."""
    period = _PERIODS.get(name)
    x = values.double()
    if period is None or float(x.max() - x.min()) <= period / 2:
        return [values]
    # An angle jumps at the end of a turn; its sine and cosine do not.
    turn = 2 * math.pi / period * x
    return [wave.round(decimals=9) for wave in (turn.sin(), turn.cos())]  # what is equal but for rounding shares a rank


def _ordered(data: Dataset) -> dict[str, Tensor]:
    return {name: values for name, values in data.factors.items() if name not in _UNORDERED}


def _rows_by_class(data: Dataset) -> dict[int, Tensor]:
    """Class -> the rows of its images, for those that have enough."""
    rows = {j: (data.labels == j).nonzero().flatten() for j in range(data.classes)}
    return {j: r for j, r in rows.items() if len(r) >= LEAST}


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into two halves, in an order that never changes."""
    # One fixed stream, so that capsules and controls are measured on the same halves.
    mixed = rows[permutation(0, 0, len(rows))]
    return mixed[: len(rows) // 2], mixed[len(rows) // 2 :]


def _components(data: Dataset, k: int) -> Tensor:
    """[n k] of each image the first principal components of its class; found on the half that chooses."""
    codes = torch.zeros(len(data), k)
    for rows in _rows_by_class(data).values():
        x = data.model_input(rows).flatten(1)
        # As the dimension is chosen on the first half, the axes are found there, too.
        first = data.model_input(_halves(rows)[0]).flatten(1)
        axes = torch.linalg.svd(first - first.mean(0), full_matrices=False).Vh[:k]  # [k (c h w)], fewer of few images
        codes[rows, : len(axes)] = (x - first.mean(0)) @ axes.T
    return codes


def _directions(data: Dataset, k: int, seed: int) -> Tensor:
    """[n k] the pixels along k random directions, the same for all images."""
    axes = normal(seed, torch.arange(k), count=math.prod(data.spec[:3]))  # [k (c h w)]
    return torch.cat([data.model_input(rows).flatten(1) @ axes.T for rows in torch.split(torch.arange(len(data)), 250)])


def _check(data: Dataset) -> None:
    if data.labels.ndim != 1:
        raise DataError(
            f"labels of shape {list(data.labels.shape)}; factors need one label an image: choose other data"
        )
    if not _ordered(data):
        raise DataError("the data know no factors of their images; choose data that do, as glyphs or affnist")
    if not _rows_by_class(data):
        raise DataError(f"no class has {LEAST} images; take more to correlate factors")
