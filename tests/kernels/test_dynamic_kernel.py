"""Dynamic routing without stored votes is dynamic routing: the same parents, coupling and gradients."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.problems import PROBLEMS, Problem
from support.tensor_sizes import Largest, pairwise
from torchcaps.kernels import chunked_dynamic, dynamic
from torchcaps.kernels.compiled_dynamic import CompiledPasses
from torchcaps.kernels.dynamic import dynamic_routing
from torchcaps.kernels.loops import elementary, loop, simd
from torchcaps.kernels.records import VECTOR_BYTES
from torchcaps.kernels.threads import SWITCH
from torchcaps.math.pose import vector_votes
from torchcaps.math.squash import norm, squash
from torchcaps.routing import Dynamic, route
from torchcaps.testing import assert_finite, variants
from torchcaps.types import Capsules, RoutingInfo

CHOICES: list[Dynamic] = list(variants(Dynamic))
FEWER: list[Dynamic] = pairwise(CHOICES)
THROUGH: list[Dynamic] = [choice for choice in CHOICES if choice.gradient == "all"]
choices = st.builds(replace, st.sampled_from(CHOICES), iterations=st.integers(1, 4))
sizes = st.tuples(st.integers(1, 40), *[st.integers(1, 9)] * 4)  # b i j k d
seeds = st.integers(0, 10_000)


@pytest.fixture(params=["loops", "chunks"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both forms of the passes; chunks so small that there are several."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "chunks":
            patch.setattr(dynamic, "has_loops", lambda *tensors: False)
            patch.setattr(chunked_dynamic, "MAX_VOTES", 200)
        yield request.param


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and weights of a sum over the parents' poses."""
    b, i, j, k, d = shape
    x, W = normal(b, i, d, seed=seed, dtype=dtype), normal(i, j, k, d, seed=seed + 1, dtype=dtype)
    return x.requires_grad_(), W.requires_grad_(), normal(b, j, k, seed=seed + 2, dtype=dtype)


def ours(x: Tensor, W: Tensor, a: Tensor, choice: Dynamic) -> list[Tensor]:
    """Parents, coupling, and the gradients by x and W."""
    total, c = dynamic_routing(x, W, **asdict(choice))
    return [squash(total), c, *torch.autograd.grad((squash(total) * a).sum(), (x, W))]


def plain(x: Tensor, W: Tensor, a: Tensor, choice: Dynamic) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "plain")
        parents, info = route(Capsules(x, torch.ones_like(x[..., 0])), W, choice)
    return [parents.pose, info.coupling[-1], *torch.autograd.grad((parents.pose * a).sum(), (x, W))]


def near(came: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Relative to the largest number of each tensor."""
    for ours, theirs in zip(came, wanted, strict=True):
        assert ours.shape == theirs.shape
        scale = max(1e-30, theirs.abs().max().item()) if theirs.numel() else 0
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale)


def shortest(x: Tensor, W: Tensor) -> float:
    """How many times shorter than |W_ij| |x_i| a vote is: what rounding is multiplied by in the slope of its cosine."""
    longest = W.flatten(2).norm(dim=-1) * x.norm(dim=-1).unsqueeze(-1)  # [b i j]
    return (longest / vector_votes(x, W).norm(dim=-1)).max().item()


# --- Equal to the plain router --------------------------------------------------------------------------------------


def test_settings_are_the_routers() -> None:
    taken = inspect.signature(dynamic_routing).parameters
    assert {name: taken[name].default for name in asdict(Dynamic())} == asdict(Dynamic())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(choices, sizes, seeds)
def test_any_shape_in_float64(choice: Dynamic, shape: tuple[int, ...], seed: int) -> None:
    x, W, a = problem(shape, seed)
    tolerance = 1e-13 * max(1e3, shortest(x, W) ** 2)
    near(ours(x, W, a, choice), plain(x, W, a, choice), tolerance)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_real_size(way: str, choice: Dynamic) -> None:
    """Sizes with and without remainders of the loops' blocks of 4 and 16."""
    for shape in ((32, 24, 4, 16, 8), (18, 19, 5, 7, 6)):
        x, W, a = problem(shape, 0, torch.float32)
        exact = plain(x.double(), W.double(), a.double(), choice)
        near(ours(x, W, a, choice), exact, 1e-5)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_any_number_of_iterations(way: str, choice: Dynamic) -> None:
    x, W, a = problem((5, 6, 3, 4, 4), 3)
    for iterations in (1, 2, 3, 5):
        choice = replace(choice, iterations=iterations)
        near(ours(x, W, a, choice), plain(x, W, a, choice), 1e-11)


@pytest.mark.parametrize("choice", THROUGH[::3], ids=str)
def test_more_samples_and_children_than_a_tile(choice: Dynamic) -> None:
    """What the last backward pass lays out in blocks at once is 64 samples of 16 children in float64."""
    x, W, a = problem((70, 35, 3, 6, 5), 5)
    near(ours(x, W, a, choice), plain(x, W, a, choice), 1e-13 * max(1e3, shortest(x, W) ** 2))


@pytest.mark.parametrize("choice", [choice for choice in THROUGH if choice.agreement == "dot"], ids=str)
def test_couplings_made_again_from_huge_logits(way: str, choice: Dynamic) -> None:
    """Logits of a million that differ by about one, so that no coupling is 0 or 1."""
    x, W, a = problem((5, 7, 3, 4, 4), 37)
    with torch.no_grad():
        W[:] = 1e6 * W[:1, :1] / (W[:1, :1] @ x[:1, :1, :, None]).norm() + W / 8
        x[:] = x[:1, :1] + 1e-7 * x
    came = ours(x, W, a, choice)
    assert came[1].min() > 1e-3 and came[1].max() < 1 - 1e-3
    near(came, plain(x, W, a, choice), 1e-7)


@pytest.mark.parametrize("scale", [1, 1e3, 1e6])
def test_the_way_back_finds_the_same_softmax_bit_for_bit(scale: float) -> None:
    """The largest coupling of a child is exp(0) / the sum."""
    x, W, a = problem((37, 19, 5, 7, 6), 43, torch.float32)
    passes = CompiledPasses(scale * x.detach(), W, cosine=False, over="parents", share=0.2)
    totals, scales, C = dynamic.iterate(passes, 2, "dot", "accumulated")
    Z = passes.new_softmax(1)
    passes.query_grad(squash(totals[0]), totals[1], a, scales[0], Z[0])
    assert torch.equal(C.amax(1), Z[0, 1, :, 0])


@pytest.mark.parametrize("problem", [p for p in PROBLEMS["dynamic"] if len(p.votes) == 1], ids=lambda p: p.name)
def test_problems_with_known_answers(problem: Problem) -> None:
    for choice in THROUGH:
        if choice.over in problem.needs:
            x, W = torch.ones(1, problem.votes.shape[1], 1), problem.votes[0].unsqueeze(-1).float()
            total, c = dynamic_routing(x, W, **asdict(choice))
            parent = squash(total)
            problem.expect(Capsules(parent, norm(parent)), RoutingInfo(c.unsqueeze(0)))


@pytest.mark.parametrize("choice", THROUGH, ids=str)
def test_gradcheck(way: str, choice: Dynamic) -> None:
    x, W, _ = problem((2, 3, 2, 4, 5), 7)
    assert torch.autograd.gradcheck(lambda *args: dynamic_routing(*args, **asdict(choice))[0], (x, W), fast_mode=True)


# --- Any tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES[::5], ids=str)
def test_any_strides_will_do(way: str, choice: Dynamic) -> None:
    x, W, a = problem((3, 7, 5, 6, 4), 11)
    strided = x.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    turned = W.detach().permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0).requires_grad_()
    slopes = a.transpose(1, 2).contiguous().transpose(1, 2)
    near(ours(strided, turned, slopes, choice), ours(x, W, a, choice), 1e-13)
    total, _ = dynamic_routing(x, W, **asdict(choice))
    wanted = torch.autograd.grad(total, (x, W), torch.ones_like(total), retain_graph=True)
    came = torch.autograd.grad(total, (x, W), torch.ones(1, dtype=x.dtype).expand_as(total))
    assert all(torch.equal(one, two) for one, two in zip(came, wanted, strict=True))


@pytest.mark.parametrize("choice", CHOICES[::5], ids=str)
def test_an_empty_batch(way: str, choice: Dynamic) -> None:
    x, W, a = problem((0, 3, 2, 4, 5), 0)
    parent, c, dx, dW = ours(x, W, a, choice)
    assert parent.shape == (0, 2, 4)
    assert c.shape == (0, 3, 2)
    assert dx.shape == x.shape
    assert torch.equal(dW, torch.zeros_like(W))


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_threads_change_nothing_and_neither_does_the_batch(choice: Dynamic) -> None:
    x, W, a = problem((37, 21, 3, 5, 6), 13, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ours(x, W, a, choice)
        torch.set_num_threads(2)
        together = ours(x, W, a, choice)
        first = ours(x[:1].detach().requires_grad_(), W, a[:1], choice)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(alone, together, strict=True))
    assert all(torch.equal(one, two[:1]) for one, two in zip(first[:3], together[:3], strict=True))


def test_only_what_is_asked_for_has_a_gradient(way: str) -> None:
    x, W, _ = problem((3, 4, 2, 5, 6), 17)
    total, c = dynamic_routing(x, W)
    assert total.requires_grad
    assert not c.requires_grad
    wanted = torch.autograd.grad(total.sum(), (x, W))
    for n, (one, two) in enumerate(((x, W.detach()), (x.detach(), W))):
        (came,) = torch.autograd.grad(dynamic_routing(one, two)[0].sum(), (one, two)[n])
        assert torch.equal(came, wanted[n])
    with torch.no_grad():
        assert torch.equal(dynamic_routing(x, W)[0], total)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_finite_at_every_scale(way: str, choice: Dynamic) -> None:
    x, W, a = problem((3, 6, 3, 5, 4), 19, torch.float32)
    for scale in (1e-6, 1e-3, 1e3, 1e6):
        small = (scale * x).detach().requires_grad_()
        came = ours(small, W, a, choice)
        assert_finite(tuple(came))
        if scale < 1 or choice.agreement == "cosine":  # else the logits are so large that their rounding decides
            near(came, plain(small.double(), W.double(), a.double(), choice), 1e-4)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_zeros(way: str, choice: Dynamic) -> None:
    x, W, a = problem((4, 6, 4, 5, 3), 23, torch.float32)
    with torch.no_grad():
        x[0], x[1, 2:4], x[2, 1:] = 0, 0, 0
        W[:, 1], W[3], W[0, 2] = 0, 0, 0
    came, wanted = ours(x, W, a, choice), plain(x, W, a, choice)
    assert_finite(tuple(came))
    near(came[:2], wanted[:2], 1e-5)


# --- An operator of torch's library ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", [Dynamic(), Dynamic(1), Dynamic(2, "cosine", "children", "replaced", "last")], ids=str
)
def test_the_operators_keep_their_word(choice: Dynamic) -> None:
    x, W, a = problem((3, 4, 2, 5, 6), 29)
    c = asdict(choice)
    args = x, W, c["iterations"], c["agreement"], c["over"], c["logits"], c["gradient"]
    told = torch.library.opcheck(torch.ops.torchcaps.dynamic_forward.default, args)
    assert set(told.values()) == {"SUCCESS"}
    *kept, coupling = torch.ops.torchcaps.dynamic_forward(*(t.detach() if isinstance(t, Tensor) else t for t in args))
    kept.append(coupling if choice.gradient == "last" else None)
    back = a, x.detach(), W.detach(), *kept, c["agreement"], c["over"], c["logits"]
    assert set(torch.library.opcheck(torch.ops.torchcaps.dynamic_backward.default, back).values()) == {"SUCCESS"}


def test_compiles_as_one_graph() -> None:
    x, W, a = problem((3, 4, 2, 5, 6), 31)
    compiled = torch.compile(ours_total, backend="aot_eager", fullgraph=True)
    total, c = compiled(x, W)
    wanted, share = ours_total(x, W)
    near([total, c], [wanted, share], 1e-14)
    near(
        list(torch.autograd.grad((total * a).sum(), (x, W))),
        list(torch.autograd.grad((wanted * a).sum(), (x, W))),
        1e-14,
    )


def ours_total(x: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    return dynamic_routing(2 * x, W, agreement="cosine")


def test_loops_are_compiled_only_when_they_run() -> None:
    modules = "torchcaps.models, torchcaps.kernels.dynamic, torchcaps.kernels.em"
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["parents", "children"])
def test_the_votes_are_never_stored(over: str) -> None:
    """The passes, which the operators consist of: an operator hides from the instrument what happens inside."""
    b, i, j, k, d = 32, 128, 10, 16, 8
    x, W = normal(b, i, d, seed=0, dtype=torch.float32), normal(i, j, k, d, seed=1, dtype=torch.float32)
    with Largest() as most, torch.no_grad():
        passes = CompiledPasses(x, W, cosine=True, over=over, share=0.1)
        totals, scales, _ = dynamic.iterate(passes, 3, "cosine", "accumulated")
        dynamic._retrace(passes, totals[-1], totals, torch.stack(scales), "cosine", "accumulated")
    assert most.bytes <= max(b * i * j * 4, W.nbytes) < b * i * j * k * 4 / 3


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_what_is_kept_for_the_way_back(way: str, choice: Dynamic) -> None:
    """Nothing with a number for each child and parent but, for gradient="last", the one coupling that counts."""
    x, W, _ = problem((32, 40, 5, 4, 3), 41)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, c = dynamic_routing(x, W, **asdict(replace(choice, iterations=4)))
    large = [t for t in kept if t.numel() >= c.numel() and t.shape not in (x.shape, W.shape)]
    assert {x.shape, W.shape} <= {t.shape for t in kept}
    assert [t.shape for t in large] == ([c.shape] if choice.gradient == "last" else [])


# --- Vectors --------------------------------------------------------------------------------------------------------


@loop
def exponentials(a: Any, out: Any) -> None:
    for n in range(a.shape[0]):
        simd.store(out, (n,), elementary.exp(simd.load(a, (n,))))


@pytest.mark.parametrize(("kind", "least", "most"), [(np.float32, -87, 88), (np.float64, -708, 709)])
def test_exp_of_vectors(kind: type, least: float, most: float) -> None:
    a = np.linspace(least, most, 64 * 64).astype(kind).reshape(-1, VECTOR_BYTES // kind().itemsize)
    came = np.empty_like(a)
    exponentials(a, came)
    exact = np.exp(a.astype(np.longdouble))
    assert (np.abs(came - exact) < 2 * np.finfo(kind).eps * exact).all()
    ends = np.full_like(a[:1], -np.inf)
    ends[0, :3] = 0, np.nan, 2 * least
    exponentials(ends, ends)
    assert ends[0, 0] == 1
    assert np.isnan(ends[0, 1])
    assert not ends[0, 2:].any()
