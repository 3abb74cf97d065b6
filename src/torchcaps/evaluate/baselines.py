"""Baselines without capsules, fitted to the same features f [n p] and given the same J groups of K numbers.

A table that shows a capsule model alone shows nothing: principal components also look like "one object a column", and
k-means also specializes. Each baseline answers what a capsule model is asked (`Baseline`), so that one evaluation
measures all. `BASELINES[name](f, capsules, dimension, seed)` fits one to the rows it is given; k-means and the RBM are
those of scikit-learn (the extra `sklearn`). Letters: j group (capsule), k number in a group, n row, p feature.

k-means and local PCA may group rows by their last columns alone, `seen` of them (0 = all): what capsules see need not
be what is drawn. Local PCA then decomposes the other columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.utils.random import normal, resample_near, uniform

__all__ = [
    "BASELINES",
    "PCA",
    "RBM",
    "Baseline",
    "KMeans",
    "LocalPCA",
    "fit_kmeans",
    "fit_kmeans_centroid",
    "fit_local_pca",
    "fit_pca",
    "fit_rbm",
]

RBM_SETTINGS = {"learning_rate": 0.05, "batch_size": 20, "n_iter": 20}
"""Tried on 2,000 drawn digits: half the rebuild error of batches of 100; 60 rounds would take off another sixth."""


class Baseline(Protocol):
    """What every baseline can be asked."""

    def codes(self, f: Tensor) -> Tensor:
        """[n j k] or [n j] the numbers that stand for each row."""

    def poses(self, f: Tensor) -> Tensor:
        """[n j k] what each group says of each row, whether or not it wins."""

    def winners(self, f: Tensor) -> Tensor:
        """[n] the group that each row belongs to."""

    def rebuild(self, f: Tensor) -> Tensor:
        """[n p] each row from its code and winner alone."""

    def samples(self, n: int, seed: int) -> Tensor:
        """[j n p] n feature vectors of each group; the first of them do not depend on n."""


@dataclass(frozen=True, eq=False)
class PCA:
    """f = mean + sum_m s_m a_m with the J K leading principal axes a_m; group j is made of axes j K ... j K + K - 1.

    For pictures and winners each of the first J axes stands for itself, the usual "mean +- component".
    """

    capsules: int
    mean: Tensor  # [p]
    axes: Tensor  # [(j k) p]
    deviation: Tensor  # [(j k)]

    def codes(self, f: Tensor) -> Tensor:
        return ((f - self.mean) @ self.axes.T).view(len(f), self.capsules, -1)  # [n j k]

    def poses(self, f: Tensor) -> Tensor:
        return self.codes(f)

    def winners(self, f: Tensor) -> Tensor:
        """The one of the first J components with the largest |score| / deviation."""
        size = self.codes(f).flatten(1)[:, : self.capsules].abs()
        deviation = self.deviation[: self.capsules]
        # A component along which nothing varies never wins.
        return torch.where(deviation > 0, size / deviation, 0.0).argmax(-1)

    def rebuild(self, f: Tensor) -> Tensor:
        return self.mean + self.codes(f).flatten(1) @ self.axes

    def samples(self, n: int, seed: int) -> Tensor:
        """mean + N(0, lambda_j) a_j."""
        along = self.axes[: self.capsules] * self.deviation[: self.capsules, None]  # [j p]
        return self.mean + _noise(seed, self.capsules, n, 1) * along[:, None]  # [j n p]


@dataclass(frozen=True, eq=False)
class KMeans:
    """J centroids; as a density, J spherical Gaussians of one variance sigma^2, the mean squared residual a feature.

    With sigma = 0 all samples of a group are the same picture: specialized, but with no instantiation.
    """

    centroids: Tensor  # [j p]
    sigma: float
    seen: int = 0

    def codes(self, f: Tensor) -> Tensor:
        """Distances to the centroids: J numbers, since k-means has no more."""
        return torch.cdist(_last(f, self.seen), _last(self.centroids, self.seen))  # [n j]

    def poses(self, f: Tensor) -> Tensor:
        return self.codes(f).unsqueeze(-1)

    def winners(self, f: Tensor) -> Tensor:
        return self.codes(f).argmin(-1)

    def rebuild(self, f: Tensor) -> Tensor:
        return self.centroids[self.winners(f)]

    def samples(self, n: int, seed: int) -> Tensor:
        j, p = self.centroids.shape
        if self.sigma == 0:
            return self.centroids[:, None].repeat(1, n, 1)  # [j n p]
        return self.centroids[:, None] + self.sigma * _noise(seed, j, n, p)


@dataclass(frozen=True, eq=False)
class LocalPCA:
    """The strongest fair baseline: the K leading axes of each of J k-means clusters, a mixture of Gaussians.

    As for capsules in competition, the code of a row is 0 in all groups but the winner; and as theirs, its samples are
    drawn from the scores of the rows that a group won, or of those among them that it rebuilds best.
    """

    means: Tensor  # [j p]
    axes: Tensor  # [j k p]
    scores: tuple[Tensor, ...]  # [n k] of each group
    covered: Tensor  # [n] true for the rows that have scores here
    seen: int = 0

    def codes(self, f: Tensor) -> Tensor:
        return self.poses(f) * torch.nn.functional.one_hot(self.winners(f), len(self.means)).unsqueeze(-1)

    def poses(self, f: Tensor) -> Tensor:
        """The codes before all groups but the winner are put to 0."""
        # (f - mean_j) . a_jk without the differences [n j p], which may not fit into memory.
        return torch.einsum("np,jkp->njk", f, self.axes) - torch.einsum("jp,jkp->jk", self.means, self.axes)

    def winners(self, f: Tensor) -> Tensor:
        return torch.cdist(_last(f, self.seen), _last(self.means, self.seen)).argmin(-1)

    def rebuild(self, f: Tensor) -> Tensor:
        return self.means[self.winners(f)] + torch.einsum("njk,jkp->np", self.codes(f), self.axes)

    def samples(self, n: int, seed: int) -> Tensor:
        drawn = [resample_near(own, seed, j, torch.arange(n)) for j, own in enumerate(self.scores)]
        scores = torch.stack(drawn)  # [j n k]
        return self.means[:, None] + torch.einsum("jnk,jkp->jnp", scores, self.axes)


@dataclass(frozen=True, eq=False)
class RBM:
    """A Bernoulli RBM with J K hidden units on v = (f - low) / width, clipped to [0, 1]; group j is K units of it."""

    W: Tensor  # [j k p]
    hidden: Tensor  # [j k]
    visible: Tensor  # [p]
    low: Tensor  # [p]
    width: Tensor  # [p]
    activity: Tensor  # [j k] mean of P(h | v) over the rows it was fitted to

    def codes(self, f: Tensor) -> Tensor:
        """P(h | v)."""
        v = torch.where(self.width > 0, (f - self.low) / self.width, 0.0).clamp(0, 1)
        return (torch.einsum("np,jkp->njk", v, self.W) + self.hidden).sigmoid()

    def poses(self, f: Tensor) -> Tensor:
        return self.codes(f)

    def winners(self, f: Tensor) -> Tensor:
        """The group whose mean activation is farthest above what it is on average."""
        return (self.codes(f) - self.activity).mean(-1).argmax(-1)

    def rebuild(self, f: Tensor) -> Tensor:
        """P(v | P(h | v)), mapped back."""
        return self._back(torch.einsum("njk,jkp->np", self.codes(f), self.W))

    def samples(self, n: int, seed: int) -> Tensor:
        """One reverse pass: each unit of group j is on as often as on average, all others are off; then P(v | h)."""
        j, k = self.activity.shape
        on = (uniform(seed, torch.arange(j)[:, None], torch.arange(n), count=k) < self.activity[:, None]).float()
        return self._back(torch.einsum("jnk,jkp->jnp", on, self.W))

    def _back(self, up: Tensor) -> Tensor:
        """P(v | h) as features, where `up` is what the hidden units send down."""
        return self.low + self.width * (up + self.visible).sigmoid()


def fit_pca(f: Tensor, capsules: int, dimension: int, seed: int = 0) -> PCA:
    """PCA of f [n p]; where the data have fewer than J K dimensions the axes left over are 0. The seed is not used."""
    x = _check(f, capsules, dimension)
    return PCA(capsules, *_principal(x, capsules * dimension))


def fit_kmeans(f: Tensor, capsules: int, dimension: int, seed: int = 0, seen: int = 0) -> KMeans:
    """k-means with k = J and the better of two starts; the dimension is not used."""
    x = _check(f, capsules, dimension)
    # scikit-learn takes seeds of 32 bits.
    make = _sklearn().cluster.KMeans
    found = make(capsules, n_init=2, random_state=seed % 2**32).fit(_last(x, seen).contiguous().numpy())
    centroids = torch.from_numpy(found.cluster_centers_).float()
    if not seen:
        # The inertia is the sum of all squared residuals.
        return KMeans(centroids, float(found.inertia_ / x.numel()) ** 0.5)
    # Means of the columns that do not group are those of the groups; so is the residual.
    groups = torch.from_numpy(found.labels_).long()
    sums = x.new_zeros(capsules, x.shape[1]).index_add_(0, groups, x)
    means = sums / torch.bincount(groups, minlength=capsules).clamp_min(1).unsqueeze(-1)
    drawn = x.shape[1] - seen
    sigma = float((x - means[groups])[:, :drawn].double().square().mean()) ** 0.5
    return KMeans(torch.cat([means[:, :drawn], centroids], 1), sigma, seen)


def fit_kmeans_centroid(f: Tensor, capsules: int, dimension: int, seed: int = 0, seen: int = 0) -> KMeans:
    """k-means that samples its centroids without noise."""
    return replace(fit_kmeans(f, capsules, dimension, seed, seen), sigma=0.0)


def fit_local_pca(
    f: Tensor, capsules: int, dimension: int, seed: int = 0, seen: int = 0, coverage: float = 1.0
) -> LocalPCA:
    """k-means, then PCA of every cluster; an empty cluster is its centroid alone.

    Args:
        f: Rows [n p].
        capsules: J.
        dimension: K.
        seed: Of k-means.
        seen: How many of the last columns group the rows, 0 = all.
        coverage: Share of a cluster's rows, those that its axes rebuild best, whose scores samples are drawn from.

    Returns:
        The means, the axes and the scores.
    """
    x = _check(f, capsules, dimension)
    found = fit_kmeans(f, capsules, dimension, seed, seen)
    winners = found.winners(x)
    # Columns that only group are not drawn: their axes are 0.
    drawn = x.clone()
    drawn[:, x.shape[1] - seen :] = 0
    x = drawn if seen else x
    # A cluster without rows gets its centroid as its only row.
    clusters = [x[winners == j] if (winners == j).any() else found.centroids[j, None] for j in range(capsules)]
    parts = [_principal(cluster, dimension) for cluster in clusters]
    # Samples are drawn from the scores of these.
    kept = [_best_rebuilt(cluster, p, coverage) for cluster, p in zip(clusters, parts, strict=True)]
    scores = tuple((cluster[k] - p.mean) @ p.axes.T for cluster, p, k in zip(clusters, parts, kept, strict=True))
    covered = torch.zeros(len(x), dtype=torch.bool)
    for j, k in enumerate(kept):
        rows = (winners == j).nonzero().flatten()
        covered[rows] = k[: len(rows)]
    means = torch.stack([p.mean for p in parts])
    if seen:
        means[:, -seen:] = found.centroids[:, -seen:]
    return LocalPCA(means, torch.stack([p.axes for p in parts]), scores, covered, seen)


def _best_rebuilt(x: Tensor, part: _Axes, coverage: float) -> Tensor:
    """[n] true for the share `coverage` of the rows x [n p] that mean and axes rebuild best, relative to their size."""
    away = x - part.mean
    size = away.square().sum(1).clamp_min(torch.finfo(x.dtype).tiny)
    explained = (away @ part.axes.T).square().sum(1) / size
    return explained >= explained.quantile(1 - coverage)


def fit_rbm(f: Tensor, capsules: int, dimension: int, seed: int = 0) -> RBM:
    """BernoulliRBM of scikit-learn (persistent CD) on columns that are scaled to [0, 1] by their extremes."""
    x = _check(f, capsules, dimension)
    # Visible units are in [0, 1]; a column that never varies is 0.
    low = x.amin(0)
    width = x.amax(0) - x.amin(0)
    v = torch.where(width > 0, (x - low) / width, 0.0)
    make = _sklearn().neural_network.BernoulliRBM
    found = make(capsules * dimension, random_state=seed % 2**32, **RBM_SETTINGS).fit(v.numpy())
    # Hidden units in groups of K, as float32.
    W = torch.from_numpy(found.components_).float().view(capsules, dimension, -1)  # [j k p]
    hidden = torch.from_numpy(found.intercept_hidden_).float().view(capsules, dimension)
    visible = torch.from_numpy(found.intercept_visible_).float()
    # The mean activity takes a fitted RBM, so it is set last.
    rbm = RBM(W, hidden, visible, low, width, activity=torch.zeros_like(hidden))
    return replace(rbm, activity=rbm.codes(x).mean(0))


BASELINES: dict[str, Callable[..., Baseline]] = {
    "PCA": fit_pca,
    "k-means": fit_kmeans,
    "k-means centroid": fit_kmeans_centroid,
    "local PCA": fit_local_pca,
    "RBM": fit_rbm,
}


class _Axes(NamedTuple):
    """Mean [p], leading axes [m p] and the deviation [m] along each."""

    mean: Tensor
    axes: Tensor
    deviation: Tensor


def _principal(x: Tensor, count: int) -> _Axes:
    """The `count` leading eigenvectors of the covariance C of x [n p], and the deviation along each; 0 beyond its rank.

    From C = X^T X / n or, if that is smaller, from X X^T / n: where u is an eigenvector of it, X^T u is one of C.
    """
    mean = x.double().mean(0)
    X = x.double() - mean
    # Decompose the smaller of the two matrices.
    wide = X.shape[0] < X.shape[1]
    values, vectors = torch.linalg.eigh((X @ X.T if wide else X.T @ X) / len(X))  # rising
    # The largest first; vectors of the other matrix are mapped to features.
    values = values.flip(0)[:count]
    vectors = vectors.flip(1)[:, :count]
    axes = torch.nn.functional.normalize((X.T @ vectors if wide else vectors).T, dim=-1)  # [m p]
    # Smaller eigenvalues are rounding, and their axes point anywhere: they become 0.
    real = values > 1e-10 * values[0].clamp_min(torch.finfo(values.dtype).tiny)
    padded = torch.zeros(count, 1 + x.shape[1], dtype=torch.double)
    padded[: len(values)] = torch.cat([values.clamp_min(0).sqrt()[:, None], axes], 1) * real[:, None]
    return _Axes(mean.float(), padded[:, 1:].float(), padded[:, 0].float())


def _last(x: Tensor, count: int) -> Tensor:
    """The last `count` columns of x, or all for 0."""
    return x[:, -count:] if count else x


def _noise(seed: int, j: int, n: int, count: int) -> Tensor:  # [j n count]
    return normal(seed, torch.arange(j)[:, None], torch.arange(n), count=count)


def _check(f: Tensor, capsules: int, dimension: int) -> Tensor:
    """The features as finite float32 [n p], n at least J."""
    if min(capsules, dimension) < 1:
        raise RecipeError(f"{capsules} capsules of {dimension} numbers; at least 1 of each is wanted")
    if f.ndim != 2 or 0 in f.shape:
        raise ShapeError(f"features are {list(f.shape)}, wanted [n p], no empty axis: flatten them")
    if len(f) < capsules:
        raise DataError(f"{len(f)} images for {capsules} capsules; at least as many are wanted: take more images")
    if not bool(f.isfinite().all()):
        raise DataError("features hold NaN or infinity: find what diverged before fitting to them")
    return f.detach().float().cpu()


def _sklearn() -> Any:
    try:
        import sklearn.cluster
        import sklearn.neural_network
    except ImportError:
        raise RecipeError("k-means and RBM need scikit-learn: pip install 'torchcaps[sklearn]'") from None
    return sklearn
