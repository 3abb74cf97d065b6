from __future__ import annotations

import math

import pytest
import torch

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate import probes
from torchcaps.evaluate.probes import knn, linear_probe


def problem(n: int = 60, m: int = 40, classes: int = 4, noise: float = 1.0, seed: int = 0):
    """Codes [n 2 3] around one center a class, and their labels; training, then test."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, 2, 3, generator=g)
    labels = torch.randint(classes, (n + m,), generator=g)
    codes = centers[labels] + noise * torch.randn(n + m, 2, 3, generator=g)
    return codes[:n], labels[:n], codes[n:], labels[n:]


def knn_by_loops(train, train_labels, test, test_labels, k) -> float:
    right = 0
    for x, label in zip(test.flatten(1).tolist(), test_labels.tolist(), strict=True):
        rows = train.flatten(1).tolist()
        near = sorted(range(len(rows)), key=lambda n: math.dist(x, rows[n]))[:k]
        found = [int(train_labels[n]) for n in near]
        right += min(set(found), key=lambda c: (-found.count(c), c)) == label
    return right / len(test)


@pytest.mark.parametrize("k", [1, 2, 5, 60])
def test_knn_by_loops(k, monkeypatch):
    data = problem()
    assert knn(*data, k=k) == knn_by_loops(*data, k)
    monkeypatch.setattr(probes, "MAX_SIMILARITIES", 60 * 7)
    assert knn(*data, k=k) == knn_by_loops(*data, k)


def test_knn_sees_past_a_common_offset():
    train, train_labels, test, test_labels = problem(noise=0.3)
    far = 1000.0
    assert knn(train + far, train_labels, test + far, test_labels) == knn_by_loops(
        train + far, train_labels, test + far, test_labels, 5
    )


def test_knn_refuses_more_neighbors_than_there_are():
    with pytest.raises(RecipeError, match="k = 61 neighbors of 60"):
        knn(*problem(), k=61)


def test_a_linear_probe_separates_what_is_separable():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(800, 5, generator=g)
    scores = x @ torch.randn(5, 3, generator=g)
    best, second = scores.topk(2).values.T
    clear = (best - second > 0.5).nonzero().flatten()[:400]  # a margin, which the l2 term needs
    x, labels = x[clear], scores[clear].argmax(-1)
    assert len(x) == 400
    assert linear_probe(x[:300], labels[:300], x[:300], labels[:300]) == 1.0
    assert linear_probe(x[:300], labels[:300], x[300:], labels[300:]) > 0.97
    x = x * torch.tensor([1e-4, 1.0, 1e4, 1.0, 1.0]) + 50  # undone by standardizing
    assert linear_probe(x[:300], labels[:300], x[300:], labels[300:]) > 0.97


def test_a_linear_probe_is_linear():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(600, 2, generator=g)
    labels = (x.prod(-1) > 0).long()  # exclusive or
    assert linear_probe(x[:400], labels[:400], x[400:], labels[400:]) < 0.65
    assert knn(x[:400], labels[:400], x[400:], labels[400:]) > 0.9


def test_the_regression_is_at_its_minimum():
    """Against Newton's method, in float64, on  mean -log softmax + l2/2 |W|^2."""
    train, labels, _, _ = problem(n=80)
    x = train.flatten(1).double()
    W, b = probes._fit(x.float(), labels, 4, 0.1, 200)

    def objective(w: torch.Tensor) -> torch.Tensor:
        logits = x @ w[:-1] + w[-1]
        return -logits.log_softmax(-1)[range(80), labels].mean() + 0.05 * w[:-1].square().sum()

    w = torch.zeros(7, 4, dtype=torch.double)
    for _ in range(10):
        gradient = torch.func.grad(objective)(w)
        hessian = torch.func.hessian(objective)(w).reshape(28, 28)
        w = w - torch.linalg.lstsq(hessian, gradient.reshape(28, 1), driver="gelsd").solution.view(7, 4)
    assert torch.allclose(W.double(), w[:-1], atol=1e-3)
    assert torch.allclose((b - b.mean()).double(), w[-1] - w[-1].mean(), atol=1e-3)


def test_probes_are_functions_of_the_data_in_any_mode_of_torch():
    data = problem(noise=2.0)
    first = linear_probe(*data), knn(*data)
    with torch.no_grad():
        assert (linear_probe(*data), knn(*data)) == first
    with torch.inference_mode():
        locked = tuple(t + 0 for t in data)
        assert (linear_probe(*locked), knn(*locked)) == first
    assert (linear_probe(*locked), knn(*locked)) == first
    assert 0.3 < first[0] < 1


def test_a_constant_code_gives_the_commonest_class():
    labels = torch.tensor([1, 1, 1, 0])
    assert linear_probe(torch.ones(4, 2), labels, torch.ones(4, 2), labels) == 0.75


def test_a_class_that_training_never_saw_is_an_error_of_the_probe():
    train, train_labels, test, _ = problem(noise=0.1)
    new = torch.full((len(test),), 9)
    assert knn(train, train_labels, test, new) == 0
    assert linear_probe(train, train_labels, test, new) == 0


@pytest.mark.parametrize("probe", [knn, linear_probe])
def test_what_does_not_fit_is_refused(probe):
    train, train_labels, test, test_labels = problem()
    with pytest.raises(ShapeError, match="test codes are"):
        probe(train, train_labels, test, test_labels[1:])
    with pytest.raises(ShapeError, match="training codes are"):
        probe(train, train_labels.float(), test, test_labels)
    with pytest.raises(ShapeError, match=r"test codes \[40, 2, 2\]"):
        probe(train, train_labels, test[..., :2], test_labels)
    with pytest.raises(DataError, match="training codes hold NaN"):
        probe(train * math.nan, train_labels, test, test_labels)
