"""The losses against loop-only readings of their equations, their gradients, their edges and their errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.losses import (
    LOSSES,
    cross_entropy_loss,
    margin_loss,
    reconstruction_loss,
    spread_loss,
    spread_margin,
)

Loss = Callable[[Tensor, Tensor], Tensor]


def spread(activation: Tensor, labels: Tensor) -> Tensor:
    return spread_loss(activation, labels, 0.4)


def shares(activation: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_loss(activation, labels, from_probabilities=True)


CLASSIFICATION: list[Loss] = [margin_loss, spread, cross_entropy_loss, shares]


def random_case(b: int, j: int, seed: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return (
        torch.rand(b, j, generator=make, dtype=torch.float64),
        torch.randint(j, (b,), generator=make),
    )


def slow_margin(rows: list[list[float]], sets: list[set[int]], m_plus: float, m_minus: float, lam: float) -> float:
    total = 0.0
    for row, present in zip(rows, sets, strict=True):
        for j, v in enumerate(row):
            total += max(0.0, m_plus - v) ** 2 if j in present else lam * max(0.0, v - m_minus) ** 2
    return total / len(rows)


def slow_spread(rows: list[list[float]], labels: list[int], m: float) -> float:
    total = 0.0
    for row, t in zip(rows, labels, strict=True):
        for i, a_i in enumerate(row):
            if i != t:
                total += max(0.0, m - (row[t] - a_i)) ** 2
    return total / len(rows)


def slow_cross_entropy(rows: list[list[float]], labels: list[int]) -> float:
    total = 0.0
    for row, t in zip(rows, labels, strict=True):
        total -= math.log(math.exp(row[t]) / sum(math.exp(a) for a in row))
    return total / len(rows)


def slow_shares(rows: list[list[float]], labels: list[int]) -> float:
    return sum(-math.log(row[t] / sum(row)) for row, t in zip(rows, labels, strict=True)) / len(rows)


sizes = (st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))


@settings(max_examples=30, deadline=None)
@given(*sizes)
def test_margin_loss_is_its_equation(b: int, j: int, seed: int) -> None:
    activation, labels = random_case(b, j, seed)
    sets = [{t} for t in labels.tolist()]
    for m_plus, m_minus, lam in [(0.9, 0.1, 0.5), (0.7, 0.3, 0.25)]:
        wanted = slow_margin(activation.tolist(), sets, m_plus, m_minus, lam)
        came = margin_loss(activation, labels, present=m_plus, absent=m_minus, absent_weight=lam)
        assert came.item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert margin_loss(activation, labels).item() == pytest.approx(
        slow_margin(activation.tolist(), sets, 0.9, 0.1, 0.5)
    )


@settings(max_examples=30, deadline=None)
@given(*sizes)
def test_spread_loss_is_its_equation(b: int, j: int, seed: int) -> None:
    activation, labels = random_case(b, j, seed)
    for m in (0.2, 0.9, 1.0):
        wanted = slow_spread(activation.tolist(), labels.tolist(), m)
        assert spread_loss(activation, labels, m).item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@settings(max_examples=30, deadline=None)
@given(*sizes)
def test_cross_entropy_is_its_equation(b: int, j: int, seed: int) -> None:
    activation, labels = random_case(b, j, seed)
    activation = 0.01 + activation  # far enough from 0 for ε not to show
    rows, ts = activation.tolist(), labels.tolist()
    assert cross_entropy_loss(activation, labels).item() == pytest.approx(slow_cross_entropy(rows, ts), abs=1e-12)
    assert shares(activation, labels).item() == pytest.approx(slow_shares(rows, ts), abs=1e-12)


def test_margin_loss_known_answers() -> None:
    right = torch.tensor([[0.9, 0.1, 0.0]])
    assert margin_loss(right, torch.tensor([0])).item() == 0
    wrong = torch.tensor([[0.0, 1.0, 0.0]])
    assert margin_loss(wrong, torch.tensor([0])).item() == pytest.approx(0.81 + 0.5 * 0.81)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_margin_loss_takes_several_classes_an_image(dtype: torch.dtype) -> None:
    activation, _ = random_case(3, 5, 0)
    sets = [{0, 3}, {4}, set()]
    T = torch.tensor([[float(j in present) for j in range(5)] for present in sets]).to(dtype)
    wanted = slow_margin(activation.tolist(), sets, 0.9, 0.1, 0.5)
    assert margin_loss(activation, T).item() == pytest.approx(wanted, rel=1e-12)


def test_margin_loss_of_numbers_is_that_of_one_hot() -> None:
    activation, labels = random_case(6, 6, 1)  # b = j, where a mix-up of axes would not change the shape
    T = torch.nn.functional.one_hot(labels, 6)
    assert torch.equal(margin_loss(activation, labels), margin_loss(activation, T))


@pytest.mark.parametrize("loss", CLASSIFICATION)
def test_the_loss_of_shares_is_the_mean_of_the_losses_of_their_classes(loss: Loss) -> None:
    """Mixup: T = .7 of class t and .3 of class u costs .7 of the loss of t and .3 of that of u."""
    a, t = random_case(5, 4, 1)
    u = (t + torch.tensor([1, 2, 3, 0, 1])) % 4
    T = 0.7 * torch.eye(4, dtype=a.dtype)[t] + 0.3 * torch.eye(4, dtype=a.dtype)[u]
    torch.testing.assert_close(loss(a, T), 0.7 * loss(a, t) + 0.3 * loss(a, u))
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, T), a)


def test_spread_loss_known_answers() -> None:
    labels = torch.tensor([1])
    assert spread_loss(torch.tensor([[0.0, 1.0, 0.1]]), labels, 0.9).item() == pytest.approx(0)
    assert spread_loss(torch.tensor([[0.5, 0.5, 0.5]]), labels, 0.2).item() == pytest.approx(2 * 0.04)
    assert spread_loss(torch.tensor([[0.7]]), torch.tensor([0]), 0.9).item() == 0  # one class has no other to lead


def test_shares_at_the_edges() -> None:
    zeros = torch.zeros(1, 4)
    assert shares(zeros, torch.tensor([2])).item() == pytest.approx(math.log(4))
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    assert shares(sure, torch.tensor([1])).item() == pytest.approx(0, abs=1e-6)
    assert shares(sure, torch.tensor([0])).item() == pytest.approx(-math.log(torch.finfo(torch.float32).eps), rel=1e-4)
    assert torch.equal(shares(torch.tensor([[-0.5, 1.0, 0.0]]), torch.tensor([1])), shares(sure, torch.tensor([1])))


def test_cross_entropy_of_activations_has_the_floor_of_the_docstring() -> None:
    best = cross_entropy_loss(torch.tensor([[1.0, 0, 0, 0, 0]]), torch.tensor([0]))
    assert best.item() == pytest.approx(math.log(1 + 4 / math.e))


@pytest.mark.parametrize("loss", CLASSIFICATION)
def test_gradients_are_right(loss: Loss) -> None:
    activation, labels = random_case(4, 5, 2)
    activation.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: loss(a, labels), (activation,))
    assert torch.autograd.gradgradcheck(lambda a: loss(a, labels), (activation,))


@pytest.mark.parametrize("loss", CLASSIFICATION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_value_and_gradient_are_finite_at_exact_zeros_and_ones(loss: Loss, dtype: torch.dtype) -> None:
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)  # [8 3], every corner of the cube
    for t in range(3):
        activation = corners.to(dtype).requires_grad_()
        value = loss(activation, torch.full((8,), t))
        (gradient,) = torch.autograd.grad(value, activation)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient[:, t].sum() < 0  # more of the true class lowers the loss
        assert value.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("loss", CLASSIFICATION)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(loss: Loss, dtype: torch.dtype) -> None:
    activation, labels = random_case(4, 300, 3)
    labels = labels % 250
    assert torch.equal(loss(activation, labels.to(dtype)), loss(activation, labels))


@pytest.mark.parametrize("loss", CLASSIFICATION)
def test_the_mean_is_over_the_batch(loss: Loss) -> None:
    activation, labels = random_case(4, 5, 4)
    alone = [loss(activation[n : n + 1], labels[n : n + 1]).item() for n in range(4)]
    assert loss(activation, labels).item() == pytest.approx(sum(alone) / 4)


@pytest.mark.parametrize("loss", CLASSIFICATION)
@pytest.mark.parametrize(
    ("activation", "labels", "part"),
    [
        (torch.rand(4), torch.zeros(4, dtype=torch.long), "[4]"),
        (torch.rand(4, 3, 2), torch.zeros(4, dtype=torch.long), "[4, 3, 2]"),
        (torch.rand(0, 3), torch.zeros(0, dtype=torch.long), "[0, 3]"),
        (torch.rand(4, 0), torch.zeros(4, dtype=torch.long), "[4, 0]"),
        (torch.ones(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long), "torch.int64"),
        (torch.rand(4, 3), torch.zeros(5, dtype=torch.long), "[5]"),
        (torch.rand(4, 3), torch.zeros(4, 4), "[4, 4]"),
        (torch.rand(4, 3), torch.zeros(()), "[]"),
        (torch.rand(4, 3), torch.zeros(4), "torch.float32"),
        (torch.rand(4, 3), torch.zeros(4, dtype=torch.bool), "torch.bool"),
        (torch.rand(4, 3), torch.tensor([0, 1, 2, 3]), "0 to 3"),
        (torch.rand(4, 3), torch.tensor([0, -1, 2, 1]), "-1 to 2"),
    ],
)
def test_wrong_input_gets_one_clear_line(loss: Loss, activation: Tensor, labels: Tensor, part: str) -> None:
    with pytest.raises(ShapeError) as caught:
        loss(activation, labels)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_classes_only_where_they_mean_something() -> None:
    activation, T = torch.rand(2, 3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    for loss in (spread, cross_entropy_loss, shares):
        with pytest.raises(ShapeError, match="one class number"):
            loss(activation, T)
    assert margin_loss(activation, T).isfinite()
    with pytest.raises(ShapeError, match="0 to 2, wanted 0 to 1"):
        margin_loss(activation, 2 * T)


@pytest.mark.parametrize("loss", CLASSIFICATION)
def test_compiles_into_one_graph(loss: Loss) -> None:
    torch._dynamo.reset()
    activation, labels = random_case(4, 5, 5)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert compiled(activation, labels).item() == pytest.approx(loss(activation, labels).item())


@pytest.mark.parametrize("kind", ["squared", "bce"])
def test_reconstruction_loss_compiles_into_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    images, reconstruction = torch.rand(2, 3, 1, 4, 4).unbind()
    compiled = torch.compile(reconstruction_loss, backend="eager", fullgraph=True)
    wanted = reconstruction_loss(reconstruction, images, kind)
    assert compiled(reconstruction, images, kind).item() == pytest.approx(wanted.item())


def test_linear_margin() -> None:
    assert spread_margin(0) == 0.2
    assert spread_margin(50_000) == spread_margin(10**9) == 0.9
    assert spread_margin(500, ramp=1000) == pytest.approx(0.55)
    assert spread_margin(250, start=0, end=1, ramp=1000) == pytest.approx(0.25)


@given(st.integers(0, 10**6))
def test_sigmoid_margin_is_the_authors_rule(step: int) -> None:
    x = min(10.0, step / 50_000 - 4)
    assert spread_margin(step, rule="sigmoid") == pytest.approx(0.2 + 0.79 / (1 + math.exp(-x)), rel=1e-12)


@pytest.mark.parametrize("rule", ["linear", "sigmoid"])
def test_margin_never_falls(rule: str) -> None:
    margins = [spread_margin(step, rule=rule) for step in range(0, 800_000, 5000)]
    assert margins == sorted(margins)
    assert 0.2 <= margins[0] < 0.22
    assert margins[-1] == pytest.approx({"linear": 0.9, "sigmoid": 0.99}[rule], abs=1e-4)


def test_margin_refuses_what_it_cannot_read() -> None:
    with pytest.raises(RecipeError, match="did you mean 'sigmoid'"):
        spread_margin(0, rule="sigmoyd")
    with pytest.raises(RecipeError, match="step -1"):
        spread_margin(-1)
    with pytest.raises(RecipeError, match="ramp 0"):
        spread_margin(0, ramp=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(0, 10_000))
def test_reconstruction_loss_is_its_equation(b: int, c: int, side: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    pixels = torch.rand(2, b, c, side, side, generator=make, dtype=torch.float64)
    images, reconstruction = (0.01 + 0.98 * pixels).unbind()
    squared = bce = 0.0
    for x, y in zip(images.flatten().tolist(), reconstruction.flatten().tolist(), strict=True):
        squared += (y - x) ** 2
        bce -= x * math.log(y) + (1 - x) * math.log(1 - y)
    assert reconstruction_loss(reconstruction, images).item() == pytest.approx(squared / b, rel=1e-12)
    assert reconstruction_loss(reconstruction, images, "bce").item() == pytest.approx(bce / b, rel=1e-10)


@pytest.mark.parametrize("kind", ["squared", "bce"])
def test_reconstruction_gradients_are_right(kind: str) -> None:
    make = torch.Generator().manual_seed(6)
    images, reconstruction = torch.rand(2, 2, 1, 3, 3, generator=make, dtype=torch.float64).unbind()
    reconstruction = reconstruction.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reconstruction_loss(x, images, kind), (reconstruction,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bce_is_finite_at_exact_zeros_and_ones(dtype: torch.dtype) -> None:
    images = torch.tensor([0.0, 0.0, 1.0, 1.0]).reshape(1, 1, 2, 2).to(dtype)
    reconstruction = torch.tensor([0.0, 1.0, 0.0, 1.0]).reshape(1, 1, 2, 2).to(dtype).requires_grad_()
    value = reconstruction_loss(reconstruction, images, "bce")
    (gradient,) = torch.autograd.grad(value, reconstruction)
    dearest = -math.log({torch.float16: 2 / 65504, torch.float64: 2.0**-52}.get(dtype, 2.0**-23))
    assert value.item() == pytest.approx(2 * dearest, rel=1e-2)  # two pixels are as wrong as can be
    assert gradient.isfinite().all()
    assert gradient[0, 0, 0, 1] > 0 > gradient[0, 0, 1, 0]
    assert reconstruction_loss(images, images, "bce").item() == pytest.approx(0, abs=2e-4)


def test_reconstruction_errors() -> None:
    images = torch.rand(2, 1, 3, 3)
    for wrong in (torch.rand(2, 1, 3, 4), torch.rand(2, 9), torch.rand(1, 1, 3, 3)):
        with pytest.raises(ShapeError, match="do not pair up"):
            reconstruction_loss(wrong, images)
    for same in (torch.rand(2, 9), torch.rand(0, 1, 3, 3)):
        with pytest.raises(ShapeError, match="do not pair up"):
            reconstruction_loss(same, same)
    with pytest.raises(ShapeError, match=r"torch\.uint8.*scale the pixels"):
        reconstruction_loss(images, images.to(torch.uint8))
    with pytest.raises(RecipeError, match="did you mean 'squared'"):
        reconstruction_loss(images, images, "square")
    with pytest.raises(DataError, match="images in"):
        reconstruction_loss(images, images - 1, "bce")
    with pytest.raises(DataError, match="reconstruction in"):
        reconstruction_loss(images + 1, images, "bce")


def test_nan_is_not_hidden() -> None:
    activation = torch.tensor([[math.nan, 0.5]])
    assert all(loss(activation, torch.tensor([1])).isnan() for loss in CLASSIFICATION)
    images = torch.full((1, 1, 2, 2), 0.5)
    assert all(reconstruction_loss(images * math.nan, images, kind).isnan() for kind in ("squared", "bce"))


def test_the_table_holds_every_classification_loss() -> None:
    assert sorted(LOSSES) == ["cross-entropy", "margin", "spread"]
    activation, labels = random_case(3, 4, 7)
    for loss in LOSSES.values():
        extra = {"margin": 0.5} if "margin" in inspect.signature(loss).parameters else {}
        assert loss(activation, labels, **extra).shape == ()
