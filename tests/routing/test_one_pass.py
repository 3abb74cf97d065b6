"""The routers that take one pass: attention (Mazzia 2021), and uniform coupling, the control."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.problems import PROBLEMS, Problem
from support.references import assert_equals_reference, route_stored, stored
from torchcaps.layers import ClassCapsules, ConvCapsules, DenseCapsules
from torchcaps.math.grid import Grid
from torchcaps.math.squash import squash_exponential
from torchcaps.routing import Attention, Dynamic, Uniform
from torchcaps.types import Capsules

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
dtypes = st.sampled_from(list(TOLERANCE))
size = st.integers(1, 6)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0.5, 1.0, 3.0]), dtypes, size, size, size, seeds)
def test_attention_is_its_equations(sharpness: float, dtype: torch.dtype, i: int, j: int, k: int, seed: int) -> None:
    votes = 0.5 * normal(2, i, j, k, seed=seed, dtype=dtype)
    prior = normal(i, j, seed=seed + 1, dtype=dtype)
    given = (votes, torch.ones(2, i), Attention(sharpness))
    assert_equals_reference("attention", *given, 20 * TOLERANCE[dtype], prior=prior)


@pytest.mark.parametrize(("router", "choice"), [("attention", Attention()), ("uniform", Uniform())])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_both_are_their_equations_in_windows_and_on_known_problems(
    router: str, choice: Attention | Uniform, dtype: torch.dtype
) -> None:
    window = Grid(3, 4).window(2, 1)
    votes = 0.3 * normal(2 * window.out.places, 8, 3, 4, seed=0, dtype=dtype)
    learned = {"prior": normal(8, 3, seed=1, dtype=dtype)} if router == "attention" else {}
    assert_equals_reference(
        router, votes, torch.ones(2, 24), choice, 20 * TOLERANCE[dtype], window=window, types=2, **learned
    )
    for problem in PROBLEMS[router]:
        assert_solved(router, choice, problem.to(dtype), 20 * TOLERANCE[dtype])


def assert_solved(router: str, choice: Attention | Uniform, problem: Problem, tolerance: float) -> None:
    shape = problem.votes.shape
    learned = {"prior": problem.votes.new_zeros(shape[1:3])} if router == "attention" else {}
    assert_equals_reference(router, problem.votes, problem.activation, choice, tolerance, **learned)


def test_no_pair_of_children_is_formed_but_all_pairs_count() -> None:
    """The agreement is the sum over all pairs of votes, as the paper writes it, not only with the mean."""
    votes = normal(2, 6, 3, 4, seed=2)
    prior = normal(6, 3, seed=3)
    parents, info = route_stored("attention", stored(votes, torch.ones(2, 6)), Attention(), prior=prior)
    pairs = torch.einsum("bijk,bmjk->bijm", votes, votes).sum(-1) / 2
    share = pairs.softmax(-1)
    torch.testing.assert_close(info.coupling[0], share)
    total = torch.einsum("bij,bijk->bjk", share + prior, votes)
    torch.testing.assert_close(parents.pose, squash_exponential(total))


def test_uniform_routing_is_dynamic_routing_that_stops_after_one_iteration() -> None:
    window = Grid(3, 3).window(2, 1)
    given = stored(normal(8, 8, 3, 4, seed=4), torch.ones(2, 18), window, 2)
    plain, info = route_stored("uniform", given, Uniform())
    stopped, its = route_stored("dynamic", given, Dynamic(iterations=1))
    torch.testing.assert_close(plain, stopped)
    torch.testing.assert_close(info.coupling, its.coupling)


@pytest.mark.parametrize("layer", ["dense", "conv", "class"])
def test_layers_own_the_prior_that_attention_learns(layer: str) -> None:
    torch.manual_seed(0)
    grid = Grid(3, 3)
    choice = Attention()
    made = {
        "dense": lambda: DenseCapsules(18, 3, 16, 5, routing=choice),
        "conv": lambda: ConvCapsules(grid, 2, 3, kernel=2, routing=choice),
        "class": lambda: ClassCapsules(grid, 2, 3, routing=choice),
    }[layer]()
    assert made.coupling_bias["prior"].shape == made.W.shape[:2]
    children = Capsules(torch.randn(2, 3, 3, 2, 16), torch.rand(2, 3, 3, 2))
    before, _ = made(children)
    before.pose.sum().backward()
    assert made.coupling_bias["prior"].grad.abs().sum() > 0
    with torch.no_grad():
        made.coupling_bias["prior"] += 1
    assert not torch.allclose(made(children)[0].pose, before.pose)
    again = type(made).__new__(type(made))
    again.__dict__ = made.__dict__
    again.load_state_dict(made.state_dict())
