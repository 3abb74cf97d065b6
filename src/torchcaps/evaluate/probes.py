"""Probes of codes: nearest neighbors and a linear classifier, as accuracies on test codes.

Codes are [n ...], one a row, flattened to [n d]; labels are [n]. Probes say how much of the class a code keeps, not
how good its capsules are: an untrained code may score as well, so print that one beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.metrics import accuracy

__all__ = ["knn", "linear_probe"]

MAX_SIMILARITIES = 1 << 24
"""Similarities held at once by `knn`."""


@torch.no_grad()
def knn(train_codes: Tensor, train_labels: Tensor, test_codes: Tensor, test_labels: Tensor, k: int = 5) -> float:
    """Accuracy of the majority among the k nearest training codes (Euclidean); in a tie the smallest label wins.

    |x - y|^2 = |x|^2 - 2 (x . y - |y|^2 / 2): the nearest y has the largest bracket, whatever x is.
    """
    x, y = _prepare(train_codes, train_labels, test_codes, test_labels)
    if not 1 <= k <= len(y):
        raise RecipeError(f"k = {k} neighbors of {len(y)} training codes; 1 to {len(y)} is wanted")
    labels = train_labels.long()
    classes = _classes(train_labels, test_labels)
    # Count the labels of the nearest, a bounded number of similarities at a time.
    half = y.square().sum(-1) / 2  # [n]
    votes = []
    for chunk in torch.split(x, max(1, MAX_SIMILARITIES // len(y))):
        nearest = (chunk @ y.T - half).topk(k, -1).indices  # [m k]
        votes.append(torch.nn.functional.one_hot(labels[nearest], classes).sum(1))  # [m classes]
    return accuracy(torch.cat(votes), test_labels)


def linear_probe(
    train_codes: Tensor,
    train_labels: Tensor,
    test_codes: Tensor,
    test_labels: Tensor,
    *,
    l2: float = 1e-4,
    steps: int = 100,
) -> float:
    """Accuracy of multinomial logistic regression: min over W, b of  mean -log softmax(W x + b)_label + l2/2 |W|^2.

    The codes are standardized by the training mean and deviation; L-BFGS takes at most `steps` steps from 0, so the
    result is a function of the data alone.
    """
    # The fit needs gradients, also where the caller evaluates without them.
    with torch.inference_mode(False), torch.enable_grad():
        x, y = _prepare(train_codes, train_labels, test_codes, test_labels)
        deviation = y.std(0, correction=0)
        # A number that never varies is 0 once it is centered; dividing by 1 leaves it so.
        deviation = torch.where(deviation > 0, deviation, 1.0)
        # Labels are copied, since autograd stores no tensor that was made in inference mode.
        W, b = _fit(y / deviation, train_labels.long().clone(), _classes(train_labels, test_labels), l2, steps)
    return accuracy(torch.addmm(b, x / deviation, W), test_labels)


def _fit(x: Tensor, labels: Tensor, classes: int, l2: float, steps: int) -> tuple[Tensor, Tensor]:
    """W [d classes] and b [classes] of the regression."""
    W = torch.zeros(x.shape[1], classes, requires_grad=True)
    b = torch.zeros(classes, requires_grad=True)
    optimizer: Any = torch.optim.LBFGS([W, b], max_iter=steps, line_search_fn="strong_wolfe")

    # L-BFGS asks for loss and gradient several times a step.
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.addmm(b, x, W), labels) + l2 / 2 * W.square().sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
    return W.detach(), b.detach()


def _prepare(
    train_codes: Tensor, train_labels: Tensor, test_codes: Tensor, test_labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Test codes [m d] and training codes [n d], less the training mean."""
    # Refuse codes that do not fit their labels or each other.
    for name, codes, labels in (("training", train_codes, train_labels), ("test", test_codes, test_labels)):
        if codes.ndim < 2 or 0 in codes.shape or labels.shape != codes.shape[:1] or labels.is_floating_point():
            raise ShapeError(
                f"{name} codes are {list(codes.shape)}, labels {labels.dtype} {list(labels.shape)};"
                " wanted [n ...] and integers [n], n at least 1"
            )
        if not bool(codes.isfinite().all()):
            raise DataError(f"{name} codes hold NaN or infinity: find what diverged before measuring it")
    if train_codes.shape[1:] != test_codes.shape[1:]:
        raise ShapeError(f"training codes are {list(train_codes.shape)}, test codes {list(test_codes.shape)}")
    # Distances stay as they are without the mean, and float32 is more exact on small numbers.
    y = train_codes.detach().flatten(1).float()
    x = test_codes.detach().flatten(1).float()
    mean = y.mean(0)
    return x - mean, y - mean


def _classes(*labels: Tensor) -> int:
    return 1 + max(int(some.max()) for some in labels)
