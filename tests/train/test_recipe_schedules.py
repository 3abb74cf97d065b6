"""Schedules that count their steps beforehand fit the training of their recipes."""

from __future__ import annotations

from typing import Any

import pytest

from torchcaps.config import to_dict
from torchcaps.train import load_recipe, recipe_names, total_steps
from torchcaps.train.recipe import Recipe, StageConfig, stage_names, stage_of

MOST = {"mnist": 60_000, "fashion-mnist": 60_000, "affnist": 60_000, "cifar10": 50_000}
"""Training images of sets of which a recipe takes the first so many, and sets the last of them aside."""
TOYS = {"none": 24_300, "azimuth": 24_300 // 3, "elevation": 24_300 // 3}
"""smallNORB, whole and a third of its viewpoints."""


def stages(recipe: Recipe) -> list[StageConfig]:
    return [stage_of(recipe, name) for name in stage_names(recipe.model)]


def counts_steps(stage: StageConfig) -> bool:
    return stage.schedule.name == "OneCycleLR" or "total_steps" in stage.schedule.options


def images(data: dict[str, Any]) -> int:
    """How many images an epoch has, from the recipe alone."""
    if data["name"] in ("glyphs", "multimnist"):  # drawn, those of validation beside them
        return data["train"]
    if data["name"] == "smallnorb":
        return TOYS[data["novel"]] - data["validation"]
    return min(MOST[data["name"]], data["train"]) - data["validation"]


COUNTED = [name for name in recipe_names() if any(map(counts_steps, stages(load_recipe(name))))]


@pytest.mark.parametrize("name", COUNTED)
def test_a_schedule_has_the_steps_of_its_training(name: str) -> None:
    """Never fewer, which would end in an error, and at most 5 % more, with which it would not come to its end."""
    recipe = load_recipe(name)
    n, taken = images(to_dict(recipe)["data"]), 0
    for stage in stages(recipe):
        steps = max(1, round(stage.train.epochs * (n // stage.train.batch)))
        taken += steps
        if counts_steps(stage):
            assert steps <= stage.schedule.options["total_steps"] <= 1.05 * steps
    assert taken == total_steps(recipe, n)


def test_these_are_the_recipes_meant() -> None:
    meant = {"capsnet-mnist-small", "cnn-mnist-small", "capsnet-smallnorb-small", "poe-quick", "matrix-smallnorb-small"}
    assert meant <= set(COUNTED)
    assert not {"capsnet-folder", "capsnet-mnist", "matrix-smallnorb"} & set(COUNTED)
