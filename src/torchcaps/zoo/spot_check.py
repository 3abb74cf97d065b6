"""The score of a model on the test images that ship with it: what a card states and a test repeats."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from torchcaps.errors import DataError
from torchcaps.evaluate.multilabel import pair_error
from torchcaps.metrics import accuracy
from torchcaps.train.run import TrainedRun
from torchcaps.train.stored_examples import stored_examples

__all__ = ["SpotCheck", "spot_check"]

SpotCheck = dict[str, float]
"""Metric name -> value on the images that ship with a model."""


class _Redrawing(Protocol):
    """A model that redraws images."""

    def reconstruct(self, images: Tensor) -> Tensor: ...


@torch.inference_mode()
def spot_check(run: TrainedRun) -> SpotCheck:
    """Measure a model on the test images that are stored with its weights.

    Args:
        run: Weights with images, as those of the zoo.

    Returns:
        Of classifiers `error`, the share of images with a wrong class (or, of two things, a wrong pair), and
        `mean_score`, the mean of the highest scores; of models that learn without labels `reconstruction_mse`, the mean
        squared error of a pixel. Each is rounded to six decimals.

    Raises:
        DataError: No images are stored with the weights.
    """
    data = stored_examples(run)
    if data is None:
        raise DataError("no test images are stored with these weights; a model of the zoo has some")
    model = run.model.eval()
    inputs = data.model_input()  # [n c h w]
    if model.is_classifier:
        scores = model.scores(inputs)
        wrong = pair_error(scores, data.labels) if data.labels.ndim == 2 else 1 - accuracy(scores, data.labels)
        # Errors on few images are often 0: the scores show whether the weights are the same
        return {"error": round(wrong, 6), "mean_score": round(float(scores.max(-1).values.mean()), 6)}
    redrawn = cast(_Redrawing, model).reconstruct(inputs)
    return {"reconstruction_mse": round(float((redrawn - inputs).square().mean()), 6)}
