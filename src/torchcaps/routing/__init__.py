"""Routing: children cast votes, routing finds agreement, parents switch on.

`route` is the one front door and the only place where input is checked; `ROUTERS` is the table of methods. To add a
router, write one file with `init`, `step`, `route` and a settings dataclass, and one line here
(docs/develop/new_router.md).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchcaps.config import check
from torchcaps.errors import RecipeError, suggestion
from torchcaps.math.grid import Window
from torchcaps.math.pose import matrix_votes, vector_votes
from torchcaps.routing import dynamic, em
from torchcaps.routing.base import Compete, InWindow, Router, compete_at_one_place
from torchcaps.routing.checks import check_input
from torchcaps.routing.dispatch import route_without_votes
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["EM", "ROUTERS", "Compete", "Dynamic", "Router", "route", "router_of", "settings_of"]

ROUTERS: dict[str, Router] = {
    "dynamic": dynamic.ROUTER,
    "em": em.ROUTER,
}


def route(
    children: Capsules,
    weights: Tensor,
    method: Any = "dynamic",
    *,
    pose: str = "vector",
    window: Window | None = None,
    offset: Tensor | None = None,
    trace: bool = False,
    **more: Any,
) -> tuple[Capsules, RoutingInfo]:
    """Children and transformations in, parents and a record of the routing out.

    children  pose [b i d] and activation [b i]; with a window [b h w i d] and [b h w i]
    weights   [i j k d] for votes W_ij x_i, or [i j 4 4] with pose="matrix" for votes M_i W_ij; with a window the
              children of one window position, (n i), take the place of i
    method    a name in ROUTERS, its settings as further keywords: route(x, W, "em", iterations=2); or a settings
              object: route(x, W, EM(iterations=2))
    offset    [i k], added to the votes (coordinate addition)
    trace     keep every iteration in the record, with agreement and free energy; this takes the plain path
    more      settings by name, and the router's learned scalars [j] (em: beta_a, beta_u)
    """
    router, settings, given = _resolve(method, more)
    check_input(children, weights, pose, window, offset, given)
    learned = {name: weights.new_full(weights.shape[1:2], initial) for name, initial in router.learned.items()} | given
    if not trace:
        found = route_without_votes(children, weights, settings, pose, window, offset, learned)
        if found is not None:
            return found
    flat, compete = _unfold(children, window)
    votes = (matrix_votes if pose == "matrix" else vector_votes)(flat.pose, weights)  # [b i j k]
    if offset is not None:
        votes = votes + offset.unsqueeze(1)
    parents, info = router.route(votes, flat.activation, settings, compete, trace, **learned)
    return (parents, info) if window is None else _fold(parents, info, window)


def router_of(settings: Any) -> Router:
    """The router whose settings these are."""
    for router in ROUTERS.values():
        if router.settings is type(settings):
            return router
    known = ", ".join(f"{name} ({router.settings.__name__})" for name, router in ROUTERS.items())
    name = f"the class {settings.__name__}" if isinstance(settings, type) else type(settings).__name__
    raise RecipeError(f"{name} is no router's settings object; known: {known}")


def settings_of(method: str, **options: Any) -> Any:
    """The settings object of a method by name: settings_of("em", iterations=2) == EM(iterations=2)."""
    if method not in ROUTERS:
        raise RecipeError(f"unknown router '{method}'{suggestion(method, ROUTERS)}")
    known = {f.name for f in fields(ROUTERS[method].settings)}
    for name in options:
        if name not in known:
            raise RecipeError(f"router '{method}' has no setting '{name}'{suggestion(name, known)}")
    return ROUTERS[method].settings(**options)


def _resolve(method: Any, more: dict[str, Any]) -> tuple[Router, Any, dict[str, Tensor]]:
    """Split keywords into the router's settings and its learned scalars, as far as they are given."""
    router = ROUTERS.get(method) if isinstance(method, str) else router_of(method)
    names = router.learned if router else {}
    options = {name: value for name, value in more.items() if name not in names}
    settings = settings_of(method, **options) if isinstance(method, str) else method
    if not isinstance(method, str) and options:
        raise RecipeError(f"route got both {type(method).__name__}(...) and '{next(iter(options))}'; put it inside")
    if not torch.compiler.is_compiling():
        check(settings)
    return router_of(settings), settings, {name: more[name] for name in names if name in more}


def _unfold(children: Capsules, window: Window | None) -> tuple[Capsules, Compete]:
    """Fold window positions into the batch: [b h w i d] -> [(b p) (n i) d], and who competes there."""
    if window is None:
        return children, compete_at_one_place
    pose = window.gather(children.pose).flatten(0, 1)
    activation = window.gather(children.activation.unsqueeze(-1)).flatten(0, 1).squeeze(-1)
    return Capsules(pose, activation), InWindow(window, children.pose.shape[3])


def _fold(parents: Capsules, info: RoutingInfo, window: Window) -> tuple[Capsules, RoutingInfo]:
    """[(b p) j k] -> [b h w j k]; the record stays [t (b p) ...], but its free energy is summed over p."""
    places = (-1, window.out.height, window.out.width)
    folded = Capsules(torch.unflatten(parents.pose, 0, places), torch.unflatten(parents.activation, 0, places))
    free = info.free_energy
    if free is not None:
        free = torch.unflatten(free, 1, (-1, window.out.places)).sum(-1)
    return folded, replace(info, free_energy=free)
