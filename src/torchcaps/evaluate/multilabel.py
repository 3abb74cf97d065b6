"""How often a classifier errs on images that show several things: scores [n j], labels [n m], m things an image.

As in `metrics`: plain floats, float64, no NaN comes out. Of equal scores the first counts; an image with a NaN among
its scores counts as wrong, and all of its labels as missed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.errors import ShapeError

__all__ = ["best_threshold", "pair_error", "single_error", "threshold_error", "top"]


def top(scores: Tensor, m: int) -> Tensor:  # [n m]
    """The classes of the m highest scores [n j], the highest first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :m]


def pair_error(scores: Tensor, labels: Tensor) -> float:
    """The share of images whose m highest scores are not those of their m labels: `both digits right`, for m = 2."""
    return 1 - int(_found(scores, labels).all(-1).sum()) / len(labels)


def single_error(scores: Tensor, labels: Tensor) -> float:
    """The share of the n m labels that are not among the m highest scores of their image."""
    return 1 - int(_found(scores, labels).sum()) / labels.numel()


def threshold_error(scores: Tensor, labels: Tensor, threshold: float) -> float:
    """The share of images whose set of classes with a score above the threshold is not the set of their labels."""
    there = _present(scores, labels)
    said = scores.double() > threshold  # [n j]
    # A NaN is above no threshold, which must not make its image right.
    right = (there == said).all(-1) & ~scores.isnan().any(-1)
    return 1 - int(right.sum()) / len(labels)


def best_threshold(scores: Tensor, labels: Tensor) -> float:
    """The threshold at which `threshold_error` is lowest: to be chosen on validation scores.

    An image is right from its highest score of an absent class up to, but without, its lowest of a present one. So the
    best thresholds lie between neighboring ends of such intervals: the middle of the widest gap among the best. 0.5 if
    no threshold gets an image right.
    """
    there = _present(scores, labels)
    x = scores.detach().double()
    # An image is right for thresholds in [low, high).
    low = x.masked_fill(there, -torch.inf).amax(-1)  # [n], -inf where every class is present
    high = x.masked_fill(~there, torch.inf).amin(-1)
    kept = low < high  # never so with a NaN
    if not bool(kept.any()):
        return 0.5
    # Where every class is present there is no lower end: a value below all scores stands for it.
    low = low[kept].clamp_min(float(x[kept].min()) - 1)
    high = high[kept]
    # Between neighboring ends: how many intervals have begun, less those that have ended.
    ends = torch.unique(torch.cat([low, high]))  # rising
    right = torch.searchsorted(low.sort().values, ends, right=True)
    right -= torch.searchsorted(high.sort().values, ends, right=True)  # [ends] images right from here to the next end
    # Among the best gaps the widest, whose middle is farthest from an error.
    widths = torch.where(right == right.max(), ends.diff(append=ends[-1:]), -1.0)
    n = int(widths.argmax())
    return float((ends[n] + ends[n + 1]) / 2)


def _found(scores: Tensor, labels: Tensor) -> Tensor:
    """[n m] whether each label is among the m highest scores."""
    _check(scores, labels)
    answers = top(scores, labels.shape[1])  # [n m]
    found = (labels.unsqueeze(-1) == answers.unsqueeze(1)).any(-1)
    return found & ~scores.isnan().any(-1, keepdim=True)


def _present(scores: Tensor, labels: Tensor) -> Tensor:
    """[n j] true where the class is among the image's labels."""
    _check(scores, labels)
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(1, labels.long(), True)


def _check(scores: Tensor, labels: Tensor) -> None:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ShapeError(f"scores are {list(scores.shape)}, wanted [n j], one for each class, no empty axis")
    n, j = scores.shape
    whole = not labels.is_floating_point() and labels.dtype != torch.bool
    if labels.ndim != 2 or len(labels) != n or not 1 <= labels.shape[1] <= j or not whole:
        raise ShapeError(
            f"labels are {labels.dtype} {list(labels.shape)}, wanted integers [{n} m], m labels a row, m at most {j}"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= j:
        raise ShapeError(f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {j} scores a row")
    ordered = labels.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ShapeError("an image has the same label twice; m different ones are wanted")
