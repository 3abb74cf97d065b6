"""The reference classifier: a CNN, trained on the labels, that classifies samples of other models."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from torchcaps.config import Choice
from torchcaps.data import DATASETS, DataConfig
from torchcaps.errors import DataError, TrainingError
from torchcaps.models import CNN, CNNConfig
from torchcaps.train import Recipe, train
from torchcaps.train.recipe import OptimizerConfig, ScheduleConfig, TrainConfig
from torchcaps.train.run import open_run
from torchcaps.utils.distributed import process_group

__all__ = ["RATE", "reference_features", "reference_probabilities", "train_reference_classifier"]

RATE = 0.004
"""At its highest, in one cycle: on Fashion-MNIST 1.8 % more images right after five epochs than at a constant .001."""


def train_reference_classifier(
    data: DataConfig, folder: Path, *, epochs: float = 5.0, seed: int = 1000, quiet: bool = False
) -> CNN:
    """Train the reference classifier of a data set, or load it if it was trained before.

    Args:
        data: A recipe's [data], not its images: it stands in the classifier's own recipe, so that a folder with one of
            other data, another seed or another number of epochs is refused.
        folder: Of its run; one that was cut off is trained on.
        epochs: How long to train.
        seed: Of its weights and of the order of images.
        quiet: No progress bars.

    Returns:
        The classifier, in evaluation mode.

    Raises:
        DataError: If images have several labels.
        TrainingError: If training was interrupted, or the folder holds something else.
    """
    labels = data.load().train.labels
    if labels.ndim != 1:
        raise DataError(
            f"labels of shape {list(labels.shape)}; a reference classifier needs one label an image: choose other data"
        )
    # An ordinary recipe, so that its folder is a run like any other.
    settings = TrainConfig(epochs=epochs, batch=min(128, len(labels)))
    recipe = Recipe(
        name="reference-classifier",
        seed=seed,
        data=data,
        model=CNNConfig(kernel=3),
        train=settings,
        optimizer=OptimizerConfig("Adam", RATE),
        schedule=ScheduleConfig("OneCycleLR", {"max_lr": RATE}),
    )
    _check_folder(folder, recipe)
    # A run that is finished is loaded, one that was cut off goes on.
    outcome = train(recipe, folder, resume="auto", quiet=quiet)
    if not outcome.finished:
        raise TrainingError(
            f"the reference classifier in '{folder}' is not trained to its end; run the command again to go on"
        )
    return cast(CNN, outcome.model.eval())


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder with something else before anything is trained; only process 0 has or needs it."""
    with process_group() as group, group.raising_together():
        try:
            if group.is_main:
                open_run(folder, recipe, resume="auto")
        except TrainingError as error:
            images = Choice(DATASETS).name_of(recipe.data) or "these images"
            raise TrainingError(
                f"'{folder}' holds no reference classifier for {images}, or one that was trained otherwise; "
                "name another folder (--reference)"
            ) from error


@torch.no_grad()
def reference_probabilities(cnn: CNN, images: Tensor, batch: int = 500) -> Tensor:  # [n classes]
    """Compute the probabilities of all classes for images [n c h w] in [0, 1]."""
    cnn.eval()
    return torch.cat([cnn.scores(chunk) for chunk in torch.split(images, batch)])


@torch.no_grad()
def reference_features(cnn: CNN, images: Tensor, batch: int = 500) -> Tensor:  # [n p]
    """Compute the last hidden layer, after its ReLU and without dropout, for images [n c h w]."""
    # Without dropout, features do not depend on the mode that the network is in.
    layers = [layer for layer in list(cnn.head)[:-1] if not isinstance(layer, nn.Dropout)]
    hidden = nn.Sequential(*layers)
    return torch.cat([hidden(cnn.trunk(chunk)) for chunk in torch.split(images, batch)])
