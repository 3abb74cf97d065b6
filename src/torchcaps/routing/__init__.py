"""Routing: children cast votes, routing finds agreement, parents switch on.

`route` is the one entry point and the only place where input is checked; `ROUTERS` is the table of methods, from which
recipes and the command line choose by name. To add a router, write one file with `init`, `step`, `route` and a settings
dataclass, and one line here (docs/develop/new_router.md). What a router sees of the votes is a `kernels.votes.Votes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchcaps.config import Choice, check
from torchcaps.errors import RecipeError, suggestion
from torchcaps.math.grid import Window
from torchcaps.routing import attention, dynamic, em, uniform, vb
from torchcaps.routing.attention import Attention
from torchcaps.routing.base import Router, RouterSettings, iterations_of, stack_info
from torchcaps.routing.checks import check_input, check_values
from torchcaps.routing.dispatch import RoutedLayer, route_layer
from torchcaps.routing.dynamic import Dynamic
from torchcaps.routing.em import EM
from torchcaps.routing.uniform import Uniform
from torchcaps.routing.vb import VB
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "EM",
    "ROUTERS",
    "VB",
    "Attention",
    "Dynamic",
    "Router",
    "RouterChoice",
    "RouterSettings",
    "Uniform",
    "iterations_of",
    "route",
    "router_of",
    "settings_of",
    "stack_info",
]

ROUTERS: dict[str, Router] = {
    "dynamic": dynamic.ROUTER,
    "em": em.ROUTER,
    "vb": vb.ROUTER,
    "attention": attention.ROUTER,
    "uniform": uniform.ROUTER,
}
"""The routers by name; one of your own is added at run time by `ROUTERS["mine"] = Router(...)`."""


class _SettingsByName(Mapping[str, type]):
    """The settings classes of `ROUTERS` by name, including those that are registered later."""

    def __getitem__(self, name: str) -> type:
        return ROUTERS[name].settings

    def __iter__(self) -> Iterator[str]:
        return iter(ROUTERS)

    def __len__(self) -> int:
        return len(ROUTERS)


RouterChoice = Annotated[RouterSettings, Choice(_SettingsByName())]
"""Annotation of a configuration's field that takes any router: `[model.routing]` with `name = "em"` in a recipe,
`--model.routing.name em` on the command line. Without a name, the field's default keeps its router."""


def route(
    children: Capsules,
    weights: Tensor,
    method: str | RouterSettings = "dynamic",
    *,
    pose: str = "vector",
    window: Window | None = None,
    offset: Tensor | None = None,
    trace: bool = False,
    validate: bool = True,
    **more: object,
) -> tuple[Capsules, RoutingInfo]:
    """Route children to parents: make the votes, find agreement, and return the parents with a record.

    Args:
        children: Pose [b i d] and activation [b i]; with a window [b h w i d] and [b h w i].
        weights: [i j k d] for votes W_ij x_i, or [i j 4 4] with pose="matrix" for votes M_i W_ij. With a window the
            children of one window position, (n i), take the place of i.
        method: A name in ROUTERS, its settings as further keywords: route(x, W, "em", iterations=2); or a settings
            object: route(x, W, EM(iterations=2)).
        pose: "vector" or "matrix", what a pose is.
        window: The positions at which parents stand, or None for a layer without places.
        offset: [i k], added to the votes (coordinate addition).
        trace: Record every iteration, with its parents, agreement and free energy; no fused kernel is taken then.
        validate: Refuse poses and activations that are not finite, and activations outside [0, 1]. Layers leave this
            check out in training, where the loss shows the same. It is never made inside `torch.compile`.
        **more: Settings by name, and what the router learns: scalars [j] (em: beta_a, beta_u; vb: beta) and numbers
            [i j] (attention: prior).

    Returns:
        parents: Pose [b j k] and activation [b j] in [0, 1]; with a window [b h w j k] and [b h w j].
        info: The record of the last iteration, or of all with `trace`; with a window its batch axis is (b h w).

    Raises:
        ShapeError: If the tensors do not fit each other or are not of one floating type.
        DataError: If a pose or an activation is not finite, or an activation lies outside [0, 1].
        RecipeError: If the router or one of its settings is unknown or out of range.
    """
    # Check everything here, so that nothing below has to.
    chosen = _choose(method, more)
    check_input(children, weights, pose, window, offset, chosen.learned, chosen.router)
    if validate:
        check_values(children)
    # Variances and densities of EM and VB leave the range of float16: compute in float32, and return the caller's type.
    if weights.dtype == torch.float16 and isinstance(chosen.settings, EM | VB):
        return _route_in_float32(children, weights, chosen, pose, window, offset, trace)
    # What the router learns and the caller does not give has its initial value.
    initial = chosen.router.initial(*weights.shape[:2])
    learned = {name: value.to(weights) for name, value in initial.items()} | chosen.learned
    layer = RoutedLayer(children, weights, pose == "matrix", window, offset)
    return route_layer(layer, chosen.router, chosen.settings, learned, trace=trace)


def _route_in_float32(
    children: Capsules,
    weights: Tensor,
    chosen: _Chosen,
    pose: str,
    window: Window | None,
    offset: Tensor | None,
    trace: bool,
) -> tuple[Capsules, RoutingInfo]:
    """Route half-precision children in single precision; the record stays in single precision."""
    parents, info = route(
        Capsules(children.pose.float(), children.activation.float()),
        weights.float(),
        chosen.settings,
        pose=pose,
        window=window,
        offset=None if offset is None else offset.float(),
        trace=trace,
        validate=False,
        **{name: value.float() for name, value in chosen.learned.items()},
    )
    return Capsules(parents.pose.to(weights.dtype), parents.activation.to(weights.dtype)), info


def router_of(settings: object) -> Router:
    """Return the router whose settings these are.

    Args:
        settings: An instance of a router's settings class, such as `EM()`.

    Returns:
        The router's record in `ROUTERS`.

    Raises:
        RecipeError: If no router in `ROUTERS` has settings of this type.
    """
    for router in ROUTERS.values():
        if router.settings is type(settings):
            return router
    known = ", ".join(f"{name} ({router.settings.__name__})" for name, router in ROUTERS.items())
    name = f"the class {settings.__name__}" if isinstance(settings, type) else type(settings).__name__
    raise RecipeError(f"{name} is no router's settings object; known: {known}")


def settings_of(method: str, **options: object) -> RouterSettings:
    """Return the settings object of a router by name: settings_of("em", iterations=2) == EM(iterations=2).

    Args:
        method: Name of the router.
        **options: Settings that differ from the defaults.

    Returns:
        The settings.

    Raises:
        RecipeError: If there is no router of that name, or if it has no such setting.
    """
    if method not in ROUTERS:
        raise RecipeError(f"unknown router '{method}'{suggestion(method, ROUTERS)}")
    known = {f.name for f in fields(ROUTERS[method].settings)}
    for name in options:
        if name not in known:
            raise RecipeError(f"router '{method}' has no setting '{name}'{suggestion(name, known)}")
    settings: RouterSettings = ROUTERS[method].settings(**options)
    return settings


class _Chosen(NamedTuple):
    """A router, its settings, and those of its learned tensors [j] or [i j] that the caller gave."""

    router: Router
    settings: RouterSettings
    learned: dict[str, Tensor]


def _choose(method: str | RouterSettings, more: Mapping[str, object]) -> _Chosen:
    """Split the keywords of `route` into the router's settings and its learned tensors."""
    router = ROUTERS.get(method) if isinstance(method, str) else router_of(method)
    names = [*router.learned, *router.learned_pairs] if router else []
    options = {name: value for name, value in more.items() if name not in names}
    settings = settings_of(method, **options) if isinstance(method, str) else method
    if not isinstance(method, str) and options:
        raise RecipeError(f"route got both {type(method).__name__}(...) and '{next(iter(options))}'; put it inside")
    if not torch.compiler.is_compiling():
        _check_once(settings)
    learned = {name: cast(Tensor, more[name]) for name in names if name in more}  # `check_input` makes sure
    return _Chosen(router_of(settings), settings, learned)


_checked: WeakValueDictionary[int, RouterSettings] = WeakValueDictionary()
"""Settings that were checked, by their identity: a layer routes with the same frozen object in every step."""


def _check_once(settings: RouterSettings) -> None:
    """Check settings unless this very object was checked before. Equal ones may differ in type: 3 == 3.0."""
    if _checked.get(id(settings)) is settings:
        return
    check(settings)
    # An object with slots cannot be remembered, and is checked again
    with contextlib.suppress(TypeError):
        _checked[id(settings)] = settings
