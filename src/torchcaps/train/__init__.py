"""Training: recipes, the loop, checkpoints, runs."""

from torchcaps.train.loop import Outcome, train
from torchcaps.train.own_data import fit
from torchcaps.train.recipe import Recipe, load_recipe, recipe_names, total_steps
from torchcaps.train.run import Run, TrainedRun, create, load, load_run

__all__ = [
    "Outcome",
    "Recipe",
    "Run",
    "TrainedRun",
    "create",
    "fit",
    "load",
    "load_recipe",
    "load_run",
    "recipe_names",
    "total_steps",
    "train",
]
