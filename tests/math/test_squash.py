"""squash and unsquash against eqs. (4)-(6) of Hauser 2019 in plain Python, their edges, and the norms they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from torchcaps.math.squash import cosine, norm, squash, unsquash

Map = Callable[[Tensor], Tensor]
FLOATS = [torch.float32, torch.float64]
TINIEST = {torch.float32: 1e-45, torch.float64: 5e-324}
DENORMAL = {torch.float32: 1e-40, torch.float64: 1e-310}


def slow_squash(z: list[float]) -> list[float]:
    """Eq. (4): |z|^2 / (1 + |z|^2)  z / |z|."""
    length = math.hypot(*z)
    return [length**2 / (1 + length**2) * v / length if length else 0.0 for v in z]


def slow_unsquash(x: list[float]) -> list[float]:
    """Eq. (6): sqrt(|x| / (1 - |x|))  x / |x|."""
    length = math.hypot(*x)
    return [math.sqrt(length / (1 - length)) * v / length if length else 0.0 for v in x]


def by_row(f: Callable[[list[float]], list[float]], x: Tensor) -> Tensor:
    return torch.tensor([f(row) for row in x.double().tolist()], dtype=torch.float64)


def directions(rows: int, d: int, seed: int = 0) -> Tensor:
    """[rows d] unit vectors in float64."""
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.square().sum(-1, keepdim=True).sqrt()


def of_lengths(lengths: list[float], d: int, dtype: torch.dtype) -> Tensor:
    """[len(lengths) d] one vector of each length, in directions of their own."""
    return (directions(len(lengths), d) * torch.tensor(lengths, dtype=torch.float64)[:, None]).to(dtype)


def value_and_gradient(f: Map, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and the gradient of a sum of its elements with unequal weights."""
    x = x.clone().requires_grad_()
    y = f(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return y.detach(), torch.autograd.grad((weights * y).sum(), x)[0]


# --- The equations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 8, 16])
def test_squash_is_equation_4(d: int) -> None:
    z = of_lengths([0.0, 1e-30, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0, 7.0, 100.0, 1e9], d, torch.float64)
    torch.testing.assert_close(squash(z), by_row(slow_squash, z), rtol=1e-14, atol=0)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 16])
def test_unsquash_is_equation_6(d: int) -> None:
    x = of_lengths([0.0, 1e-30, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999], d, torch.float64)
    torch.testing.assert_close(unsquash(x), by_row(slow_unsquash, x), rtol=1e-12, atol=0)


def test_known_values() -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[25 / 26 * 0.6, 25 / 26 * 0.8], [0.0, 0.5], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(squash(z), x)
    torch.testing.assert_close(unsquash(x), z)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_length_is_the_logistic_of_the_log_of_the_squared_length(dtype: torch.dtype) -> None:
    lengths = [1e-9, 1e-4, 0.03, 0.5, 1.0, 1.5, 10.0, 1e3, 1e6]
    found = squash(of_lengths(lengths, 5, dtype)).double().square().sum(-1).sqrt()
    wanted = torch.tensor([1 / (1 + math.exp(-math.log(s * s))) for s in lengths], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=64 * torch.finfo(dtype).eps, atol=0)


@given(
    exponent=st.floats(-30, 15), d=st.integers(1, 20), seed=st.integers(0, 10**6), single=st.booleans()
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_squash_at_every_scale(exponent: float, d: int, seed: int, single: bool) -> None:
    dtype = torch.float32 if single else torch.float64
    z = (directions(1, d, seed) * 10**exponent).to(dtype)
    x = squash(z)
    assert x.dtype == dtype
    roundings = 4  # of the length, its square, the quotient and the product, half an eps each
    assert float(x.double().square().sum().sqrt()) <= 1 + roundings * torch.finfo(dtype).eps / 2
    assert bool((x.sign() * z.sign() >= 0).all())
    close = 1e-5 if single else 1e-13
    torch.testing.assert_close(x.double(), by_row(slow_squash, z), rtol=close, atol=1e-20 if single else 0)


@given(low=st.floats(1e-6, 1e3), factor=st.floats(1.001, 10))
@settings(max_examples=60, deadline=None)
def test_a_longer_vector_stays_longer(low: float, factor: float) -> None:
    u = directions(1, 4)
    assert float(norm(squash(u * low * factor))) > float(norm(squash(u * low)))


def test_only_the_last_axis_counts() -> None:
    z = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for f in (squash, lambda x: unsquash(x / 10)):
        each = torch.stack([f(row) for row in z.reshape(-1, 5)]).view_as(z)
        torch.testing.assert_close(f(z), each, rtol=0, atol=0)
    assert norm(z).shape == (2, 3, 4)
    assert norm(z, keepdim=True).shape == (2, 3, 4, 1)


# --- Inverses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("d", [1, 3, 8])
def test_squash_undoes_unsquash(dtype: torch.dtype, close: float, d: int) -> None:
    lengths = [0.0, DENORMAL[dtype], 1e-30, 1e-12, 1e-6, 1e-3, *(i / 50 for i in range(1, 50))]
    x = of_lengths([*lengths, 0.999, 1 - 1e-4, 1 - 1e-5, 1 - 1e-6], d, dtype)
    torch.testing.assert_close(squash(unsquash(x)), x, rtol=0, atol=close)


@given(length=st.floats(0, 1 - 1e-6), d=st.integers(1, 16), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_squash_undoes_unsquash_at_any_length(length: float, d: int, seed: int) -> None:
    x = directions(1, d, seed) * length
    torch.testing.assert_close(squash(unsquash(x)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(squash(unsquash(x.float())), x.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.float32, [1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]),
        (torch.float64, [1e-40, 1e-20, 1e-9, 1e-3, 0.1, 1.0, 3.0, 10.0, 100.0, 1e3]),
    ],
)
@pytest.mark.parametrize("d", [1, 3, 8])
def test_unsquash_undoes_squash(dtype: torch.dtype, lengths: list[float], d: int) -> None:
    z = of_lengths(lengths, d, dtype)
    back = unsquash(squash(z))
    error = (back - z).double().square().sum(-1).sqrt()
    assert bool((error <= 1e-6 * torch.tensor(lengths, dtype=torch.float64)).all()), error


def test_below_the_floor_of_the_norm_unsquash_of_squash_is_only_absolutely_close() -> None:
    z = of_lengths([0.0, 1e-40, 1e-20, 1e-10, 1e-7, 1e-6, 3e-6, 1e-5], 3, torch.float32)
    torch.testing.assert_close(unsquash(squash(z)), z, rtol=0, atol=1e-6)


# --- Edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("f", [squash, unsquash, norm])
def test_finite_at_zero_at_denormals_and_far_out(f: Map, dtype: torch.dtype) -> None:
    for d in (1, 2, 16):
        for scale in (0.0, TINIEST[dtype], DENORMAL[dtype], 1e-30, 1e-13, 1e-12, 1e9, 1e18):
            x = torch.full((2, d), scale, dtype=dtype)
            y, gradient = value_and_gradient(f, x)
            assert bool(y.isfinite().all()), (scale, y)
            assert bool(gradient.isfinite().all()), (scale, gradient)


@pytest.mark.parametrize("dtype", FLOATS)
def test_squash_far_out_has_length_1_and_no_slope(dtype: torch.dtype) -> None:
    y, gradient = value_and_gradient(squash, directions(3, 4).to(dtype) * 1e18)
    torch.testing.assert_close(norm(y), torch.ones(3, dtype=dtype))
    assert float(gradient.abs().max()) < 1e-17


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_stays_zero_and_squash_is_flat_there(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, 3, dtype=dtype)
    y, gradient = value_and_gradient(squash, zero)
    assert not y.any()
    assert float(gradient.abs().max()) < 1e-10
    assert not unsquash(zero).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1.0, 1.0 + 1e-6, 1.5, 2.0, 1e6, 1e18])
def test_unsquash_reads_lengths_of_1_and_more_as_the_last_below_1(dtype: torch.dtype, length: float) -> None:
    x = torch.tensor([[length, 0.0], [0.0, -length], [0.6 * length, 0.8 * length]], dtype=dtype)
    y, gradient = value_and_gradient(unsquash, x)
    last = torch.finfo(dtype).eps / 2
    longest = torch.full((3,), math.sqrt((1 - last) / last), dtype=torch.float64)
    torch.testing.assert_close(y.double().square().sum(-1).sqrt(), longest, rtol=1e-3, atol=0)
    torch.testing.assert_close(squash(y), x / length, rtol=0, atol=1e-6)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_their_type_and_stay_finite(dtype: torch.dtype) -> None:
    x = of_lengths([0.0, 1e-7, 1e-3, 0.1, 0.5, 0.9, 1.0, 5.0], 4, dtype)
    for f in (squash, unsquash, norm):
        y, gradient = value_and_gradient(f, x)
        assert y.dtype == gradient.dtype == dtype
        assert bool(y.isfinite().all() and gradient.isfinite().all())
    torch.testing.assert_close(squash(x).double(), by_row(slow_squash, x), rtol=0, atol=0.01)


# --- Derivatives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [squash, unsquash, norm, lambda x: cosine(x, x.flip(-2))])
@pytest.mark.parametrize("length", [0.05, 0.3, 0.8])
def test_first_and_second_derivatives(f: Map, length: float) -> None:
    x = (directions(3, 4, seed=5) * length).requires_grad_()
    assert gradcheck(f, (x,))
    assert gradgradcheck(f, (x,), atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("f", [squash, unsquash, norm, lambda x: cosine(x, x.flip(-1))])
@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e-20, 1e-12, 1e-6])
def test_second_derivatives_are_finite_near_zero(f: Map, dtype: torch.dtype, scale: float) -> None:
    x = torch.tensor([1.0, -2.0, 0.5], dtype=dtype) * scale
    hessian = torch.autograd.functional.hessian(lambda x: f(x[None]).sum(), x)
    assert bool(hessian.isfinite().all()), hessian


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gradient_of_the_norm_is_the_direction_and_0_at_0(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=dtype, requires_grad=True)
    length = norm(x)
    torch.testing.assert_close(length, torch.tensor([5.0, 0.0, 1e-3], dtype=dtype), rtol=1e-6, atol=1e-11)
    length.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[[0, 2]], torch.tensor([[0.6, -0.8], [1.0, 0.0]], dtype=dtype))
    assert not x.grad[1].any()


# --- The cosine ---------------------------------------------------------------------------------------------


def test_cosine_against_loops() -> None:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(6, 5, generator=make, dtype=torch.float64)
    y = torch.randn(6, 5, generator=make, dtype=torch.float64)
    for a, b, found in zip(x.tolist(), y.tolist(), cosine(x, y).tolist(), strict=True):
        dot = math.fsum(p * q for p, q in zip(a, b, strict=True))
        assert found == pytest.approx(dot / math.hypot(*a) / math.hypot(*b), abs=1e-14)


@given(
    a=st.floats(-8, 15), b=st.floats(-8, 15), d=st.integers(1, 16), seed=st.integers(0, 10**6)
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_cosine_is_in_range_and_knows_no_lengths(a: float, b: float, d: int, seed: int) -> None:
    x, y = directions(2, d, seed).float()
    found = float(cosine(x * 10**a, y * 10**b))
    assert abs(found) <= 1 + 1e-6
    assert found == pytest.approx(float(cosine(x, y)), abs=1e-5)
    assert float(cosine(x * 10**a, x * 10**b)) == pytest.approx(1, abs=1e-5)
    assert float(cosine(x * 10**a, -x * 10**b)) == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_cosine_of_a_vector_without_direction_is_0(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    y = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    found = cosine(x, y)
    assert found.tolist() == [0, 0, 0]
    found.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert bool(x.grad.isfinite().all() and y.grad.isfinite().all())


def test_the_cosine_broadcasts_a_parent_over_its_votes() -> None:
    make = torch.Generator().manual_seed(2)
    votes = torch.randn(2, 3, 4, 5, generator=make)
    parent = torch.randn(2, 4, 5, generator=make)
    found = cosine(votes, parent.unsqueeze(1))
    assert found.shape == (2, 3, 4)
    assert float(found[1, 2, 3]) == pytest.approx(float(cosine(votes[1, 2, 3], parent[1, 3])), abs=1e-6)


HUGE = {torch.float64: 1e300, torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}


@pytest.mark.parametrize("dtype", HUGE)
def test_lengths_whose_squares_overflow_are_finite_and_so_are_gradients(dtype) -> None:
    """Before, float32 and bfloat16 beyond 1e18 gave infinite lengths and a squash of 0."""
    size = HUGE[dtype]
    x = torch.tensor([[3.0, 4.0], [-0.3, 0.4], [0.0, 0.0]], dtype=dtype) * (size / 4)
    x.requires_grad_()
    expected = torch.tensor([5.0, 0.5, 0.0], dtype=torch.float64) * (size / 4)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=1e-3)
    direction = torch.tensor([[0.6, 0.8], [-0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(squash(x).double(), direction, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        cosine(x, x).double(), torch.tensor([1.0, 1.0, 0.0]).double(), rtol=0, atol=2 * tolerance
    )
    for value in (norm(x).sum(), squash(x).sum(), cosine(x[:2], x[:2].flip(0)).sum()):
        (gradient,) = torch.autograd.grad(value, x)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ordinary_lengths_are_computed_to_the_bit_as_without_scaling(dtype) -> None:
    x = torch.randn(64, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 10
    floor = 1e-200 if dtype == torch.float64 else 1e-24
    length = torch.sqrt((x * x).sum(-1, keepdim=True) + floor)
    assert torch.equal(norm(x, keepdim=True), length)
    assert torch.equal(squash(x), x * (length / (1 + length * length)))


def test_infinite_and_undefined_numbers_stay_what_they_are() -> None:
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]])
    assert norm(x)[0] == float("inf") and norm(x)[1].isnan()
