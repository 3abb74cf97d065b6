from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate.baselines import (
    BASELINES,
    PCA,
    fit_kmeans,
    fit_kmeans_centroid,
    fit_local_pca,
    fit_pca,
    fit_rbm,
)
from torchcaps.metrics import nmi
from torchcaps.utils.random import resample_near

J, K, P = 3, 2, 8


def planted(n: int = 300, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n p] of J far clusters, each a K-dimensional Gaussian and some noise; clusters, centers, axes [j k p]."""
    g = torch.Generator().manual_seed(seed)
    centers = 20 * torch.eye(J, P)
    axes = torch.linalg.qr(torch.randn(J, P, K, generator=g)).Q.mT.contiguous()  # [j k p]
    cluster = torch.arange(n) % J
    scores = torch.randn(n, K, generator=g) * torch.tensor([3.0, 1.0])
    rows = centers[cluster] + torch.einsum("nk,nkp->np", scores, axes[cluster])
    return rows + 0.01 * torch.randn(n, P, generator=g), cluster, centers, axes


def error(baseline, f: torch.Tensor) -> float:
    return float((baseline.rebuild(f) - f).square().mean())


def same_span(a: torch.Tensor, b: torch.Tensor, atol: float) -> bool:
    return torch.allclose(a.T @ a, b.T @ b, atol=atol)


@pytest.mark.parametrize("name", BASELINES)
def test_every_rival_has_the_one_shape_and_is_a_function_of_its_seed(name):
    f, *_ = planted(60)
    baseline, again = (BASELINES[name](f, J, K, 5) for _ in range(2))
    codes, winners, samples = baseline.codes(f), baseline.winners(f), baseline.samples(4, 1)
    assert codes.shape in ((60, J), (60, J, K)) and baseline.rebuild(f).shape == (60, P) and samples.shape == (J, 4, P)
    assert winners.shape == (60,) and winners.dtype == torch.long and set(winners.tolist()) <= set(range(J))
    assert torch.equal(again.codes(f), codes) and torch.equal(again.samples(4, 1), samples)
    assert torch.allclose(baseline.samples(9, 1)[:, :4], samples, atol=1e-5)
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in (codes, samples, baseline.rebuild(f)))
    if name != "k-means centroid":
        assert not torch.equal(baseline.samples(4, 2), samples)


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
@pytest.mark.parametrize("name", BASELINES)
def test_degenerate_features_stay_finite(name):
    for f in (torch.ones(5, P), torch.eye(5, P), torch.ones(J, P), planted(J)[0]):
        baseline = BASELINES[name](f, J, K, 0)
        assert bool(baseline.rebuild(f).isfinite().all()) and bool(baseline.samples(3, 0).isfinite().all())
        assert bool(baseline.codes(2 * f).isfinite().all())


@pytest.mark.parametrize("name", BASELINES)
def test_what_cannot_be_fitted_is_refused(name):
    f, *_ = planted(10)
    with pytest.raises(DataError, match="10 images for 11 capsules"):
        BASELINES[name](f, 11, K, 0)
    with pytest.raises(RecipeError, match="3 capsules of 0 numbers"):
        BASELINES[name](f, J, 0, 0)
    with pytest.raises(ShapeError, match="flatten"):
        BASELINES[name](f[None], J, K, 0)
    with pytest.raises(DataError, match="NaN"):
        BASELINES[name](f * math.nan, J, K, 0)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    f, *_ = planted(10)
    for fit in (fit_kmeans, fit_kmeans_centroid, fit_local_pca, fit_rbm):
        with pytest.raises(RecipeError, match=r"torchcaps\[sklearn\]"):
            fit(f, J, K, 0)
    assert fit_pca(f, J, K, 0).capsules == J


@pytest.mark.parametrize("n", [200, 7])  # more rows than features, and fewer
def test_pca_is_the_eigendecomposition_of_the_covariance(n):
    g = torch.Generator().manual_seed(3)
    f = torch.randn(n, P, generator=g) @ torch.randn(P, P, generator=g) + 5
    found = fit_pca(f, 2, 2)
    U, S, V = torch.linalg.svd(f.double() - f.double().mean(0), full_matrices=False)
    assert torch.allclose(found.deviation.double(), S[:4] / math.sqrt(n), rtol=1e-5)
    for m in range(4):
        assert abs(float(found.axes[m].double() @ V[m])) == pytest.approx(1, abs=1e-5)
    assert torch.allclose(found.axes @ found.axes.T, torch.eye(4), atol=1e-5)
    assert torch.allclose(found.codes(f).flatten(1).double().abs(), (U * S)[:, :4].abs(), atol=1e-4)
    assert error(found, f) == pytest.approx(float(S[4:].square().sum()) / (n * P), rel=1e-4)


def test_pca_finds_a_planted_subspace_and_pads_beyond_its_rank():
    g = torch.Generator().manual_seed(4)
    axes = torch.linalg.qr(torch.randn(P, 2, generator=g)).Q.T  # [2 p]
    f = torch.randn(100, 2, generator=g) * torch.tensor([3.0, 1.0]) @ axes + 1
    found = fit_pca(f, J, K)
    assert same_span(found.axes, axes, 1e-5) and error(found, f) < 1e-9
    assert bool((found.axes[2:] == 0).all()) and bool((found.deviation[2:] == 0).all())
    assert set(found.winners(f).tolist()) == {0, 1}  # an axis that is not there never wins


def test_pca_winners_by_loops():
    f, *_ = planted(50)
    found = fit_pca(f, J, K)
    for row, winner in zip(f, found.winners(f).tolist(), strict=True):
        size = [abs(float((row - found.mean) @ found.axes[m])) / float(found.deviation[m]) for m in range(J)]
        assert winner == max(range(J), key=lambda m: size[m])


def test_pca_samples_lie_on_one_axis_each_with_its_variance():
    found = PCA(2, torch.tensor([1.0, 2.0, 3.0]), torch.eye(3)[:2].repeat(2, 1), torch.tensor([2.0, 0.5, 9.0, 9.0]))
    s = found.samples(4000, 0) - found.mean  # [j n p]
    assert bool((s[0, :, 1:] == 0).all()) and bool((s[1, :, [0, 2]] == 0).all())
    assert float(s[0, :, 0].std()) == pytest.approx(2, rel=0.05) and float(s[1, :, 1].std()) == pytest.approx(
        0.5, rel=0.05
    )
    assert float(s[0, :, 0].mean()) == pytest.approx(0, abs=0.15)


def test_kmeans_finds_planted_clusters():
    f, cluster, _, _ = planted()
    found = fit_kmeans(f, J, K, 0)
    assert nmi(found.winners(f), cluster) == 1
    for j in range(J):
        mine = f[found.winners(f) == j]
        assert torch.allclose(found.centroids[j], mine.mean(0), atol=1e-4)
        assert torch.equal(found.rebuild(mine), found.centroids[j].expand_as(mine))
    distance = [[float((row - c).norm()) for c in found.centroids] for row in f[:5]]
    assert torch.allclose(found.codes(f[:5]), torch.tensor(distance), atol=1e-3)
    assert found.sigma**2 == pytest.approx(error(found, f), rel=1e-4)


def test_kmeans_samples_have_its_moments_and_centroids_have_no_noise():
    f, *_ = planted()
    found, bare = fit_kmeans(f, J, K, 0), fit_kmeans_centroid(f, J, K, 0)
    s = found.samples(3000, 0)
    assert torch.allclose(s.mean(1), found.centroids, atol=0.15)
    assert torch.allclose(s.std(1), torch.full((J, P), found.sigma), rtol=0.06)
    assert torch.equal(bare.samples(5, 0), found.centroids[:, None].expand(J, 5, P))


def test_local_pca_finds_planted_subspaces():
    f, cluster, centers, axes = planted()
    found = fit_local_pca(f, J, K, 0)
    assert nmi(found.winners(f), cluster) == 1 and error(found, f) < 2e-4
    for j in range(J):
        mine = int(found.winners(centers[j : j + 1]))
        assert same_span(found.axes[mine], axes[j], 0.02)
        assert torch.allclose(found.scores[mine].std(0), torch.tensor([3.0, 1.0]), rtol=0.2)


def test_local_pca_codes_and_rebuild_by_loops():
    f, *_ = planted(30)
    found = fit_local_pca(f, J, K, 0)
    codes, rebuilt = found.codes(f), found.rebuild(f)
    for n, row in enumerate(f):
        j = min(range(J), key=lambda c: float((row - found.means[c]).norm()))
        score = torch.stack([(row - found.means[j]) @ found.axes[j, k] for k in range(K)])
        assert torch.allclose(codes[n, j], score, atol=1e-4)
        assert int((codes[n].abs().sum(-1) > 0).sum()) == 1
        drawn = found.means[j] + sum(score[k] * found.axes[j, k] for k in range(K))
        assert torch.allclose(rebuilt[n], drawn, atol=1e-4)


def test_local_pca_with_a_coverage_keeps_the_scores_of_the_rows_that_it_rebuilds_best():
    f, *_ = planted(60)
    everything = fit_local_pca(f, J, K, 0)
    found = fit_local_pca(f, J, K, 0, coverage=0.8)
    assert bool(everything.covered.all()) and torch.equal(found.axes, everything.axes)
    winners, rebuilt = found.winners(f), found.rebuild(f)
    for j in range(J):
        own = [n for n in range(len(f)) if int(winners[n]) == j]
        wrong = [float((f[n] - rebuilt[n]).norm() / (f[n] - found.means[j]).norm()) for n in own]
        best = [n for n, error in zip(own, wrong, strict=True) if error <= np.quantile(wrong, 0.8) + 1e-6]
        assert [n for n in own if found.covered[n]] == best
        assert torch.allclose(found.scores[j], found.codes(f)[best, j], atol=1e-4)
        assert len(best) < len(own)


def test_local_pca_samples_scores_near_those_of_its_groups_along_their_axes():
    f, *_ = planted()
    found = fit_local_pca(f, J, K, 0)
    s = found.samples(4000, 0)
    for j in range(J):
        scores = resample_near(found.scores[j], 0, j, torch.arange(4000))
        assert torch.allclose(s[j], found.means[j] + scores @ found.axes[j], atol=1e-4)
        assert torch.allclose(s[j].mean(0), found.means[j], atol=0.3)
        # Neighbors of the outermost rows lie on one side, so that samples are narrower than the group
        wide = scores.var(0) / found.scores[j].var(0)
        assert bool((wide > 0.5).all()) and bool((wide < 1.1).all())


def test_on_planted_data_more_structure_rebuilds_better():
    f, *_ = planted()
    fresh = planted(seed=0, n=600)[0][300:]  # of the same clusters and axes
    local, centroid = fit_local_pca(f, J, K, 0), fit_kmeans_centroid(f, J, K, 0)
    assert error(local, fresh) < 0.01 * error(centroid, fresh) < 0.01 * float(f.var(0).mean())


def bars(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n 12] in [-1, 3]: one of three blocks of four is on."""
    block = torch.arange(n) % 3
    return 4 * torch.nn.functional.one_hot(block, 3).repeat_interleave(4, -1).float() - 1, block


def test_the_rbm_learns_bars():
    f, block = bars(2100)
    found = fit_rbm(f, 4, 3, 0)
    assert error(found, f) < 0.2 * float(f.var(0, correction=0).mean())
    assert found.codes(f).shape == (2100, 4, 3) and nmi(found.winners(f), block) > 0.5


def test_the_rbm_by_loops():
    f, _ = bars(60)
    f = torch.cat([f, torch.full((60, 1), 7.0)], 1)  # a column that never moves
    found = fit_rbm(f, 2, 3, 0)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    W, c, b = found.W.flatten(0, 1), found.hidden.flatten(), found.visible
    codes = []
    for row in f[:4].tolist():
        v = [(x + 1) / 4 for x in row[:12]] + [0.0]
        h = [sigmoid(sum(float(W[m, i]) * v[i] for i in range(13)) + float(c[m])) for m in range(6)]
        up = [sigmoid(sum(float(W[m, i]) * h[m] for m in range(6)) + float(b[i])) for i in range(13)]
        codes.append(h)
        back = torch.tensor([4 * p - 1 for p in up[:12]] + [7.0])
        assert torch.allclose(found.rebuild(torch.tensor([row]))[0], back, atol=1e-4)
    assert torch.allclose(found.codes(f[:4]).flatten(1), torch.tensor(codes), atol=1e-5)
    assert torch.allclose(found.activity, found.codes(f).mean(0), atol=1e-6)
    above = (torch.tensor(codes).view(4, 2, 3) - found.activity).mean(-1)
    assert found.winners(f[:4]).tolist() == above.argmax(-1).tolist()


def test_rbm_samples_are_single_reverse_passes_of_one_group():
    f, _ = bars(60)
    found = fit_rbm(f, 2, 2, 0)
    s = found.samples(3000, 0)  # [j n p]
    for j in range(2):
        seen = torch.zeros(len(s[j]), dtype=torch.bool)
        for on in torch.cartesian_prod(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])):
            drawn = -1 + 4 * (on @ found.W[j] + found.visible).sigmoid()
            is_correct = (s[j] - drawn).abs().amax(-1) < 1e-4
            seen |= is_correct
            chance = torch.where(on > 0, found.activity[j], 1 - found.activity[j]).prod()
            assert float(is_correct.float().mean()) == pytest.approx(float(chance), abs=0.04)
        assert bool(seen.all())
