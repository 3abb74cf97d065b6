from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate.sample_metrics import capsules_used, cross_capsule_cka, frechet, sample_confidence
from torchcaps.metrics import linear_cka


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def judged_by_loops(p: list[list[list[float]]], confident: float) -> dict[str, float]:
    sure, covered, shares = 0, set(), []
    for capsule in p:
        counts: dict[int, int] = {}
        for row in capsule:
            if max(row) > confident:
                verdict = row.index(max(row))
                counts[verdict] = counts.get(verdict, 0) + 1
        sure += sum(counts.values())
        covered |= {c for c, count in counts.items() if count / len(capsule) >= 0.1 - 1e-12}
        if counts:
            shares.append(max(counts.values()) / sum(counts.values()))
    return {
        "confident_fraction": sure / (len(p) * len(p[0])),
        "classes_covered": len(covered),
        "consistency": sum(shares) / len(shares) if shares else 0.0,
    }


def verdicts(table: list[list[int]], classes: int = 4) -> torch.Tensor:
    """[j n classes] .95 for the named class; -1 = undecided."""
    p = torch.full((len(table), len(table[0]), classes), 1 / classes)
    for j, row in enumerate(table):
        for n, verdict in enumerate(row):
            if verdict >= 0:
                p[j, n] = 0.05 / (classes - 1)
                p[j, n, verdict] = 0.95
    return p


def test_samples_judged_by_hand():
    # capsule 0: all class 0; capsule 1: half undecided, of 5 sure ones 4 are class 1, 1 is class 2; capsule 2: unsure
    table = [[0] * 10, [1] * 4 + [2] + [-1] * 5, [-1] * 10]
    assert sample_confidence(verdicts(table)) == pytest.approx(
        {"confident_fraction": 0.5, "classes_covered": 3, "consistency": (1 + 4 / 5) / 2}
    )


def test_a_class_below_a_tenth_of_every_capsule_is_not_covered():
    spread = [[0] * 10 + [3], [0] * 10 + [3]]  # 1 of 11, twice
    assert sample_confidence(verdicts(spread))["classes_covered"] == 1
    assert sample_confidence(verdicts([[0] * 9 + [3]]))["classes_covered"] == 2


def test_nothing_confident_gives_zeros():
    assert sample_confidence(verdicts([[-1] * 5] * 2)) == {
        "confident_fraction": 0.0,
        "classes_covered": 0.0,
        "consistency": 0.0,
    }


def test_exactly_at_the_threshold_is_not_confident():
    p = torch.tensor([[[0.75, 0.25]]])
    assert sample_confidence(p, confident=0.75)["confident_fraction"] == 0
    assert sample_confidence(p, confident=0.74)["confident_fraction"] == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 25), st.integers(2, 5), st.integers(0, 10**6), st.sampled_from([0.5, 0.9]))
def test_samples_judged_like_the_loop(j, n, classes, seed, confident):
    p = (8 * draw(j, n, classes, seed=seed)).softmax(-1)
    assert sample_confidence(p, confident) == pytest.approx(judged_by_loops(p.tolist(), confident))


def test_what_is_no_table_of_probabilities_is_refused():
    with pytest.raises(ShapeError, match=r"\[j n classes\]"):
        sample_confidence(torch.ones(3, 4))
    for value in (-0.1, 1.5, math.nan):
        with pytest.raises(DataError, match="softmax"):
            sample_confidence(torch.full((1, 2, 3), value))
    with pytest.raises(RecipeError, match=r"confident = 1\.0"):
        sample_confidence(torch.ones(1, 1, 1), confident=1.0)


def with_moments(mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """[n p] whose mean is exact and whose covariance is exactly diagonal: +-, one axis at a time."""
    p = len(mean)
    rows = torch.cat([torch.diag(deviation), -torch.diag(deviation)]) * math.sqrt((2 * p - 1) / 2)
    return mean.double() + rows


def test_frechet_of_diagonal_gaussians_in_closed_form():
    mu_a, mu_b = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.0, 2.0, 5.0]).double()
    s_a, s_b = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 0.0]).double()
    wanted = float((mu_a - mu_b).square().sum() + (s_a - s_b).square().sum())  # for commuting covariances
    assert frechet(with_moments(mu_a, s_a), with_moments(mu_b, s_b)) == pytest.approx(wanted, rel=1e-9)


def test_frechet_equals_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    a, b = draw(50, 6) @ draw(6, 6, seed=1), draw(80, 6, seed=2) @ draw(6, 6, seed=3) + 1
    C_a, C_b = torch.cov(a.T), torch.cov(b.T)
    root = linalg.sqrtm(C_a.numpy() @ C_b.numpy()).real
    mean = float((a.mean(0) - b.mean(0)).square().sum())
    assert frechet(a, b) == pytest.approx(mean + float(C_a.trace() + C_b.trace()) - 2 * root.trace(), rel=1e-8)


def test_frechet_is_a_squared_distance():
    a, b = draw(30, 5), 2 * draw(40, 5, seed=1) + 1
    assert frechet(a, a) == pytest.approx(0, abs=1e-7)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-9)
    assert frechet(a, a + 3) == pytest.approx(5 * 9, rel=1e-6)
    assert frechet(10 * a, 10 * b) == pytest.approx(100 * frechet(a, b), rel=1e-9)
    rotation = torch.linalg.qr(draw(5, 5, seed=2)).Q
    assert frechet(a @ rotation, b @ rotation) == pytest.approx(frechet(a, b), rel=1e-9)


def test_frechet_of_degenerate_features():
    flat = torch.zeros(4, 3)
    assert frechet(flat, flat) == 0
    assert frechet(torch.ones(1, 3), flat) == pytest.approx(3)
    few, many = draw(4, 30), draw(300, 30, seed=1)  # rank 3 of 30
    assert math.isfinite(frechet(few, many)) and frechet(few, few) == pytest.approx(0, abs=1e-6)
    line = draw(20, 1) * torch.ones(1, 7).double()
    assert frechet(line, 3 * line) == pytest.approx(
        7 * float(4 * line[:, 0].var() + 4 * line[:, 0].mean() ** 2), rel=1e-6
    )
    for size in (1e-150, 1e150):
        assert frechet(size * few, size * many) == pytest.approx(size**2 * frechet(few, many), rel=1e-6)
    assert not math.isnan(frechet(1e300 * few, 1e300 * many))


def test_frechet_refuses_what_does_not_fit():
    with pytest.raises(ShapeError, match=r"\[3, 2\] and \[3, 4\]"):
        frechet(torch.ones(3, 2), torch.ones(3, 4))
    with pytest.raises(DataError, match="NaN"):
        frechet(torch.full((3, 2), math.nan), torch.ones(3, 2))


def test_cka_is_the_mean_over_pairs_of_varying_capsules():
    poses = draw(40, 4, 3)
    poses[:, 2] = 7.0
    wanted = [linear_cka(poses[:, i], poses[:, j]) for i, j in ((0, 1), (0, 3), (1, 3))]
    assert cross_capsule_cka(poses) == pytest.approx(sum(wanted) / 3)


def test_capsules_that_tell_the_same_have_cka_one():
    same = draw(50, 1, 4)
    turned = same @ torch.linalg.qr(draw(4, 4, seed=1)).Q
    assert cross_capsule_cka(torch.cat([same, 2 * turned, same], 1)) == pytest.approx(1)
    assert cross_capsule_cka(draw(3000, 2, 2)[:, :, :]) < 0.05


def test_cka_without_a_pair_is_zero_and_of_many_takes_some():
    assert cross_capsule_cka(torch.ones(5, 3, 2)) == 0
    assert cross_capsule_cka(draw(5, 1, 2)) == 0
    many = draw(12, 22, 2)
    many[:, 0] = 0  # left out before the first 20 are taken
    assert cross_capsule_cka(many) == pytest.approx(cross_capsule_cka(many[:, :21]))
    rows = draw(5000, 2, 2)
    kept = torch.linspace(0, 4999, 1000).long()
    assert cross_capsule_cka(rows) == pytest.approx(linear_cka(rows[kept, 0], rows[kept, 1]))
    with pytest.raises(ShapeError, match=r"\[n j k\]"):
        cross_capsule_cka(torch.ones(5, 3))


def test_capsules_used_by_loops():
    winners = torch.tensor([0] * 70 + [1] * 27 + [2] * 2 + [4])
    for j in (5, 8, 40):
        counts = [sum(int(w) == c for w in winners) for c in range(j)]
        assert capsules_used(winners, j) == sum(count >= len(winners) / (10 * j) for count in counts)
    assert capsules_used(winners, 5) == 3  # two of a hundred are just enough for one of five
    with pytest.raises(DataError, match="0 to 4; 0 to 3 is wanted"):
        capsules_used(winners, 4)
    with pytest.raises(ShapeError, match="capsule numbers"):
        capsules_used(winners.float(), 5)
