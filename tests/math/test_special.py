"""Digamma and sums of digammas against scipy, in every dtype, with gradients."""

from __future__ import annotations

import pytest
import torch
from scipy.special import polygamma, psi

from torchcaps.math.special import digamma, sum_of_digammas

X = torch.cat([torch.logspace(-3, 6, 200, dtype=torch.float64), torch.linspace(0.5, 40, 100, dtype=torch.float64)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_digamma_is_that_of_scipy(dtype: torch.dtype, tolerance: float) -> None:
    x = X.to(dtype)
    wanted = torch.from_numpy(psi(x.double().numpy()))
    error = (digamma(x).double() - wanted).abs() / wanted.abs().clamp_min(1)
    assert float(error.max()) < tolerance


def test_its_derivatives_are_polygammas() -> None:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(digamma(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, torch.from_numpy(polygamma(1, X.numpy())), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(second, torch.from_numpy(polygamma(2, X.numpy())), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_the_sum_of_digammas_is_the_sum(count: int, dtype: torch.dtype, tolerance: float) -> None:
    nu = (count + torch.logspace(-1, 5, 50, dtype=torch.float64)).to(dtype)
    wanted = sum(torch.from_numpy(psi(((nu.double() - d) / 2).numpy())) for d in range(count))
    error = (sum_of_digammas(nu, count).double() - wanted).abs() / wanted.abs().clamp_min(1)
    assert float(error.max()) < tolerance * count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([0.01, 1.0, 17.0, 300.0], dtype=dtype)
    assert bool(digamma(x).isfinite().all())
    assert bool(sum_of_digammas(x + 16, 16).isfinite().all())
