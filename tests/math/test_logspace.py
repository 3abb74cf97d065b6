"""Logarithms of probabilities: the floor at p = 0, and entropies against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from torchcaps.math.logspace import LOG_ZERO, entropy, log_floor

FLOATS = [torch.float32, torch.float64]


def random_shares(*shape: int, seed: int = 0) -> torch.Tensor:
    """Log probabilities [shape] in float64 that sum to 1 along the last axis."""
    make = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=make, dtype=torch.float64)).log_softmax(-1)


@given(p=st.floats(1e-18, 1))
@settings(max_examples=100, deadline=None)
def test_the_logarithm_itself_above_the_floor(p: float) -> None:
    for dtype in FLOATS:
        x = torch.tensor(p, dtype=dtype)
        assert float(log_floor(x)) == pytest.approx(math.log(float(x)), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.bfloat16])
def test_zero_is_finite_and_below_the_floor_of_anything_positive(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    log_p = log_floor(torch.tensor([0.0, tiny, tiny**0.5], dtype=dtype))
    assert log_p.dtype == dtype and bool(log_p.isfinite().all())
    assert float(log_p[0]) == pytest.approx(LOG_ZERO, rel=1e-2)
    assert log_p[1:].tolist() == pytest.approx([0.5 * math.log(tiny)] * 2, rel=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_slope_is_1_over_p_above_the_floor_and_0_below(dtype: torch.dtype) -> None:
    floor = torch.finfo(dtype).tiny ** 0.5
    p = torch.tensor([1.0, 0.25, 1e-6, 2 * floor, 0.5 * floor, 0.0], dtype=dtype, requires_grad=True)
    log_floor(p).sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(p.grad[:4], 1 / p.detach()[:4])
    assert p.grad[4:].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nowhere_does_a_slope_times_its_share_overflow(dtype: torch.dtype) -> None:
    floor = torch.finfo(dtype).tiny ** 0.5
    p = torch.tensor([floor, 1.1 * floor], dtype=dtype, requires_grad=True)
    (1e15 * log_floor(p)).sum().backward()
    assert p.grad is not None
    assert bool(p.grad.isfinite().all())


def test_entropy_against_loops() -> None:
    log_p = random_shares(4, 7)
    for row, found in zip(log_p.exp().tolist(), entropy(log_p).tolist(), strict=True):
        assert found == pytest.approx(-math.fsum(p * math.log(p) for p in row), abs=1e-13)


def test_known_entropies() -> None:
    nothing = -math.inf
    log_p = torch.tensor(
        [[math.log(0.25)] * 4, [0.0, nothing, nothing, nothing], [math.log(0.5), math.log(0.5), nothing, nothing]]
    )
    assert entropy(log_p).tolist() == pytest.approx([math.log(4), 0, math.log(2)], abs=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_any_axis(dim: int) -> None:
    log_p = random_shares(3, 4, 5).transpose(dim, -1)
    found = entropy(log_p, dim)
    wanted = entropy(log_p.transpose(dim, -1)).unsqueeze(-1).transpose(dim, -1).squeeze(dim)
    torch.testing.assert_close(found, wanted)


@given(n=st.integers(1, 12), seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_between_0_and_the_uniform_choice(n: int, seed: int) -> None:
    found = float(entropy(random_shares(n, seed=seed)))
    assert -1e-12 <= found <= math.log(n) + 1e-12


def test_entropy_has_a_gradient_even_where_an_outcome_is_impossible() -> None:
    assert gradcheck(entropy, (random_shares(3, 4).requires_grad_(),))
    log_p = torch.tensor([0.0, -math.inf, -800.0], requires_grad=True)
    entropy(log_p).backward()
    assert log_p.grad is not None
    assert log_p.grad.tolist() == pytest.approx([-1, 0, 0])
