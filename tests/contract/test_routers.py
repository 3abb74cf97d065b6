"""Every router in ROUTERS keeps the contract, in every combination of its Literal settings.

The test walks the registry: a router that is added there and not to the tables of problems.py, references.py and
`COMPETITION` below fails here, so that forgetting to test it is not possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.problems import PROBLEMS, Problem
from support.references import REFERENCES, route_stored, stored
from torchcaps.errors import RecipeError
from torchcaps.kernels.votes import DenseVotes, Slots, Votes
from torchcaps.math.squash import norm, squash
from torchcaps.routing import ROUTERS, Router
from torchcaps.routing.base import stack_info
from torchcaps.testing import Over, assert_finite, assert_router, variants
from torchcaps.types import Capsules, RoutingInfo

COMPETITION: dict[str, Callable[[Any], Over]] = {
    "dynamic": lambda settings: settings.over,
    "em": lambda settings: "parents" if settings.competition == "all" else "positions",
    "vb": lambda settings: "background",
    "attention": lambda settings: "parents",
    "uniform": lambda settings: "parents",
}


def kind_of(name: str, settings: Any) -> str:
    """The competition that a problem of known answer needs; a background class takes nothing there."""
    return COMPETITION[name](settings).replace("background", "parents")


EVERY = [(name, settings) for name, router in ROUTERS.items() for settings in variants(router.settings)]
SOLVED = [
    (name, settings, problem)
    for name, settings in EVERY
    for problem in PROBLEMS.get(name, ())
    if kind_of(name, settings) in problem.needs and getattr(settings, "switch", "cost") == "cost"
]
"""A mixing proportion says how much a parent has, not how well it agrees: the answers are those of switches by cost."""


def label(value: object) -> str:
    if isinstance(value, Problem):
        return value.name.replace(" ", "-")
    if isinstance(value, str):
        return value
    return "-".join(v for v in vars(value).values() if isinstance(v, str))


# --- Nothing is forgotten -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_is_tested(name: str) -> None:
    assert PROBLEMS.get(name), f"router '{name}' has no problems of known answer: add it to tests/problems.py"
    assert name in REFERENCES, f"router '{name}' has no loop-only reference: add it to tests/references.py"
    assert name in COMPETITION, f"router '{name}' does not say over what its coupling sums to 1"


def test_nothing_is_tested_that_does_not_exist() -> None:
    assert set(PROBLEMS) == set(REFERENCES) == set(COMPETITION) == set(ROUTERS)


@pytest.mark.parametrize("name", ROUTERS)
def test_settings_have_defaults_and_a_type_of_their_own(name: str) -> None:
    settings = ROUTERS[name].settings
    assert settings() == settings()
    assert [r.settings for r in ROUTERS.values()].count(settings) == 1


# --- The contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "settings"), EVERY, ids=label)
def test_contract(name: str, settings: Any, dtype: torch.dtype) -> None:
    exact = getattr(settings, "gradient", "all") == "all"  # "last" holds the coupling constant on purpose
    assert_router(name, settings, dtype=dtype, over=COMPETITION[name](settings), differentiable=exact)


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("name", [name for name in ROUTERS if hasattr(ROUTERS[name].settings, "iterations")])
def test_contract_at_other_iterations(name: str, iterations: int) -> None:
    settings = ROUTERS[name].settings(iterations=iterations)
    assert_router(name, settings, dtype=torch.float32, over=COMPETITION[name](settings), seed=iterations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "settings", "problem"), SOLVED, ids=label)
def test_known_answers(name: str, settings: Any, problem: Problem, dtype: torch.dtype) -> None:
    problem = problem.to(dtype)
    initial = ROUTERS[name].initial(*problem.votes.shape[1:3])
    learned = {key: value.to(dtype) for key, value in initial.items()}
    given = stored(problem.votes, problem.activation)
    parents, info = route_stored(name, given, settings, trace=True, **learned)
    assert_finite((parents, info))
    problem.expect(parents, info)


# --- The instruments themselves: each law must catch the router that breaks it -----------------------------------


@dataclass(frozen=True)
class Mean:
    iterations: int = 1


def fair(votes: Votes, settings: Mean, trace: bool) -> tuple[Capsules, RoutingInfo]:
    """The simplest router that keeps the contract: equal coupling."""
    c = votes.compete(votes.new_pairs(0.0)).exp()
    pose = squash(votes.total(c))
    parents = Capsules(pose, norm(pose))
    if not trace:
        return parents, stack_info([RoutingInfo(c)])
    return parents, stack_info([RoutingInfo(c, parents=parents)] * settings.iterations)


def spoiled(votes: Votes, how: str) -> Votes:
    """Stored votes that are not what they were; those of other kinds stay."""
    if not isinstance(votes, DenseVotes):
        return votes
    V, activation, slots = votes.votes, votes.activation, votes.slots
    match how:
        case "in place":
            activation.clamp_(max=0.25)
        case "children":
            V = V * torch.arange(1, V.shape[2] + 1).to(V)[:, None, None]
        case "parents":
            V = V * torch.arange(1, V.shape[3] + 1).to(V)[:, None]
        case "batch":
            V = V - V.mean(0, keepdim=True)
        case "gradient":
            V = V.detach() + 0.5 * (V - V.detach())
        case "window":  # every child of every window is taken for another one
            slots = Slots(torch.arange(slots.child.numel()).view_as(slots.child), slots.child.numel())
            activation = activation.new_ones(len(activation), slots.children)
        case "kinds":
            V = V - 0.5
    return DenseVotes(V, activation, slots)


def broken(how: str) -> Callable[..., tuple[Capsules, RoutingInfo]]:
    """`fair` with one law broken."""
    calls: list[int] = []

    def route(votes: Votes, settings: Mean, trace: bool) -> tuple[Capsules, RoutingInfo]:
        (pose, a), info = fair(spoiled(votes, how), settings, trace)
        calls.append(1)
        match how:
            case "shape":
                pose = pose.flatten(1)
            case "dtype":
                a = a.float()
            case "nan":
                a = a * torch.nan
            case "range":
                a = a + 1
            case "negative":
                info = replace(info, coupling=-info.coupling)
            case "sum":
                info = replace(info, coupling=info.coupling / 2)
            case "record":
                info = replace(info, coupling=info.coupling + 0 * votes.total(votes.new_pairs(1.0)).sum())
            case "random":
                a = a / (1 + len(calls))
            case "trace":
                a = a / 2 if trace else a
            case "iterations":
                info = replace(info, coupling=info.coupling.repeat(2, 1, 1, 1, 1) if trace else info.coupling)
            case "no parents":
                info = replace(info, parents=None)
            case "always parents":
                info = replace(info, parents=Capsules(pose.detach()[None], a.detach()[None]))
            case "last parents" if info.parents is not None:
                info = replace(info, parents=info.parents._replace(pose=2 * info.parents.pose))
            case "early parents" if info.parents is not None:
                info.parents.activation[0] *= 0.5
        return Capsules(pose, a), info

    return route


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_fair_router_passes_unregistered(iterations: int) -> None:
    assert_router(Router(Mean, fair), Mean(iterations))


@pytest.mark.parametrize(
    ("how", "law"),
    [
        ("in place", "changed in place"),
        ("children", "order of the children"),
        ("parents", "another order"),
        ("batch", "depends on its batch"),
        ("window", "with a window"),
        ("gradient", "the gradient is not"),
        ("kinds", "ChunkedVotes give other results than stored votes"),
        ("shape", r"parents.pose has shape \[3, 12\]; \[3, 1, 3, 4\] is wanted"),
        ("dtype", "parents.activation is torch.float32 for votes of torch.float64"),
        ("nan", "not finite|differ"),
        ("range", "parents.activation runs from"),
        ("negative", "negative"),
        ("sum", "does not sum to 1 over parents"),
        ("record", "info.coupling is not detached"),
        ("random", "two runs on the same input differ"),
        ("trace", "trace=True changes the parents|differ"),
        ("iterations", "trace=True has shape"),
        ("no parents", "info.parents is missing with trace=True"),
        ("always parents", "info.parents is there without trace=True"),
        ("last parents", "the last of info.parents is not what the router returned"),
        ("early parents", "info.parents of iteration 1 are not those of a run with iterations=1"),
    ],
)
def test_a_broken_law_is_named(how: str, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        assert_router(Router(Mean, broken(how)), Mean(iterations=2))


def test_wrong_claims_about_competition_are_caught() -> None:
    for over in ("children", "positions"):
        with pytest.raises(AssertionError, match=f"sum to 1 over {over}"):
            assert_router(Router(Mean, fair), over=over)


def test_a_registered_router_must_be_what_the_front_door_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = replace(ROUTERS["dynamic"], settings=Mean, route=fair)
    monkeypatch.setitem(ROUTERS, "mean", halved)
    assert_router("mean")
    twin = Router(Mean, broken("range"))
    monkeypatch.setitem(ROUTERS, "mean", twin)
    with pytest.raises(AssertionError, match=r"parents\.activation"):
        assert_router("mean")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="did you mean 'dynamic'"):
        assert_router("dynamik")


def test_assert_finite_says_where() -> None:
    bad = torch.tensor([[0.0, torch.inf], [torch.nan, 1.0]])
    assert_finite({"a": (1, 2.0, None, "text", torch.ones(2), Capsules(torch.ones(1), torch.ones(1)))})
    with pytest.raises(AssertionError, match=r"value\.pose: 2 of 4 not finite, first at \[0, 1\]"):
        assert_finite(Capsules(bad, torch.ones(1)))
    with pytest.raises(AssertionError, match=r"info\.coupling"):
        assert_finite(RoutingInfo(bad), "info")
    with pytest.raises(AssertionError, match=r"value\['x'\]\[1\]: nan is not finite"):
        assert_finite({"x": [1.0, float("nan")]})


def test_variants_are_all_combinations() -> None:
    assert len(set(variants(ROUTERS["dynamic"].settings))) == 16
    assert len(set(variants(ROUTERS["em"].settings))) == 8
    assert len(set(variants(ROUTERS["vb"].settings))) == 2
    assert variants(Mean) == [Mean()]
