"""Votes that are never stored: every operation, its gradients and its edge cases, against the stored ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torchcaps.kernels.votes import ChunkedVotes, CompiledVotes, DenseVotes, Slots, Votes
from torchcaps.kernels.votes.base import VotesInput
from torchcaps.math.grid import Grid

CPU = torch.device("cpu")
IMPLEMENTATIONS = [ChunkedVotes, CompiledVotes]


class Case(NamedTuple):
    """A layer: kind of pose, window or one place, sizes, one W for all places of a window, offsets."""

    matrix: bool = False
    window: bool = True
    batch: int = 3
    d: int = 5
    k: int = 6
    types: int = 2
    parents: int = 3
    shared: bool = False
    offset: bool = False


CASES = [
    *(Case(matrix, window) for matrix, window in itertools.product([True, False], repeat=2)),
    *(Case(matrix, shared=True, offset=True) for matrix in (True, False)),
    *(Case(batch=batch, d=d, k=k) for batch, d, k in [(1, 1, 1), (16, 8, 16), (33, 4, 4), (7, 3, 5)]),
    Case(matrix=True, batch=40, types=1, parents=1, window=False, offset=True),
]


def label(case: Case) -> str:
    return "-".join(f"{name}{value}" for name, value in case._asdict().items() if value is not False)


class Given(NamedTuple):
    """Tensors that the operations are differentiated by."""

    pose: Tensor
    activation: Tensor
    weights: Tensor
    log_weight: Tensor  # [b p i j]
    mean: Tensor  # [b p j k]
    scale: Tensor
    bias: Tensor  # [b p j]


class Problem(NamedTuple):
    given: Given
    slots: Slots
    offset: Tensor | None
    matrix: bool

    def votes(self, kind: Callable[[VotesInput], Votes], given: Given) -> Votes:
        return kind(VotesInput(*given[:3], self.slots, matrix=self.matrix, offset=self.offset))


def problem(case: Case, dtype: torch.dtype = torch.float64) -> Problem:
    generator = torch.Generator().manual_seed(hash(case) % 2**31)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    window = Grid(4, 5).window(3, 1)
    slots = Slots.of_window(window, case.types, CPU) if case.window else Slots.at_one_place(7 * case.types, CPU)
    d = 16 if case.matrix else case.d
    k = 16 if case.matrix else case.k
    kind = (4, 4) if case.matrix else (k, d)
    rows = case.types if case.shared else slots.size
    b, p, j = case.batch, slots.places, case.parents
    given = Given(
        pose=normal(b, slots.children, d),
        activation=normal(b, slots.children).sigmoid(),
        weights=0.5 * normal(rows, j, *kind),
        log_weight=normal(b, p, slots.size, j),
        mean=normal(b, p, j, k),
        scale=(0.5 * normal(b, p, j, k)).exp(),
        bias=normal(b, p, j),
    )
    return Problem(given, slots, normal(slots.size, k) if case.offset else None, case.matrix)


def results(votes: Votes, given: Given) -> dict[str, Tensor]:
    """Every operation, its results as [b p ...]."""
    log_weight, mean, scale, bias = map(votes.split_batch, given[3:])
    moments = votes.moments(log_weight)
    found = {
        "log mass": moments.log_mass + votes.log_scale,
        "mean": moments.mean,
        "variance": moments.variance,
        "log likelihood": votes.log_likelihood(mean, scale, bias),
        "total": votes.total(log_weight),
        "dot": votes.dot(mean),
        "squared lengths": votes.squared_lengths(),
        "compete": votes.compete(log_weight),
        "compete by type": votes.compete(log_weight, across_parents=False),
        "compete with a background": votes.compete(log_weight, background=0.3),
        "log activation": votes.log_activation + votes.log_scale,
        "uniform": votes.uniform_log_share(),
        "uniform by type": votes.uniform_log_share(across_parents=False),
    }
    return {name: votes.join_batch(value) for name, value in found.items()}


def gradients(found: dict[str, Tensor], given: Given) -> dict[str, dict[str, Tensor]]:
    """Of every result that depends on anything, the gradients of a random weighting of its numbers."""
    made = {}
    for name, value in found.items():
        if not value.requires_grad:
            continue
        generator = torch.Generator().manual_seed(len(name))
        weights = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        grads = torch.autograd.grad((value * weights).sum(), given, retain_graph=True, allow_unused=True)
        zeros = (torch.zeros_like(x) for x in given)
        made[name] = {
            which: zero if g is None else g for which, g, zero in zip(Given._fields, grads, zeros, strict=True)
        }
    return made


def leaves(given: Given) -> Given:
    return Given(*(x.clone().requires_grad_() for x in given))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_values_and_gradients_equal_those_of_stored_votes(case, kind, dtype, tolerance):
    given = problem(case, dtype)
    outcomes = []
    for each in (DenseVotes.cast, kind):
        own = leaves(given.given)
        found = results(given.votes(each, own), own)
        outcomes.append((found, gradients(found, own)))
    (values, slopes), (other_values, other_slopes) = outcomes
    for name, expected in values.items():
        torch.testing.assert_close(other_values[name], expected, rtol=tolerance, atol=tolerance * 10, msg=name)
    assert slopes.keys() == other_slopes.keys()
    for name, by in slopes.items():
        for which, expected in by.items():
            scale = float(expected.abs().max()) + 1
            error = float((other_slopes[name][which] - expected).abs().max()) / scale
            assert error < tolerance * 10, (name, which)


def test_moments_are_those_of_a_loop_over_votes():
    """Mean and variance as printed, one loop per index, of the stored votes."""
    case = Case(window=False, batch=2, d=2, k=3, types=1, parents=2)
    given = problem(case)
    votes = given.votes(DenseVotes.cast, given.given)
    assert isinstance(votes, DenseVotes)
    moments = votes.moments(given.given.log_weight)
    V, log_w, a = votes.votes, given.given.log_weight, given.given.activation
    for b, j, k in itertools.product(range(2), range(2), range(3)):
        w = [float(log_w[b, 0, i, j].exp() * a[b, i]) for i in range(7)]
        mean = sum(w[i] * float(V[b, 0, i, j, k]) for i in range(7)) / sum(w)
        variance = sum(w[i] * (float(V[b, 0, i, j, k]) - mean) ** 2 for i in range(7)) / sum(w)
        assert float(moments.mean[b, 0, j, k]) == pytest.approx(mean)
        assert float(moments.variance[b, 0, j, k]) == pytest.approx(variance)
        log_mass = moments.log_mass + votes.log_scale
        assert float(log_mass[b, 0, j].exp()) == pytest.approx(sum(w))


@pytest.mark.parametrize("matrix", [True, False])
def test_gradcheck_of_compiled_votes(matrix):
    case = Case(matrix=matrix, batch=2, d=2, k=3, types=1, parents=2, window=False)
    given = problem(case)

    def outcome(*tensors: Tensor) -> tuple[Tensor, ...]:
        own = Given(*tensors)
        return tuple(v for v in results(given.votes(CompiledVotes, own), own).values() if v.requires_grad)

    assert torch.autograd.gradcheck(outcome, tuple(leaves(given.given)), fast_mode=True)


@pytest.mark.parametrize("kind", [DenseVotes.cast, *IMPLEMENTATIONS])
def test_shares_of_a_child_add_up_to_one_over_all_windows(kind):
    given = problem(Case())
    votes = given.votes(kind, given.given)
    share = votes.join_batch(votes.compete(votes.split_batch(given.given.log_weight))).exp().sum(-1)  # [b p i]
    whole = torch.zeros(3, given.slots.children, dtype=torch.float64)
    whole.index_add_(1, given.slots.child.flatten(), share.flatten(1))
    torch.testing.assert_close(whole, torch.ones_like(whole))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_results_do_not_depend_on_the_threads_and_repeat_to_the_bit(batch, threads):
    given = problem(Case(matrix=True, batch=batch), torch.float32)

    def outcome() -> list[Tensor]:
        own = leaves(given.given)
        found = results(given.votes(CompiledVotes, own), own)
        slopes = gradients(found, own)
        return [*(v.detach() for v in found.values()), *(g for by in slopes.values() for g in by.values())]

    before = torch.get_num_threads()
    one = outcome()
    try:
        torch.set_num_threads(threads)
        several, again = outcome(), outcome()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(several, again, strict=True))
    for x, y in zip(one, several, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_an_empty_batch_has_empty_results(kind):
    given = problem(Case(batch=0))
    for name, value in results(given.votes(kind, given.given), given.given).items():
        assert len(value) == 0, name


@pytest.mark.parametrize("kind", [DenseVotes.cast, *IMPLEMENTATIONS])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e6])
def test_results_are_finite_for_children_that_are_off_and_votes_of_any_size(kind, size):
    given = problem(Case(matrix=True), torch.float32)
    own = leaves(given.given._replace(pose=given.given.pose * size, activation=given.given.activation * 0))
    found = results(given.votes(kind, own), own)
    assert all(torch.isfinite(value).all() for value in found.values())
    for name, by in gradients(found, own).items():
        assert all(torch.isfinite(g).all() for g in by.values()), name


def operators() -> list[tuple[Callable[..., object], tuple[object, ...]]]:
    """Every operator with arguments to call it by."""
    from torchcaps.kernels.votes import compiled

    given = problem(Case(batch=8, types=1, parents=2))
    votes = given.votes(CompiledVotes, leaves(given.given))
    assert isinstance(votes, CompiledVotes)
    layer = votes._fixed
    handle = [torch.zeros(x.shape, dtype=x.dtype).requires_grad_() for x in votes._handle()]
    learning = tuple(x.detach().requires_grad_(n < 2) if isinstance(x, Tensor) else x for n, x in enumerate(layer))
    log_weight, mean, scale, bias = map(votes.split_batch, given.given[3:])
    pairs = compiled._pairs(log_weight).requires_grad_()
    parents = [compiled._samples_last(x).requires_grad_() for x in (mean, scale, bias)]
    log_a = votes._log_a.detach().requires_grad_()
    return [
        (compiled._handles, learning),
        (compiled._moments, (*layer, given.slots.order, given.slots.ends, handle, pairs, log_a)),
        (compiled._log_likelihood, (*layer, handle, *parents)),
        (compiled._total, (*layer, handle, pairs)),
        (compiled._dot, (*layer, handle, parents[0])),
        (compiled._squared_lengths, (*layer, handle)),
        (compiled._compete, (pairs, given.slots.order, given.slots.ends, 1, -float("inf"))),
    ]


@pytest.mark.parametrize("number", range(7))
def test_operators_pass_opcheck(number):
    operator, arguments = operators()[number]
    torch.library.opcheck(operator, arguments)


def test_operations_compile_into_one_graph():
    given = problem(Case(batch=8), torch.float32)

    def run(own: Given) -> dict[str, Tensor]:
        return results(given.votes(CompiledVotes, own), own)

    plain = run(given.given)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(given.given)
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[name], expected, msg=name)
