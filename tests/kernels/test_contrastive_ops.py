"""Routing without votes is routing: the same coupling, sums and gradient, from less memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.tensor_sizes import Largest, pairwise
from torchcaps.kernels import contrastive_ops
from torchcaps.kernels.threads import SWITCH
from torchcaps.math.pose import vector_votes
from torchcaps.math.squash import squash
from torchcaps.routing import Dynamic, route
from torchcaps.testing import assert_finite, variants
from torchcaps.types import Capsules

DTYPES = (torch.float32, torch.float64)
CHOICES: list[Dynamic] = [choice for choice in variants(Dynamic) if choice.gradient == "all"]
FEWER: list[Dynamic] = pairwise(CHOICES)
choices = st.builds(replace, st.sampled_from(CHOICES), iterations=st.integers(1, 5))
size = st.integers(1, 6)
sizes = st.tuples(st.integers(1, 3), size, size, size, size)  # b i j k d
seeds = st.integers(0, 10_000)


@pytest.fixture(params=["loops", "products"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test with compiled loops, and as matrix products without them."""
    monkeypatch.setenv(SWITCH, {"loops": "fast", "products": "plain"}[request.param])
    return str(request.param)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def keywords(choice: Dynamic) -> dict[str, Any]:
    return {name: value for name, value in asdict(choice).items() if name != "gradient"}


def plain(x: Tensor, W: Tensor, choice: Dynamic) -> tuple[Tensor, Tensor]:
    """Coupling [b i j] and parents' poses [b j k] of the router that stores the votes."""
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "plain")
        parents, info = route(Capsules(x, torch.ones_like(x[..., 0])), W, choice)
    return info.coupling[-1], parents.pose


def couple(x: Tensor, W: Tensor, **settings: Any) -> Tensor:
    """The coupling alone."""
    return contrastive_ops.route(x, W, **settings)[0]


def cancellation(x: Tensor, W: Tensor) -> float:
    """How many times shorter than |W_ij| |x_i| the shortest vote is: what rounding is multiplied by in its cosine."""
    longest = W.flatten(2).norm(dim=-1) * x.norm(dim=-1).unsqueeze(-1)  # [b i j]
    return (longest / vector_votes(x, W).norm(dim=-1)).max().item()


# --- The coupling is the router's -----------------------------------------------------------------------------------


def test_settings_are_the_routers() -> None:
    taken = inspect.signature(contrastive_ops.route).parameters
    assert {name: taken[name].default for name in keywords(Dynamic())} == keywords(Dynamic())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(choices, sizes, seeds)
def test_coupling_is_the_routers(
    dtype: torch.dtype, choice: Dynamic, shape: tuple[int, int, int, int, int], seed: int
) -> None:
    b, i, j, k, d = shape
    x, W = normal(b, i, d, seed=seed, dtype=dtype), normal(i, j, k, d, seed=seed + 1, dtype=dtype)
    c, pose = plain(x, W, choice)
    came, z = contrastive_ops.route(x, W, **keywords(choice))
    tolerance = 100 * torch.finfo(dtype).eps * cancellation(x, W)
    torch.testing.assert_close(came, c, rtol=tolerance, atol=tolerance)
    for s in (z, contrastive_ops.forward(x, W, came)):
        torch.testing.assert_close(squash(s), pose, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_coupling_is_the_routers_at_a_real_size(choice: Dynamic) -> None:
    x, W = normal(8, 72, 8, seed=0, dtype=torch.float32), normal(72, 10, 16, 8, seed=1, dtype=torch.float32)
    c, _ = plain(x, W, choice)
    torch.testing.assert_close(couple(x, W, **keywords(choice)), c, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_small_tiles_change_nothing(choice: Dynamic, monkeypatch: pytest.MonkeyPatch) -> None:
    x, W = normal(3, 7, 4, seed=2), normal(7, 5, 6, 4, seed=3)
    whole = couple(x, W, **keywords(choice))
    for votes in (1, 200):  # one child at a time; two, with one left over
        monkeypatch.setattr(contrastive_ops, "MAX_VOTES", votes)
        torch.testing.assert_close(couple(x, W, **keywords(choice)), whole, rtol=1e-13, atol=0)


# --- The sums, read as loops ----------------------------------------------------------------------------------------


def indices(*shape: int) -> Iterator[Sequence[int]]:
    return iter(torch.cartesian_prod(*map(torch.arange, (*shape, 1))).tolist())  # the 1: one axis still gives rows


def of(c: Tensor | float, b: int, i: int, j: int) -> float:
    return c[b, i, j].item() if isinstance(c, Tensor) else c


def looped(x: Tensor, W: Tensor, c: Tensor | float, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_i c_ij W_ij x_i, sum_j c_ij W_ij^T h_j and sum_b c_ij h_j x_i^T, a product at a time."""
    z, y, G = (torch.zeros(t.shape, dtype=torch.float64) for t in (h, x, W))
    for b, i, j, k, d, _ in indices(len(x), *W.shape):
        share = of(c, b, i, j)
        z[b, j, k] += share * W[i, j, k, d].item() * x[b, i, d].item()
        y[b, i, d] += share * W[i, j, k, d].item() * h[b, j, k].item()
        G[i, j, k, d] += share * h[b, j, k].item() * x[b, i, d].item()
    return z, y, G


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(1, 4)] * 5), st.one_of(st.none(), st.floats(-2, 2, width=32)), seeds)
def test_sums_are_their_definitions(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], number: float | None, seed: int
) -> None:
    b, i, j, k, d = shape
    x, W = normal(b, i, d, seed=seed, dtype=dtype), normal(i, j, k, d, seed=seed + 1, dtype=dtype)
    h = normal(b, j, k, seed=seed + 2, dtype=dtype)
    c = normal(b, i, j, seed=seed + 3, dtype=dtype) if number is None else number
    came = contrastive_ops.forward(x, W, c), contrastive_ops.reverse(h, W, c), contrastive_ops.grad(x, c, h)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for ours, wanted in zip(came, looped(x, W, c, h), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("c", [normal(6, 9, 5, seed=3), 0.3], ids=["tensor", "number"])
def test_gradient_is_that_of_the_forward_sum(c: Tensor | float) -> None:
    x, W, a = normal(6, 9, 4, seed=0), normal(9, 5, 3, 4, seed=1).requires_grad_(), normal(6, 5, 3, seed=2)
    share = c if isinstance(c, Tensor) else torch.full((6, 9, 5), c, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((torch.einsum("bij,ijkd,bid->bjk", share, W, x) * a).sum(), W)
    torch.testing.assert_close(contrastive_ops.grad(x, c, a), wanted)
    other = normal(*wanted.shape, seed=4)
    torch.testing.assert_close(contrastive_ops.grad(x, c, a, onto=other.clone()), wanted + other)


def test_any_strides_will_do_and_nothing_given_is_changed() -> None:
    for b, d in ((3, 4), (1, 1)):  # 1, 1: turning the axes moves nothing, so a buffer could be an input itself
        x, W = normal(d, 7, b, seed=0).permute(2, 1, 0), normal(d, 5, 6, 7, seed=1).permute(3, 1, 2, 0)
        c, h = couple(x, W, agreement="cosine"), normal(b, 6, 5, seed=2).transpose(1, 2)
        strided = [x, W, c, h]
        before = [t.clone(memory_format=torch.contiguous_format) for t in strided]
        torch.testing.assert_close(couple(*before[:2], agreement="cosine"), c)
        for f, places in (
            (contrastive_ops.forward, (0, 1, 2)),
            (contrastive_ops.reverse, (3, 1, 2)),
            (contrastive_ops.grad, (0, 2, 3)),
        ):
            torch.testing.assert_close(f(*(strided[p] for p in places)), f(*(before[p] for p in places)))
        assert all(torch.equal(t, u) for t, u in zip(strided, before, strict=True))


def test_nothing_is_recorded_for_autograd() -> None:
    x, W = normal(2, 3, 4, seed=0).requires_grad_(), normal(3, 5, 6, 4, seed=1).requires_grad_()
    c, h = couple(x, W, agreement="cosine"), normal(2, 5, 6, seed=2).requires_grad_()
    made = [c, contrastive_ops.forward(x, W, c), contrastive_ops.reverse(h, W, c), contrastive_ops.grad(x, c, h)]
    assert not any(t.requires_grad for t in made)
    assert not any(t.is_inference() for t in made)


# --- Numbers at their ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_zeros_agree_with_nobody(choice: Dynamic) -> None:
    x, W = normal(4, 6, 3, seed=0, dtype=torch.float32), normal(6, 4, 5, 3, seed=1, dtype=torch.float32)
    x[0], x[1, 2:4], x[2, 1:] = 0, 0, 0
    W[:, 1], W[3], W[0, 2] = 0, 0, 0
    c, _ = plain(x, W, choice)
    torch.testing.assert_close(couple(x, W, **keywords(choice)), c)
    uniform = torch.full_like(c, 1 / (4 if choice.over == "parents" else 6))
    torch.testing.assert_close(couple(x, 0 * W, **keywords(choice)), uniform)
    torch.testing.assert_close(couple(0 * x, W, **keywords(choice)), uniform)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_a_vote_that_cancels_agrees_with_nobody(choice: Dynamic) -> None:
    """W_ij x_i = 0 exactly, but x_i . (W_ij^T v_j) is only rounded to about 0 and must not be blown up by 1 / 0."""
    x, W = normal(2, 4, 3, seed=4, dtype=torch.float32), normal(4, 3, 7, 3, seed=5, dtype=torch.float32)
    x[:, 0], W[0] = (
        1,
        torch.arange(1, 8, dtype=torch.float32).unsqueeze(-1) * torch.tensor([1, 2, -3], dtype=torch.float32),
    )
    assert not vector_votes(x, W)[:, 0].any()
    c, _ = plain(x, W, choice)
    tolerance = 1e3 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(couple(x, W, **keywords(choice)), c, rtol=tolerance, atol=tolerance)


def test_a_cosine_stays_one_where_a_vote_is_all_rounding() -> None:
    """Every W_ij turns x_i into nothing but rounding error; logits of one agreement still differ by at most 2."""
    x, W = normal(1, 6, 3, seed=14), normal(6, 50, 7, 3, seed=15)
    W = W - vector_votes(x, W)[0].unsqueeze(-1) * (x[0] / x[0].square().sum(-1, keepdim=True)).view(6, 1, 1, 3)
    assert cancellation(x.float(), W.float()) > 1e6
    for over in ("parents", "children"):
        b = couple(x.float(), W.float(), iterations=2, agreement="cosine", over=over).log()
        assert (b.amax(-1) - b.amin(-1) if over == "parents" else b.amax(1) - b.amin(1)).max() < 2.001


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_coupling_is_the_routers_at_every_scale(choice: Dynamic) -> None:
    for scale in (1e-30, 1e-13, 3e-12, 1e-9, 1e-3, 1e3, 1e9, 1e15):
        x, W = scale * normal(3, 5, 4, seed=6, dtype=torch.float32), normal(5, 3, 6, 4, seed=7, dtype=torch.float32)
        c, _ = plain(x, W, choice)
        torch.testing.assert_close(couple(x, W, **keywords(choice)), c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_children_of_very_different_lengths(choice: Dynamic) -> None:
    lengths = torch.tensor([1e-6, 1e-3, 1, 1e3, 1e6], dtype=torch.float32).unsqueeze(-1)
    x, W = lengths * normal(3, 5, 4, seed=8, dtype=torch.float32), normal(5, 3, 6, 4, seed=9, dtype=torch.float32)
    c, _ = plain(x.double(), W.double(), choice)
    torch.testing.assert_close(couple(x, W, **keywords(choice)).double(), c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "scales"), [
    (torch.float32, (1e-45, 1e-38, 1e-19, 1e19, 1e30, 1e38)),
    (torch.float64, (5e-324, 1e-200, 1e-75, 1e75)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_finite_for_the_largest_and_least_numbers(
    choice: Dynamic, dtype: torch.dtype, scales: tuple[float, ...]
) -> None:
    for scale in scales:
        for weight in (1.0, scale):
            x = torch.tensor(scale, dtype=dtype) * normal(3, 5, 4, seed=10).clamp(-1, 1).to(dtype)
            W = torch.tensor(weight, dtype=dtype) * normal(5, 3, 6, 4, seed=11).clamp(-1, 1).to(dtype)
            c = couple(x, W, **keywords(choice))
            assert_finite(c)
            total = c.sum(-1 if choice.over == "parents" else 1)
            torch.testing.assert_close(total, torch.ones_like(total))


def test_where_float32_overflows_it_is_routed_in_float64() -> None:
    x, W = 1e25 * normal(3, 5, 4, seed=12, dtype=torch.float32), normal(5, 3, 6, 4, seed=13, dtype=torch.float32)
    for choice in CHOICES:
        c = couple(x, W, **keywords(choice))
        assert c.dtype == torch.float32
        torch.testing.assert_close(c, plain(x.double(), W.double(), choice)[0].float())


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_the_votes_are_never_stored(choice: Dynamic) -> None:
    b, i, j, k, d = 32, 256, 20, 16, 8
    x, W = normal(b, i, d, seed=0, dtype=torch.float32), normal(i, j, k, d, seed=1, dtype=torch.float32)
    votes = b * i * j * k * 4
    with Largest() as ours:
        c = couple(x, W, **keywords(choice))
        z = contrastive_ops.forward(x, W, c)
        contrastive_ops.reverse(z, W, c), contrastive_ops.grad(x, c, z)
        contrastive_ops.reverse(z, W, 0.1), contrastive_ops.grad(x, 0.1, z)
    with Largest() as theirs:
        plain(x, W, choice)
    assert theirs.bytes >= votes
    assert ours.bytes <= max(W.nbytes, c.nbytes, 4 * contrastive_ops.MAX_VOTES) < votes / 3
