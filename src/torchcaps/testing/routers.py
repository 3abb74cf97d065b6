"""Checks of the laws that every router must keep, for the library's routers and for your own.

    from torchcaps.testing import assert_router, variants

    assert_router("em")                                        # a name in ROUTERS, its default settings
    assert_router(Router(Mine, route), Mine(iterations=2))     # your own record, registered or not
    for settings in variants(Mine):                            # every combination of its Literal settings
        assert_router(Router(Mine, route), settings)

Each check returns nothing or raises an AssertionError that names the law that was broken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from torchcaps.kernels.votes import ChunkedVotes, CompiledVotes, DenseVotes, Slots, Votes, VotesInput
from torchcaps.math.grid import Grid
from torchcaps.math.pose import vector_votes
from torchcaps.routing import ROUTERS, Router, RouterSettings, iterations_of, route, router_of, settings_of
from torchcaps.routing.base import run_router
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["Over", "assert_finite", "assert_router", "variants"]

Over = Literal["parents", "children", "positions", "background"]
"""What a coupling sums to 1 over; with a background class besides the parents, it sums to at most 1 over these."""

S = TypeVar("S", bound=RouterSettings)


# --- Finite ---------------------------------------------------------------------------------------------------


def assert_finite(tree: object, name: str = "value") -> None:
    """Check that a tensor, record, mapping or sequence, however nested, holds no NaN and no infinity.

    Args:
        tree: What to check; text and None hold no numbers.
        name: What the error calls it.

    Raises:
        AssertionError: With the path to the first number that is not finite.
    """
    for path, leaf in _leaves(tree, name):
        if isinstance(leaf, Tensor):
            bad = ~torch.isfinite(leaf)
            if bad.any():
                first = bad.nonzero()[0].tolist()
                raise AssertionError(f"{path}: {int(bad.sum())} of {bad.numel()} not finite, first at {first}")
        elif not math.isfinite(leaf):
            raise AssertionError(f"{path}: {leaf} is not finite")


def _leaves(tree: object, path: str) -> Iterator[tuple[str, Tensor | float]]:
    """Every tensor and number below `tree`, with the path that leads to it; text and None hold none."""
    if isinstance(tree, Tensor | float | int):
        yield path, tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _leaves(getattr(tree, field.name), f"{path}.{field.name}")
    # A NamedTuple before other sequences: its paths have names instead of numbers
    elif isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        for key, value in tree._asdict().items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")


# --- Routers --------------------------------------------------------------------------------------------------


def variants(settings: type[S]) -> list[S]:
    """Return one settings object per combination of the Literal fields; the other fields keep their defaults.

    Args:
        settings: The settings class of a router.
    """
    hints = get_type_hints(settings)
    choices = {f.name: get_args(hints[f.name]) for f in fields(settings) if get_origin(hints[f.name]) is Literal}
    return [settings(**dict(zip(choices, picked, strict=True))) for picked in itertools.product(*choices.values())]


def assert_router(
    router: Router | str,
    settings: RouterSettings | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    over: Over = "parents",
    differentiable: bool = True,
    seed: int = 0,
) -> None:
    """Hold a router to the contract of docs/develop/new_router.md, on small random votes.

    Args:
        router: A name in ROUTERS, or a record, registered or not.
        settings: Of the router; None for its defaults.
        dtype: Of the votes; gradients are checked in float64 alone.
        over: What the coupling sums to 1 over: a child's "parents" (at all positions), a parent's "children", or, type
            by type, the "positions" of a window, so that at one position every share is 1. With a "background" class
            the parents' shares sum to at most 1 (in overlapping windows, from the second iteration on).
        differentiable: Whether the gradient is that of the values, to second order; False for a router that treats
            some of its computation as constant on purpose.
        seed: Of the votes.

    Raises:
        AssertionError: If a law is broken, with its name.
        RecipeError: If there is no router of that name.
    """
    record = router_of(settings_of(router)) if isinstance(router, str) else router
    settings = record.settings() if settings is None else settings
    # Laws at one position; sizes mostly differ, so that swapped axes are noticed
    trial = _trial(record, settings, dtype, seed, (3, 5, 3, 4))
    for law in (
        _is_pure,
        _has_shapes,
        _traces,
        _stops_anywhere,
        _order_of_children,
        _order_of_parents,
        _one_of_a_batch,
    ):
        law(trial)
    _shares(trial, over)
    # Laws of windows, of `route`, of gradients and of the kinds of votes
    _shares_in_windows(record, settings, dtype, seed, over)
    if record in ROUTERS.values():
        # `route` finds a router by its settings, so it must be registered
        _front_door(_trial(record, settings, dtype, seed, (2, 4, 3, 5)))
    if differentiable and dtype == torch.float64:
        _gradient(_trial(record, settings, dtype, seed, (1, 3, 2, 2)))
    if dtype in (torch.float32, torch.float64):
        _same_for_all_kinds_of_votes(trial, seed)


@dataclass(frozen=True)
class _Trial:
    """One call of a router: its input, votes [(b p) i j k] and activations [b n], and who stands in which window."""

    router: Router
    settings: RouterSettings
    votes: Tensor
    activation: Tensor
    learned: dict[str, Any]  # tensors [j] and [i j]; `Any`, since they are keywords of `route` beside others
    slots: Slots

    @property
    def stored(self) -> DenseVotes:
        """The votes as the router gets them."""
        return DenseVotes(torch.unflatten(self.votes, 0, (-1, self.slots.places)), self.activation, self.slots)

    def run(self, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        """Call the router; places are folded into the batch."""
        parents, info = run_router(self.router, self.stored, self.settings, self.learned, trace=trace)
        return Capsules(*(x.flatten(0, 1) for x in parents)), info

    def with_gradient(self) -> _Trial:
        """The same call, with inputs that want gradients."""
        copies = {name: value.clone().requires_grad_() for name, value in self.learned.items()}
        votes, activation = (x.clone().requires_grad_() for x in (self.votes, self.activation))
        return replace(self, votes=votes, activation=activation, learned=copies)

    def hold(self, ok: bool | Tensor, law: str) -> None:
        """Raise an error that states the law unless it holds."""
        if not ok:
            raise AssertionError(f"{self.settings}: {law}")

    def close(self, came: object, wanted: object, law: str) -> None:
        """Equal up to rounding, or an error that states the law that was broken."""
        # Half of the digits: sums in another order differ in the last ones, and iterations enlarge that
        near = torch.finfo(self.votes.dtype).eps ** 0.5
        try:
            torch.testing.assert_close(came, wanted, rtol=near, atol=near)
        except AssertionError as error:
            raise AssertionError(f"{self.settings}: {law}: {error}") from None


def _trial(
    router: Router,
    settings: RouterSettings,
    dtype: torch.dtype,
    seed: int,
    sizes: tuple[int, ...],
    slots: Slots | None = None,
) -> _Trial:
    """Votes from N(0, 1), activations from (0, 1), learned tensors near their initial values; sizes b, i, j, k."""
    b, i, j, _ = sizes
    slots = slots or Slots.at_one_place(i, torch.device("cpu"))
    make = torch.Generator().manual_seed(seed)
    votes = torch.randn(sizes, generator=make).to(dtype)
    activation = torch.rand(b // slots.places, slots.children, generator=make).to(dtype)
    learned = {
        name: (value + torch.rand(value.shape, generator=make)).to(dtype)
        for name, value in router.initial(i, j).items()
    }
    return _Trial(router, settings, votes, activation, learned, slots)


def _is_pure(trial: _Trial) -> None:
    """The same input gives the same output, bit by bit, and is left as it was; the record has no gradient."""
    inputs = [trial.votes, trial.activation, *trial.learned.values()]
    before = [x.clone() for x in inputs]
    first, _ = trial.run()
    trial.hold(all(map(torch.equal, inputs, before)), "the input was changed in place")
    # With gradients this time: whether they are wanted must not change the values
    second, info = trial.with_gradient().run(trace=True)
    trial.hold(all(map(torch.equal, first, second)), "two runs on the same input differ")
    for path, leaf in _leaves(info, "info"):
        trial.hold(not (isinstance(leaf, Tensor) and leaf.requires_grad), f"{path} is not detached")


def _has_shapes(trial: _Trial) -> None:
    """Parents [b p j k] and [b p j] in [0, 1], coupling [1 b p i j] not negative; finite, of the votes' type."""
    parents, info = trial.router.route(trial.stored, trial.settings, False, **trial.learned)
    b, i, j, k = trial.votes.shape
    _has_shape(trial, "parents.pose", parents.pose, (b, 1, j, k))
    _has_shape(trial, "parents.activation", parents.activation, (b, 1, j))
    _has_shape(trial, "info.coupling", info.coupling, (1, b, 1, i, j))
    # Values: probabilities, and shares of a child
    a = parents.activation
    trial.hold((a.min() >= 0) & (a.max() <= 1), f"parents.activation runs from {a.min()} to {a.max()}")
    trial.hold(info.coupling.min() >= 0, "a coupling is negative")


def _has_shape(trial: _Trial, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """A finite tensor of this shape and of the votes' type."""
    came = list(tensor.shape)
    dtype = trial.votes.dtype
    trial.hold(came == list(shape), f"{name} has shape {came}; {list(shape)} is wanted")
    trial.hold(tensor.dtype == dtype, f"{name} is {tensor.dtype} for votes of {dtype}")
    assert_finite(tensor, f"{trial.settings}: {name}")


def _traces(trial: _Trial) -> None:
    """trace=True adds the earlier iterations to the record and changes nothing else."""
    (plain, last) = trial.run()
    (traced, info) = trial.run(trace=True)
    trial.hold(all(map(torch.equal, plain, traced)), "trace=True changes the parents")
    trial.hold(torch.equal(last.coupling, info.coupling[-1:]), "trace=True changes the last coupling")
    # Shapes: all fields have the iteration as their first axis
    t = iterations_of(trial.settings)
    b, i, j, _ = trial.votes.shape
    _has_shape(trial, "info.coupling of trace=True", info.coupling, (t, b, i, j))
    trial.hold(last.parents is None, "info.parents is there without trace=True")
    trial.hold(info.parents is not None, "info.parents is missing with trace=True")
    assert info.parents is not None
    _has_shape(trial, "info.parents.pose", info.parents.pose, (t, *traced.pose.shape))
    _has_shape(trial, "info.parents.activation", info.parents.activation, (t, *traced.activation.shape))
    # The record ends with what was returned
    final = (x[-1] for x in info.parents)
    trial.hold(all(map(torch.equal, final, traced)), "the last of info.parents is not what the router returned")
    # Not every router has these two
    if info.agreement is not None:
        _has_shape(trial, "info.agreement", info.agreement, (t, b, j))
    if info.free_energy is not None:
        _has_shape(trial, "info.free_energy", info.free_energy, (t, b))


def _stops_anywhere(trial: _Trial) -> None:
    """The parents that the record has of iteration t are those of a run with t iterations."""
    traced = trial.run(trace=True)[1].parents
    assert traced is not None
    for t in range(1, iterations_of(trial.settings)):
        stopped, _ = replace(trial, settings=replace(trial.settings, iterations=t)).run()
        came = Capsules(traced.pose[t - 1], traced.activation[t - 1])
        trial.close(came, stopped, f"info.parents of iteration {t} are not those of a run with iterations={t}")


def _order_of_children(trial: _Trial) -> None:
    """Reversed children have the same parents."""
    (parents, info) = trial.run()
    votes = trial.votes.flip(1)
    a = trial.activation.flip(1)
    learned = {name: value.flip(0) if value.ndim == 2 else value for name, value in trial.learned.items()}
    moved, its = replace(trial, votes=votes, activation=a, learned=learned).run()
    trial.close(moved, parents, "the order of the children changes the parents")
    trial.close(its.coupling, info.coupling.flip(2), "the coupling does not follow the children")


def _order_of_parents(trial: _Trial) -> None:
    """Parents that change places, with their votes and learned tensors, only change places."""
    parents, info = trial.run()
    learned = {name: value.roll(1, -1) for name, value in trial.learned.items()}
    moved, its = replace(trial, votes=trial.votes.roll(1, 2), learned=learned).run()
    wanted = Capsules(*(x.roll(1, 1) for x in parents))
    trial.close(moved, wanted, "parents in another order are other parents")
    trial.close(its.coupling, info.coupling.roll(1, 3), "the coupling does not follow the parents")


def _one_of_a_batch(trial: _Trial) -> None:
    """An image routed alone has the parents that it has in a batch."""
    parents, info = trial.run()
    for n in range(len(trial.votes)):
        # A slice, so that the batch axis stays
        one = slice(n, n + 1)
        alone, its = replace(trial, votes=trial.votes[one], activation=trial.activation[one]).run()
        trial.close(alone, Capsules(*(x[one] for x in parents)), "an image depends on its batch")
        trial.close(its.coupling, info.coupling[:, one], "a coupling depends on its batch")


def _shares(trial: _Trial, over: Over) -> None:
    """The coupling sums to 1 over what competes, in every iteration."""
    c = trial.run(trace=True)[1].coupling  # [t b i j]
    total = {"parents": c.sum(-1), "children": c.sum(-2), "positions": c, "background": c.sum(-1).clamp_min(1)}[over]
    trial.close(total, torch.ones_like(total), f"the coupling does not sum to 1 over {over}")


def _shares_in_windows(router: Router, settings: RouterSettings, dtype: torch.dtype, seed: int, over: Over) -> None:
    """The same with a 2x2 window on 3x3 places, where the child in the middle stands in four windows."""
    window = Grid(3, 3).window(2, 1)
    types = 2
    b = 2
    p = window.out.places
    n = window.kernel**2
    # Route with the window's competition
    slots = Slots.of_window(window, types, torch.device("cpu"))
    trial = _trial(router, settings, dtype, seed, (b * p, n * types, 3, 4), slots)
    parents, info = trial.run(trace=True)
    assert_finite((parents, info), f"{settings}: with a window")
    # Add up the shares of each child over the windows that it stands in
    c = info.coupling  # [t (b p) (n i) j]
    flat = c.reshape(-1, slots.child.numel(), c.shape[-1])  # [(t b) (p n i) j]
    held = flat.new_zeros(len(flat), slots.children, flat.shape[-1])
    held = held.index_add(1, slots.child.flatten(), flat)  # [(t b) (h w i) j]
    beyond_first = held.sum(-1)[b:].clamp_min(1)
    total = {"parents": held.sum(-1), "children": c.sum(2), "positions": held, "background": beyond_first}[over]
    trial.close(total, torch.ones_like(total), f"with a window the coupling does not sum to 1 over {over}")


def _same_for_all_kinds_of_votes(trial: _Trial, seed: int) -> None:
    """Parents, coupling and gradients do not depend on whether votes are stored or recomputed, and by what."""
    window = Grid(3, 3).window(2, 1)
    types = 2
    i = window.kernel**2 * types
    slots = Slots.of_window(window, types, torch.device("cpu"))
    dtype = trial.votes.dtype
    # Children, weights and what the router learns
    make = torch.Generator().manual_seed(seed)
    pose = torch.randn(3, slots.children, 3, generator=make)
    activation = torch.rand(3, slots.children, generator=make)
    weights = torch.randn(i, 3, 4, 3, generator=make)
    initial = trial.router.initial(i, 3)
    given = [x.to(dtype).requires_grad_() for x in (pose, activation, weights, *initial.values())]
    learned = dict(zip(initial, given[3:], strict=True))

    def outcome(kind: Callable[[VotesInput], Votes]) -> tuple[Tensor | None, ...]:
        votes = kind(VotesInput(given[0], given[1], given[2], slots))
        parents, info = run_router(trial.router, votes, trial.settings, learned, trace=True)
        # A fixed weighting of the results, so that gradients can be compared
        value = (parents.pose * torch.linspace(-1, 1, parents.pose.shape[-1]).to(dtype)).sum()
        value = value + parents.activation.square().sum()
        gradients = torch.autograd.grad(value, given, allow_unused=True)
        return (*parents, info.coupling, *gradients)

    wanted = outcome(DenseVotes.cast)
    for kind in (ChunkedVotes, CompiledVotes):
        trial.close(outcome(kind), wanted, f"{kind.__name__} give other results than stored votes")


def _front_door(trial: _Trial) -> None:
    """`route` on poses and weights is the router on the votes that they cast."""
    pose = trial.votes[:, :, 0]  # [b i d], any numbers will do
    weights = torch.stack([trial.votes[0].roll(n, 0) for n in range(pose.shape[-1])], -1)  # [i j k d]
    came, _ = route(Capsules(pose, trial.activation), weights, trial.settings, **trial.learned)
    wanted, _ = replace(trial, votes=vector_votes(pose, weights)).run()
    trial.close(came, wanted, "torchcaps.route gives other parents than the router")


def _gradient(trial: _Trial) -> None:
    """First and second derivatives with respect to votes, activation and learned tensors, against differences."""
    trial = trial.with_gradient()

    def parents(votes: Tensor, activation: Tensor, *learned: Tensor) -> tuple[Tensor, ...]:
        changed = dict(zip(trial.learned, learned, strict=True))
        return tuple(replace(trial, votes=votes, activation=activation, learned=changed).run()[0])

    inputs = (trial.votes, trial.activation, *trial.learned.values())
    try:
        torch.autograd.gradcheck(parents, inputs)
        torch.autograd.gradgradcheck(parents, inputs)
    except RuntimeError as error:
        raise AssertionError(f"{trial.settings}: the gradient is not that of the values: {error}") from error
