"""
6. Write a system
=================

A system is a family of models with its own metrics. This tutorial adds one: a model, two lines of an adapter, one line
in each table. Training, exact resume, evaluation beside controls, attacks and prediction then work with it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from torchcaps.config import Count
from torchcaps.layers import DenseCapsules, PrimaryCapsules
from torchcaps.losses import margin_loss
from torchcaps.math import Grid
from torchcaps.models import MODELS, Model
from torchcaps.systems import System, evaluate_runs, register
from torchcaps.train import train
from torchcaps.train.recipe import recipe_of

# %%
# The model
# ---------
# Layers own parameters and make one routing call each. ``objective`` returns what training lowers, ``scores`` makes the
# model a classifier.


class Flat(Model):
    """Images -> primary capsules -> class capsules, without a convolution before them."""

    def __init__(self, config, spec):
        super().__init__()
        self.spec = spec
        grid = Grid.of_image(spec.height, spec.width)
        self.primary = PrimaryCapsules(grid, spec.channels, config.types, dimension=8, kernel=7, stride=3)
        self.classes = DenseCapsules(self.primary.count, spec.classes, 8, config.dimension)

    def scores(self, images):  # [b c h w] -> [b j]
        return self.classes(self.primary(images))[0].activation

    def objective(self, batch, step):
        return {"loss": margin_loss(self.scores(batch.images), batch.labels)}


# %%
# Its settings
# ------------
# A frozen dataclass. The annotations are the checks: ``types = 0`` in a recipe is refused.


@dataclass(frozen=True)
class FlatConfig:
    """Settings of `Flat`."""

    types: Count = 8
    dimension: Count = 16

    def build(self, spec):
        return Flat(self, spec)


# %%
# The adapter
# -----------
# For a classifier, a name and its models are enough.


class FlatSystem(System):
    """A classifier; metrics and controls are those of any classifier."""

    name = "flat"
    models = ("flat",)


MODELS["flat"] = FlatConfig
register(FlatSystem())

# %%
# Train and evaluate
# ------------------
# Every result has controls beside it: the same network without training, and the nearest mean image.

recipe = recipe_of(
    {
        "name": "flat-glyphs",
        "model": {"name": "flat"},
        "data": {"name": "glyphs", "train": 800, "test": 200},
        "train": {"epochs": 6, "batch": 40},
    }
)
with tempfile.TemporaryDirectory() as folder:
    train(recipe, Path(folder) / "run", quiet=True)
    result = evaluate_runs([Path(folder) / "run"])

rows = {"flat": result.metrics, **result.controls}
errors = {name: 100 * row["test_error"][0] for name, row in rows.items()}
print({name: f"{value:.0f} %" for name, value in errors.items()})
fig, axis = plt.subplots(figsize=(5, 2))
axis.barh(list(errors), list(errors.values()))
axis.set_xlabel("test error (%)")
fig.tight_layout()

# %%
# Next: :doc:`add a system </develop/new_system>` lists what an adapter can declare, and ``assert_system`` checks it.
# Or :doc:`scale out <plot_7_scale_out>`.
