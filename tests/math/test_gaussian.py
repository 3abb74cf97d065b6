"""Axis-aligned Gaussians of weighted votes: against torch.distributions and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import Normal

from torchcaps.math.gaussian import LOG_2PI, diagonal_log_density, weighted_mean, weighted_variance


def random_votes(b: int, i: int, j: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Votes [b i j k] and shares [b i j] that sum to 1 over i, in float64."""
    make = torch.Generator().manual_seed(seed)
    votes = torch.randn(b, i, j, k, generator=make, dtype=torch.float64)
    return votes, torch.randn(b, i, j, generator=make, dtype=torch.float64).softmax(1)


def slow_mean(votes: Tensor, share: Tensor) -> Tensor:
    b, i, j, k = votes.shape
    mean = torch.zeros(b, j, k, dtype=torch.float64)
    for s in range(b):
        for c in range(j):
            for h in range(k):
                mean[s, c, h] = math.fsum(float(share[s, n, c]) * float(votes[s, n, c, h]) for n in range(i))
    return mean


def slow_variance(votes: Tensor, share: Tensor, mean: Tensor) -> Tensor:
    b, i, j, k = votes.shape
    variance = torch.zeros(b, j, k, dtype=torch.float64)
    for s in range(b):
        for c in range(j):
            for h in range(k):
                m = float(mean[s, c, h])
                each = [float(share[s, n, c]) * (float(votes[s, n, c, h]) - m) ** 2 for n in range(i)]
                variance[s, c, h] = math.fsum(each)
    return variance


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 4), (3, 4, 1, 16), (1, 7, 2, 3)])
def test_mean_and_variance_against_loops(shape: tuple[int, int, int, int]) -> None:
    votes, share = random_votes(*shape)
    mean = weighted_mean(votes, share)
    torch.testing.assert_close(mean, slow_mean(votes, share), rtol=1e-12, atol=1e-13)
    variance = weighted_variance(votes, share, mean)
    torch.testing.assert_close(variance, slow_variance(votes, share, mean), rtol=1e-12, atol=1e-13)


def test_the_variance_is_around_the_mean_that_is_given() -> None:
    votes, share = random_votes(2, 5, 3, 4)
    mean = weighted_mean(votes, share)
    moved = weighted_variance(votes, share, mean + 2)
    torch.testing.assert_close(moved, weighted_variance(votes, share, mean) + 4)


def test_equal_shares_give_the_ordinary_mean_and_variance() -> None:
    votes, _ = random_votes(2, 6, 3, 4)
    share = torch.full((2, 6, 3), 1 / 6, dtype=torch.float64)
    mean = weighted_mean(votes, share)
    torch.testing.assert_close(mean, votes.mean(1))
    torch.testing.assert_close(weighted_variance(votes, share, mean), votes.var(1, unbiased=False))


def test_one_vote_that_counts_has_itself_as_mean_and_no_variance() -> None:
    votes, share = random_votes(1, 4, 2, 3)
    share = torch.zeros_like(share)
    share[:, 2] = 1
    mean = weighted_mean(votes, share)
    torch.testing.assert_close(mean, votes[:, 2])
    assert not weighted_variance(votes, share, mean).any()


def test_a_common_offset_of_the_votes_does_not_spoil_the_variance() -> None:
    """sum share (V - mu)^2, not the cancelling sum share V^2 - mu^2."""
    votes, share = random_votes(2, 5, 3, 4)
    far, weight = (votes + 1e4).float(), share.float()
    found = weighted_variance(far, weight, weighted_mean(far, weight))
    wanted = weighted_variance(votes, share, weighted_mean(votes, share))
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=1e-2)


@given(
    b=st.integers(1, 3), i=st.integers(1, 5), j=st.integers(1, 4), k=st.integers(1, 16),
    exponent=st.floats(-6, 6), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_log_density_is_a_sum_of_normals(b: int, i: int, j: int, k: int, exponent: float, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    votes, _ = random_votes(b, i, j, k, seed)
    mean = torch.randn(b, j, k, generator=make, dtype=torch.float64)
    variance = torch.rand(b, j, k, generator=make, dtype=torch.float64).add(0.1) * 10**exponent
    found = diagonal_log_density(votes, mean, variance)
    assert found.shape == (b, i, j)
    for n in range(i):
        wanted = Normal(mean, variance.sqrt()).log_prob(votes[:, n]).sum(-1)  # [b j]
        torch.testing.assert_close(found[:, n], wanted, rtol=1e-10, atol=1e-8)


def test_log_density_against_the_formula_of_procedure_1() -> None:
    """p = exp(-sum_h (V - mu)^2 / (2 sigma^2)) / sqrt(prod_h 2 pi sigma^2), as printed."""
    votes, share = random_votes(2, 3, 2, 4)
    mean = weighted_mean(votes, share)
    variance = weighted_variance(votes, share, mean) + 0.5
    found = diagonal_log_density(votes, mean, variance).exp()
    for s in range(2):
        for n in range(3):
            for c in range(2):
                m, v = mean[s, c].tolist(), variance[s, c].tolist()
                x = votes[s, n, c].tolist()
                top = math.exp(-sum((x[h] - m[h]) ** 2 / (2 * v[h]) for h in range(4)))
                bottom = math.sqrt(math.prod(2 * math.pi * v[h] for h in range(4)))
                assert float(found[s, n, c]) == pytest.approx(top / bottom, rel=1e-10)


def test_a_standard_normal_at_its_mean() -> None:
    one = torch.ones(1, 1, 3, dtype=torch.float64)
    found = float(diagonal_log_density(one.unsqueeze(1), one, one))
    assert found == pytest.approx(-1.5 * math.log(2 * math.pi)) == pytest.approx(-1.5 * LOG_2PI)


def test_the_density_has_mass_1() -> None:
    votes = torch.linspace(-12, 12, 4001, dtype=torch.float64).view(1, -1, 1, 1)
    mean, variance = (torch.full((1, 1, 1), v, dtype=torch.float64) for v in (0.7, 1.9))
    density = diagonal_log_density(votes, mean, variance).exp().flatten()
    assert float(torch.trapezoid(density, votes.flatten())) == pytest.approx(1, abs=1e-6)


def test_votes_far_away_are_unlikely_not_impossible() -> None:
    votes = torch.full((1, 1, 1, 16), 1e6)
    mean, variance = torch.zeros(1, 1, 16), torch.full((1, 1, 16), 5e-4)
    votes.requires_grad_()
    found = diagonal_log_density(votes, mean, variance)
    found.sum().backward()
    assert found.item() == pytest.approx(-0.5 * 16 * 1e12 / 5e-4, rel=1e-3)
    assert votes.grad is not None
    assert bool(votes.grad.isfinite().all())


def test_derivatives() -> None:
    votes, share = random_votes(2, 3, 2, 3)
    mean = weighted_mean(votes, share)
    variance = weighted_variance(votes, share, mean) + 0.1
    inputs = [t.detach().requires_grad_() for t in (votes, share, mean, variance)]
    v, r, m, s = inputs
    for f, x in (
        (weighted_mean, (v, r)),
        (weighted_variance, (v, r, m)),
        (diagonal_log_density, (v, m, s)),
    ):
        assert gradcheck(f, x)
        assert gradgradcheck(f, x)
