"""Training: recipes, the loop, checkpoints, runs."""

from torchcaps.train.loop import Outcome, total_steps, train
from torchcaps.train.recipe import Recipe, load_recipe, recipe_names
from torchcaps.train.run import Run, TrainedRun, create, load, load_run

__all__ = [
    "Outcome",
    "Recipe",
    "Run",
    "TrainedRun",
    "create",
    "load",
    "load_recipe",
    "load_run",
    "recipe_names",
    "total_steps",
    "train",
]
