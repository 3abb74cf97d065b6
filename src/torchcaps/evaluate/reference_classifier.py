"""The judge: a plain CNN, trained on the labels and apart from the model whose samples it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from torchcaps.data import DataConfig
from torchcaps.errors import DataError, TrainingError
from torchcaps.models import CNN, CNNConfig
from torchcaps.train import Recipe, train
from torchcaps.train.recipe import OptimizerConfig, ScheduleConfig, TrainConfig

__all__ = ["RATE", "reference_features", "reference_probabilities", "train_reference_classifier"]

RATE = 0.004
"""At its highest, in one cycle: on Fashion-MNIST 1.8 % more images right after five epochs than at a constant .001."""


def train_reference_classifier(
    data: DataConfig, folder: Path, *, epochs: float = 5.0, seed: int = 1000, quiet: bool = False
) -> CNN:
    """The judge of a data set, in evaluation mode: trained into `folder`, or taken from there if it was before.

    `data` is a recipe's [data], not its images: it stands in the judge's own recipe, so that a folder with the judge
    of other data, another seed or another number of epochs is refused; one that was cut off is trained on.
    """
    labels = data.load().train.labels
    if labels.ndim != 1:
        raise DataError(f"labels of shape {list(labels.shape)}; a judge needs one label an image: choose other data")
    settings = TrainConfig(epochs=epochs, batch=min(128, len(labels)))
    recipe = Recipe(
        name="judge",
        seed=seed,
        data=data,
        model=CNNConfig(kernel=3),
        train=settings,
        optimizer=OptimizerConfig("Adam", RATE),
        schedule=ScheduleConfig("OneCycleLR", {"max_lr": RATE}),
    )
    outcome = train(recipe, folder, resume="auto", quiet=quiet)
    if not outcome.finished:
        raise TrainingError(f"the judge in '{folder}' is not trained to its end; run the command again to go on")
    return cast(CNN, outcome.model.eval())


@torch.no_grad()
def reference_probabilities(cnn: CNN, images: Tensor, batch: int = 500) -> Tensor:  # [n classes]
    """What the judge holds images [n c h w] in [0, 1] for."""
    cnn.eval()
    return torch.cat([cnn.scores(part) for part in torch.split(images, batch)])


@torch.no_grad()
def reference_features(cnn: CNN, images: Tensor, batch: int = 500) -> Tensor:  # [n p]
    """Activations of the judge's last hidden layer, after its ReLU and without dropout, of images [n c h w]."""
    layers = [layer for layer in list(cnn.head)[:-1] if not isinstance(layer, nn.Dropout)]
    hidden = nn.Sequential(*layers)
    return torch.cat([hidden(cnn.trunk(part)) for part in torch.split(images, batch)])
