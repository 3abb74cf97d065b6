"""A system of your own
====================

A fifth system in one file: a model, its adapter, one line in each table (docs/develop/new_system.md)."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchcaps.config import Count
from torchcaps.evaluate.classification import class_scores
from torchcaps.layers import DenseCapsules, PrimaryCapsules
from torchcaps.losses import margin_loss
from torchcaps.math import Grid
from torchcaps.models import MODELS, Model
from torchcaps.systems import Metric, System, evaluate_runs, register
from torchcaps.train import train
from torchcaps.train.recipe import recipe_of


class Shallow(Model):
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


@dataclass(frozen=True)
class ShallowConfig:
    types: Count = 8
    dimension: Count = 16

    def build(self, spec):
        return Shallow(self, spec)


class ShallowSystem(System):
    name = "shallow"
    models = ("shallow",)
    metrics = (*System.metrics, Metric("mean_length", "neither"))

    def measure(self, model, recipe, splits, options):
        length = class_scores(model, splits.test).max(-1).values.mean()
        return {**super().measure(model, recipe, splits, options), "mean_length": float(length)}


MODELS["shallow"] = ShallowConfig
register(ShallowSystem())
tables = {"model": {"name": "shallow"}, "data": {"name": "glyphs", "train": 500, "test": 200}, "train": {"epochs": 4}}
with tempfile.TemporaryDirectory() as folder:
    train(recipe_of({"name": "shallow-glyphs", **tables}), Path(folder) / "run", quiet=True)
    result = evaluate_runs([Path(folder) / "run"])
for name, row in {"shallow": result.metrics, **result.controls}.items():
    print(f"{name:14} test error {row['test_error'][0]:.0%}")
