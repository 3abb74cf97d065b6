"""The adapter of CapsNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from torchcaps.data import Dataset, Splits
from torchcaps.evaluate.classification import classifier_metrics
from torchcaps.evaluate.factors import (
    PIXEL_CONTROLS,
    class_capsules,
    factor_controls,
    factor_metrics,
    factor_tracking,
    has_factors,
)
from torchcaps.evaluate.results import Metrics, gather
from torchcaps.models import CapsNet, Model
from torchcaps.systems.base import CLASSIFIER_METRICS, EvaluationOptions, Metric, System
from torchcaps.systems.capsnet import figures as capsnet_figures
from torchcaps.systems.capsnet.explorer import CapsNetView
from torchcaps.systems.figure_context import ClassFigureContext, ComparedRun, Figure, FigureOptions
from torchcaps.systems.prediction import Prediction
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun

__all__ = ["CapsNetSystem"]


class CapsNetSystem(System):
    """Class capsules by dynamic routing, trained with labels by the margin loss."""

    name = "capsnet"
    title = "CapsNets"
    paper = "Sabour, Frosst and Hinton 2017, Dynamic Routing Between Capsules"
    models = ("capsnet", "capsnet-small", "efficient-capsnet")
    metrics = (*CLASSIFIER_METRICS, Metric("factor_correlation*", "higher"))
    controls = (*System.controls, *PIXEL_CONTROLS)
    figures: ClassVar[Mapping[str, Figure[Any]]] = {
        "reconstructions": Figure(
            "Test images, and what the decoder redraws from the longest capsule and from that of the label.",
            capsnet_figures.draw_reconstructions,
            obstacle=capsnet_figures.needs_one_label,
        ),
        "perturbations": Figure(
            "In each row one number of a class capsule changes from -.25 to .25: a good row changes one property.",
            capsnet_figures.draw_perturbations,
            options=("capsule",),
        ),
        "routing": Figure(
            "Where in the image the winning capsule gets its support from: bright squares send much.",
            capsnet_figures.draw_routing,
        ),
        "multimnist": Figure(
            "Two overlapping digits, each redrawn from its own capsule, in two colors.",
            capsnet_figures.draw_multimnist,
            obstacle=capsnet_figures.needs_two_labels,
        ),
        "calibration": Figure(
            "How often the answer is right, by how sure the network is. Bars on the diagonal are well calibrated.",
            capsnet_figures.draw_calibration,
            obstacle=capsnet_figures.needs_one_label,
        ),
    }
    explorer_view = CapsNetView
    redraws = True

    def measure(self, model: Model, recipe: Recipe, splits: Splits, options: EvaluationOptions) -> dict[str, float]:
        """Compute the metrics of a classifier and, where factors are known, how well poses track them."""
        test = splits.test
        if not has_factors(test):
            return classifier_metrics(model, recipe, splits, options.views)
        # One pass over the images: activations are the scores, and poses are compared with factors.
        classes = class_capsules(cast(CapsNet, model), test)
        found = classifier_metrics(model, recipe, splits, options.views, scores=classes.activation)
        true_class = classes.pose[torch.arange(len(test)), test.labels]  # [n k]
        tracking = factor_metrics(factor_tracking(true_class, test))
        return found | tracking

    def measure_controls(
        self, runs: Sequence[TrainedRun], splits: Splits, options: EvaluationOptions
    ) -> dict[str, Metrics]:
        """Add codes that learned nothing of the factors, where factors are known."""
        rows = super().measure_controls(runs, splits, options)
        if has_factors(splits.test):
            dimension = cast(CapsNet, runs[0].model).config.dimension
            for name, factors in factor_controls(splits.test, dimension).items():
                rows[name] = gather([factor_metrics(factors)])
        return rows

    def figure_context(
        self,
        model: Model,
        options: FigureOptions,
        load: Callable[[], Dataset],
        name: str = "this run",
        compared: Sequence[ComparedRun] = (),
    ) -> ClassFigureContext[CapsNet]:
        """Build a context that encodes the test images once for all figures."""
        return ClassFigureContext(cast(CapsNet, model), options, load, name, tuple(compared))

    def draw_prediction(self, model: Model, data: Dataset, row: int, prediction: Prediction) -> bytes:
        """Draw a picture beside what the decoder redraws from the capsules of the classes that were named."""
        return capsnet_figures.draw_redrawn(cast(CapsNet, model), data, row, prediction)
