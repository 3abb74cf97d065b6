"""What a router is: a record of pure functions and settings, so that one line in `ROUTERS` adds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from torchcaps.types import Capsules, RoutingInfo

__all__ = ["Compete", "Router", "compete_at_one_place", "stack_info"]


class Compete(Protocol):
    """Who shares a child: log-softmax of logits [b i j] over all parents that the child can choose from.

    In a convolutional layer these stand at several places; with `across_parents=False` only the places of one and
    the same parent type compete.
    """

    def __call__(self, logits: Tensor, *, across_parents: bool = True) -> Tensor: ...


def compete_at_one_place(logits: Tensor, *, across_parents: bool = True) -> Tensor:
    """The competition of a layer without places: over j, or nobody at all.

    A log-softmax in two steps: torch 2.13 cannot compile the gradient of its own where strides are mixed.
    """
    if not across_parents:
        return torch.zeros_like(logits)
    away = logits - logits.detach().amax(-1, keepdim=True)
    return away - away.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class Router:
    """One way to find agreement.

    settings    a frozen dataclass, every field with a default; its type names the router in a layer
    route       (votes [b i j k], activation [b i], settings, compete, trace, **learned) -> parents, info
    learned     scalars per parent that the layer above learns and passes in, with their initial values
    """

    settings: type[Any]
    route: Callable[..., tuple[Capsules, RoutingInfo]]
    learned: Mapping[str, float] = field(default_factory=dict)


def stack_info(infos: list[RoutingInfo]) -> RoutingInfo:
    """Join records of single iterations [b ...] into one with the iteration first [t b ...], detached."""

    def join(name: str) -> Tensor | None:
        values = [getattr(info, name) for info in infos]
        return None if values[0] is None else torch.stack([v.detach() for v in values])

    coupling = torch.stack([info.coupling.detach() for info in infos])
    return RoutingInfo(coupling, join("agreement"), join("free_energy"))
