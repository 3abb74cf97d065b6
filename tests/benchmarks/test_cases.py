"""Cases by name, what they run, and how much arithmetic that is."""

from __future__ import annotations

import os

import pytest
import torch
from benchmarks.cases import NAMES, case_of, plainly
from benchmarks.cost import Cost, contrast_cost, cost_of, dense_cost, dynamic_cost, em_cost
from benchmarks.reference import plain_dynamic
from torch import nn

from torchcaps.errors import RecipeError, TorchcapsError
from torchcaps.kernels.threads import SWITCH, kernel_mode, kernels_enabled
from torchcaps.layers import SharedCapsules
from torchcaps.math.grid import Grid
from torchcaps.routing import Dynamic, route
from torchcaps.types import Capsules

TINY = (
    "dynamic-6x4-3x5",
    "dynamic-6x4-3x5-t1",
    "dynamic-composed-6x4-3x5",
    "cd-6x4-3x5",
    "em-6x3",
    "em-4-2-2-2",
    "em-composed-4-2-2-2",
    "capsnet-18",
    "sparse-18",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_the_issue_are_cases(name):
    case = case_of(name)
    assert case.name == name
    assert (case.trunk is None) == name.startswith(("dynamic", "cd"))


@pytest.mark.parametrize("name", TINY)
def test_works_run_forward_and_step(name):
    case = case_of(name)
    for make in (case.ours, case.plain, case.trunk):
        if make:
            work = make(2)
            work.forward()
            work.step()
    cost = case.cost()
    assert cost.step > cost.forward > 0 and cost.votes > 0


def test_a_network_s_step_moves_all_its_weights(monkeypatch):
    kept: list[list[torch.Tensor]] = []
    from torchcaps.train.recipe import OptimizerConfig

    build = OptimizerConfig.build

    def spy(self, parameters):
        kept.append(list(parameters))
        return build(self, kept[-1])

    case = case_of("em-4-2-2-2")
    monkeypatch.setattr(OptimizerConfig, "build", spy)
    for make, few in ((case.ours, False), (case.trunk, True)):
        work = make(2)
        parameters = kept[-1]
        before = [p.detach().clone() for p in parameters]
        work.forward()
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
        work.step()
        moved = [not torch.equal(p, q) for p, q in zip(parameters, before, strict=True)]
        assert all(moved) if few else sum(moved) > len(moved) / 2
        assert (len(parameters) == 6) == few  # three convolutions with their biases


def test_plain_and_ours_see_the_switch_and_put_it_back(monkeypatch):
    seen = []
    for value in (None, "fast", "plain"):
        if value is None:
            monkeypatch.delenv(SWITCH, raising=False)
        else:
            monkeypatch.setenv(SWITCH, value)
        with kernel_mode("plain"):
            seen.append(kernels_enabled())
        with kernel_mode("fast"):
            seen.append(kernels_enabled())
        assert os.environ.get(SWITCH) == value
    assert seen == [False, True] * 3


def test_plainly_switches_off_and_fails_clean(monkeypatch):
    from benchmarks.cases import Work

    monkeypatch.delenv(SWITCH, raising=False)

    def broken() -> None:
        raise ValueError("in plain" if not kernels_enabled() else "in fast")

    work = plainly(Work(kernels_enabled, broken))
    assert work.forward() is False
    with pytest.raises(ValueError, match="in plain"):
        work.step()
    assert SWITCH not in os.environ


@pytest.mark.parametrize("name", ["dynamic", "dynamic-6x4", "capsnet-28x28", "em-1-2-3", "", "dynamic-0x4-3x5"])
def test_other_names_are_refused_in_one_line(name):
    with pytest.raises(RecipeError) as caught:
        case_of(name)
    assert f"no case '{name}'" in str(caught.value) and "\n" not in str(caught.value)


def test_the_nearest_name_is_told():
    with pytest.raises(RecipeError, match="did you mean 'capsnet-28'"):
        case_of("capsnet28")


def test_images_that_are_too_small_are_refused():
    with pytest.raises(TorchcapsError, match="too small"):
        case_of("capsnet-9").ours(1)


def test_dynamic_by_hand():
    # 6 children of 4 to 3 parents of 5: a pass is 2 * 6 * 3 * 5 * 4 = 720; 3 iterations.
    assert case_of("dynamic-6x4-3x5").cost() == Cost(3 * 720, 8 * 720, 90)
    assert case_of("dynamic-6x4-3x5-t1").cost() == Cost(720, 4 * 720, 90)
    assert dynamic_cost(18, 5, 4, 3) == Cost(2160, 5760, 90)


def test_shared_places_by_hand():
    """Six places of two types, three parents of five numbers, and children of four numbers and their place."""
    layer = SharedCapsules(Grid.of_image(3, 2), 2, 3, 4, 5, routing=Dynamic(2))
    x = Capsules(torch.rand(1, 3, 2, 2, 4), torch.rand(1, 3, 2, 2))
    once = 2 * 12 * 3 * 5 * 6
    assert cost_of(layer, lambda: layer(x)) == Cost(2 * once, 6 * once, 12 * 3 * 5)


def test_contrast_by_hand():
    assert case_of("cd-6x4-3x5").cost() == contrast_cost(18, 5, 4, 3) == Cost(3 * 720, 7 * 720, 90)


def test_em_layer_by_hand():
    # 18 pairs, a vote is 16 numbers of 4 products: 128 operations, and 8 for each number; 3 or 2 iterations.
    assert case_of("em-6x3").cost() == Cost(3 * 18 * 256, 9 * 18 * 256, 288)
    assert case_of("em-6x3-t2").cost() == Cost(2 * 18 * 256, 6 * 18 * 256, 288)


def test_em_network_by_hand():
    # 32x32 -> conv 5x5/2: 14x14 of 4; primary 2 types; 3x3/2 -> 6x6 of 2; 3x3 -> 4x4 of 2; 5 classes.
    pairs = 36 * (9 * 2) * 2 + 16 * (9 * 2) * 2 + 16 * 2 * 5
    routing = em_cost(pairs, 16, 4, 3)
    assert routing == Cost(3 * pairs * 256, 9 * pairs * 256, 16 * pairs)
    convolutions = [
        dense_cost(196 * 4, 2 * 25, first=True),
        dense_cost(196 * 32, 4, first=False),
        dense_cost(196 * 2, 4, first=False),
    ]
    assert case_of("em-4-2-2-2").cost() == sum(convolutions, routing)


def test_the_first_layer_has_no_input_to_teach():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    cost = cost_of(net, lambda: net(torch.ones(1, 3)))
    assert cost == Cost(2 * 12 + 2 * 20, 2 * 24 + 3 * 40, 0)
    assert not any(module._forward_hooks for module in net)


@pytest.mark.parametrize("name", ["em-mixing", "em-vector", "vb", "attention", "uniform"])
def test_matrix_capsules_are_measured_with_every_router(name):
    work = case_of(f"{name}-4-2-2-2").ours(2)
    work.step()
    assert case_of(f"{name}-4-2-2-2").cost()


def test_the_dynamic_routing_that_ours_is_compared_with_is_the_same():
    x, W = torch.randn(3, 6, 4), torch.randn(6, 3, 5, 4)
    ones = torch.ones(3, 6)
    parents, _ = route(Capsules(x, ones), W, Dynamic())
    torch.testing.assert_close(plain_dynamic(x, W, 3), parents.pose)
