"""What a router is: a record of pure functions and settings, so that one line in `ROUTERS` adds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchcaps.kernels.votes import Votes
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["Router", "RouterSettings", "iterations_of", "run_router", "stack_info"]


class RouterSettings(Protocol):
    """Settings of one router: a frozen dataclass, every field with a default; its type names the router."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def iterations_of(settings: RouterSettings) -> int:
    """Return how many iterations a router takes.

    Args:
        settings: Of the router.

    Returns:
        Its setting `iterations`, or 1 if it has none.
    """
    return int(getattr(settings, "iterations", 1))


@dataclass(frozen=True)
class Router:
    """One way to find agreement: an entry of `ROUTERS`.

    Attributes:
        settings: A frozen dataclass, every field with a default; its type names the router in a layer.
        route: (votes, settings, trace, **learned) -> (parents, info), where `votes` is an object of
            `torchcaps.kernels.votes.Votes`; shapes end in [b p j k] and [b p i j], as its operations have them.
        learned: Scalars per parent [j] that the layer above learns and passes in, with their initial values.
        learned_pairs: The same per pair of child and parent [i j].
        activation_is_length: True if the length of a pose is the capsule's activation, in children and parents. Such
            a router does not read the children's activations: their votes carry them.
    """

    settings: type[Any]
    route: Callable[..., tuple[Capsules, RoutingInfo]]
    learned: Mapping[str, float] = field(default_factory=dict)
    learned_pairs: Mapping[str, float] = field(default_factory=dict)
    activation_is_length: bool = False

    def initial(self, children: int, parents: int) -> dict[str, Tensor]:
        """Return the initial values of all that the router learns, [j] and [i j], by name."""
        scalars = {name: torch.full((parents,), value) for name, value in self.learned.items()}
        pairs = {name: torch.full((children, parents), value) for name, value in self.learned_pairs.items()}
        return scalars | pairs


def run_router(
    router: Router, votes: Votes, settings: RouterSettings, learned: Mapping[str, Tensor], *, trace: bool
) -> tuple[Capsules, RoutingInfo]:
    """Call a router, and return what it found with the batch as the first axis, however the votes lay it out.

    Args:
        router: The router.
        votes: What it routes.
        settings: Of the router.
        learned: Its learned tensors by name, [j] or [i j].
        trace: Whether to record every iteration.

    Returns:
        parents: Pose [b p j k] and activation [b p j].
        info: The record, with (b p) as its batch axis; its free energy is summed over places.
    """
    parents, info = router.route(votes, settings, trace, **learned)

    def joined(x: Tensor) -> Tensor:
        """[t ...] with the axes of the votes -> [t b p ...]."""
        return _stacked([votes.join_batch(each) for each in x])

    found = info.parents
    record = RoutingInfo(
        joined(info.coupling).flatten(1, 2),
        None if info.agreement is None else joined(info.agreement).flatten(1, 2),
        None if info.free_energy is None else joined(info.free_energy).sum(-1),
        None if found is None else Capsules(*(joined(x).flatten(1, 2) for x in found)),
    )
    return Capsules(votes.join_batch(parents.pose), votes.join_batch(parents.activation)), record


def stack_info(infos: list[RoutingInfo]) -> RoutingInfo:
    """Join the records of single iterations into one, detached.

    Args:
        infos: one record an iteration, its tensors without the axis of iterations: coupling [b p i j] and, in all
            records or in none, agreement [b p j], free_energy [b p] and parents ([b p j k], [b p j]).

    Returns:
        The record with the iteration as the first axis: coupling [t b p i j], and so on.
    """
    return RoutingInfo(
        _stacked([info.coupling.detach() for info in infos]),
        _stack([info.agreement for info in infos]),
        _stack([info.free_energy for info in infos]),
        _stack_parents([info.parents for info in infos]),
    )


def _stack(values: list[Tensor | None]) -> Tensor | None:
    """Stack tensors along a new first axis, detached; None if one of them is missing."""
    present = [value.detach() for value in values if value is not None]
    return _stacked(present) if len(present) == len(values) else None


def _stacked(values: list[Tensor]) -> Tensor:
    """Stack tensors along a new first axis; a single one is not copied."""
    return values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)


def _stack_parents(parents: list[Capsules | None]) -> Capsules | None:
    """Stack poses and activations along a new first axis, detached; None if one of them is missing."""
    poses = _stack([None if each is None else each.pose for each in parents])
    activations = _stack([None if each is None else each.activation for each in parents])
    return None if poses is None or activations is None else Capsules(poses, activations)
