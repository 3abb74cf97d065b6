"""The papers' own numbers, to stand beside ours; theirs are of full-size networks and longer training."""

from __future__ import annotations

from torchcaps.config import to_dict
from torchcaps.models import CapsNetConfig
from torchcaps.train.recipe import Recipe

__all__ = ["paper_numbers"]

SABOUR = {
    "mnist": {"test_error": 0.0025},
    "affnist": {"affnist_accuracy": 0.79, "mnist_accuracy": 0.9923},
    "multimnist": {"multimnist_error": 0.052},
    "cifar10": {"test_error": 0.106},
    "smallnorb": {"test_error": 0.027},
}
"""Sabour, Frosst and Hinton 2017, sections 5 to 7, by data set."""


def paper_numbers(recipe: Recipe) -> dict[str, float]:
    """Metric -> the number in the paper that the recipe follows; nothing where it has none."""
    data = str(to_dict(recipe)["data"]["name"])
    return SABOUR.get(data, {}) if isinstance(recipe.model, CapsNetConfig) else {}
