"""What a router is: a record of pure functions and settings, so that one line in `ROUTERS` adds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from torchcaps.math.grid import Window
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "Compete",
    "Router",
    "RouterSettings",
    "WindowCompetition",
    "compete_at_one_place",
    "iterations_of",
    "places_of",
    "stack_info",
]


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


class Compete(Protocol):
    """The competition for children: log-softmax of logits [b i j] over all parents that can have the child.

    In a convolutional layer these stand at several positions; with `across_parents=False` only the positions of one and
    the same parent type compete.
    """

    def __call__(self, logits: Tensor, *, across_parents: bool = True) -> Tensor: ...


def compete_at_one_place(logits: Tensor, *, across_parents: bool = True) -> Tensor:
    """Let the parents of a layer without places compete: over j, or not at all.

    A log-softmax in two steps: torch 2.13 cannot compile the gradient of its own where strides are mixed.

    Args:
        logits: [b i j].
        across_parents: Whether parents compete; if not, each has every child whole.

    Returns:
        Log shares [b i j].
    """
    if not across_parents:
        return torch.zeros_like(logits)
    away = logits - logits.detach().amax(-1, keepdim=True)
    return away - away.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class WindowCompetition:
    """The competition of a layer whose parents stand at every position of a window, over `types` children a place."""

    window: Window
    types: int

    @property
    def places(self) -> int:
        """How many positions there are."""
        return self.window.out.places

    def __call__(self, logits: Tensor, *, across_parents: bool = True) -> Tensor:
        return self.window.log_share(logits, self.types, across_parents=across_parents)


def places_of(compete: Compete) -> int:
    """Return p, how many positions of one image are folded into the batch axis (b p) of what competes."""
    return compete.places if isinstance(compete, WindowCompetition) else 1


@dataclass(frozen=True)
class Router:
    """One way to find agreement: an entry of `ROUTERS`.

    Attributes:
        settings: A frozen dataclass, every field with a default; its type names the router in a layer.
        route: (votes [b i j k], activation [b i], settings, compete, trace, **learned) -> (parents, info).
        learned: Scalars per parent that the layer above learns and passes in, with their initial values.
        activation_is_length: True if the length of a pose is the capsule's activation, in children and parents. Such
            a router does not read the children's activations: their votes carry them.
    """

    settings: type[Any]
    route: Callable[..., tuple[Capsules, RoutingInfo]]
    learned: Mapping[str, float] = field(default_factory=dict)
    activation_is_length: bool = False


def stack_info(infos: list[RoutingInfo]) -> RoutingInfo:
    """Join the records of single iterations into one, detached.

    Args:
        infos: one record an iteration, its tensors without the axis of iterations: coupling [b i j] and, in all
            records or in none, agreement [b j], free_energy [b] and parents ([b j k], [b j]).

    Returns:
        The record with the iteration as the first axis: coupling [t b i j], and so on.
    """
    return RoutingInfo(
        torch.stack([info.coupling.detach() for info in infos]),
        _stack([info.agreement for info in infos]),
        _stack([info.free_energy for info in infos]),
        _stack_parents([info.parents for info in infos]),
    )


def _stack(values: list[Tensor | None]) -> Tensor | None:
    """Stack tensors along a new first axis, detached; None if one of them is missing."""
    present = [value.detach() for value in values if value is not None]
    return torch.stack(present) if len(present) == len(values) else None


def _stack_parents(parents: list[Capsules | None]) -> Capsules | None:
    """Stack poses and activations along a new first axis, detached; None if one of them is missing."""
    poses = _stack([None if each is None else each.pose for each in parents])
    activations = _stack([None if each is None else each.activation for each in parents])
    return None if poses is None or activations is None else Capsules(poses, activations)
