"""The adapter of products of expert capsules."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from torchcaps.data import Dataset, Splits
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.reference_classifier import RATE, reference_probabilities, train_reference_classifier
from torchcaps.evaluate.results import gather
from torchcaps.evaluate.sample_metrics import sample_confidence
from torchcaps.metrics import accuracy
from torchcaps.models import CNN, Model, PoE
from torchcaps.systems.base import EvaluatedRun, EvaluationOptions, Measurements, Metric, System
from torchcaps.systems.comparison import data_settings, peak_memory, require_comparable
from torchcaps.systems.figure_context import ComparedRun, Figure, FigureOptions
from torchcaps.systems.poe import figures as poe_figures
from torchcaps.systems.poe.controls import CONTROLS, require_controls, run_and_controls
from torchcaps.systems.poe.encoders import PoEEncoder
from torchcaps.systems.poe.explorer import PoEView
from torchcaps.systems.poe.metrics import IMAGES, build_evaluation_data, measure
from torchcaps.systems.prediction import Prediction, name_above
from torchcaps.systems.run_folders import REFERENCE_PREFIX
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun

__all__ = ["PoESystem", "reference_folder"]

REFERENCE_STEPS = 300
REFERENCE_EPOCHS = 5.0
"""How long a reference classifier is trained: so many epochs, but of few images at least so many steps of 128."""


REAL_IMAGES = "real images"
"""Row of the table: what the reference classifier says of test images."""


class PoESystem(System):
    """Capsules that learn without labels, as the factors of a product of experts over features."""

    name = "poe"
    title = "products of expert capsules"
    paper = "Hauser 2019, Training Products of Expert Capsules with Mixing by Dynamic Routing"
    models = ("poe",)
    predicts = "capsule"
    metrics = (
        Metric("confident_fraction", "higher"),
        Metric("classes_covered", "higher", "count"),
        Metric("consistency", "higher"),
        Metric("mixture_confident", "higher"),
        Metric("mixture_consistency", "higher"),
        Metric("gaussian_confident", "higher"),
        Metric("gaussian_consistency", "higher"),
        Metric("restricted_confident", "higher"),
        Metric("complete_confident", "higher"),
        Metric("argmax_nmi", "higher"),
        Metric("purity", "higher"),
        Metric("accuracy", "higher"),
        Metric("cka", "neither"),
        Metric("bottleneck_mse", "lower"),
        Metric("tied_mse", "lower"),
        Metric("autoencoder_mse", "lower"),
        Metric("knn", "higher"),
        Metric("linear_probe", "higher"),
        Metric("frechet", "lower"),
        Metric("capsules_used", "higher", "count"),
    )
    controls = CONTROLS
    evaluation_options = frozenset({"images", "only", "reference"})
    figures: ClassVar[Mapping[str, Figure[Any]]] = {
        "samples": Figure(
            "Every column is one capsule that draws on its own. A good one draws one kind of thing in many variants.",
            poe_figures.draw_samples,
            options=("capsule", "domain"),
        ),
        "pairs": Figure(
            "Two capsules that draw one image together.",
            poe_figures.draw_pairs,
            options=("capsule", "domain"),
            by_default=False,
            obstacle=poe_figures.needs_two_capsules,
        ),
        "sweeps": Figure(
            "The capsule that wins most. In each row one number of its pose changes from -2 to 2 standard deviations: "
            "along the principal axes of its poses, or along one coordinate. A good row changes one property.",
            poe_figures.draw_sweeps,
            options=("capsule",),
        ),
        "wins": Figure(
            "Left, the mean of the test images that a capsule wins; right, what it draws. Both should be alike.",
            poe_figures.draw_wins,
            options=("capsule", "domain"),
        ),
        "reconstructions": Figure(
            "Test images, in their frames if the model has any, and what it redraws from their capsules.",
            poe_figures.draw_reconstructions,
        ),
        "interpolation": Figure(
            "From one test image, left, to another, right, in equal steps. Every step should be a believable image.",
            poe_figures.draw_interpolation,
            obstacle=poe_figures.needs_two_images,
        ),
        "completion": Figure(
            "Half of each test image is hidden, and the model fills it in.",
            poe_figures.draw_completion,
        ),
        "routing": Figure(
            "Where in the image the winning capsule gets its support from: bright squares add much.",
            poe_figures.draw_routing,
        ),
    }
    max_figure_images = None
    explorer_view = PoEView

    def evaluate(
        self, runs: Sequence[EvaluatedRun], others: Sequence[EvaluatedRun], options: EvaluationOptions
    ) -> Measurements:
        """Measure capsules, their samples and their codes beside controls on the same features.

        A reference classifier, trained on the labels, classifies the samples. Its accuracy on test images and the peak
        memory (MB) are in the budget.
        """
        # Refuse what cannot be measured before the reference classifier is trained.
        images = IMAGES if options.images is None else options.images
        names = self.select_controls(options.only)
        if images < 1:
            raise RecipeError(f"{images} images are to be measured; at least 1 is wanted")
        require_comparable(runs[0], [*runs, *others])
        for one in (*runs, *others):
            _require_finished(one)
        recipe = runs[0].run.recipe
        splits = recipe.data.load()
        folder = options.reference or reference_folder(recipe, runs[0].folder)
        reference = _train_reference(recipe, splits, folder)

        # The runs, each with its own controls: these have its autoencoder.
        rows = []
        control_rows = []
        for one in runs:
            data = build_evaluation_data(cast(PoE, one.run.model), splits, reference, images)
            found = run_and_controls(one.run.recipe, one.folder, data, names)
            rows.append(found.run)
            control_rows.append(found.controls)

        # Other runs, a row a recipe.
        named: dict[str, list[dict[str, float]]] = {}
        for other in others:
            model = cast(PoE, other.run.model)
            row = measure(PoEEncoder(model), build_evaluation_data(model, splits, reference, images))
            named.setdefault(other.run.recipe.name, []).append(row)
        table = {name: gather(found) for name, found in named.items()}
        table |= {name: gather(found[name] for found in control_rows) for name in control_rows[0]}

        # What the reference classifier says of real images: those of the last run, since all runs share them.
        verdicts = reference_probabilities(reference, data.images)
        confident = sample_confidence(verdicts.unsqueeze(0))["confident_fraction"]
        table[REAL_IMAGES] = {"confident_fraction": [confident]}
        budget = {"reference_accuracy": accuracy(verdicts, data.labels), **peak_memory()}
        return Measurements(gather(rows), table, budget)

    def select_controls(self, only: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of the controls to measure; refuse those that need scikit-learn where it is missing."""
        # That row of the table is always measured
        names = super().select_controls(None if only is None else [name for name in only if name != REAL_IMAGES])
        require_controls(names)
        return names

    @torch.inference_mode()
    def predict(self, run: TrainedRun, data: Dataset, threshold: float | None = None) -> list[Prediction]:
        """Say which capsule each image is in: the most active one or, with a threshold, all above it.

        Args:
            run: A run whose capsules are trained.
            data: Images in the format of the run's own.
            threshold: From 0 to 1; None for the most active capsule alone.

        Returns:
            One prediction an image, with the activations [j] of all capsules as scores.
        """
        active = cast(PoE, run.model.eval()).encode(data.model_input()).activation  # [b j]
        if not bool(active.isfinite().all()):
            raise TrainingError("the activations of this run are not finite: its training has diverged; train it again")
        return name_above(active, threshold)

    def figure_context(
        self,
        model: Model,
        options: FigureOptions,
        load: Callable[[], Dataset],
        name: str = "this run",
        compared: Sequence[ComparedRun] = (),
    ) -> poe_figures.PoEFigureContext:
        """Build a context that infers the capsules of the picked test images once for all figures."""
        return poe_figures.PoEFigureContext(cast(PoE, model), options, load, name, tuple(compared))


def reference_folder(recipe: Recipe, folder: Path) -> Path:
    """Return the folder, beside that of a run, of the reference classifier for all runs on the same data."""
    data = data_settings(recipe)
    # Runs on the same data share one classifier; other data or another rate need a new one.
    digest = zlib.crc32(json.dumps([data, RATE], sort_keys=True).encode())
    return folder.parent / f"{REFERENCE_PREFIX}{data['name']}-{digest:08x}"


def _train_reference(recipe: Recipe, splits: Splits, folder: Path) -> CNN:
    """Train the reference classifier into a folder, or load it from there."""
    steps_an_epoch = len(splits.train) // min(128, len(splits.train))
    # More epochs where images are few.
    epochs = max(REFERENCE_EPOCHS, REFERENCE_STEPS / steps_an_epoch)
    return train_reference_classifier(recipe.data, folder, epochs=epochs)


def _require_finished(one: EvaluatedRun) -> None:
    """Refuse a run whose stages have not all been trained: its decoder would draw noise."""
    if not one.run.finished:
        raise TrainingError(
            f"'{one.folder}' is not trained to its end (stage '{one.run.stage}'); go on with: torchcaps train --resume"
        )
