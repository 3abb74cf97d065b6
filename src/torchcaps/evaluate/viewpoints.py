"""Errors of a classifier with several views of an image averaged, and on viewpoints that were not trained on.

test_error_13crop              the scores of 13 views of an image, averaged; where images are larger than a view
novel_error, familiar_error    of the test images whose viewpoint was not, or was, among those of training
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import DataError
from torchcaps.metrics import accuracy
from torchcaps.models import Model
from torchcaps.utils.progress import progress

__all__ = ["VIEWS", "has_views", "novel_errors", "view_scores", "viewpoint_metrics"]

VIEWS = 13
"""Of an image, as the authors' code has it; the paper says "multiple"."""


def viewpoint_metrics(model: Model, data: Dataset, scores: Tensor, views: int = VIEWS) -> dict[str, float]:
    """Whatever of this can be asked of the data; `scores` [n j] are those of the middle of each image, the first view.

    `views` is how many of an image are averaged; with 1 there is nothing to ask.
    """
    found: dict[str, float] = {}
    if has_views(data) and views > 1:
        found[f"test_error_{views}crop"] = 1 - accuracy(view_scores(model, data, views), data.labels)
    return found | (novel_errors(scores, data) if "familiar" in data.factors else {})


def has_views(data: Dataset) -> bool:
    """True if a view is smaller than the images, one label each, so that there are several views of them."""
    view = data.preprocess.view
    return data.labels.ndim == 1 and view is not None and view < max(data.images.shape[-2:])


@torch.inference_mode()
def view_scores(model: Model, data: Dataset, count: int = VIEWS, batch: int = 50) -> Tensor:
    """[n j] the mean over `count` views of an image of the scores that the model gives each."""
    model.eval()
    batches = progress(torch.split(torch.arange(len(data)), batch), f"scoring {count} views of images")
    # A generator: the views of one batch are in memory at a time.
    views = (data.views(rows, count) for rows in batches)  # [count b c s s]
    # Views are folded into the batch to be scored.
    return torch.cat([torch.unflatten(model.scores(v.flatten(0, 1)), 0, v.shape[:2]).mean(0) for v in views])


def novel_errors(scores: Tensor, data: Dataset) -> dict[str, float]:
    """Errors on the two parts of the test set that the factor `familiar` tells apart; `scores` are [n j]."""
    if "familiar" not in data.factors:
        raise DataError("these data have no split by viewpoint; set data.novel to azimuth or elevation")
    familiar = data.factors["familiar"].bool()
    halves = {"novel_error": ~familiar, "familiar_error": familiar}
    return {name: 1 - accuracy(scores[rows], data.labels[rows]) for name, rows in halves.items() if bool(rows.any())}
