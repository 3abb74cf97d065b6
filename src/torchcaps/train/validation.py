"""How often a model is right on images that it does not learn from, asked while it learns."""

from __future__ import annotations

import torch

from torchcaps.data import Dataset
from torchcaps.errors import RecipeError
from torchcaps.models import Model
from torchcaps.models.base import is_correct
from torchcaps.train.recipe import Recipe, stage_names, stage_of

__all__ = ["check_regularization", "check_validation", "validation_accuracy"]

_BATCH = 250
"""Images that are floats at a time."""


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
