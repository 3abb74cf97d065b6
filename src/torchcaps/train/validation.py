"""How often a model is right on images that it does not learn from, asked while it learns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchcaps.data import Dataset, subset
from torchcaps.errors import RecipeError
from torchcaps.models import Model
from torchcaps.models.base import is_correct
from torchcaps.train.recipe import Recipe, stage_names, stage_of

__all__ = [
    "FinalScore",
    "check_regularization",
    "check_validation",
    "final_images",
    "final_score",
    "validation_accuracy",
]

_BATCH = 250
"""Images that are floats at a time."""
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
def validation_accuracy(model: Model, data: Dataset, device: torch.device) -> float:
    """The share of images whose label, or all of whose labels, have the highest scores; in evaluation mode as it is."""
    # Compared on the CPU, where the labels are.
    rows = torch.split(torch.arange(len(data)), _BATCH)
    right = [is_correct(model.scores(data.model_input(some).to(device)).cpu(), data.labels[some]) for some in rows]
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
    """Return a set of test images that is quick to go through: all of a small one, evenly spaced ones of a large."""
    n = len(data)
    return data if n <= _MOST_TESTED else subset(data, torch.arange(_MOST_TESTED) * n // _MOST_TESTED)


def final_score(model: Model, data: Dataset, device: torch.device) -> FinalScore:
    """Measure a classifier in evaluation mode on test images; of several labels, all must be right."""
    counts = torch.bincount(data.labels.flatten(), minlength=data.classes)
    return FinalScore(validation_accuracy(model, data, device), len(data), float(counts.max() / counts.sum()))
