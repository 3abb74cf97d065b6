"""A recipe is all that a run depends on: data, model, optimiser, schedule, loop and seed, as frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchcaps.config import (
    Choice,
    Count,
    Options,
    PositiveFloat,
    Range,
    from_dict,
    merge,
    read_toml,
    to_dict,
)
from torchcaps.data import DATASETS, DataConfig, GlyphsConfig
from torchcaps.errors import RecipeError, nearest
from torchcaps.models import MODELS, CapsNetConfig, ModelConfig

__all__ = [
    "Loop",
    "OptimiserConfig",
    "Recipe",
    "ScheduleConfig",
    "Stage",
    "find_recipe",
    "load_recipe",
    "recipe_names",
    "recipe_of",
    "resolved",
    "stage_names",
    "stage_of",
]

OPTIMISERS: dict[str, type[Optimizer]] = {
    n: c
    for n, c in vars(torch.optim).items()
    if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer
}
SCHEDULES: dict[str, type[LRScheduler]] = {
    n: c
    for n, c in vars(torch.optim.lr_scheduler).items()
    if isinstance(c, type) and issubclass(c, LRScheduler) and not n.startswith("_") and n != "LRScheduler"
}


@dataclass(frozen=True)
class OptimiserConfig:
    """Any optimiser of torch.optim by its name there; `options` are its further arguments."""

    name: str = "Adam"
    lr: Annotated[float, Range(0, 1e6, open_low=True)] = 1e-3
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            raise RecipeError(f"unknown optimiser '{self.name}'{nearest(self.name, OPTIMISERS)}")
        self._try()

    def _try(self) -> None:
        """One step on a small weight: what refuses it would refuse the first step of a run."""
        weight = torch.nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.ones(2, 2)
        try:
            self.build([weight]).step()
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(f"optimiser {self.name} cannot be used here: {' '.join(str(error).split())}") from None

    def build(self, parameters: Any) -> Optimizer:
        make: Any = OPTIMISERS[self.name]
        try:
            optimiser: Optimizer = make(parameters, lr=self.lr, **self.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"optimiser {self.name} refuses {self.options}: {error}") from None
        return optimiser


@dataclass(frozen=True)
class ScheduleConfig:
    """Any schedule of torch.optim.lr_scheduler by its name there, moved on after every step; "constant" is none."""

    name: str = "constant"
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name != "constant" and self.name not in SCHEDULES:
            raise RecipeError(f"unknown schedule '{self.name}'{nearest(self.name, ['constant', *SCHEDULES])}")
        self._try()

    def _try(self) -> None:
        """One step of a schedule, as after the first step of a run."""
        optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
        schedule = self.build(optimiser)
        try:
            optimiser.step()
            if schedule:
                schedule.step()
        except Exception as error:
            raise RecipeError(f"schedule {self.name} cannot be used here: {' '.join(str(error).split())}") from None

    def build(self, optimiser: Optimizer) -> LRScheduler | None:
        if self.name == "constant":
            return None
        make: Any = SCHEDULES[self.name]
        try:
            schedule: LRScheduler = make(optimiser, **self.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"schedule {self.name} refuses {self.options}: {error}") from None
        return schedule


@dataclass(frozen=True)
class Loop:
    """How long and how: `save_every` and `log_every` count steps; `clip` bounds the norm of the gradient."""

    epochs: PositiveFloat = 5.0
    batch: Count = 128
    max_shift: Annotated[int, Range(0, 256)] = 0
    clip: PositiveFloat | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    save_every: Count = 200
    log_every: Count = 10


@dataclass(frozen=True)
class Stage:
    """How one stage of a model is trained."""

    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: Loop = field(default_factory=Loop)


@dataclass(frozen=True)
class Recipe:
    """One row of a results table, before it is run.

    A model trained in stages takes for each its entry of `stages`, or else `optimiser`, `schedule` and `train`.
    """

    name: str = "unnamed"
    about: str = ""
    seed: Annotated[int, Range(0)] = 0
    data: Annotated[DataConfig, Choice(DATASETS)] = field(default_factory=GlyphsConfig)
    model: Annotated[ModelConfig, Choice(MODELS)] = field(default_factory=CapsNetConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: Loop = field(default_factory=Loop)
    stages: dict[str, Stage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise RecipeError(f"name = {self.name!r}; letters, digits, '.', '_' and '-' are wanted: it names files")
        known = stage_names(self.model)
        for name in self.stages:
            if name not in known:
                raise RecipeError(f"this model has no stage '{name}'{nearest(name, known)}")


def stage_names(model: ModelConfig) -> tuple[str, ...]:
    """The stages of a model in the order of training; most have just one."""
    names: tuple[str, ...] = getattr(model, "STAGES", ("all",))
    return names


def stage_of(recipe: Recipe, name: str) -> Stage:
    """How a stage is trained: by its own settings, or by the recipe's if it has none."""
    return recipe.stages.get(name) or Stage(recipe.optimiser, recipe.schedule, recipe.train)


def resolved(recipe: Recipe) -> Recipe:
    """The same recipe with the settings of every stage written out."""
    return replace(recipe, stages={name: stage_of(recipe, name) for name in stage_names(recipe.model)})


def _shelf() -> Path:
    """The folder of recipes that comes with the package."""
    return Path(str(resources.files("torchcaps"))) / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in _shelf().glob("*.toml"))


def find_recipe(name: str) -> Path:
    """A path to a .toml file, or the name of a recipe that comes with the package."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in recipe_names():
        raise RecipeError(f"unknown recipe '{name}'{nearest(name, recipe_names())} (a file must end in .toml)")
    return _shelf() / f"{name}.toml"


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read, override and check: whatever is wrong is said in one line."""
    path = find_recipe(name)
    return recipe_of(merge({"name": path.stem, **read_toml(path)}, overrides or {}), where=path.name)


def recipe_of(data: Mapping[str, Any], where: str = "") -> Recipe:
    """The recipe that plain tables describe; what [stages.NAME] leaves out is as in the recipe's own tables."""
    stages = data.get("stages")
    if isinstance(stages, Mapping):
        own = to_dict(from_dict(Recipe, {key: data[key] for key in data if key != "stages"}, where=where))
        start = {key: own[key] for key in ("optimiser", "schedule", "train")}
        full = {name: merge(start, table) if isinstance(table, Mapping) else table for name, table in stages.items()}
        data = {**data, "stages": full}
    return from_dict(Recipe, data, where=where)
