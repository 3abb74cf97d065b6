"""Variational Bayes routing is the equations of its public code, and its constants are those of the distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import psi
from torch import Tensor

from support.problems import PROBLEMS, Problem
from support.references import assert_equals_reference, route_stored, stored
from torchcaps.math.grid import Grid
from torchcaps.routing import VB, vb
from torchcaps.testing import variants

choices = st.builds(
    VB,
    iterations=st.integers(1, 4),
    alpha=st.sampled_from([0.1, 1.0, 5.0]),
    kappa=st.sampled_from([0.1, 1.0, 5.0]),
    scatter=st.sampled_from([0.01, 1.0]),
    background=st.sampled_from([-100.0, math.log(1e-11), -3.0]),
    precision=st.sampled_from(["wishart", "gamma"]),
)
size = st.integers(1, 6)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(choices, size, size, size, seeds)
def test_is_its_equations(choice: VB, i: int, j: int, k: int, seed: int) -> None:
    votes = normal(2, i, j, k, seed=seed)
    activation = normal(2, i, seed=seed + 1).sigmoid()
    beta = normal(j, seed=seed + 2)
    assert_equals_reference("vb", votes, activation, choice, 1e-11, scale=10, beta=beta)


@settings(max_examples=30, deadline=None)
@given(choices, st.integers(2, 4), st.integers(2, 4), st.integers(1, 2), st.integers(1, 2), seeds)
def test_is_its_equations_with_a_window(choice: VB, h: int, w: int, stride: int, types: int, seed: int) -> None:
    window = Grid(h, w).window(2, stride)
    votes = normal(2 * window.out.places, 4 * types, 2, 3, seed=seed)
    activation = normal(2, h * w * types, seed=seed + 1).sigmoid()
    beta = normal(2, seed=seed + 2)
    given = (votes, activation, choice, 1e-11)
    assert_equals_reference("vb", *given, scale=10, window=window, types=types, beta=beta)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-11)], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS["vb"], ids=lambda p: p.name.replace(" ", "-"))
def test_is_its_equations_on_known_problems(problem: Problem, dtype: torch.dtype, tolerance: float) -> None:
    problem = problem.to(dtype)
    for choice in variants(VB):
        beta = problem.votes.new_zeros(problem.votes.shape[2])
        given = (problem.votes, problem.activation, choice, tolerance)
        assert_equals_reference("vb", *given, scale=float(problem.votes.abs().max()), beta=beta)


def test_constants_are_those_of_the_wishart_and_of_the_gamma_distribution() -> None:
    """E log det of W(I / B, nu) by its formula, term by term, and D times E log of a gamma distribution."""
    votes = stored(normal(1, 7, 2, 5, seed=0), torch.ones(1, 7, dtype=torch.float64))
    for choice in (VB(precision="wishart"), VB(precision="gamma")):
        state = vb.init(votes, choice)
        nu0 = 6 if choice.precision == "wishart" else 2
        nu = nu0 + 3.5  # seven children, shared by two
        B = nu / state.scale[0, 0].square()  # [j k]
        for j in range(2):
            terms = [psi((nu - d) / 2) if choice.precision == "wishart" else psi(nu / 2) for d in range(5)]
            wanted = sum(terms) + 5 * math.log(2) - float(B[j].log().sum())
            assert float(state.log_volume[0, 0, j]) == pytest.approx(wanted, rel=1e-12)


def test_a_parent_without_support_has_a_short_pose_and_the_priors_variance() -> None:
    V = normal(1, 4, 2, 3, seed=1)
    strong = vb.init(stored(V, torch.ones(1, 4)), VB())
    weak = vb.init(stored(V, torch.full((1, 4), 1e-9)), VB())
    assert weak.mean.abs().max() < 1e-8
    torch.testing.assert_close(weak.scale, torch.full_like(weak.scale, 2.0), rtol=1e-6, atol=0)
    mass = 2.0  # four children, shared by two
    torch.testing.assert_close(strong.mean[0, 0], mass / (1 + mass) * V[0].mean(0))


def test_what_fits_no_parent_goes_to_the_background() -> None:
    V = normal(1, 6, 2, 4, seed=2)
    V[0, 5] = 300.0  # an outlier for both parents
    beta = torch.zeros(2, dtype=torch.float64)
    _, info = route_stored("vb", stored(V, torch.ones(1, 6)), VB(kappa=1e-3), beta=beta)
    shares = info.coupling[-1, 0].sum(-1)
    _, alone = route_stored("vb", stored(V, torch.ones(1, 6)), VB(kappa=1e-3, background=-1e4), beta=beta)
    assert shares[5] < shares[:5].min()
    torch.testing.assert_close(alone.coupling[-1, 0].sum(-1), torch.ones(6, dtype=torch.float64))
