"""Numbers that say what a model has learned: pure functions from tensors to one Python float, torch only.

Here n counts samples, and p, q or d the features of one sample. All work in float64 and outside of gradients.
Each docstring says what comes out of a degenerate input; never NaN. Wrong shapes or types, and n = 0, raise
`ShapeError`; values for which the number would mean nothing (NaN, a confidence above 1) raise `DataError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError

__all__ = [
    "accuracy",
    "expected_calibration_error",
    "linear_cka",
    "matched_accuracy",
    "nmi",
    "participation_ratio",
    "purity",
    "resultant_length",
    "spearman",
]


def linear_cka(x: Tensor, y: Tensor) -> float:
    """|YᵀX|² / (|XᵀX| |YᵀY|) of centered X [n p] and Y [n q], Frobenius norms (Kornblith et al. 2019).

    Args:
        x: Features [n p] of n samples.
        y: Other features [n q] of the same samples.

    Returns:
        1 if both are the same up to rotation and scale, 0 if they have nothing linear in common or one is constant.
    """
    if x.shape[:1] != y.shape[:1]:
        raise ShapeError(f"x is {list(x.shape)}, y is {list(y.shape)}: row n of both must be the same sample")
    X = _centered("x", x)  # [n p]
    Y = _centered("y", y)  # [n q]
    if len(X) < max(X.shape[1], Y.shape[1]):  # few samples: the same three norms from the small Gram matrices
        K = X @ X.T
        L = Y @ Y.T  # [n n]
        common = (K * L).sum()
    else:
        K = X.T @ X
        L = Y.T @ Y  # [p p], [q q]
        common = (Y.T @ X).square().sum()
    return _ratio(common, K.norm() * L.norm())


def participation_ratio(x: Tensor) -> float:
    """(sum λ)² / sum λ² over the eigenvalues λ of the covariance of x [n d]: how many dimensions it fills.

    Since sum λ = tr C and sum λ² = |C|², no eigenvalue is computed, and the Gram matrix may stand in for C.

    Args:
        x: Features [n d].

    Returns:
        From 1 (a line) to d (a ball); 0 if the samples are all the same.
    """
    X = _centered("x", x)
    n, d = X.shape
    # The smaller of covariance and Gram matrix: both have the same eigenvalues but for zeros
    C = X.T @ X if d <= n else X @ X.T
    return _ratio(C.trace().square(), C.square().sum(), top=float(d))


def resultant_length(x: Tensor) -> float:
    """|mean of x / |x|| over the rows of x [n d]: how far they point in one direction.

    Args:
        x: Vectors [n d]; rows of zeros have no direction and are left out.

    Returns:
        1 if all point in one direction, 0 if they are spread evenly or all are zero.
    """
    X = _features("x", x)
    # Rows without a direction
    X = X[X.abs().amax(1) > 0]
    if not len(X):
        return 0.0
    X = X / X.abs().amax(1, keepdim=True)  # so that no square overflows or vanishes
    return min(1.0, float((X / X.norm(dim=1, keepdim=True)).mean(0).norm()))


def nmi(a: Tensor, b: Tensor) -> float:
    """I(a; b) / ((H(a) + H(b)) / 2) of two labelings [n]; scikit-learn's `normalized_mutual_info_score`.

    Args:
        a: Labels [n], integers.
        b: Other labels [n] of the same samples.

    Returns:
        1 if both are the same up to the names, 0 if independent; one cluster against several gives 0, against one 1.
    """
    _check_labelings(a, b)
    H_a = _entropy(a)
    H_b = _entropy(b)
    H_ab = _entropy(_pair(a, b))
    # Two labelings of one cluster each are the same
    if H_a + H_b == 0:
        return 1.0
    # I = H(a) + H(b) - H(a, b); rounding may leave [0, 1]
    return min(1.0, max(0.0, 2 * (H_a + H_b - H_ab) / (H_a + H_b)))


def purity(clusters: Tensor, classes: Tensor) -> float:
    """Return the share of samples that belong to the commonest class of their cluster.

    Args:
        clusters: Number of each sample's cluster [n].
        classes: Its class [n].

    Returns:
        1 if every cluster holds one class, also if each sample is its own cluster; never below 1 / classes.
    """
    _check_labelings(clusters, classes)
    # Number of each sample's cluster, and of its (cluster, class) cell
    cluster, sizes = _distinct(clusters)  # [n], [clusters]
    cell, counts = _distinct(_pair(clusters, classes))
    commonest = torch.zeros_like(sizes).scatter_reduce(0, cluster, counts[cell], "amax")  # [clusters]
    return int(commonest.sum()) / len(clusters)


def matched_accuracy(clusters: Tensor, classes: Tensor) -> float:
    """Return the share of samples whose cluster is matched to their class, for the best matching one to one.

    Args:
        clusters: Numbers of the clusters [n].
        classes: Numbers of the classes [n]. Where there are more clusters than classes, some are matched to none.

    Returns:
        In [0, 1].

    Raises:
        ShapeError: If the two are not vectors of one length, at least 1.
    """
    _check_labelings(clusters, classes)
    rows = torch.unique(clusters, return_inverse=True)[1]
    columns = torch.unique(classes, return_inverse=True)[1]
    size = max(int(rows.max()), int(columns.max())) + 1
    counts = torch.bincount(rows * size + columns, minlength=size * size).view(size, size)
    return _best_assignment(counts.tolist()) / len(clusters)


def _best_assignment(gain: list[list[int]]) -> int:
    """Return the largest sum of a square table's entries, one in each row and column (Kuhn-Munkres, O(n³)).

    Potentials u and v keep cost(i, j) >= u_i + v_j; each row is added along the shortest way of reduced costs.
    """
    n = len(gain)
    u = [0.0] * (n + 1)
    v = [0.0] * (n + 1)
    row_of = [0] * (n + 1)  # the row that has column j, 0 = none; column 0 is the start of a search
    for i in range(1, n + 1):
        row_of[0] = i
        j = 0
        shortest = [float("inf")] * (n + 1)
        before = [0] * (n + 1)
        done = [False] * (n + 1)
        # Grow a tree of tight entries until it reaches a free column
        while row_of[j]:
            done[j] = True
            row = row_of[j]
            for k in range(1, n + 1):
                reduced = -gain[row - 1][k - 1] - u[row] - v[k]
                if not done[k] and reduced < shortest[k]:
                    shortest[k] = reduced
                    before[k] = j
            following = min((k for k in range(1, n + 1) if not done[k]), key=lambda k: shortest[k])
            step = shortest[following]
            for k in range(n + 1):
                if done[k]:
                    u[row_of[k]] += step
                    v[k] -= step
                else:
                    shortest[k] -= step
            j = following
        # Shift the rows along the way back to the start
        while j:
            row_of[j] = row_of[before[j]]
            j = before[j]
    return sum(gain[row_of[j] - 1][j - 1] for j in range(1, n + 1))


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose highest score is that of their label.

    Args:
        scores: Scores [n j], one for each class. Of equal scores the first counts; a row with a NaN counts as wrong.
        labels: Classes [n], integers below j.

    Returns:
        From 0 to 1.
    """
    # Shapes, then values
    if scores.ndim != 2 or 0 in scores.shape:
        raise ShapeError(f"scores are {list(scores.shape)}, wanted [n j], one for each class, no empty axis")
    n, j = scores.shape
    if labels.shape != (n,) or not _discrete(labels):
        raise ShapeError(f"labels are {labels.dtype} {list(labels.shape)}, wanted integers [{n}], one a row")
    t = labels.long()
    if bool(((t < 0) | (t >= j)).any()):
        raise ShapeError(f"labels run from {int(t.min())} to {int(t.max())}, but there are {j} scores a row")
    # argmax takes NaN for the largest: such a row must not count as right by chance
    right = (scores.argmax(1) == t) & ~scores.isnan().any(1)
    return int(right.sum()) / n


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's ρ of x and y [n]: the correlation of their ranks, where ties share their mean rank.

    Args:
        x: Values [n]; infinities have a rank, NaN has none and is refused.
        y: Other values [n] of the same samples.

    Returns:
        From -1 to 1, as `scipy.stats.spearmanr`; 0 if either is constant.
    """
    _check_vectors(x, y, "x", "y")
    r = _ranks("x", x)
    s = _ranks("y", y)
    # Ranks are centered, so that this is a correlation
    scale = (r.square().sum() * s.square().sum()).sqrt()
    return min(1.0, max(-1.0, float((r * s).sum() / scale))) if scale > 0 else 0.0


def expected_calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """sum_B |B| / n · |accuracy(B) - confidence(B)| over the bins B = (lo, hi] of [0, 1] (Guo et al. 2017).

    Args:
        confidence: Probability [n] in [0, 1] that the model gave to its prediction.
        correct: [n], true or 1 where the prediction was right.
        bins: Number of bins of equal width; a confidence of 0 falls into the first, empty bins count nothing.

    Returns:
        From 0 (calibrated) to 1.
    """
    _check_vectors(confidence, correct, "confidence", "correct")
    # Check what came
    if bins < 1:
        raise RecipeError(f"bins is {bins}, wanted at least 1")
    p = confidence.detach().double()
    hit = correct.detach().double()
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise DataError("confidence holds values outside [0, 1] or NaN: pass probabilities, not logits")
    if not bool(((hit == 0) | (hit == 1)).all()):
        raise DataError("correct holds values other than 0 and 1: pass `prediction == label`")
    # |B| (accuracy - confidence) is the sum of hit - p over the bin: no counts are needed
    edges = torch.arange(1, bins, dtype=p.dtype, device=p.device) / bins
    gaps = torch.bincount(torch.bucketize(p, edges), weights=hit - p, minlength=bins)  # [bins]
    return float(gaps.abs().sum()) / len(p)


def _features(name: str, x: Tensor) -> Tensor:
    """x [n d] checked, in float64, outside of any graph."""
    if x.ndim != 2 or 0 in x.shape or x.is_complex():
        raise ShapeError(f"{name} is {x.dtype} {list(x.shape)}, wanted real [n d], no empty axis: flatten it")
    x = x.detach().double()
    if not bool(x.isfinite().all()):
        raise DataError(f"{name} holds NaN or infinity: look for what diverged before measuring it")
    return x


def _centered(name: str, x: Tensor) -> Tensor:
    """x [n d] less its mean, scaled to at most 1; constant columns are exactly 0, whatever the rounding."""
    X = _features(name, x)
    # Scaled first, so that differences cannot overflow
    X = X / X.abs().max().clamp_min(torch.finfo(X.dtype).tiny)
    # Less the first row: constant columns are now exactly 0, which their rounded mean would not make them
    X = X - X[0]
    X = X - X.mean(0)
    return X / X.abs().max().clamp_min(torch.finfo(X.dtype).tiny)


def _ratio(part: Tensor, whole: Tensor, top: float = 1.0) -> float:
    """part / whole within [0, top], and 0 / 0 = 0."""
    return min(top, max(0.0, float(part / whole))) if whole > 0 else 0.0


def _distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the m distinct values, in rising order, each x [n] is, and how often each occurs [m]."""
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return place, counts


def _pair(a: Tensor, b: Tensor) -> Tensor:
    """One number [n] for each pair (a, b): equal where both are."""
    (i, _) = _distinct(a)
    (j, counts) = _distinct(b)
    return i * len(counts) + j


def _entropy(x: Tensor) -> float:
    """H = -sum p log p in nats over the distinct values of x [n]; exactly 0 if there is one."""
    p = _distinct(x)[1].double() / len(x)
    return -float((p * p.log()).sum())


def _ranks(name: str, x: Tensor) -> Tensor:
    """The centered ranks of x [n], equal values sharing the mean of theirs."""
    values = x.detach().double() if x.is_floating_point() else x
    if bool(values.isnan().any()):
        raise DataError(f"{name} holds NaN, which has no rank: drop those samples first")
    # A value's rank is the mean of those that its equals occupy
    place, counts = _distinct(values)
    last = counts.cumsum(0).double()  # rank of the last among equals
    return (last - (counts.double() - 1) / 2)[place] - (len(x) + 1) / 2


def _discrete(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _check_vectors(a: Tensor, b: Tensor, a_name: str, b_name: str) -> None:
    if a.ndim != 1 or a.shape != b.shape or not len(a) or a.is_complex() or b.is_complex():
        raise ShapeError(
            f"{a_name} is {a.dtype} {list(a.shape)} and {b_name} is {b.dtype} {list(b.shape)},"
            " wanted two real vectors [n] of the same samples, n at least 1"
        )


def _check_labelings(a: Tensor, b: Tensor) -> None:
    _check_vectors(a, b, "the first labeling", "the second labeling")
    if not (_discrete(a) and _discrete(b)):
        raise ShapeError(f"labelings are {a.dtype} and {b.dtype}, wanted integers: pass cluster numbers")
