"""EM routing without votes is EM routing: parents, assignments and gradients, in compiled loops and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.tensor_sizes import Largest, pairwise
from torchcaps.kernels import em as kernel
from torchcaps.kernels.em import em_routing
from torchcaps.kernels.votes import DenseVotes, Slots, VotesInput
from torchcaps.math.grid import Grid, Window
from torchcaps.math.pose import add_coordinates
from torchcaps.routing import EM, em
from torchcaps.testing import assert_finite, variants

BY_COST: list[EM] = [choice for choice in variants(EM) if choice.switch == "cost"]
"""Mixing proportions have no kernel."""
CHOICES: list[EM] = [replace(choice, damping=damping) for choice in BY_COST for damping in (0.0, 0.3)]
FEWER: list[EM] = pairwise(CHOICES)
choices = st.builds(replace, st.sampled_from(CHOICES), iterations=st.integers(1, 4))
seeds = st.integers(0, 10_000)
few = settings(max_examples=20, deadline=None)

Six = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]


class Task(NamedTuple):
    """A layer to route: its inputs as `em_routing` takes them, and the window (None = no places)."""

    inputs: Six
    window: Window | None

    @property
    def seen(self) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.int64) if self.window is None else self.window.covered(torch.device("cpu"))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def task(
    b: int, i: int, j: int, seed: int, window: Window | None = None, *, shared: int = 1, offset: bool = False,
    dtype: torch.dtype = torch.float64, scale: float = 1.0,
) -> Task:  # fmt: skip
    """`shared` places share W (only without a window), so that there are shared * i children."""
    n = 1 if window is None else window.kernel**2
    place = (1, shared * i) if window is None else (window.grid.places, i)
    pose = scale * normal(b, *place, 16, seed=seed, dtype=dtype)
    activation = normal(b, *place, seed=seed + 1, dtype=dtype).sigmoid()
    W = 0.5 * normal(n * i, j, 4, 4, seed=seed + 2, dtype=dtype)
    more = 0.2 * normal(n * i * shared, 16, seed=seed + 3, dtype=dtype) if offset else None
    return Task((pose, activation, W, more, *normal(2, j, seed=seed + 4, dtype=dtype).unbind(0)), window)


def plain(job: Task, choice: EM) -> tuple[Tensor, Tensor, Tensor]:
    """The readable router on stored votes: mean [b p j 16], activation [b p j], R [b p c j]; no kernel."""
    pose, activation, W, offset, beta_a, beta_u = job.inputs
    types = pose.shape[2]
    cpu = pose.device
    slots = Slots.at_one_place(types, cpu) if job.window is None else Slots.of_window(job.window, types, cpu)
    given = VotesInput(pose.flatten(1, 2), activation.flatten(1, 2), W, slots=slots, matrix=True, offset=offset)
    parents, info = em.route(DenseVotes.cast(given), choice, False, beta_a, beta_u)
    return parents.pose, parents.activation, info.coupling[0]


def taken(choice: EM) -> dict[str, Any]:
    """The settings that the kernel takes: all but the kind of switch."""
    return {name: value for name, value in asdict(choice).items() if name != "switch"}


def fast(job: Task, choice: EM) -> tuple[Tensor, Tensor, Tensor]:
    mean, logit, R = em_routing(*job.inputs, job.seen, **taken(choice))
    return mean, logit.sigmoid(), R


def with_slopes(route: Any, job: Task, choice: EM) -> list[Tensor]:
    """mean, activation, R, and the derivatives by pose, activation, W, beta_a and beta_u of a random loss."""
    leaves = [None if x is None else x.detach().clone().requires_grad_(n != 3) for n, x in enumerate(job.inputs)]
    mean, on, R = route(Task(tuple(leaves), job.window), choice)
    dtype = mean.dtype
    g = (normal(*mean.shape, seed=90, dtype=dtype), 10 * normal(*on.shape, seed=91, dtype=dtype))
    wanted = [x for n, x in enumerate(leaves) if n != 3]
    return [mean.detach(), on.detach(), R, *torch.autograd.grad((mean, on), wanted, g)]


def near(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Each to `tolerance` of its largest number."""
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        largest = float(y.abs().max()) if y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * largest + 1e-300)


@pytest.fixture(params=["loops", "chunks"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test for the compiled loops and for the form that other devices take."""
    if request.param == "chunks":
        monkeypatch.setattr(kernel, "has_loops", lambda x: False)
    yield request.param


ONLY_LOOPS = pytest.mark.parametrize("form", ["loops"], indirect=True)

# --- Equal to the plain router ----------------------------------------------------------------------------------

windows = st.builds(
    lambda h, w, kernel, stride: Grid(max(h, kernel), max(w, kernel)).window(kernel, stride),
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2),
)  # fmt: skip
tasks = st.builds(task, st.integers(1, 10), st.integers(1, 4), st.integers(1, 4), seeds, st.none() | windows)


@few
@given(job=tasks, choice=choices)
def test_equals_plain_in_float64(job: Task, choice: EM) -> None:
    near(with_slopes(fast, job, choice), with_slopes(plain, job, choice), 1e-10)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_setting_with_a_window_and_offset(choice: EM) -> None:
    job = task(9, 2, 3, 5, Grid(5, 4).window(3, 1), offset=True)
    near(with_slopes(fast, job, choice), with_slopes(plain, job, choice), 1e-10)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_places_that_share_weights(choice: EM) -> None:
    """Class capsules: W [i j 4 4] serves the children of all places, which tell their place by the offset."""
    centers = Grid(3, 2).centers(0.1).repeat_interleave(4, 0).double()
    job = task(5, 4, 3, 7, shared=6)
    job = Task((*job.inputs[:3], add_coordinates(centers, 16), *job.inputs[4:]), None)
    near(with_slopes(fast, job, choice), with_slopes(plain, job, choice), 1e-10)


@pytest.mark.parametrize("choice", FEWER, ids=str)
def test_float32_is_as_good_as_plain(choice: EM) -> None:
    """To 1e-5, or as near to float64 as the plain path in float32 comes, where that is farther."""
    exact = task(20, 4, 5, 11, Grid(5, 5).window(3, 1))
    job = Task(tuple(None if x is None else x.float() for x in exact.inputs), exact.window)
    exact = Task(tuple(None if x is None else x.double() for x in job.inputs), exact.window)
    truth = with_slopes(plain, exact, choice)
    both = zip(with_slopes(fast, job, choice), with_slopes(plain, job, choice), truth, strict=True)
    for ours, theirs, true in both:
        size = float(true.abs().max())
        off, usual = (float((x.double() - true).abs().max()) / size for x in (ours, theirs))
        assert off < max(1e-5, 3 * usual)


def test_votes_that_nearly_agree_in_float32() -> None:
    """A cloud a thousandth as wide as it is far: its variance must come from differences, not from squares."""
    pose = 1 + 1e-3 * normal(4, 1, 12, 16, seed=1)
    W = torch.eye(4, dtype=torch.float64).expand(12, 3, 4, 4) + 1e-3 * normal(12, 3, 4, 4, seed=2)
    zero = torch.zeros(3, dtype=torch.float64)
    exact = Task(
        (pose.float().double(), torch.full((4, 1, 12), 0.5).double(), W.float().double(), None, zero, zero), None
    )
    job = Task(tuple(None if x is None else x.float() for x in exact.inputs), None)
    choice = EM(min_variance=1e-9)
    for ours, true in zip(fast(job, choice), plain(exact, choice), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=2e-2, atol=2e-3)
    (mean, *_), (true, *_) = fast(job, EM()), plain(exact, EM())
    torch.testing.assert_close(mean.double(), true, rtol=1e-6, atol=0)


def test_gradcheck() -> None:
    job = task(2, 2, 2, 13, Grid(3, 3).window(2, 1))
    for choice in (EM(iterations=2, damping=0.2), EM(assignment="descent", competition="positions")):
        leaves = [x.clone().requires_grad_() for x in job.inputs if x is not None]

        def run(*x: Tensor, choice: EM = choice) -> tuple[Tensor, Tensor]:
            mean, logit, _ = em_routing(*x[:3], None, *x[3:], job.seen, **taken(choice))
            return mean, logit

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


# --- Sizes, strides, threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [0, 1, 8, 17])
def test_any_batch(b: int) -> None:
    job = task(b, 3, 2, 17, Grid(4, 4).window(3, 1))
    near(with_slopes(fast, job, EM()), with_slopes(plain, job, EM()), 1e-10)


def test_strided_inputs() -> None:
    job = task(6, 3, 2, 19, Grid(4, 3).window(2, 1))
    pose, activation, W, _, beta_a, beta_u = job.inputs
    turned = (
        pose.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        activation.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        W.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        None,
        torch.stack([beta_a, beta_a], 1)[:, 0],
        beta_u.flip(0).flip(0),
    )
    assert not turned[0].is_contiguous() and not turned[2].is_contiguous()
    torch.testing.assert_close(fast(Task(turned, job.window), EM()), fast(job, EM()), rtol=0, atol=0)
    near(with_slopes(fast, Task(turned, job.window), EM()), with_slopes(plain, job, EM()), 1e-10)


@ONLY_LOOPS
@pytest.mark.parametrize("choice", [EM(), EM(damping=0.3, assignment="descent", competition="positions")], ids=str)
@pytest.mark.parametrize("window", [Grid(5, 5).window(3, 2), Grid(1, 1).window(1, 1)], ids=["windows", "one place"])
def test_threads_that_share_a_block_compute_what_one_does(choice: EM, window: Window) -> None:
    job = task(3, 3, 4, 23, window)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_slopes(fast, job, choice)
        torch.set_num_threads(3)
        shared = [with_slopes(fast, job, choice) for _ in range(2)]
        with torch.no_grad():
            looked = fast(job, choice)
    finally:
        torch.set_num_threads(before)
    near(shared[0], alone, 1e-12)
    torch.testing.assert_close(shared[0], shared[1], rtol=0, atol=0)
    torch.testing.assert_close(list(looked), list(alone[: len(looked)]), rtol=1e-12, atol=1e-12)


@ONLY_LOOPS
def test_any_number_of_threads_and_the_same_each_time() -> None:
    job = task(40, 3, 4, 23, Grid(5, 5).window(3, 2), dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            runs.append(with_slopes(fast, job, EM()))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(runs[1], runs[2], rtol=0, atol=0)
    near(runs[1], runs[0], 1e-5)
    near(runs[3], runs[0], 1e-5)


def test_without_gradient_it_is_the_same() -> None:
    job = task(5, 3, 2, 29, Grid(4, 4).window(3, 1))
    for choice in (EM(), EM(iterations=1), EM(damping=0.5, assignment="descent")):
        with torch.no_grad():
            found = fast(job, choice)
        torch.testing.assert_close(list(found), with_slopes(fast, job, choice)[:3], rtol=0, atol=0)


def test_places_that_no_window_reaches_get_no_gradient() -> None:
    job = task(3, 2, 2, 31, Grid(4, 4).window(3, 2))
    found = with_slopes(fast, job, EM())
    near(found, with_slopes(plain, job, EM()), 1e-10)
    assert not found[3].unflatten(1, (4, 4))[:, 3].any()


# --- Never worse than plain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("assignment", ["paper", "descent"])
def test_finite_at_any_scale_in_float32(scale: float, assignment: str) -> None:
    job = task(5, 3, 4, 37, Grid(4, 4).window(3, 1), dtype=torch.float32, scale=scale)
    for choice in (EM(assignment=assignment), EM(assignment=assignment, min_variance=1e-9, damping=0.1)):
        if all(torch.isfinite(x).all() for x in with_slopes(plain, job, choice)):
            assert_finite(with_slopes(fast, job, choice))


def test_children_that_are_off() -> None:
    """Some, all of one window, all of one sample: the same parents and slopes as plain, and all finite."""
    job = task(4, 3, 3, 41, Grid(4, 4).window(3, 1))
    activation = job.inputs[1].clone()
    activation[0] = 0
    activation[1, :8] = 0
    activation[2, ::2, 1] = 1e-200
    job = Task((job.inputs[0], activation, *job.inputs[2:]), job.window)
    found = with_slopes(fast, job, EM())
    assert_finite(found)
    near(found, with_slopes(plain, job, EM()), 1e-10)


def test_a_parent_that_nobody_wants() -> None:
    """Its shares underflow, its weights do not: it still has a mean and a variance."""
    job = task(3, 6, 2, 43)
    W, beta_u = job.inputs[2].clone(), torch.tensor([-400.0, 400.0], dtype=torch.float64)
    W[:, 1] *= 1e4
    job = Task((*job.inputs[:2], W, None, job.inputs[4], beta_u), None)
    choice = EM(final_inverse_temperature=1.0, assignment="descent")
    wanted = with_slopes(plain, job, choice)
    assert wanted[2][..., 1].max() < 1e-300
    near(with_slopes(fast, job, choice)[:6], wanted[:6], 1e-9)  # its switch is stuck: no slopes by beta but rounding


# --- A good citizen of torch ------------------------------------------------------------------------------------


@ONLY_LOOPS
def test_operators_pass_opcheck() -> None:
    job = task(3, 2, 2, 47, Grid(3, 3).window(2, 1), offset=True, dtype=torch.float32)
    pose, activation, W, offset, beta_a, beta_u = job.inputs
    leaves = [x.requires_grad_() for x in (pose, activation.log(), W)]
    betas = [x.requires_grad_() for x in (beta_a, beta_u)]
    how = ([0.01, 0.02], 5e-4, 0.1, True, False)
    assert set(torch.library.opcheck(kernel._forward, (*leaves, offset, *betas, job.seen, *how, True)).values()) == {
        "SUCCESS"
    }
    inputs = [x.detach() for x in leaves], [x.detach() for x in betas]
    mean, logit, _, *record = kernel._forward(*inputs[0], offset, *inputs[1], job.seen, *how, True)
    args = (torch.ones_like(mean), torch.ones_like(logit), *record, *inputs[0], offset, *inputs[1], job.seen, *how)
    assert set(
        torch.library.opcheck(kernel._backward, args, test_utils=("test_schema", "test_faketensor")).values()
    ) == {"SUCCESS"}


def test_tiles_have_the_shapes_they_promise() -> None:
    job = task(3, 2, 2, 61, Grid(3, 3).window(2, 1), dtype=torch.float32)
    pose, activation, W, _, beta_a, beta_u = job.inputs
    for keep in (True, False):
        args = (pose, activation.log(), W, None, beta_a, beta_u, job.seen, [0.01, 0.02], 5e-4, 0.1, True, False, keep)
        assert set(
            torch.library.opcheck(kernel._forward, args, test_utils=("test_schema", "test_faketensor")).values()
        ) == {"SUCCESS"}


@ONLY_LOOPS
def test_compiles_as_one_graph() -> None:
    job = task(3, 2, 2, 53, Grid(3, 3).window(2, 1))
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_slopes(compiled, job, EM()), with_slopes(fast, job, EM()))


def test_coupling_is_detached() -> None:
    job = task(2, 2, 2, 59)
    job.inputs[0].requires_grad_()
    mean, _, R = fast(job, EM())
    assert mean.requires_grad and not R.requires_grad


@ONLY_LOOPS
def test_the_votes_are_never_stored() -> None:
    """Nothing is larger than log R of the iterations but the first, an eighth of the votes."""
    job = task(32, 16, 8, 67, Grid(6, 6).window(3, 1), dtype=torch.float32)
    pose, activation, W, _, beta_a, beta_u = job.inputs
    how = [0.01, 0.02, 0.03], 5e-4, 0.0, False, True
    layer = kernel.EmInputs(pose, activation.log(), W, None, beta_a, beta_u, job.seen, *how)
    with Largest() as most, torch.no_grad():
        mean, logit, coupling, *record = kernel._forward_loops(layer, True)
        kernel._backward_loops(layer, *record, mean, logit)
    votes = coupling.nbytes * 16
    assert most.bytes <= 2 * coupling.nbytes < votes / 7
