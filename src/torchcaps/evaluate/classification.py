"""Errors of a classifier, and of the nearest mean image as a control.

Which metrics there are depends on the data:

    one label an image        test_error; test_error_13crop, novel_error and familiar_error, see `viewpoints`
    affNIST                   affnist_accuracy on moved digits, mnist_accuracy on the validation digits as trained on
    several labels            multimnist_error: not all of them right; digit_error: one of them missed;
                              threshold_error: those above a threshold, chosen on validation images or .5, are others
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torchcaps.data import AffnistConfig, Dataset, Splits
from torchcaps.errors import RecipeError
from torchcaps.evaluate.multilabel import best_threshold, pair_error, single_error, threshold_error
from torchcaps.evaluate.viewpoints import VIEWS, novel_errors, viewpoint_metrics
from torchcaps.metrics import accuracy, expected_calibration_error
from torchcaps.models import Model
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun, load_run
from torchcaps.utils.progress import progress

__all__ = [
    "class_scores",
    "classification",
    "classifier_metrics",
    "load_classifier",
    "nearest_mean_metrics",
    "require_classifier",
]

THRESHOLD = 0.5
"""Of scores, for images that show several classes, where no validation images choose a better one."""


def load_classifier(folder: Path) -> TrainedRun:
    """Load the run in a folder.

    Raises:
        RecipeError: If its model is no classifier.
    """
    run = load_run(folder)
    require_classifier(run, folder)
    return run


def require_classifier(run: TrainedRun, folder: Path) -> None:
    """Refuse a run, loaded from a folder, whose model has no scores of classes.

    Raises:
        RecipeError: If it has none.
    """
    if not run.model.is_classifier:
        kind = type(run.model).__name__
        raise RecipeError(f"'{folder}' is a run of {kind}, which is no classifier; name one that is")


@torch.inference_mode()
def class_scores(model: Model, data: Dataset, batch: int = 250) -> Tensor:
    """Compute the scores of every image of a data set.

    Args:
        model: A classifier; it is set to evaluation mode.
        data: The images.
        batch: How many images to score at a time.

    Returns:
        Scores [n j].
    """
    model.eval()
    batches = progress(torch.split(torch.arange(len(data)), batch), "scoring images")
    return torch.cat([model.scores(data.model_input(rows)) for rows in batches])


def classification(model: Model, data: Dataset) -> dict[str, float]:
    """Measure a classifier on a data set.

    Args:
        model: The classifier.
        data: Images and labels.

    Returns:
        `test_error`, and `calibration_error`: how far the winning score is from the chance of being right.
    """
    return _measure(class_scores(model, data), data.labels)


def classifier_metrics(
    model: Model, recipe: Recipe, splits: Splits, views: int = VIEWS, *, scores: Tensor | None = None
) -> dict[str, float]:
    """Compute every metric of a classifier that its data allow, see the module's docstring.

    Args:
        model: The classifier.
        recipe: That it was built by.
        splits: Its data; metrics are of the test images.
        views: How many views to average of images that are larger than the model's input; 1 for none.
        scores: [n j] of the test images, if they are known already.

    Returns:
        Metric name -> value.
    """
    test = splits.test
    scores = class_scores(model, test) if scores is None else scores
    held = splits.validation
    # Which errors there are depends on the number of labels of an image.
    if test.labels.ndim == 2:
        found = _several(scores, test.labels, class_scores(model, held) if held else None, held)
    else:
        found = _measure(scores, test.labels) | viewpoint_metrics(model, test, scores, views)
    # affNIST is tested on moved digits only; the validation digits are placed as those of training.
    if isinstance(recipe.data, AffnistConfig):
        moved = {"affnist_accuracy": 1 - found.pop("test_error")}
        placed = {"mnist_accuracy": accuracy(class_scores(model, held), held.labels)} if held else {}
        return moved | placed | found
    return found


def nearest_mean_metrics(recipe: Recipe, splits: Splits) -> dict[str, float]:
    """Compute the metrics of a control: the class whose mean training image is nearest, in pixels."""
    train = splits.train
    test = splits.test
    # Distances to the mean image of each class, a bounded chunk of test images at a time.
    means = torch.stack([_mean_image(train, j) for j in range(train.classes)])  # [j (c h w)]
    chunks = torch.split(torch.arange(len(test)), 1000)
    distances = torch.cat([torch.cdist(test.model_input(rows).flatten(1), means) for rows in chunks])  # [n j]
    # A class without training images is infinitely far.
    scores = (-distances.nan_to_num(torch.inf)).softmax(-1)  # [n j]
    # The metrics of a classifier, but for those that ask a model for more views.
    if test.labels.ndim == 2:
        return _several(scores, test.labels, None, None)
    found = _measure(scores, test.labels) | (novel_errors(scores, test) if "familiar" in test.factors else {})
    if isinstance(recipe.data, AffnistConfig):
        return {"affnist_accuracy": 1 - found.pop("test_error")} | found
    return found


def _mean_image(data: Dataset, label: int) -> Tensor:
    """[(c h w)] the mean of the images that show a class; NaN if there are none."""
    here = data.labels == label
    rows = (here if here.ndim == 1 else here.any(-1)).nonzero().flatten()
    # In float64: a float32 sum over thousands of images would lose digits.
    sums = torch.stack([data.model_input(chunk).flatten(1).double().sum(0) for chunk in torch.split(rows, 1000)])
    return (sums.sum(0) / len(rows)).float()


def _measure(scores: Tensor, labels: Tensor) -> dict[str, float]:
    # Scores need not be probabilities, but a confidence has to be in [0, 1].
    confidence, chosen = scores.clamp(0, 1).max(-1)
    return {
        "test_error": 1 - accuracy(scores, labels),
        "calibration_error": expected_calibration_error(confidence, chosen == labels),
    }


def _several(scores: Tensor, labels: Tensor, held_scores: Tensor | None, held: Dataset | None) -> dict[str, float]:
    # Chosen on validation scores, never on those that are measured.
    threshold = THRESHOLD if held_scores is None or held is None else best_threshold(held_scores, held.labels)
    return {
        "multimnist_error": pair_error(scores, labels),
        "digit_error": single_error(scores, labels),
        "threshold_error": threshold_error(scores, labels, threshold),
    }
