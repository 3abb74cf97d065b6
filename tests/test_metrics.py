"""The metrics against scikit-learn, scipy, numpy and loops; their invariances, their degenerate cases, their errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.metrics import (
    accuracy,
    expected_calibration_error,
    linear_cka,
    matched_accuracy,
    nmi,
    participation_ratio,
    purity,
    resultant_length,
    spearman,
)

fast = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 100_000)
labelings = st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 3)), min_size=1, max_size=40)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(d: int, seed: int) -> Tensor:
    q, _ = torch.linalg.qr(normal(d, d, seed=seed))
    return q


def columns(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    a, b = zip(*pairs, strict=True)
    return torch.tensor(a), torch.tensor(b)


# linear_cka


def slow_cka(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with H = I - 1/n, the definition, not the shortcut."""
    n = len(x)
    H = torch.eye(n, dtype=x.dtype) - 1 / n
    K, L = H @ (x @ x.T) @ H, H @ (y @ y.T) @ H
    return float((K @ L).trace() / ((K @ K).trace() * (L @ L).trace()).sqrt())


@fast
@given(st.integers(2, 12), st.integers(1, 9), st.integers(1, 9), seeds)
def test_cka_is_its_definition(n: int, p: int, q: int, seed: int) -> None:
    x, y = normal(n, p, seed=seed) + 3, normal(n, q, seed=seed + 1)
    y = y + x[:, :1]
    assert linear_cka(x, y) == pytest.approx(slow_cka(x, y), abs=1e-10)


@fast
@given(st.integers(3, 12), st.integers(1, 6), seeds, st.floats(1e-6, 1e6))
def test_cka_ignores_rotation_scale_shift_and_order(n: int, p: int, seed: int, scale: float) -> None:
    x, y = normal(n, p, seed=seed), normal(n, 4, seed=seed + 1)
    moved = scale * x @ rotation(p, seed + 2) + normal(p, seed=seed + 3)
    wanted = linear_cka(x, y)
    assert linear_cka(moved, y) == pytest.approx(wanted, abs=1e-6)
    assert linear_cka(y, x) == pytest.approx(wanted, abs=1e-12)
    assert linear_cka(-moved, x) == pytest.approx(1, abs=1e-6)
    assert 0 <= wanted <= 1


def test_cka_known_answers() -> None:
    x = torch.tensor([[1.0, 0], [-1, 0], [0, 0], [0, 0]])
    y = torch.tensor([[0.0], [0], [1], [-1]])
    assert linear_cka(x, y) == 0
    both = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert linear_cka(x, both) == pytest.approx(1 / math.sqrt(2))


def test_cka_is_not_blind_to_a_linear_map_that_is_no_rotation() -> None:
    x = normal(50, 4, seed=0)
    assert linear_cka(x, x * torch.tensor([10.0, 1, 1, 1])) < 0.9


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e-300, 1e300, -7.3])
def test_cka_of_constant_features_is_zero(constant: float) -> None:
    x, flat = normal(30, 3, seed=1), torch.full((30, 2), constant, dtype=torch.float64)
    assert linear_cka(x, flat) == linear_cka(flat, x) == linear_cka(flat, flat) == 0
    half_flat = torch.cat([x, flat / max(1.0, abs(constant))], 1)
    assert linear_cka(x, half_flat) == pytest.approx(1, abs=1e-9)


def test_cka_at_the_ends_of_float64() -> None:
    x, y = normal(20, 3, seed=2), normal(20, 2, seed=3)
    for scale in (1e-300, 5e307):  # at the upper end, the difference of two rows is no longer a number
        assert linear_cka(x * scale, y) == pytest.approx(linear_cka(x, y))
        assert participation_ratio(x * scale) == pytest.approx(participation_ratio(x))
    beside = torch.cat([x * 1e-200, torch.ones(20, 1)], 1)  # a large constant hides no small feature
    assert linear_cka(beside, y) == pytest.approx(linear_cka(x, y))


# participation_ratio


@fast
@given(st.integers(2, 12), st.integers(1, 9), seeds)
def test_participation_ratio_is_its_definition(n: int, d: int, seed: int) -> None:
    x = normal(n, d, seed=seed) * torch.arange(1, d + 1) + 5
    eigenvalues = np.linalg.eigvalsh(np.atleast_2d(np.cov(x.numpy(), rowvar=False)))
    wanted = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert participation_ratio(x) == pytest.approx(wanted, rel=1e-9)
    assert 1 - 1e-9 <= participation_ratio(x) <= d
    turned = 7 * x @ rotation(d, seed + 1) - 2
    assert participation_ratio(turned) == pytest.approx(wanted, rel=1e-9)


def test_participation_ratio_known_answers() -> None:
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)  # [8 3]
    assert participation_ratio(corners) == pytest.approx(3)
    assert participation_ratio(corners[:, :1] * torch.tensor([1.0, 2, 3])) == pytest.approx(1)
    assert participation_ratio(torch.full((9, 4), 0.1)) == 0
    assert participation_ratio(torch.rand(1, 4)) == 0


# resultant_length


@fast
@given(st.integers(1, 10), st.integers(1, 5), seeds)
def test_resultant_length_is_its_definition(n: int, d: int, seed: int) -> None:
    x = normal(n, d, seed=seed)
    mean = [0.0] * d
    for row in x.tolist():
        length = math.sqrt(sum(v * v for v in row))
        mean = [m + v / length / n for m, v in zip(mean, row, strict=True)]
    wanted = math.sqrt(sum(m * m for m in mean))
    assert resultant_length(x) == pytest.approx(wanted, abs=1e-12)
    stretched = x * torch.linspace(0.1, 9, n, dtype=x.dtype)[:, None]
    assert resultant_length(stretched @ rotation(d, seed + 1)) == pytest.approx(wanted, abs=1e-12)


def test_resultant_length_known_answers() -> None:
    assert resultant_length(torch.tensor([[3.0, 4.0], [0.3, 0.4]])) == pytest.approx(1)
    assert resultant_length(torch.tensor([[1.0, 0.0], [-5.0, 0.0]])) == 0
    assert resultant_length(torch.tensor([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(math.sqrt(0.5))


def test_resultant_length_leaves_zero_rows_out() -> None:
    x = normal(5, 3, seed=4)
    padded = torch.cat([x, torch.zeros(7, 3, dtype=x.dtype)])
    assert resultant_length(padded) == pytest.approx(resultant_length(x))
    assert resultant_length(torch.zeros(4, 3)) == 0


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300])
def test_resultant_length_at_the_ends_of_float64(scale: float) -> None:
    x = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * scale
    assert resultant_length(x) == pytest.approx(math.sqrt(0.5))


# nmi and purity


@fast
@given(labelings)
def test_nmi_is_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    score = pytest.importorskip("sklearn.metrics").normalized_mutual_info_score
    a, b = columns(pairs)
    assert nmi(a, b) == pytest.approx(score(a.numpy(), b.numpy()), abs=1e-12)


@fast
@given(labelings, st.permutations(range(-2, 5)))
def test_nmi_ignores_names_and_sides(pairs: list[tuple[int, int]], names: list[int]) -> None:
    a, b = columns(pairs)
    renamed = torch.tensor([100 * names[v + 2] for v in a.tolist()])
    assert nmi(renamed, b) == pytest.approx(nmi(a, b), abs=1e-12)
    assert nmi(b, a) == pytest.approx(nmi(a, b), abs=1e-12)
    assert nmi(a, renamed) == pytest.approx(1)
    assert 0 <= nmi(a, b) <= 1


def test_nmi_known_answers() -> None:
    a = torch.tensor([0, 0, 1, 1])
    one = torch.zeros(4, dtype=torch.long)
    assert nmi(a, 1 - a) == 1
    assert nmi(a, torch.tensor([0, 1, 0, 1])) == pytest.approx(0, abs=1e-15)
    assert nmi(a, one) == nmi(one, a) == 0
    assert nmi(one, one + 5) == 1
    assert nmi(a, torch.arange(4)) == pytest.approx(2 / 3)  # I = log 2, H = log 2 and log 4


@pytest.mark.parametrize("n", [3, 7, 49, 1000])
def test_nmi_of_one_cluster_is_exact(n: int) -> None:
    one, many = torch.full((n,), 3), torch.arange(n) % 3
    assert nmi(one, one) == 1
    assert nmi(one, many) == nmi(many, one) == 0


@fast
@given(labelings)
def test_purity_is_its_definition(pairs: list[tuple[int, int]]) -> None:
    members: dict[int, Counter[int]] = {}
    for cluster, label in pairs:
        members.setdefault(cluster, Counter())[label] += 1
    wanted = sum(max(count.values()) for count in members.values()) / len(pairs)
    a, b = columns(pairs)
    assert purity(a, b) == wanted
    assert purity(10 - 3 * a, b + 9) == wanted  # the names do not matter
    assert purity(torch.arange(len(pairs)), b) == 1
    assert purity(torch.zeros_like(b), b) == max(Counter(b.tolist()).values()) / len(pairs)


def test_labelings_of_other_types() -> None:
    a, b = torch.tensor([True, False, True]), torch.tensor([4, 5, 4], dtype=torch.uint8)
    assert nmi(a, b) == purity(a, b) == 1


# accuracy


@fast
@given(st.integers(1, 20), st.integers(1, 5), seeds)
def test_accuracy_is_its_definition(n: int, j: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    scores = torch.randint(3, (n, j), generator=make).double()  # with ties
    labels = torch.randint(j, (n,), generator=make)
    right = sum(row.index(max(row)) == t for row, t in zip(scores.tolist(), labels.tolist(), strict=True))
    assert accuracy(scores, labels) == right / n


def test_accuracy_counts_nan_as_wrong() -> None:
    scores = torch.tensor([[math.nan, 0.0], [0.0, 1.0], [2.0, math.nan]])
    assert accuracy(scores, torch.tensor([0, 1, 1])) == pytest.approx(1 / 3)


# spearman


@fast
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=2, max_size=30))
def test_spearman_is_scipys_with_ties(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = columns(pairs)
    if len(set(x.tolist())) == 1 or len(set(y.tolist())) == 1:
        assert spearman(x, y) == 0  # scipy: NaN
    else:
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x.numpy(), y.numpy()).statistic, abs=1e-12)


@fast
@given(st.integers(2, 40), seeds)
def test_spearman_sees_only_the_order(n: int, seed: int) -> None:
    x, y = normal(n, seed=seed), normal(n, seed=seed + 1)
    rho = spearman(x, y)
    assert spearman(x.exp(), 5 * y - 3) == rho
    assert spearman(-x, y) == pytest.approx(-rho)
    assert spearman(y, x) == pytest.approx(rho)
    assert spearman(x, x.sinh()) == pytest.approx(1)


def test_spearman_edges() -> None:
    inf = math.inf
    assert spearman(torch.tensor([-inf, 0.0, inf]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(1)
    assert spearman(torch.tensor([0.0, -0.0]), torch.tensor([1.0, 2.0])) == 0  # the two zeros are equal
    assert spearman(torch.tensor([1.0]), torch.tensor([2.0])) == 0
    big = torch.tensor([2**53, 2**53 + 1, 0])  # not apart in float64
    assert spearman(big, torch.tensor([1, 2, 0])) == pytest.approx(1)


# expected_calibration_error


def slow_ece(confidence: list[float], correct: list[bool], bins: int) -> float:
    total = 0.0
    for k in range(bins):
        inside = [
            (p, c)
            for p, c in zip(confidence, correct, strict=True)
            if k / bins < p <= (k + 1) / bins or (k == 0 and p == 0)
        ]
        if inside:
            gap = sum(c for _, c in inside) / len(inside) - sum(p for p, _ in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(gap)
    return total


@fast
@given(
    st.lists(st.tuples(st.floats(0, 1) | st.sampled_from([0.0, 0.2, 1 / 3, 0.6, 1.0]), st.booleans()), min_size=1),
    st.integers(1, 20),
)
def test_ece_is_its_definition(pairs: list[tuple[float, bool]], bins: int) -> None:
    confidence, correct = [p for p, _ in pairs], [c for _, c in pairs]
    came = expected_calibration_error(torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct), bins)
    assert came == pytest.approx(slow_ece(confidence, correct, bins), abs=1e-12)
    assert 0 <= came <= 1


def test_ece_known_answers() -> None:
    sure = torch.ones(10)
    assert expected_calibration_error(sure, sure) == 0
    assert expected_calibration_error(sure, torch.zeros(10, dtype=torch.long)) == 1
    half = torch.tensor([True, False] * 5)
    assert expected_calibration_error(torch.full((10,), 0.5), half) == 0
    assert expected_calibration_error(sure * 0.75, half) == pytest.approx(0.25)
    on_the_edge = torch.tensor([0.5, 0.75]), torch.tensor([True, False])
    assert expected_calibration_error(*on_the_edge, bins=2) == (0.5 + 0.75) / 2  # .5 is of the lower bin
    assert expected_calibration_error(*on_the_edge, bins=1) == (0.75 - 0.5) / 2


# what they share


LABELS = torch.tensor([0, 1, 0])
X = torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]])
V = torch.tensor([0.1, 0.2, 0.3])
CALLS: list[tuple[Callable[..., float], tuple[Tensor, ...]]] = [
    (linear_cka, (X, X)),
    (participation_ratio, (X,)),
    (resultant_length, (X,)),
    (nmi, (LABELS, LABELS)),
    (purity, (LABELS, LABELS)),
    (accuracy, (X, LABELS)),
    (spearman, (V, V)),
    (expected_calibration_error, (V, LABELS)),
]


@pytest.mark.parametrize(("metric", "args"), CALLS)
def test_a_metric_is_a_python_float_and_changes_nothing(metric: Callable[..., float], args: tuple[Tensor, ...]) -> None:
    before = [a.clone() for a in args]
    tracked = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    assert type(metric(*args)) is float
    assert metric(*tracked) == metric(*args)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


@pytest.mark.parametrize(("metric", "args"), CALLS)
def test_wrong_shapes_get_one_clear_line(metric: Callable[..., float], args: tuple[Tensor, ...]) -> None:
    first, *rest = args
    wrong: list[tuple[Any, ...]] = [
        (first[None], *rest),
        (first[:0], *[r[:0] for r in rest]),
        (first.sum(), *rest),
    ]
    if rest:
        wrong.append((first[:2], *rest))
    for bad in wrong:
        with pytest.raises(ShapeError) as caught:
            metric(*bad)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("metric", "args"), [c for c in CALLS if c[0] is not accuracy and c[1][0].is_floating_point()])
def test_nan_in_is_an_error_not_nan_out(metric: Callable[..., float], args: tuple[Tensor, ...]) -> None:
    first, *rest = args
    with pytest.raises(DataError, match="NaN"):
        metric(first * math.nan, *rest)


def test_other_values_that_mean_nothing() -> None:
    with pytest.raises(DataError, match="infinity"):
        linear_cka(X, X / 0)
    with pytest.raises(ShapeError, match="wanted integers"):
        nmi(LABELS.float(), LABELS)
    with pytest.raises(ShapeError, match="wanted integers"):
        accuracy(X, LABELS.float())
    with pytest.raises(ShapeError, match="0 to 2"):
        accuracy(X, torch.tensor([0, 1, 2]))
    with pytest.raises(DataError, match="not logits"):
        expected_calibration_error(V * 10, LABELS)
    with pytest.raises(DataError, match="other than 0 and 1"):
        expected_calibration_error(V, LABELS * 2)
    with pytest.raises(RecipeError, match="bins is 0"):
        expected_calibration_error(V, LABELS, bins=0)
    with pytest.raises(ShapeError, match="complex"):
        resultant_length(X.to(torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_measured_in_float64(dtype: torch.dtype) -> None:
    x = (normal(50, 6, seed=5) + 100).to(dtype)
    y = normal(50, 3, seed=6).to(dtype)
    assert linear_cka(x, y) == linear_cka(x.double(), y.double())
    assert participation_ratio(x) == participation_ratio(x.double())
    assert resultant_length(x) == resultant_length(x.double())
    assert spearman(x[:, 0], x[:, 1]) == spearman(x[:, 0].double(), x[:, 1].double())


@fast
@given(pairs=labelings)
def test_matched_accuracy_is_the_best_of_all_matchings(pairs: list[tuple[int, int]]) -> None:
    from scipy.optimize import linear_sum_assignment

    clusters, classes = (torch.tensor(list(side)) for side in zip(*pairs, strict=True))
    counts = np.zeros((7, 4))
    for cluster, label in pairs:
        counts[cluster + 2, label] += 1
    best = counts[linear_sum_assignment(-counts)].sum() / len(pairs)
    assert matched_accuracy(clusters, classes) == pytest.approx(best)
