"""`route` takes kernels where there are some, with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.kernels.threads import SWITCH
from torchcaps.layers import ClassCapsules, ConvCapsules, DenseCapsules
from torchcaps.math.grid import Grid
from torchcaps.routing import EM, Dynamic, dispatch, route
from torchcaps.types import Capsules

GRID = Grid.of_image(6, 5)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small the layer and the batch, a kernel is worth it."""
    monkeypatch.setattr(dispatch, "WORTH", 0)
    monkeypatch.setattr(dispatch, "FEWEST", 0)
    yield


LAYERS: dict[str, Any] = {
    "dynamic": lambda: DenseCapsules(7, 3, 4, 5),
    "dynamic, cosine over children": lambda: DenseCapsules(
        7, 3, 4, 5, routing=Dynamic(agreement="cosine", over="children", iterations=2)
    ),
    "em": lambda: DenseCapsules(7, 3, 16, 16, routing=EM(), pose="matrix"),
    "em in windows": lambda: ConvCapsules(GRID, 2, 3, kernel=3, stride=2),
    "em in windows, positions": lambda: ConvCapsules(GRID, 2, 3, routing=EM(competition="positions", damping=0.1)),
    "em with coordinates": lambda: ClassCapsules(GRID, 2, 3, std=0.3),
}


def children_of(name: str, b: int = 5) -> Capsules:
    places = (6, 5, 2) if "windows" in name or "coordinates" in name else (7,)
    d = 4 if name.startswith("dynamic") else 16
    g = torch.Generator().manual_seed(1)
    pose = torch.randn(b, *places, d, generator=g, dtype=torch.float64)
    return Capsules(pose.requires_grad_(), torch.rand(b, *places, generator=g, dtype=torch.float64).requires_grad_())


def results(name: str, b: int = 5) -> dict[str, Tensor]:
    """Parents, coupling and every gradient of a layer with fixed weights."""
    torch.manual_seed(0)
    layer, children = LAYERS[name]().double(), children_of(name, b)
    parents, info = layer(children)
    weight = torch.linspace(-1, 1, parents.pose.numel(), dtype=torch.float64).view_as(parents.pose)
    (parents.pose * weight).sum().add(parents.activation.square().sum()).backward()
    grads = {n: p.grad for n, p in layer.named_parameters()}
    found = {"pose": parents.pose, "activation": parents.activation, "coupling": info.coupling, **grads}
    found["children"] = children.pose.grad
    if not name.startswith("dynamic"):
        found["switches"] = children.activation.grad
    return {n: t.detach() for n, t in found.items()}


@pytest.mark.parametrize("b", [1, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_same_with_and_without_kernels(name: str, b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = results(name, b)
    monkeypatch.setenv(SWITCH, "plain")
    plain = results(name, b)
    assert fast.keys() == plain.keys()
    for part in plain:
        torch.testing.assert_close(fast[part], plain[part], rtol=1e-9, atol=1e-10)


def test_dynamic_routing_of_few_samples_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FEWEST", 4)
    layer = DenseCapsules(7, 3, 4, 5)
    monkeypatch.setattr(dispatch, "_fused_dynamic", lambda *_: pytest.fail("the kernel"))
    for b in (1, 3):
        layer(Capsules(torch.ones(b, 7, 4), torch.ones(b, 7)))
    with pytest.raises(pytest.fail.Exception, match="the kernel"):
        layer(Capsules(torch.ones(4, 7, 4), torch.ones(4, 7)))


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_are_taken_unless_switched_off_or_every_iteration_is_to_be_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    for kernel in ("dynamic_routing", "em_routing"):
        plain = getattr(dispatch, kernel)
        monkeypatch.setattr(dispatch, kernel, lambda *a, _k=kernel, _p=plain, **o: (taken.append(_k), _p(*a, **o))[1])
    layer, children = LAYERS[name]().double(), children_of(name)
    layer(children)
    assert taken == ["dynamic_routing" if name.startswith("dynamic") else "em_routing"]
    layer(children, trace=True)
    monkeypatch.setenv(SWITCH, "plain")
    layer(children)
    monkeypatch.setenv(SWITCH, "fast")
    monkeypatch.setattr(dispatch, "WORTH", 10**9)
    layer(children)
    assert len(taken) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_each_iteration_of_a_trace_is_what_a_kernel_that_stops_there_gives(name: str) -> None:
    layer, children = LAYERS[name]().double(), children_of(name)
    _, info = layer(children, trace=True)
    settings = layer.routing
    for t in range(1, settings.iterations + 1):
        layer.routing = replace(settings, iterations=t)
        for recorded, stopped in zip(info.parents, layer(children)[0], strict=True):
            torch.testing.assert_close(recorded[t - 1], stopped.reshape(recorded[t - 1].shape))


def test_where_there_is_no_kernel_the_votes_are_made() -> None:
    g = torch.Generator().manual_seed(0)
    x, W = torch.rand(2, 4, 3, generator=g), torch.rand(4, 2, 5, 3, generator=g)
    children = Capsules(x, torch.rand(2, 4, generator=g))
    parents, info = route(children, W, EM())
    assert parents.pose.shape == (2, 2, 5) and info.coupling.shape == (1, 2, 4, 2)
    half, _ = route(Capsules(x.bfloat16(), children.activation.bfloat16()), W.bfloat16(), Dynamic())
    assert half.pose.dtype == torch.bfloat16
    shifted, _ = route(children, W, replace(Dynamic(), iterations=2), offset=torch.ones(4, 5))
    assert shifted.pose.shape == (2, 2, 5)


def test_mixing_proportions_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "em_routing", lambda *_, **__: pytest.fail("the kernel knows switches by cost only"))
    for routing in (EM(switch="mixing"), EM(switch="mixing", competition="positions", damping=0.1)):
        layer = ConvCapsules(GRID, 2, 3, kernel=3, stride=2, routing=routing).double()
        parents, _ = layer(children_of("em in windows"))
        total = parents.activation.flatten(1).sum(1)
        torch.testing.assert_close(total, torch.ones_like(total))


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "plian")
    with pytest.raises(RecipeError, match=r"plian.*did you mean 'plain'"):
        LAYERS["dynamic"]().double()(children_of("dynamic"))
