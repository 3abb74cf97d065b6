"""No NaN and no infinity, in values or gradients, for any router, setting, size, vote scale or activation.

An example is one image: votes between 1e-6 and 1e6 in size, the same for all children or each its own, some of them
zero or equal, activations anywhere in [0, 1] and exactly at its ends. CI draws a few hundred images a router with
hypothesis; `pytest -m long` takes 100,000 a router, many in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.math.grid import Grid, Window
from torchcaps.routing import EM, ROUTERS, VB, Attention, Dynamic, Uniform, route, router_of
from torchcaps.testing import assert_finite, variants
from torchcaps.types import Capsules

LONG, BATCH = 100_000, 64  # images a router, images a call
DTYPES = (torch.float32, torch.float64)

Pick = Callable[[list[Any]], Any]


def any_dynamic(pick: Pick) -> Dynamic:
    choice: Dynamic = pick(variants(Dynamic))
    return replace(choice, iterations=pick([1, 2, 3, 4, 5]))


def any_em(pick: Pick) -> EM:
    choice: EM = pick(variants(EM))
    return replace(
        choice,
        iterations=pick([1, 2, 3, 4, 5]),
        final_inverse_temperature=pick([1e-3, 0.01, 1.0, 10.0]),
        decay=pick([0.0, 0.5, 0.95]),
        min_variance=pick([1e-6, 5e-4, 1.0]),
        damping=pick([0.0, 0.1, 1.0]),
    )


def any_vb(pick: Pick) -> VB:
    choice: VB = pick(variants(VB))
    return replace(
        choice,
        iterations=pick([1, 2, 3, 4, 5]),
        alpha=pick([0.01, 1.0, 100.0]),
        kappa=pick([1e-6, 1.0, 100.0]),
        scatter=pick([1e-6, 1.0, 100.0]),
        background=pick([-1e4, -25.0, 0.0]),
    )


SETTINGS: dict[str, Callable[[Pick], Any]] = {
    "dynamic": any_dynamic,
    "em": any_em,
    "vb": any_vb,
    "attention": lambda pick: Attention(pick([0.01, 1.0, 100.0])),
    "uniform": lambda pick: Uniform(),
}


@dataclass(frozen=True)
class Layer:
    """A router's settings and the sizes around it; `window` is one over a grid of places or none."""

    settings: Any
    dtype: torch.dtype
    types: int
    parents: int
    d: int
    k: int
    window: Window | None

    @property
    def places(self) -> tuple[int, ...]:
        return (self.window.grid.height, self.window.grid.width) if self.window else ()

    @property
    def children(self) -> int:
        return self.types * (self.window.kernel**2 if self.window else 1)


def any_layer(name: str, pick: Pick) -> Layer:
    types, parents, d, k = (pick([1, 2, 3, 4, 5]) for _ in range(4))
    window = pick([None, None, Grid(2, 3).window(2, 1), Grid(4, 3).window(2, 2), Grid(3, 3).window(1, 1)])
    return Layer(SETTINGS[name](pick), pick(list(DTYPES)), types, parents, d, k, window)


def poses(layer: Layer, exponent: Tensor, kind: Tensor, make: torch.Generator) -> Tensor:
    """[b (h w) i d] normal numbers times 10^exponent; kind 1: all children alike; 2: some are zero; 3: all are zero.

    `exponent` is [b 1] for one scale an image or [b i] for one a child; `kind` is [b].
    """
    b = len(kind)
    shape = (b, *layer.places, layer.types, layer.d)
    spread = (b, *(1 for _ in layer.places), exponent.shape[-1], 1)
    kinds = kind.view(b, *(1 for _ in shape[1:]))
    x = torch.randn(shape, generator=make) * 10 ** exponent.view(spread)
    x = torch.where(kinds == 1, x.flatten(1, -2)[:, 0].view(b, *(1 for _ in shape[2:]), layer.d), x)
    off = torch.rand(shape[:-1], generator=make).unsqueeze(-1) < 0.5
    return x.masked_fill(((kinds == 2) & off) | (kinds == 3), 0).to(layer.dtype)


def assert_stays_finite(layer: Layer, x: Tensor, a: Tensor, make: torch.Generator, beta: float) -> None:
    """Route, then pull random gradients back to poses, activations, weights and learned scalars."""
    W = torch.randn(layer.children, layer.parents, layer.k, layer.d, generator=make).to(layer.dtype)
    learned: dict[str, Any] = {
        name: (beta * torch.randn(value.shape, generator=make)).to(layer.dtype).requires_grad_()
        for name, value in router_of(layer.settings).initial(layer.children, layer.parents).items()
    }
    given = {"pose": x.requires_grad_(), "activation": a.requires_grad_(), "weights": W.requires_grad_(), **learned}
    parents, info = route(Capsules(x, a), W, layer.settings, window=layer.window, trace=True, **learned)
    assert_finite({"parents": parents, "info": info}, str(layer))
    pull = [torch.randn(y.shape, generator=make).to(y) for y in parents]
    gradients = torch.autograd.grad(parents, list(given.values()), pull, allow_unused=True)
    assert_finite(dict(zip(given, gradients, strict=True)), f"{layer} gradient")


def test_every_router_is_here() -> None:
    assert set(SETTINGS) == set(ROUTERS)


# --- A few hundred images a router --------------------------------------------------------------------------------

activations = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32))
exponents = st.one_of(st.sampled_from([-6.0, 6.0]), st.floats(-6, 6))


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_values_and_gradients_are_finite(name: str, data: st.DataObject) -> None:
    layer = any_layer(name, lambda options: data.draw(st.sampled_from(options)))
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    scales = data.draw(st.sampled_from([1, layer.types]))
    exponent = torch.tensor([data.draw(st.lists(exponents, min_size=scales, max_size=scales))])
    kind = torch.tensor([data.draw(st.sampled_from([0, 0, 1, 2, 3]))])
    x = poses(layer, exponent, kind, make)
    on = data.draw(st.lists(activations, min_size=layer.types, max_size=layer.types))
    a = torch.tensor(on, dtype=layer.dtype).expand(x.shape[:-1]).clone()
    assert_stays_finite(layer, x, a, make, beta=data.draw(st.sampled_from([0.0, 1.0, 100.0])))


# --- 100,000 images a router ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ROUTERS)
def test_values_and_gradients_are_finite_at_length(name: str) -> None:
    for call in range(-(-LONG // BATCH)):
        make = torch.Generator().manual_seed(call)

        def pick(options: list[Any], make: torch.Generator = make) -> Any:
            return options[int(torch.randint(len(options), (), generator=make))]

        layer = any_layer(name, pick)
        exponent = 12 * torch.rand(BATCH, pick([1, layer.types]), generator=make) - 6
        x = poses(layer, exponent, torch.randint(5, (BATCH,), generator=make), make)
        u = torch.rand(x.shape[:-1], generator=make)
        faint = 10 ** (-40 * torch.rand(u.shape, generator=make))  # small numbers, down to denormal ones
        a = torch.where(u < 0.3, 3 * u, torch.where(u < 0.6, faint, torch.where(u < 0.8, 0, 1))).to(layer.dtype)
        assert_stays_finite(layer, x, a, make, beta=pick([0.0, 1.0, 100.0]))
