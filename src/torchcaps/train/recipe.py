"""A recipe is all that a run depends on: data, model, optimizer, schedule, loop and seed, as frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path, PurePath
from typing import Annotated, Literal, NamedTuple

from torchcaps.config import (
    Choice,
    Count,
    NonNegativeInt,
    PositiveFloat,
    Range,
    Seed,
    Share,
    Table,
    flatten,
    from_dict,
    merge,
    read_toml,
    to_dict,
)
from torchcaps.data import DATASETS, DataConfig, GlyphsConfig
from torchcaps.errors import RecipeError, suggestion
from torchcaps.models import MODELS, CapsNetConfig, ModelConfig
from torchcaps.train.optimizer import OptimizerConfig, ScheduleConfig

__all__ = [
    "BatchShare",
    "OptimizerConfig",
    "PaperNumbers",
    "Recipe",
    "ScheduleConfig",
    "StageConfig",
    "TrainConfig",
    "find_recipe",
    "load_recipe",
    "recipe_names",
    "recipe_of",
    "stage_names",
    "stage_of",
    "stages_that_set",
    "total_steps",
    "with_absolute_path",
    "with_all_stages",
    "without_folders",
]


class BatchShare(NamedTuple):
    """What one process does of every batch.

    Attributes:
        rows: Its images, counted from the first of the batch.
        weight: Number of its images, divided by the mean number of images of a process.
        parts: Number of its micro-batches, 1 if the batch is not divided into any.
        first_part: Number of the first of them among those of all processes.
    """

    rows: slice
    weight: float
    parts: int
    first_part: int


@dataclass(frozen=True)
class TrainConfig:
    """How long and how: `save_every`, `log_every` and `validate_every` count steps; `clip` bounds the gradient's norm.

    Every `validate_every` steps the accuracy on the validation images is written down; a stage ends at the first check
    that finds `stop_at` or more. With `stop_at` alone, a check is made every 200 steps.

    Of few images, training takes `min_steps` steps, however many epochs these are.

    Against memorizing: `mixup_alpha` mixes each image with another by a share from Beta(alpha, alpha), 0 = none;
    `label_smoothing` divides that share of every label among all classes; with `ema_decay` the model is the exponential
    moving average of the weights of its steps.

    `batch` counts the images of one update over all processes. With `micro_batch` they go through the model so many at
    a time and gradients add up: memory depends on `micro_batch`, and a step does the same on any number of processes.
    Processes need not have equal shares: each counts by its number of images.
    """

    epochs: Annotated[float, Range(0, open_low=True, limit=1e6)] = 5.0
    min_steps: NonNegativeInt = 0
    batch: Count = 128
    micro_batch: Count | None = None
    max_shift: Annotated[int, Range(0, 256)] = 0
    mixup_alpha: Share = 0.0
    label_smoothing: Share = 0.0
    ema_decay: Annotated[float, Range(0, 0.999999)] | None = None
    clip: PositiveFloat | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    save_every: Count = 200
    log_every: Count = 10
    stop_at: Share | None = None
    validate_every: Count | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise RecipeError(f"micro_batch = {self.micro_batch} does not divide batch = {self.batch}; take a divisor")

    def share(self, rank: int = 0, processes: int = 1) -> BatchShare:
        """Which images of every batch process `rank` takes: whole micro-batches, as many as the others or one more.

        Raises:
            RecipeError: There are fewer images or micro-batches in a batch than processes.
        """
        unit = self.micro_batch or 1
        units = self.batch // unit
        if units < processes:
            what = "images" if self.micro_batch is None else f"micro-batches of {unit} images"
            raise RecipeError(f"a batch of {units} {what} is too small for {processes} processes; use fewer of them")
        start = units * rank // processes
        stop = units * (rank + 1) // processes
        rows = slice(start * unit, stop * unit)
        weight = (stop - start) * processes / units
        if self.micro_batch is None:
            return BatchShare(rows, weight, parts=1, first_part=rank)
        return BatchShare(rows, weight, parts=stop - start, first_part=start)

    def steps(self, images: int) -> int:
        """How many steps the epochs are with so many training images; a last batch that is not full is left out."""
        return max(1, self.min_steps, round(self.epochs * (images // self.batch)))

    @property
    def validates(self) -> bool:
        """True if the validation accuracy is measured at all."""
        return self.stop_at is not None or self.validate_every is not None

    def validates_at(self, step: int) -> bool:
        """True if the validation accuracy is measured after so many steps."""
        return self.validates and step % (self.validate_every or 200) == 0


@dataclass(frozen=True)
class StageConfig:
    """How one stage of a model is trained."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


NOT_INHERITED = ("name", "about", "paper")
"""Keys that a recipe does not take over from its `base`."""

FOLLOWED = ("data", "model")
"""Tables in which a recipe follows its paper: with other settings there, the paper's numbers do not apply."""


@dataclass(frozen=True)
class PaperNumbers:
    """What the paper that a recipe follows reports for it: data for tables, without influence on training.

    Attributes:
        metrics: Metric name -> the number in the paper.
        note: Where in the paper it stands, and how the paper's network differs.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """All settings of one training.

    Attributes:
        name: Of the recipe; run folders and result files are called after it.
        about: One line for `torchcaps list`.
        seed: Of weights, order, augmentation and dropout.
        start: Folder of a run whose weights, steps and seconds this one goes on from.
        data: The data set.
        model: The network.
        optimizer: A class of torch.optim and its arguments.
        schedule: A class of torch.optim.lr_scheduler and its arguments.
        train: Epochs, batch, augmentation and what else concerns the loop.
        stages: Settings of single stages; a stage without an entry takes `optimizer`, `schedule` and `train`.
        paper: Numbers to print beside the results; recipes that differ in nothing else are equal.
    """

    name: str = "unnamed"
    about: str = ""
    seed: Seed = 0
    start: str | None = None
    data: Annotated[DataConfig, Choice(DATASETS)] = field(default_factory=GlyphsConfig)
    model: Annotated[ModelConfig, Choice(MODELS)] = field(default_factory=CapsNetConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    stages: dict[str, StageConfig] = field(default_factory=dict)
    paper: PaperNumbers = field(default_factory=PaperNumbers, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise RecipeError(f"name = {self.name!r}; letters, digits, '.', '_' and '-' are wanted: it names files")
        known = stage_names(self.model)
        for name in self.stages:
            if name not in known:
                raise RecipeError(f"this model has no stage '{name}'{suggestion(name, known)}")


def stage_names(model: ModelConfig) -> tuple[str, ...]:
    """The stages of a model in the order of training; most have just one."""
    names: tuple[str, ...] = getattr(model, "STAGES", ("all",))
    return names


def stage_of(recipe: Recipe, name: str) -> StageConfig:
    """How a stage is trained: by its own settings, or by the recipe's if it has none."""
    return recipe.stages.get(name) or StageConfig(recipe.optimizer, recipe.schedule, recipe.train)


def stages_that_set(name: str, key: str) -> set[str]:
    """Return the stages whose own tables in a recipe set a key, so that the recipe's own value is not theirs.

    Args:
        name: Of a recipe, or the path of its file.
        key: Such as `train.epochs`.
    """
    stages = _read(find_recipe(name)).get("stages", {})
    return {stage for stage, table in stages.items() if isinstance(table, Mapping) and key in flatten(table)}


def with_absolute_path(recipe: Recipe) -> Recipe:
    """Return a recipe whose own data have an absolute path, so that commands on its run work in any folder."""
    settings = to_dict(recipe)
    path = settings["data"].get("path")
    if not path:
        return recipe
    settings["data"]["path"] = str(Path(path).expanduser().absolute())
    return from_dict(Recipe, settings)


def without_folders(recipe: Recipe) -> Table:
    """Return a recipe as plain data to publish: of folders and files of this machine, no more than their names."""
    settings = to_dict(recipe)
    data = settings["data"]
    if "data_dir" in data:
        data["data_dir"] = "none"
    if "path" in data:
        data["path"] = PurePath(data["path"]).name
    if recipe.start is not None:
        settings["start"] = PurePath(recipe.start).name
    return settings


def total_steps(recipe: Recipe, images: int) -> int:
    """Return the number of training steps of a recipe, over all stages.

    Args:
        recipe: With its epochs and batch.
        images: The number of training images.

    Returns:
        The number of steps.
    """
    return sum(stage_of(recipe, name).train.steps(images) for name in stage_names(recipe.model))


def with_all_stages(recipe: Recipe) -> Recipe:
    """The same recipe with the settings of every stage written out."""
    return replace(recipe, stages={name: stage_of(recipe, name) for name in stage_names(recipe.model)})


def _recipe_folder() -> Path:
    """The folder of recipes that comes with the package."""
    return Path(str(resources.files("torchcaps"))) / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in _recipe_folder().glob("*.toml"))


def find_recipe(name: str) -> Path:
    """A path to a .toml file, or the name of a recipe that comes with the package."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in recipe_names():
        raise RecipeError(f"unknown recipe '{name}'{suggestion(name, recipe_names())} (a file must end in .toml)")
    return _recipe_folder() / f"{name}.toml"


def load_recipe(name: str, overrides: Mapping[str, object] | None = None) -> Recipe:
    """Read a recipe, change some of its settings, and check all of them.

    Args:
        name: Of a recipe that comes with the package (`torchcaps list`), or the path of a .toml file.
        overrides: Nested tables of the settings to change, such as {"train": {"epochs": 2}}.

    Returns:
        The recipe. Without a name of its own, it is called like its file.

    Raises:
        RecipeError: There is no such recipe, or one of its settings is unknown or out of range.
    """
    path = find_recipe(name)
    # A recipe without a name of its own is called like its file.
    tables = {"name": path.stem, **_read(path)}
    merged = merge(tables, _as_long_as_said(overrides or {}))
    # The paper's numbers are of the recipe's own model and data: of others they would say nothing.
    if "paper" not in (overrides or {}) and any(_compared(merged, key) != _compared(tables, key) for key in FOLLOWED):
        merged.pop("paper", None)
    return recipe_of(merged, where=_shown(path))


def _compared(tables: Mapping[str, object], key: str) -> object:
    """A table of a recipe without the place where this machine stores the data."""
    table = tables.get(key)
    return {k: v for k, v in table.items() if k != "data_dir"} if isinstance(table, Mapping) else table


def _read(path: Path, above: tuple[Path, ...] = ()) -> Table:
    """The tables of a recipe file, merged over those of its `base`, which may have one itself.

    `base` is the name of a recipe that comes with the package, or a path that ends in .toml, as seen from the file.
    `name`, `about` and `paper` are never inherited. Tables are merged key by key, but for the rule of the name (see
    `merge`): a table that names another model, data set, optimizer or schedule than the base's replaces it whole.
    """
    # `above` is the chain of files that led here; a file in it twice is a circle.
    own = read_toml(path)
    here = path.resolve()
    if here in above:
        raise RecipeError(f"recipe {_shown(path)!r}: the bases of this recipe lead back to it; one must have none")
    if "base" not in own:
        return own
    # The base first, then this file over it.
    below = _read(_base_path(path, own.pop("base")), (*above, here))
    inherited = {key: value for key, value in below.items() if key not in NOT_INHERITED}
    return merge(inherited, _as_long_as_said(own))


def _as_long_as_said(tables: Mapping[str, object]) -> Table:
    """Return tables in which `epochs` stand alone: who says how many does not mean the `min_steps` of another."""
    found: Table = {}
    for key, value in tables.items():
        found[key] = _as_long_as_said(value) if isinstance(value, Mapping) else value
        if key == "train" and isinstance(value, Mapping) and "epochs" in value:
            found[key] = {"min_steps": 0, **found[key]}
    return found


def _shown(path: Path) -> str:
    """Return what errors call a recipe: the path of a file of one's own, the name of a file of the package."""
    return path.name if path.parent == _recipe_folder() else str(path)


def _base_path(path: Path, base: object) -> Path:
    if not isinstance(base, str):
        raise RecipeError(
            f"recipe {_shown(path)!r}: base is {type(base).__name__}; the name or path of a recipe is wanted"
        )
    try:
        return path.parent / base if base.endswith(".toml") else find_recipe(base)
    except RecipeError as error:
        raise RecipeError(f"recipe {_shown(path)!r}: base: {' '.join(str(error).split())}") from None


def recipe_of(data: Mapping[str, object], where: str = "") -> Recipe:
    """The recipe that plain tables describe; what [stages.NAME] leaves out is as in the recipe's own tables."""
    stages = data.get("stages")
    if isinstance(stages, Mapping):
        # What a stage leaves out comes from the recipe, with defaults filled in.
        own = to_dict(from_dict(Recipe, {key: data[key] for key in data if key != "stages"}, where=where))
        start = {key: own[key] for key in ("optimizer", "schedule", "train")}
        full = {name: merge(start, table) if isinstance(table, Mapping) else table for name, table in stages.items()}
        data = {**data, "stages": full}
    return from_dict(Recipe, data, where=where)
