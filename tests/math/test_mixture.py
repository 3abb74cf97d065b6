"""Mixtures of Gaussians: the steps by loops, what is found of a known mixture, and samples."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from torchcaps.math.mixture import RIDGE, Mixture, _log_joint, fit_mixture, sample_mixture


def points(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_groups(n: int = 400) -> Tensor:
    """A quarter of the points around (-2, -2, -2), the others around (3, 0, 0), bent differently."""
    left = points(n // 4, 3, 1) @ torch.tensor([[0.5, 0.3, 0], [0, 0.5, 0], [0, 0, 0.1]]).double() - 2
    right = 0.3 * points(n - n // 4, 3, 2) + torch.tensor([3.0, 0, 0]).double()
    return torch.cat([left, right])


def density(x: list[float], mixture: Mixture) -> float:
    """p(x) by the formula, one component after another."""
    total = 0.0
    for w, mu, root in zip(mixture.weight, mixture.mean, mixture.root, strict=True):
        C = root @ root.T
        away = torch.tensor(x).double() - mu
        power = float(away @ torch.linalg.inv(C) @ away)
        total += float(w) * math.exp(-power / 2) / math.sqrt((2 * math.pi) ** len(x) * float(torch.linalg.det(C)))
    return total


def test_the_e_step_weighs_each_component_as_the_formula_does() -> None:
    """log of the sum over components of w_c N(x_n; mu_c, C_c) [n], with weights that are not equal."""
    x = two_groups(40)
    mixture = fit_mixture(x, 2)
    assert float(mixture.weight.max()) > 0.7
    wanted = torch.tensor([math.log(density(row, mixture)) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(_log_joint(mixture, x).logsumexp(-1), wanted, rtol=1e-5, atol=1e-5)


def test_one_component_is_the_mean_and_the_covariance_with_a_ridge() -> None:
    x = two_groups()
    mixture = fit_mixture(x, 1)
    torch.testing.assert_close(mixture.mean[0], x.mean(0))
    wanted = torch.cov(x.T, correction=0) + RIDGE * torch.diag(x.var(0, correction=0))
    torch.testing.assert_close(mixture.root[0] @ mixture.root[0].T, wanted)


def test_two_groups_are_found_as_scikit_learn_finds_them() -> None:
    x = two_groups()
    mixture = fit_mixture(x, 2, seed=3)
    order = mixture.weight.argsort()
    torch.testing.assert_close(mixture.weight[order], torch.tensor([0.25, 0.75]).double(), atol=1e-3, rtol=0)
    unit = (x - x.mean(0)) / x.std(0, correction=0)
    other = GaussianMixture(2, reg_covar=RIDGE, tol=1e-8, random_state=0).fit(unit.numpy())
    # The likelihood of points in their own units, not of units of their deviation
    wanted = other.score(unit.numpy()) - float(x.std(0, correction=0).log().sum())
    found = sum(math.log(density(row, mixture)) for row in x.tolist()) / len(x)
    assert found == pytest.approx(wanted, abs=1e-3)


def test_samples_have_the_moments_of_the_points_and_each_depends_on_its_own_number_alone() -> None:
    x = two_groups(4000)
    mixture = fit_mixture(x, 2)
    drawn = sample_mixture(mixture, 5, 1, torch.arange(40_000))
    torch.testing.assert_close(drawn.mean(0), x.mean(0), atol=0.04, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), torch.cov(x.T), atol=0.12, rtol=0)
    assert torch.equal(sample_mixture(mixture, 5, 1, torch.tensor([7])), drawn[7:8])
    assert not torch.equal(sample_mixture(mixture, 6, 1, torch.tensor([7])), drawn[7:8])


@pytest.mark.parametrize(("n", "count"), [(1, 1), (11, 1), (24, 2), (1000, 8)])
def test_few_points_have_few_components(n: int, count: int) -> None:
    assert len(fit_mixture(points(n, 6)).weight) == count


@pytest.mark.parametrize("x", [torch.ones(1, 4), torch.ones(90, 3), torch.cat([points(80, 2), torch.ones(80, 1)], 1)])
def test_numbers_that_never_vary_do_not_in_samples(x: Tensor) -> None:
    mixture = fit_mixture(x)
    drawn = sample_mixture(mixture, 0, torch.arange(50))
    assert bool(drawn.isfinite().all()) and torch.equal(drawn[:, -1], torch.ones(50).double())


def test_points_that_are_all_in_a_few_places_leave_components_without_points_finite() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double().repeat(60, 1)
    mixture = fit_mixture(x, 8)
    assert bool(mixture.root.isfinite().all()) and float(mixture.weight.sum()) == pytest.approx(1)
    near = (sample_mixture(mixture, 0, torch.arange(100)).unsqueeze(1) - x[:2]).norm(dim=-1).amin(1)
    assert float(near.max()) < 0.5
