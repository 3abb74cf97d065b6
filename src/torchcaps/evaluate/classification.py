"""How often a classifier errs, beside controls that need no capsules at all."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data import Dataset, Splits
from torchcaps.metrics import accuracy, expected_calibration_error
from torchcaps.models import Model
from torchcaps.train.display import progress
from torchcaps.train.recipe import Recipe
from torchcaps.train.training import set_up

__all__ = ["class_scores", "classification", "nearest_mean", "untrained"]


@torch.inference_mode()
def class_scores(model: Model, data: Dataset, batch: int = 250) -> Tensor:
    """[n j] the model's scores of every image, a bounded batch at a time."""
    model.eval()
    batches = progress(torch.split(data.images, batch), "scoring images")
    return torch.cat([model.scores(images.float() / 255) for images in batches])


def classification(model: Model, data: Dataset) -> dict[str, float]:
    """test_error, and how far the winning score is from the chance of being right (calibration_error)."""
    return _measure(class_scores(model, data), data.labels)


def untrained(recipe: Recipe, data: Dataset) -> dict[str, float]:
    """Control: the recipe's own network before its first step."""
    return classification(set_up(recipe, data.spec).model, data)


def nearest_mean(splits: Splits) -> dict[str, float]:
    """Control: the class whose mean training image is nearest, in pixels."""
    train, test = splits.train, splits.test
    pixels = train.images.flatten(1).float() / 255  # [n (c h w)]
    means = torch.stack([pixels[train.labels == j].mean(0) for j in range(train.classes)])  # [j (c h w)]
    distances = torch.cdist(test.images.flatten(1).float() / 255, means).nan_to_num(torch.inf)  # [n j], no image: far
    return _measure((-distances).softmax(-1), test.labels)


def _measure(scores: Tensor, labels: Tensor) -> dict[str, float]:
    confidence, chosen = scores.clamp(0, 1).max(-1)
    return {
        "test_error": 1 - accuracy(scores, labels),
        "calibration_error": expected_calibration_error(confidence, chosen == labels),
    }
