"""How often a model is right on images that it does not learn from, asked while it learns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import Dataset, subset
from torchcaps.errors import RecipeError
from torchcaps.models import Model
from torchcaps.models.base import is_correct
from torchcaps.train.recipe import Recipe, stage_names, stage_of
from torchcaps.utils.mapped import is_mapped

__all__ = [
    "FinalScore",
    "check_regularization",
    "check_validation",
    "final_images",
    "final_score",
    "validation_accuracy",
]

_BATCH = 250
_BATCH_BYTES = 1 << 25
"""Images that are floats at a time, and the most bytes that they take."""
_MOST_TESTED = 5000
"""Test images that are looked at when training ends; `torchcaps evaluate` looks at all."""


def check_validation(recipe: Recipe, model: Model, data: Dataset | None) -> None:
    """Refuse, before the first step, a recipe that asks for an accuracy which nobody could measure."""
    if not any(stage_of(recipe, name).train.validates for name in stage_names(recipe.model)):
        return
    wish = "train.stop_at and train.validate_every"
    if data is None:
        raise RecipeError(f"{wish} need images to validate on, and none are held out: set data.validation")
    if not model.is_classifier:
        raise RecipeError(f"{wish} are for classifiers, and {type(model).__name__} is none: leave them out")


def check_regularization(recipe: Recipe, model: Model) -> None:
    """Refuse, before the first step, mixup, label smoothing or averaged weights that the model cannot be trained with.

    Raises:
        RecipeError: If the model reads no shares of classes, or is trained in stages.
    """
    names = stage_names(recipe.model)
    for settings in (stage_of(recipe, name).train for name in names):
        if (settings.mixup_alpha or settings.label_smoothing) and not model.takes_shares:
            raise RecipeError(
                f"train.mixup_alpha and train.label_smoothing are for classifiers by activations or logits, and "
                f"{type(model).__name__} here is none: leave them out"
            )
        if settings.ema_decay is not None and len(names) > 1:
            raise RecipeError(
                f"train.ema_decay is for models that are trained at once, and {type(model).__name__} has the stages "
                f"{', '.join(names)}: leave it out"
            )


@torch.no_grad()
def validation_accuracy(model: Model, data: Dataset, device: torch.device, rows: Tensor | None = None) -> float:
    """Measure how often a model is right; of several labels, all must have the highest scores.

    Args:
        model: In evaluation mode.
        data: The images.
        device: Where the model is.
        rows: Numbers of the images to look at; None for all.

    Returns:
        The share of images that it is right about.
    """
    rows = torch.arange(len(data)) if rows is None else rows
    size = max(1, min(_BATCH, _BATCH_BYTES // (4 * math.prod(data.spec[:3]))))
    # Compared on the CPU, where the labels are.
    right = [
        is_correct(model.scores(data.model_input(some).to(device)).cpu(), data.labels[some])
        for some in torch.split(rows, size)
    ]
    return float(torch.cat(right).double().mean())


class FinalScore(NamedTuple):
    """How often a classifier is right on test images.

    Attributes:
        accuracy: Share of images that it is right about.
        images: Number of images.
        chance: Share of the most frequent class, which needs no network.
    """

    accuracy: float
    images: int
    chance: float

    @property
    def is_chance(self) -> bool:
        """True if the accuracy is that of naming one class, or less."""
        return self.accuracy <= self.chance


def final_images(data: Dataset) -> Dataset:
    """Return the test images to keep until training ends: those that are then looked at, or all of a mapped file."""
    # Rows of a mapped file would be copied into memory
    return data if is_mapped(data.images) or len(data) <= _MOST_TESTED else subset(data, _tested_rows(len(data)))


def _tested_rows(count: int) -> Tensor:
    """Return the numbers of the images to test on: all of a small set, evenly spaced ones of a large one."""
    most = min(count, _MOST_TESTED)
    return torch.arange(most) * count // most


def final_score(model: Model, data: Dataset, device: torch.device) -> FinalScore:
    """Measure a classifier in evaluation mode on test images; of several labels, all must be right."""
    rows = _tested_rows(len(data))
    counts = torch.bincount(data.labels[rows].flatten(), minlength=data.classes)
    accuracy = validation_accuracy(model, data, device, rows)
    return FinalScore(accuracy, len(rows), float(counts.max() / counts.sum()))
