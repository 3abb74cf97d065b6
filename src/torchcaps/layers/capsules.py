"""Capsule layers: they own the transformations W and the router's learned scalars, and call `route` once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.config import check
from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.math.grid import Grid
from torchcaps.math.pose import MATRIX, add_coordinates
from torchcaps.routing import EM, Dynamic, route, router_of
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ClassCapsules", "ConvCapsules", "DenseCapsules", "SharedCapsules", "check_positive"]


def check_positive(**counts: int) -> None:
    """Refuse layers without capsules, channels or dimensions at construction."""
    for name, count in counts.items():
        if count < 1:
            raise ShapeError(f"{name} = {count}; at least 1 is wanted")


class _Routed(nn.Module):
    """What all layers share: W [i j k d], the settings of a router and its learned scalars [j]."""

    def __init__(self, shape: tuple[int, int, int, int], routing: Any, std: float) -> None:
        super().__init__()
        learned = router_of(routing).learned
        check(routing)
        self.routing = routing
        self.W = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std))
        self.learned = nn.ParameterDict({n: nn.Parameter(torch.full(shape[1:2], v)) for n, v in learned.items()})

    def extra_repr(self) -> str:
        return f"W={list(self.W.shape)}, {self.routing}"

    def _route(self, children: Capsules, weights: Tensor, **how: Any) -> tuple[Capsules, RoutingInfo]:
        """Route in the precision of W, whatever mixed precision the layers around use: agreement needs the digits."""
        exact = Capsules(children.pose.to(weights.dtype), children.activation.to(weights.dtype))
        with torch.autocast(weights.device.type, enabled=False):
            return route(exact, weights, self.routing, **how, **self.learned)


def _weight_shape(children: int, parents: int, d: int, k: int, pose: str) -> tuple[int, int, int, int]:
    check_positive(child_dimension=d, parent_dimension=k)
    if pose not in ("vector", "matrix"):
        raise RecipeError(f"unknown pose '{pose}'{suggestion(pose, ('vector', 'matrix'))}")
    if pose == "matrix":
        if d != MATRIX**2 or k != MATRIX**2:
            raise ShapeError(f"matrix poses have {MATRIX**2} numbers; got {d} below and {k} above")
        return children, parents, MATRIX, MATRIX
    return children, parents, k, d


class DenseCapsules(_Routed):
    """Every child votes for every parent: children [b i d] or [b h w i d] -> parents [b j k]."""

    def __init__(
        self,
        children: int,
        parents: int,
        child_dimension: int,
        parent_dimension: int,
        *,
        routing: Any = None,
        pose: str = "vector",
        std: float = 0.1,
    ) -> None:
        check_positive(children=children, parents=parents)
        shape = _weight_shape(children, parents, child_dimension, parent_dimension, pose)
        super().__init__(shape, routing or Dynamic(), std)
        self.pose = pose

    def forward(self, children: Capsules, *, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        return self._route(self.with_coordinates(children), self.expanded_weights(), pose=self.pose, trace=trace)

    def with_coordinates(self, children: Capsules) -> Capsules:
        """The children [b i d] as they are routed."""
        return children.flat()

    def expanded_weights(self) -> Tensor:
        """W [i j k d] as they are routed with, one for each of them."""
        return self.W


class ConvCapsules(_Routed):
    """Parents at every position of a window; children [b h w i d] -> parents [b h w j k].

    W is shared by all positions. A child competes for, and is shared among, all parents whose window holds it, at
    whatever position they stand.
    """

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        parent_types: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        routing: Any = None,
        pose: str = "matrix",
        child_dimension: int = 16,
        parent_dimension: int = 16,
        std: float = 0.3,
    ) -> None:
        check_positive(child_types=child_types, parent_types=parent_types)
        window = grid.window(kernel, stride)
        children = kernel * kernel * child_types
        shape = _weight_shape(children, parent_types, child_dimension, parent_dimension, pose)
        super().__init__(shape, routing or EM(), std)
        self.window = window
        self.grid = window.out
        self.pose = pose

    def forward(self, children: Capsules, *, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        return self._route(children, self.W, pose=self.pose, window=self.window, trace=trace)


class ClassCapsules(_Routed):
    """One parent per class; children [b h w i d] -> parents [b j k].

    W is shared by all places of a child type; coordinate addition tells the votes where they come from: the center of
    the child's receptive field, in pixels times `coordinate_scale` (0 = off).
    """

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        classes: int,
        *,
        routing: Any = None,
        pose: str = "matrix",
        child_dimension: int = 16,
        parent_dimension: int = 16,
        coordinate_scale: float = 0.01,
        std: float = 0.01,
    ) -> None:
        check_positive(child_types=child_types, classes=classes)
        shape = _weight_shape(child_types, classes, child_dimension, parent_dimension, pose)
        super().__init__(shape, routing or EM(), std)
        self.grid = grid
        self.pose = pose
        centers = grid.centers(coordinate_scale).repeat_interleave(child_types, 0)  # [(h w i) 2]
        self.offset: Tensor
        self.register_buffer("offset", add_coordinates(centers, parent_dimension), persistent=False)

    def forward(self, children: Capsules, *, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        if tuple(children.pose.shape[1:3]) != (self.grid.height, self.grid.width):
            wanted = f"[b {self.grid.height} {self.grid.width} i d]"
            raise ShapeError(f"children's pose has shape {list(children.pose.shape)}; {wanted} is wanted")
        everywhere = self.W.repeat(self.grid.places, 1, 1, 1)  # [(h w i) j 4 4]
        return self._route(children.flat(), everywhere, pose=self.pose, offset=self.offset, trace=trace)


class SharedCapsules(DenseCapsules):
    """Every child votes for every parent by a W that all places of its type share: [b h w i d] -> parents [b j k].

        V_ij = W_ij x_i + a_i (row and column where `add_coordinates` puts them, 0 elsewhere)

    Coordinate addition for routers to which a vote's length says how sure it is: a child that is off must not vote for
    where it stands. The coordinates are those of its receptive field's center from the middle of all, in pixels times
    `coordinate_scale`. They are two more numbers of the child, taken over by two fixed columns of W, so that whatever
    routes vectors routes these.
    """

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        parents: int,
        child_dimension: int,
        parent_dimension: int,
        *,
        routing: Any = None,
        coordinate_scale: float = 0.02,
        std: float = 0.1,
    ) -> None:
        check_positive(child_types=child_types)
        super().__init__(child_types, parents, child_dimension, parent_dimension, routing=routing, std=std)
        self.grid = grid
        centers = grid.centers(coordinate_scale)  # [(h w) 2]
        self.places: Tensor
        self.taken: Tensor
        self.register_buffer("places", centers - centers.mean(0), persistent=False)
        self.register_buffer("taken", add_coordinates(torch.eye(2), parent_dimension).T.contiguous(), persistent=False)

    def with_coordinates(self, children: Capsules) -> Capsules:
        """The children [b (h w i) d+2], with where they stand, as far as they are on."""
        x, a = children
        wanted = [self.grid.height, self.grid.width, self.W.shape[0], self.W.shape[3]]  # h w i d
        if list(x.shape[1:]) != wanted or a.shape != x.shape[:-1]:
            came = f"pose {list(x.shape)} and activation {list(a.shape)}"
            raise ShapeError(f"children came as {came}; [b h w i d] and [b h w i] with {wanted} for h w i d are wanted")
        here = self.places.view(self.grid.height, self.grid.width, 1, 2) * a.unsqueeze(-1)
        return Capsules(torch.cat([x, here], -1), a).flat()

    def expanded_weights(self) -> Tensor:
        """W [(h w i) j k d+2], whose last two columns add the place to the vote."""
        taken = self.taken.expand(*self.W.shape[:2], -1, -1)  # [i j k 2]
        return torch.cat([self.W, taken], -1).repeat(self.grid.places, 1, 1, 1)
