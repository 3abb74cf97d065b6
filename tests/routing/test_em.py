"""EM routing is procedure 1 of Hinton 2018, and its steps are those of a mixture of Gaussians where they should be."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from support.problems import PROBLEMS, Problem
from support.references import assert_equals_reference, route_stored, stored
from torchcaps.kernels.votes import DenseVotes
from torchcaps.math.grid import Grid, Window
from torchcaps.routing import EM, em
from torchcaps.testing import variants
from torchcaps.types import Capsules, RoutingInfo

share = st.sampled_from([0.0, 0.1, 0.5, 1.0])
choices = st.builds(
    EM,
    iterations=st.integers(1, 5),
    final_inverse_temperature=st.sampled_from([0.01, 0.1, 1.0]),
    decay=st.sampled_from([0.0, 0.5, 0.95]),
    min_variance=st.sampled_from([5e-4, 1e-2]),
    damping=share,
    assignment=st.sampled_from(["paper", "descent"]),
    competition=st.sampled_from(["all", "positions"]),
    switch=st.sampled_from(["cost", "mixing"]),
)
size = st.integers(1, 6)
seeds = st.integers(0, 10_000)


class Case(NamedTuple):
    """A problem with its votes [(b p) i j k] and activations [b n] in sight."""

    votes: Tensor
    activation: Tensor
    beta_a: Tensor
    beta_u: Tensor
    settings: EM
    window: Window | None = None
    types: int = 1

    @property
    def problem(self) -> em.Problem:
        """As the router's steps take it."""
        given = stored(self.votes, self.activation, self.window, self.types)
        return em.Problem(given, self.beta_a, self.beta_u, self.settings)


def case(b: int, i: int, j: int, k: int, seed: int, choice: EM | None = None) -> Case:
    """Votes, activations and learned scalars at random, in float64 but exact in float32."""
    make = torch.Generator().manual_seed(seed)
    votes, activation = torch.randn(b, i, j, k, generator=make), torch.rand(b, i, generator=make)
    beta_a, beta_u = torch.randn(2, j, generator=make).double()
    return Case(votes.double(), activation.double(), beta_a, beta_u, choice or EM())


def case_in_windows(window: Window, types: int, j: int, k: int, seed: int, choice: EM) -> Case:
    """Two images; a child is as active for all windows that hold it."""
    make = torch.Generator().manual_seed(seed)
    below = torch.rand(2, window.grid.places * types, generator=make, dtype=torch.float64)
    alone = case(2 * window.out.places, window.kernel**2 * types, j, k, seed, choice)
    return alone._replace(activation=below, window=window, types=types)


def run(given: Case, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
    votes = given.problem.votes
    assert isinstance(votes, DenseVotes)
    return route_stored("em", votes, given.settings, trace, beta_a=given.beta_a, beta_u=given.beta_u)


def assert_is_procedure(given: Case, tolerance: float, scale: float | None = None) -> None:
    assert_equals_reference(
        "em",
        given.votes,
        given.activation,
        given.settings,
        tolerance,
        scale=float(given.votes.abs().max()) if scale is None else scale,
        window=given.window,
        types=given.types,
        beta_a=given.beta_a,
        beta_u=given.beta_u,
    )


# --- It is the procedure ----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(choices, size, size, size, seeds)
def test_is_the_procedure(choice: EM, i: int, j: int, k: int, seed: int) -> None:
    assert_is_procedure(case(2, i, j, k, seed, choice), 1e-12)


@settings(max_examples=40, deadline=None)
@given(choices, st.integers(2, 4), st.integers(2, 4), st.integers(1, 2), st.integers(1, 2), seeds)
def test_is_the_procedure_with_a_window(choice: EM, h: int, w: int, stride: int, types: int, seed: int) -> None:
    window = Grid(h, w).window(2, stride)
    assert_is_procedure(case_in_windows(window, types, 2, 3, seed, choice), 1e-12)


@pytest.mark.parametrize("choice", variants(EM), ids=lambda c: f"{c.assignment}-{c.competition}-{c.switch}")
def test_is_the_procedure_in_float32(choice: EM) -> None:
    """More children than parents; else variances are tiny, densities huge, and their rounding shows in the shares."""
    for seed in range(50):
        votes, activation, beta_a, beta_u, *_ = case(2, 8, 3, 4, seed, choice)
        single = Case(votes.float(), activation.float(), beta_a.float(), beta_u.float(), choice)
        assert_is_procedure(single, 1e-6, scale=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS["em"], ids=lambda p: p.name.replace(" ", "-"))
def test_is_the_procedure_on_known_problems(problem: Problem, dtype: torch.dtype, tolerance: float) -> None:
    problem = problem.to(dtype)
    zero = problem.votes.new_zeros(problem.votes.shape[2])
    for choice in variants(EM):
        given = Case(problem.votes, problem.activation, zero, zero, choice)
        assert_is_procedure(given, tolerance)


def test_one_iteration_by_hand() -> None:
    votes = torch.tensor([-1.0, 1.0], dtype=torch.float64).view(1, 2, 1, 1)  # two children, one parent
    beta_a, beta_u = torch.tensor([[3.0], [0.25]], dtype=torch.float64)
    choice = EM(iterations=1, final_inverse_temperature=0.5, decay=0, min_variance=0.5)
    activation = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    parents, _ = run(Case(votes, activation, beta_a, beta_u, choice))
    mu, mass = -1 / 3, 1.5
    variance = (1 * (-1 - mu) ** 2 + 0.5 * (1 - mu) ** 2) / mass + 0.5
    logit = 0.5 * (3 - (0.25 + math.log(variance) / 2) * mass)
    assert parents.pose.item() == pytest.approx(mu, rel=1e-14)
    assert parents.activation.item() == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-14)


def test_mixing_proportions_sum_to_1_over_the_layer_and_follow_the_assigned_activation() -> None:
    """Section 5, for a window: the parents of all its positions are one layer."""
    window = Grid(3, 3).window(2, 1)
    problem = case_in_windows(window, 2, 3, 4, 0, EM(switch="mixing"))
    parents, info = run(problem, trace=True)
    seen = problem.activation[:, problem.problem.votes.slots.child].flatten(0, 1)  # [(b p) i]
    mass = torch.einsum("xij,xi->xj", info.coupling[-1], seen).view(2, 4, 3)  # [b p j]
    on = parents.activation.view(2, 4, 3)
    for image in range(2):
        total = sum(float(m) for m in mass[image].flatten())
        assert float(on[image].sum()) == pytest.approx(1, abs=1e-12)
        torch.testing.assert_close(on[image], mass[image] / total)
    assert info.free_energy is None and info.agreement is not None
    again, _ = run(problem._replace(beta_a=problem.beta_a + 5, beta_u=problem.beta_u - 3))
    assert torch.equal(again.activation, parents.activation)  # nothing is learned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_parent_has_all_of_the_mixture(dtype: torch.dtype) -> None:
    votes, on = torch.randn(2, 3, 1, 4, dtype=dtype).requires_grad_(), torch.rand(2, 3, dtype=dtype).requires_grad_()
    zero = torch.zeros(1, dtype=dtype)
    parents, _ = run(Case(votes, on, zero, zero, EM(switch="mixing")))
    assert torch.equal(parents.activation, torch.ones_like(parents.activation))
    slopes = torch.autograd.grad(parents.activation.sum() + parents.pose.sum(), (votes, on))
    assert all(bool(slope.isfinite().all()) for slope in slopes)


def test_inverse_temperature_rises_as_the_authors_have_it() -> None:
    came = [em.inverse_temperature(EM(), t) for t in range(3)]
    assert came == pytest.approx([0.01 * 0.05, 0.01 * 0.0975, 0.01 * 0.142625], rel=1e-12)
    assert [em.inverse_temperature(EM(final_inverse_temperature=2, decay=0), t) for t in range(3)] == [
        2,
        2,
        2,
    ]


# --- It is a mixture of Gaussians where it should be ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_those_of_scikit_learn(seed: int) -> None:
    """All parents see the same points, every child is on, and a_j plays the mixing proportions."""
    i, j, k, floor = 40, 3, 4, 1e-3
    make = torch.Generator().manual_seed(seed)
    X = torch.randn(i, k, generator=make, dtype=torch.float64)
    means, variances = (
        torch.randn(j, k, generator=make).double(),
        torch.rand(j, k, generator=make).double() + 0.2,
    )
    w = torch.rand(j, generator=make, dtype=torch.float64)
    w = w / w.sum()
    mixture = GaussianMixture(
        j,
        covariance_type="diag",
        reg_covar=floor,
        max_iter=1,
        weights_init=w.numpy(),
        means_init=means.numpy(),
        precisions_init=variances.reciprocal().numpy(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration is what is wanted
        mixture.fit(X.numpy())

    zero, votes = torch.zeros(j, dtype=torch.float64), X[None, :, None].expand(1, i, j, k)
    on = torch.ones(1, i, dtype=torch.float64)
    problem = Case(votes, on, zero, zero, EM(min_variance=floor)).problem

    def assigned(mean: Tensor, variance: Tensor, proportion: Tensor) -> Tensor:
        state = em.State(votes[:, None, ..., 0], mean[None, None], variance[None, None], proportion.logit()[None, None])
        return em.e_step(problem, state)

    log_share = assigned(means, variances, w)
    state = em.m_step(problem, log_share, 0.0, 1.0)
    mean, variance = state.mean[0, 0], state.variance[0, 0]
    torch.testing.assert_close(mean, torch.from_numpy(mixture.means_), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, torch.from_numpy(mixture.covariances_), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_share[0, 0].exp().mean(0), torch.from_numpy(mixture.weights_), rtol=1e-12, atol=0)

    again = assigned(mean, variance, torch.from_numpy(mixture.weights_)).exp()
    torch.testing.assert_close(again[0, 0], torch.from_numpy(mixture.predict_proba(X.numpy())), rtol=1e-9, atol=1e-12)


def test_density_is_the_product_of_normal_densities() -> None:
    given = case(2, 5, 3, 4, seed=0)
    state = em.init(given.problem)  # [b 1 j k]
    log_p = normal_log_density(given.votes, state.mean, state.variance).sum(-1)
    wanted = (log_p + state.logit.sigmoid().log()).log_softmax(-1)
    torch.testing.assert_close(em.e_step(given.problem, state).squeeze(1), wanted)


def normal_log_density(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    density = torch.exp(-((x - mean) ** 2) / (2 * variance)) / torch.sqrt(2 * torch.pi * variance)
    return density.log()


# --- What follows from it -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(choices, size, size, size, seeds)
def test_shifted_votes_give_shifted_parents(choice: EM, i: int, j: int, k: int, seed: int) -> None:
    problem = case(1, i, j, k, seed, replace(choice, damping=0.0))
    shift = torch.linspace(-1, 1, j * k, dtype=torch.float64).view(j, k)  # each parent in its own coordinates
    (parents, info), (moved, same) = run(problem), run(problem._replace(votes=problem.votes + shift))
    torch.testing.assert_close(moved.pose, parents.pose + shift, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(moved.activation, parents.activation, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(same.coupling, info.coupling, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("damping", [0.0, 0.1, 0.75, 1.0])
def test_damping_keeps_a_part_of_the_previous_mean(damping: float) -> None:
    problem = case(2, 5, 1, 4, seed=1)  # one parent: the shares stay 1, and so does what it averages
    a = problem.activation
    mean = torch.einsum("bi,bijk->bjk", a, problem.votes) / a.sum(1)[:, None, None]
    for t in (1, 2, 5):
        parents, _ = run(problem._replace(settings=EM(iterations=t, damping=damping)))
        torch.testing.assert_close(parents.pose, (1 - damping**t) * mean)


def test_without_rivals_at_one_place_nobody_shares() -> None:
    problem = case(2, 5, 3, 4, 2, EM(competition="positions"))
    parents, info = run(problem)
    assert torch.equal(info.coupling, torch.ones_like(info.coupling))
    a = problem.activation
    mean = torch.einsum("bi,bijk->bjk", a, problem.votes) / a.sum(1)[:, None, None]
    torch.testing.assert_close(parents.pose, mean)


def test_half_the_activation_is_half_the_mass() -> None:
    """Halving all a_i leaves the Gaussians and halves the cost: logit - lambda beta_a is halved."""
    problem = case(2, 5, 3, 4, 3, EM(iterations=1))
    whole, half = (run(problem._replace(activation=problem.activation / n))[0] for n in (1, 2))
    at_rest = em.inverse_temperature(problem.settings, 0) * problem.beta_a
    torch.testing.assert_close(half.pose, whole.pose)
    torch.testing.assert_close(2 * (half.activation.logit() - at_rest), whole.activation.logit() - at_rest)


def test_the_record_holds_each_iterations_mean_log_density() -> None:
    problem = case(1, 5, 3, 4, seed=4)
    _, info = run(problem, trace=True)
    assert info.agreement is not None
    for t in range(3):
        parents, alone = run(problem._replace(settings=EM(iterations=t + 1)))
        torch.testing.assert_close(info.coupling[t], alone.coupling[0])
        for j in range(3):
            votes, mu = problem.votes[0, :, j], parents.pose[0, j]  # [i k], [k]
            w = alone.coupling[0, 0, :, j] * problem.activation[0]
            w = (w / w.sum()).unsqueeze(-1)  # [i 1]
            variance = (w * (votes - mu) ** 2).sum(0) + 5e-4
            wanted = (w * normal_log_density(votes, mu, variance)).sum()
            torch.testing.assert_close(info.agreement[t, 0, j], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_child_that_is_off_never_outweighs_one_that_is_on(dtype: torch.dtype) -> None:
    """Not even where the active child's share of the parent is far below what the type can hold as a number."""
    votes = torch.tensor([[[[5.0]], [[-3.0]]]], dtype=dtype)  # [b i j k]
    given = Case(votes, torch.tensor([[1.0, 0.0]], dtype=dtype), votes.new_zeros(1), votes.new_zeros(1), EM())
    log_share = torch.tensor([[[[-500.0], [0.0]]]], dtype=dtype)
    state = em.m_step(given.problem, log_share, 0.0, 0.01)
    assert float(state.mean) == pytest.approx(5.0)
