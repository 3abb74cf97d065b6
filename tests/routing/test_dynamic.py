"""Dynamic routing is procedure 1 of Sabour 2017, and with `cosine` section 2.2 of Hauser 2019."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.problems import PROBLEMS, Problem
from support.references import agree, assert_equals_reference, route_stored, stored
from torchcaps.math.grid import Grid
from torchcaps.math.squash import cosine, squash
from torchcaps.routing import Dynamic, dynamic
from torchcaps.testing import variants
from torchcaps.types import Capsules, RoutingInfo

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Five iterations of cosines multiply what float32 rounds; float64 shows that nothing else differs."""
dtypes = st.sampled_from(list(TOLERANCE))
choices = st.builds(replace, st.sampled_from(variants(Dynamic)), iterations=st.integers(1, 5))
size = st.integers(1, 6)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(votes: Tensor, choice: Dynamic, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
    return route_stored("dynamic", stored(votes, torch.ones(votes.shape[:2])), choice, trace)


# --- It is the procedure ----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(choices, dtypes, size, size, size, seeds)
def test_is_the_procedure(choice: Dynamic, dtype: torch.dtype, i: int, j: int, k: int, seed: int) -> None:
    votes = normal(2, i, j, k, seed=seed, dtype=dtype)
    assert_equals_reference("dynamic", votes, torch.ones(2, i), choice, TOLERANCE[dtype], scale=1)


@settings(max_examples=40, deadline=None)
@given(choices, dtypes, st.integers(2, 4), st.integers(2, 4), st.integers(1, 2), st.integers(1, 2), seeds)
def test_is_the_procedure_with_a_window(
    choice: Dynamic, dtype: torch.dtype, h: int, w: int, stride: int, types: int, seed: int
) -> None:
    window = Grid(h, w).window(2, stride)
    votes = normal(2 * window.out.places, 4 * types, 2, 3, seed=seed, dtype=dtype)
    assert_equals_reference(
        "dynamic",
        votes,
        torch.ones(2, window.grid.places * types),
        choice,
        TOLERANCE[dtype],
        scale=1,
        window=window,
        types=types,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS["dynamic"], ids=lambda p: p.name.replace(" ", "-"))
def test_is_the_procedure_on_known_problems(problem: Problem, dtype: torch.dtype) -> None:
    problem = problem.to(dtype)
    for choice in variants(Dynamic):
        assert_equals_reference("dynamic", problem.votes, problem.activation, choice, TOLERANCE[dtype])


def test_two_iterations_by_hand() -> None:
    votes = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]], dtype=torch.float64)  # one child, two parents
    parents, info = run(votes, Dynamic(iterations=2))
    c = 1 / (1 + math.exp(-0.2))  # after s = .5, |v| = .25 / 1.25 = .2
    assert info.coupling.flatten().tolist() == pytest.approx([c, 1 - c], rel=1e-14)
    assert parents.activation.flatten().tolist() == pytest.approx([c * c / (1 + c * c), 0], rel=1e-14)


# --- What follows from it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", variants(Dynamic), ids=str)
def test_one_iteration_is_uniform(choice: Dynamic) -> None:
    votes = normal(2, 4, 5, 3, seed=0)
    parents, info = run(votes, replace(choice, iterations=1))
    share = 1 / 5 if choice.over == "parents" else 1 / 4
    torch.testing.assert_close(info.coupling, torch.full((1, 2, 4, 5), share, dtype=torch.float64))
    torch.testing.assert_close(parents.pose, squash(share * votes.sum(1)))


@settings(max_examples=30, deadline=None)
@given(choices, size, size, st.integers(2, 5), seeds)
def test_turned_votes_give_turned_parents(choice: Dynamic, i: int, j: int, k: int, seed: int) -> None:
    votes = normal(1, i, j, k, seed=seed)
    Q = torch.linalg.qr(normal(k, k, seed=seed + 1)).Q
    (parents, info), (turned, same) = run(votes, choice), run(votes @ Q, choice)
    torch.testing.assert_close(turned.pose, parents.pose @ Q)
    torch.testing.assert_close(turned.activation, parents.activation)
    torch.testing.assert_close(same.coupling, info.coupling)


def test_with_cosine_squashing_can_happen_outside_the_loop() -> None:
    votes, total = normal(2, 4, 3, 5, seed=3), normal(2, 3, 5, seed=4)
    inside = cosine(votes, squash(total).unsqueeze(1))
    found = dynamic.agreement(stored(votes, torch.ones(2, 4)), total.unsqueeze(1), Dynamic(agreement="cosine"))
    torch.testing.assert_close(found.squeeze(1), inside)


def test_more_iterations_decide_more() -> None:
    votes = PROBLEMS["dynamic"][2].votes  # two clusters
    entropies = [run(votes, Dynamic(iterations=t))[1].entropy.mean().item() for t in (1, 2, 3, 4)]
    assert entropies[0] == pytest.approx(math.log(2))
    assert entropies == sorted(entropies, reverse=True)


def test_the_childs_activation_is_in_its_votes_already() -> None:
    votes = normal(2, 4, 3, 5, seed=5)
    on, _ = route_stored("dynamic", stored(votes, torch.ones(2, 4)), Dynamic())
    off, _ = route_stored("dynamic", stored(votes, torch.zeros(2, 4)), Dynamic())
    assert torch.equal(on.pose, off.pose)


# --- The record and the gradient ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dot", "cosine"])
def test_the_record_holds_each_iterations_mean_agreement(how: Literal["dot", "cosine"]) -> None:
    votes = normal(1, 4, 3, 5, seed=6)
    _, info = run(votes, Dynamic(iterations=3, agreement=how), trace=True)
    assert info.agreement is not None
    for t in range(3):
        parents, alone = run(votes, Dynamic(iterations=t + 1, agreement=how))
        torch.testing.assert_close(info.coupling[t], alone.coupling[0])
        for j in range(3):
            c, v = alone.coupling[0, 0, :, j].tolist(), parents.pose[0, j].tolist()
            each = [agree(votes[0, i, j].tolist(), v, how) for i in range(4)]
            wanted = sum(x * y for x, y in zip(c, each, strict=True)) / sum(c)
            assert info.agreement[t, 0, j].item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("over", ["parents", "children"])
def test_gradient_of_the_last_iteration_takes_the_coupling_as_constant(
    over: Literal["parents", "children"],
) -> None:
    votes = normal(2, 4, 3, 5, seed=7).requires_grad_()
    weight = normal(2, 3, 5, seed=8)
    every, info = run(votes, Dynamic(over=over))
    last, _ = run(votes, Dynamic(over=over, gradient="last"))
    fixed = squash(torch.einsum("bij,bijk->bjk", info.coupling[-1], votes))
    (wanted,) = torch.autograd.grad((fixed * weight).sum(), votes)
    (came,) = torch.autograd.grad((last.pose * weight).sum(), votes)
    (through,) = torch.autograd.grad((every.pose * weight).sum(), votes)
    torch.testing.assert_close(last.pose, every.pose)
    torch.testing.assert_close(came, wanted)
    assert (through - wanted).abs().max() > 1e-3
