"""Metrics of samples and poses of single capsules: pure functions from tensors to numbers.

Here j counts capsules, n samples of one capsule or images, p features of an image. As in `metrics`, all work in
float64 and outside of gradients, no result is NaN, and what a degenerate input gives is said.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.metrics import linear_cka

__all__ = ["capsules_used", "cross_capsule_cka", "frechet", "sample_confidence"]

CAPSULES = 20
SAMPLES = 1000
"""At most so many capsules and images enter `cross_capsule_cka`."""


def sample_confidence(probabilities: Tensor, confident: float = 0.9) -> dict[str, float]:
    """Summarize what a reference classifier says about samples of each capsule.

    A verdict is the class with the largest probability; it is confident if that is above `confident`.

    Args:
        probabilities: [j n classes] of n samples of each capsule j.
        confident: The least probability of a confident verdict.

    Returns:
        `confident_fraction`, the share of all j n samples with a confident verdict; `classes_covered`, the classes
        that are the confident verdict on at least 10 % of the samples of some capsule; `consistency`, the share of a
        capsule's confident verdicts that fall on its commonest class, averaged over the capsules that have one, 0 if
        none has.
    """
    _check_probabilities(probabilities, confident)
    n, classes = probabilities.shape[1:]
    # Count the confident verdicts of each capsule by class.
    largest, verdict = probabilities.detach().max(-1)  # [j n]
    sure = (largest > confident).unsqueeze(-1)  # [j n 1]
    counts = (torch.nn.functional.one_hot(verdict, classes) * sure).sum(1)  # [j classes]
    total = counts.sum(-1)  # [j]
    # A capsule without a confident verdict has no commonest class.
    commonest = counts.amax(-1)[total > 0].double() / total[total > 0]
    return {
        "confident_fraction": int(total.sum()) / sure.numel(),
        # In whole numbers, so that exactly 10 % is enough.
        "classes_covered": float((10 * counts >= n).any(0).sum()),
        "consistency": float(commonest.mean()) if len(commonest) else 0.0,
    }


def frechet(a: Tensor, b: Tensor) -> float:
    """|mu_a - mu_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of features a [n p] and b [m p].

    The squared 2-Wasserstein distance of two Gaussians with these means and covariances (divisor n - 1): 0 = the same
    first two moments. C_a C_b has the eigenvalues of the symmetric R C_b R, R = C_a^(1/2), so that only symmetric
    matrices are decomposed. A single row has covariance 0. Few rows make it larger: compare at equal n and m.
    """
    _check_features(a, b)
    a = a.detach().double()
    b = b.detach().double()
    # In units of the largest value, so that no square overflows.
    scale = max(float(a.abs().max()), float(b.abs().max()), torch.finfo(a.dtype).tiny)
    (mu_a, C_a) = _moments(a / scale)
    (mu_b, C_b) = _moments(b / scale)
    # The root of C_a, and with it the trace of the root of C_a C_b.
    values, Q = _spectrum(C_a)
    R = (Q * values.sqrt()) @ Q.T  # [p p]
    shared = _spectrum(R @ C_b @ R)[0].sqrt().sum()
    distance = (mu_a - mu_b).square().sum() + C_a.trace() + C_b.trace() - 2 * shared
    # Rounding may put the distance of equal moments below 0.
    return max(0.0, float(distance)) * scale * scale


def cross_capsule_cka(poses: Tensor) -> float:
    """Mean linear CKA over all pairs of capsules j < j' of poses [n j k]: 1 = each tells the same, 0 = nothing shared.

    Capsules whose pose is the same for every image are left out; without a pair of others the result is 0, so read it
    beside `capsules_used`. Of more than 20 capsules the first 20 that vary count, of more than 1000 images 1000 that
    are evenly spaced.
    """
    if poses.ndim != 3 or 0 in poses.shape:
        raise ShapeError(f"poses are {list(poses.shape)}, wanted [n j k], one a capsule and image, no empty axis")
    # Evenly spaced images, and the first capsules that vary over them.
    rows = torch.linspace(0, len(poses) - 1, min(SAMPLES, len(poses))).long()
    some = poses.detach()[rows]  # [n j k]
    varying = (some != some[:1]).any(0).any(-1).nonzero().flatten()[:CAPSULES]
    pairs = [linear_cka(some[:, i], some[:, j]) for i, j in combinations(varying.tolist(), 2)]
    return sum(pairs) / len(pairs) if pairs else 0.0


def capsules_used(winners: Tensor, j: int) -> int:
    """How many of j capsules win at least 1 / (10 j) of the images, a tenth of an even share; winners are [n]."""
    if winners.ndim != 1 or not len(winners) or winners.is_floating_point():
        raise ShapeError(f"winners are {winners.dtype} {list(winners.shape)}, wanted capsule numbers [n], n at least 1")
    if int(winners.min()) < 0 or int(winners.max()) >= j:
        raise DataError(f"winners run from {int(winners.min())} to {int(winners.max())}; 0 to {j - 1} is wanted")
    wins = torch.bincount(winners, minlength=j)  # [j]
    # In whole numbers, so that exactly a tenth of an even share is enough.
    return int((10 * j * wins >= len(winners)).sum())


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [p] and covariance [p p] of x [n p]."""
    mean = x.mean(0)
    X = x - mean
    return mean, X.T @ X / max(1, len(x) - 1)


def _spectrum(C: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [p] and eigenvectors [p p] of a covariance; values that are but rounding, also negative, are 0."""
    # A product of matrices is symmetric but for rounding, and eigh reads one triangle only.
    values, Q = torch.linalg.eigh((C + C.T) / 2)
    least = len(C) * torch.finfo(C.dtype).eps * values.abs().max()
    return torch.where(values > least, values, 0.0), Q


def _check_probabilities(probabilities: Tensor, confident: float) -> None:
    if probabilities.ndim != 3 or 0 in probabilities.shape:
        raise ShapeError(f"probabilities are {list(probabilities.shape)}, wanted [j n classes], no empty axis")
    if not bool(((probabilities >= 0) & (probabilities <= 1 + 1e-5)).all()):
        raise DataError("probabilities hold values outside [0, 1] or NaN: pass a classifier's softmax, not its logits")
    if not 0 <= confident < 1:
        raise RecipeError(f"confident = {confident}; at least 0 and below 1 is wanted")


def _check_features(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or 0 in (*a.shape, *b.shape) or a.shape[1] != b.shape[1]:
        raise ShapeError(f"features are {list(a.shape)} and {list(b.shape)}, wanted [n p] and [m p], none empty")
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise DataError("features hold NaN or infinity: find what diverged before measuring it")
