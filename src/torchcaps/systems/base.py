"""The adapter class of a capsule system: everything that commands and tables need to know about its models.

A system is a family of models from one paper. Its adapter, a subclass of `System`, declares which entries of the
`MODELS` table belong to it and answers for them. The defaults suit any classifier, so that a new system starts with
two lines, `name` and `models`. `docs/develop/new_system.md` walks through an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from torchcaps.config import Choice
from torchcaps.data import Dataset, Splits, subset
from torchcaps.errors import RecipeError, suggestion
from torchcaps.evaluate.classification import classifier_metrics, nearest_mean_metrics, require_classifier
from torchcaps.evaluate.results import Metrics, Result, gather
from torchcaps.evaluate.viewpoints import VIEWS
from torchcaps.models import MODELS, Model
from torchcaps.systems.figure_context import ComparedRun, Figure, FigureContext, FigureOptions
from torchcaps.systems.prediction import Prediction, classify
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun
from torchcaps.train.train_state import build_model
from torchcaps.utils.random import permutation

if TYPE_CHECKING:
    from torchcaps.systems.explorer_view import ExplorerView

__all__ = [
    "CLASSIFIER_METRICS",
    "EvaluatedRun",
    "EvaluationOptions",
    "Measurements",
    "Metric",
    "PaperBudget",
    "System",
    "Table",
    "model_name",
]

Table = list[list[str]]
"""Cells of a table as text; the first row is the header."""


def model_name(config: object) -> str:
    """Return the name under which the class of a model configuration is registered in the `MODELS` table.

    Args:
        config: A model's configuration, such as `CapsNetConfig()`.

    Returns:
        Its name in recipes.

    Raises:
        RecipeError: If it is not registered.
    """
    name = Choice(MODELS).name_of(config)
    if name is None:
        kind = type(config).__name__
        raise RecipeError(f'{kind} is not in the MODELS table; register it first: MODELS["my-model"] = {kind}')
    return name


class Metric(NamedTuple):
    """A number that a system is measured by.

    Attributes:
        name: Key in results; `*` stands for any text, as in "test_error_*crop".
        better: Which direction is better; "neither" for numbers that only describe.
        form: How tables print it.
    """

    name: str
    better: Literal["lower", "higher", "neither"]
    form: Literal["number", "percent", "count"] = "number"

    def covers(self, name: str) -> bool:
        """Return True if a key in results is this metric."""
        return fnmatchcase(name, self.name)


CLASSIFIER_METRICS = (
    Metric("test_error", "lower", "percent"),
    Metric("calibration_error", "lower"),
    Metric("test_error_*crop", "lower", "percent"),
    Metric("novel_error", "lower", "percent"),
    Metric("familiar_error", "lower", "percent"),
    Metric("affnist_accuracy", "higher", "percent"),
    Metric("mnist_accuracy", "higher", "percent"),
    Metric("multimnist_error", "lower", "percent"),
    Metric("digit_error", "lower", "percent"),
    Metric("threshold_error", "lower", "percent"),
)
"""What any classifier is measured by; which of these apply depends on the data."""


class PaperBudget(NamedTuple):
    """How long the authors of a paper trained.

    Attributes:
        steps: Steps of the optimizer.
        batch: Images a step.
        text: The same as the end of a sentence that begins with our own budget.
    """

    steps: int
    batch: int
    text: str


@dataclass(frozen=True)
class EvaluationOptions:
    """What `torchcaps evaluate` was asked for; None stands for the system's default.

    Attributes:
        images: How many images to measure on; which ones, the system says.
        only: Names of the controls to measure.
        reference: Folder of the reference classifier, which classifies samples.
        views: How many views to average, of images that are larger than the model's input.
        unmasked: Whether rows are of codes before the mask; of networks that have one.
    """

    images: int | None = None
    only: tuple[str, ...] | None = None
    reference: Path | None = None
    views: int = VIEWS
    unmasked: bool | None = None

    def given(self) -> set[str]:
        """Return the names of the options that are not their defaults."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}


class EvaluatedRun(NamedTuple):
    """A run to measure, where it lies, and its system."""

    run: TrainedRun
    folder: Path
    system: System


class Measurements(NamedTuple):
    """What an evaluation found.

    Attributes:
        metrics: Metric name -> values over the seeds.
        controls: Name of a control -> the same for it.
        budget: Further entries of the result's budget.
    """

    metrics: Metrics
    controls: dict[str, Metrics]
    budget: dict[str, float]


class System:
    """A family of models, and what is particular about it wherever runs are measured, drawn or explored.

    Attributes:
        name: Key in the `SYSTEMS` table, lower case.
        title: What messages call models of this system, in the plural ("sparse capsules").
        paper: Citation, "" if there is no paper.
        models: Names in the `MODELS` table that belong to this system; each name belongs to exactly one system.
        metrics: What its models are measured by.
        controls: Names of the rows that stand beside every result.
        evaluation_options: Which of `EvaluationOptions` its evaluation has; "views" suits classifiers.
        paper_budget: How long the paper's networks were trained, where that is known.
        figures: Kind -> figure, in the order in which they are drawn.
        max_figure_images: Of more test images than this, figures use this many, picked by the seed; None for all.
        explorer_view: Class that answers the explorer's questions, None if these models cannot be explored.
        redraws: True if a model can draw what it recognized in an image, see `draw_prediction`.
        predicts: What `predict` names: the "class" of an image, or the "capsule" that it is in.
        attacked_by_own_loss: False if the classifier that attacks see was not trained by a loss of its own.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    models: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[Metric, ...]] = CLASSIFIER_METRICS
    controls: ClassVar[tuple[str, ...]] = ("untrained", "nearest mean")
    evaluation_options: ClassVar[frozenset[str]] = frozenset({"views"})
    paper_budget: ClassVar[PaperBudget | None] = None
    figures: ClassVar[Mapping[str, Figure[Any]]] = {}
    max_figure_images: ClassVar[int | None] = 10_000
    explorer_view: ClassVar[type[ExplorerView[Any, Any]] | None] = None
    redraws: ClassVar[bool] = False
    predicts: ClassVar[Literal["class", "capsule"]] = "class"
    attacked_by_own_loss: ClassVar[bool] = True

    # --- Evaluation -------------------------------------------------------------------------------------------

    def evaluate(
        self, runs: Sequence[EvaluatedRun], others: Sequence[EvaluatedRun], options: EvaluationOptions
    ) -> Measurements:
        """Measure runs of one recipe beside other runs and the system's controls.

        The default is for classifiers: it calls `measure` for every run, for every other run that of its own system,
        and `measure_controls` once.

        Args:
            runs: Of one recipe, which differ in the seed alone.
            others: Runs of other recipes; they make one row a recipe.
            options: What was asked for.

        Returns:
            The metrics of the runs and of all rows beside them.

        Raises:
            RecipeError: If a run cannot be measured in this way.
        """
        # Refuse what is no classifier before the first measurement.
        for one in (*runs, *others):
            one.system.check_classifier(one.run, one.folder)
        # The runs share their data; they differ in the seed.
        recipe = runs[0].run.recipe
        splits = recipe.data.load()
        metrics = gather(self.measure(one.run.model, one.run.recipe, splits, options) for one in runs)
        # Other runs have data and metrics of their own; runs of one recipe are seeds of one row.
        rows: dict[str, list[dict[str, float]]] = {}
        for other in others:
            model = other.run.model
            other_recipe = other.run.recipe
            row = other.system.measure(model, other_recipe, other_recipe.data.load(), options)
            rows.setdefault(other_recipe.name, []).append(row)
        table = {name: gather(values) for name, values in rows.items()}
        table |= self.measure_controls([one.run for one in runs], splits, options)
        return Measurements(metrics, table, {})

    def measure(self, model: Model, recipe: Recipe, splits: Splits, options: EvaluationOptions) -> dict[str, float]:
        """Compute the metrics of one model; by default those of a classifier.

        Args:
            model: In any mode; trained or not.
            recipe: That it was built by.
            splits: Its data.
            options: What was asked for.

        Returns:
            Metric name -> value. Every name is covered by one of `metrics`.
        """
        return classifier_metrics(model, recipe, splits, options.views)

    def measure_controls(
        self, runs: Sequence[TrainedRun], splits: Splits, options: EvaluationOptions
    ) -> dict[str, Metrics]:
        """Compute the rows that stand beside the runs: their networks untrained, and the nearest mean image."""
        # Many views of an image tell an untrained network no more than one.
        single_view = replace(options, views=1)
        recipes = [run.recipe for run in runs]
        untrained = (
            self.measure(build_model(recipe, splits.train.spec), recipe, splits, single_view) for recipe in recipes
        )
        return {
            "untrained": gather(untrained),
            "nearest mean": gather([nearest_mean_metrics(recipes[0], splits)]),
        }

    def select_controls(self, only: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of the controls to measure, in the order of the table: all, or those that `only` names.

        Raises:
            RecipeError: If a name is unknown.
        """
        for name in only or ():
            if name not in self.controls:
                raise RecipeError(f"unknown control '{name}'{suggestion(name, self.controls)}")
        return self.controls if only is None else tuple(name for name in self.controls if name in only)

    # --- The paper --------------------------------------------------------------------------------------------

    def paper_tables(self, result: Result) -> list[Table]:
        """Return the tables of this system's paper with the rows of a result below; empty if there are none."""
        return []

    def budget_note(self, result: Result) -> str | None:
        """Return one line if the runs of a result saw fewer images in training than the paper's, None otherwise."""
        budget = self.paper_budget
        steps = int(result.budget["steps"])
        batch = int(result.config["train"]["batch"])
        # Budgets are compared by images, since batches differ in size.
        if budget is None or steps * batch >= budget.steps * budget.batch:
            return None
        return f"a smaller budget than the paper's: {steps:,} steps of {batch} images; {budget.text}"

    # --- Figures ----------------------------------------------------------------------------------------------

    def figure_context(
        self,
        model: Model,
        options: FigureOptions,
        load: Callable[[], Dataset],
        name: str = "this run",
        compared: Sequence[ComparedRun] = (),
    ) -> FigureContext[Any]:
        """Build what all figures of one run are drawn from; see `FigureContext` for the arguments."""
        return FigureContext(model, options, load, name, tuple(compared))

    def figure_images(self, recipe: Recipe, seed: int) -> Dataset:
        """Load the test images that figures are drawn from: all, or `max_figure_images` picked by the seed."""
        test = recipe.data.load().test
        if self.max_figure_images is None or len(test) <= self.max_figure_images:
            return test
        return subset(test, permutation(seed, 0, len(test))[: self.max_figure_images])

    # --- Classification ---------------------------------------------------------------------------------------

    def check_classifier(self, run: TrainedRun, folder: Path) -> None:
        """Refuse a run that cannot be used as a classifier, before any work is done with it.

        Raises:
            RecipeError: If it is not one.
        """
        require_classifier(run, folder)

    def classifier(self, run: TrainedRun) -> TrainedRun:
        """Return the run with a model that has `scores` of classes, for attacks: by default the run itself."""
        return run

    def predict(self, run: TrainedRun, data: Dataset, threshold: float | None = None) -> list[Prediction]:
        """Classify images or, in a system that learns without labels, say which capsule each is in.

        Args:
            run: A classifier, or a run of a system that predicts capsules.
            data: Images in the format of the run's own; labels are not used.
            threshold: Name every class whose score is above it; None for the best class alone.

        Returns:
            One prediction an image.
        """
        return classify(run, data, threshold)

    def draw_prediction(self, model: Model, data: Dataset, row: int, prediction: Prediction) -> bytes:
        """Draw one image beside what the model recognized in it, as a PNG; only systems with `redraws`."""
        raise RecipeError(f"{self.title or self.name} redraw nothing")

    # --- The explorer -----------------------------------------------------------------------------------------

    def explore(
        self, model: Model, names: Sequence[str] = (), examples: Tensor | None = None
    ) -> ExplorerView[Any, Any]:
        """Build the explorer's view of a trained model.

        Args:
            model: A model of this system.
            names: Class names, for systems whose capsules stand for classes; empty for numbers.
            examples: Images [n c h w] in the model's input format, whose poses serve as samples where the model has no
                other.

        Returns:
            An `ExplorerView` of the model.

        Raises:
            RecipeError: If this system has no explorer view.
        """
        if self.explorer_view is None:
            raise RecipeError(f"a {type(model).__name__} cannot be explored; its system '{self.name}' has no view")
        return self.explorer_view(model, names, examples)
