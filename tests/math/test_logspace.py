"""Logarithms of probabilities: the floor at p = 0."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcaps.math.logspace import LOG_ZERO, log_floor

FLOATS = [torch.float32, torch.float64]


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
