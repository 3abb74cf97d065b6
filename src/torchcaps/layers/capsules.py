"""Capsule layers: they own the transformations W and what the router learns, and call `route` once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.config import check
from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.math.grid import Grid, Window
from torchcaps.math.pose import MATRIX, add_coordinates, matrix_votes, vector_votes
from torchcaps.routing import EM, Dynamic, RouterSettings, route, router_of
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["ClassCapsules", "ConvCapsules", "DenseCapsules", "SharedCapsules", "check_positive"]


def check_positive(**counts: int) -> None:
    """Refuse layers without capsules, channels or dimensions at construction.

    Args:
        **counts: Name in the error line -> count.

    Raises:
        ShapeError: If a count is below 1.
    """
    for name, count in counts.items():
        if count < 1:
            raise ShapeError(f"{name} = {count}; at least 1 is wanted")


def _rename_learned(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Load weights of version 0.1, which called the scalars `learned`, by their present name."""
    # A list of the names first: the dictionary changes inside the loop
    for name in [name for name in state if name.startswith(f"{prefix}learned.")]:
        state[name.replace(f"{prefix}learned.", f"{prefix}activation_bias.")] = state.pop(name)


class _RoutedLayer(nn.Module):
    """What all capsule layers share: W, the settings of a router and what it learns.

    Attributes:
        W: [i j k d], or [i j 4 4] of matrix poses.
        routing: The settings of the router, which its type names.
        pose: "vector" or "matrix".
        activation_bias: Name -> scalars [j] that the router takes from the layer (em: beta_a and beta_u).
        coupling_bias: Name -> numbers [i j], one for each row of W (attention: prior).
    """

    def __init__(self, shape: tuple[int, int, int, int], routing: RouterSettings, pose: str, std: float) -> None:
        super().__init__()
        # An unknown router or setting is refused before any weight is allocated
        router = router_of(routing)
        check(routing)
        self.routing = routing
        self.pose = pose
        self.W = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std))
        # What the router learns, for each parent type, and for each row of W
        learned = {name: nn.Parameter(value) for name, value in router.initial(shape[0], shape[1]).items()}
        self.activation_bias = nn.ParameterDict({name: learned[name] for name in router.learned})
        self.coupling_bias = nn.ParameterDict({name: learned[name] for name in router.learned_pairs})
        self.register_load_state_dict_pre_hook(_rename_learned)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"W={list(self.W.shape)}, {self.routing}"

    @torch.no_grad()
    def copy_parent(self, j: int, source: int, noise: Tensor) -> None:
        """Give parent j the weights of another, with noise [i k d] in units of their deviation."""
        own = self.W[:, source]
        self.W[:, j] = own + own.std() * noise
        for value in self.activation_bias.values():
            value[j] = value[source]
        for value in self.coupling_bias.values():
            value[:, j] = value[:, source]

    def _route(
        self,
        children: Capsules,
        weights: Tensor,
        *,
        trace: bool,
        window: Window | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Capsules, RoutingInfo]:
        """Route in the precision of W, whatever mixed precision the layers around use: agreement needs the digits."""
        # Cast up and leave autocast: either alone would let half precision in
        exact = Capsules(children.pose.to(weights.dtype), children.activation.to(weights.dtype))
        # Places that share W share these, too
        copies = weights.shape[0] // self.W.shape[0]
        pairs = {name: value.repeat(copies, 1) for name, value in self.coupling_bias.items()}
        with torch.autocast(weights.device.type, enabled=False):
            return route(
                exact,
                weights,
                self.routing,
                pose=self.pose,
                window=window,
                offset=offset,
                trace=trace,
                validate=not self.training,  # in training, a loss that is not finite says the same
                **self.activation_bias,
                **pairs,
            )


def _weight_shape(children: int, parents: int, d: int, k: int, pose: str) -> tuple[int, int, int, int]:
    """The shape of W: [i j k d], or [i j 4 4] of matrix poses, which have 16 numbers below and above."""
    check_positive(child_dimension=d, parent_dimension=k)
    if pose not in ("vector", "matrix"):
        raise RecipeError(f"unknown pose '{pose}'{suggestion(pose, ('vector', 'matrix'))}")
    # Matrix poses: M W, of the same size below and above
    if pose == "matrix":
        if d != MATRIX**2 or k != MATRIX**2:
            raise ShapeError(f"matrix poses have {MATRIX**2} numbers; got {d} below and {k} above")
        return children, parents, MATRIX, MATRIX
    return children, parents, k, d


class DenseCapsules(_RoutedLayer):
    """Every child votes for every parent: children [b i d] or [b h w i d] -> parents [b j k].

    Args:
        children: i, how many there are at all places together.
        parents: j.
        child_dimension: d, the numbers of a child's pose.
        parent_dimension: k, the numbers of a parent's pose.
        routing: Settings of a router, `Dynamic()` if none are given.
        pose: "vector" for votes W_ij x_i, "matrix" for M_i W_ij.
        std: Standard deviation of W at the start, normal and cut at two of them.

    Attributes:
        offset: [i k], added to all votes, or None.

    Raises:
        ShapeError: If a count is below 1, or matrix poses do not have 16 numbers.
        RecipeError: If `pose` or the router is unknown, or one of its settings out of range.
    """

    offset: Tensor | None

    def __init__(
        self,
        children: int,
        parents: int,
        child_dimension: int,
        parent_dimension: int,
        *,
        routing: RouterSettings | None = None,
        pose: str = "vector",
        std: float = 0.1,
    ) -> None:
        check_positive(children=children, parents=parents)
        shape = _weight_shape(children, parents, child_dimension, parent_dimension, pose)
        super().__init__(shape, routing or Dynamic(), pose, std)
        # Without coordinates; not persistent, since subclasses compute theirs from the grid
        self.register_buffer("offset", None, persistent=False)

    def forward(self, children: Capsules, *, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        """Route children [b i d] or [b h w i d] to parents [b j k]; with `trace`, record every iteration."""
        flat = self.with_coordinates(children)
        return self._route(flat, self.expanded_weights(), trace=trace, offset=self.offset)

    def with_coordinates(self, children: Capsules) -> Capsules:
        """Return the children [b i d] as they are routed: without places."""
        return children.flat()

    def expanded_weights(self) -> Tensor:
        """Return W [i j k d] as it is routed with: one transformation for each child."""
        return self.W

    def votes(self, children: Capsules) -> Tensor:
        """Return the votes V_ij [b i j k] of children [b i d] or [b h w i d], for figures: routing makes its own."""
        make_votes = matrix_votes if self.pose == "matrix" else vector_votes
        votes = make_votes(self.with_coordinates(children).pose, self.expanded_weights())  # [b i j k]
        return votes if self.offset is None else votes + self.offset.unsqueeze(1)


def _at_all_places(W: Tensor, grid: Grid) -> Tensor:
    """Repeat W [i j k d] of the types at one place for every place: [(h w i) j k d]."""
    return W.repeat(grid.places, 1, 1, 1)


class ConvCapsules(_RoutedLayer):
    """Parents at every position of a window; children [b h w i d] -> parents [b h w j k].

    W is shared by all positions. A child competes for, and is shared among, all parents whose window holds it, at
    whatever position they stand.

    Args:
        grid: Where the children stand; `self.grid` is where the parents do.
        child_types: Capsules at one place below.
        parent_types: Capsules at one place above.
        kernel: Side of the window, in places.
        stride: Places from one window position to the next.
        routing: Settings of a router, `EM()` if none are given.
        pose: "vector" for votes W_ij x_i, "matrix" for M_i W_ij.
        child_dimension: d, the numbers of a child's pose.
        parent_dimension: k, the numbers of a parent's pose.
        std: Standard deviation of W at the start, normal and cut at two of them.

    Raises:
        ShapeError: If a count is below 1, the window does not fit, or matrix poses do not have 16 numbers.
        RecipeError: If `pose` or the router is unknown, or one of its settings out of range.
    """

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        parent_types: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        routing: RouterSettings | None = None,
        pose: str = "matrix",
        child_dimension: int = 16,
        parent_dimension: int = 16,
        std: float = 0.3,
    ) -> None:
        check_positive(child_types=child_types, parent_types=parent_types)
        # Every slot (n i) of a window has its own W, which all positions share
        window = grid.window(kernel, stride)
        children = kernel * kernel * child_types
        shape = _weight_shape(children, parent_types, child_dimension, parent_dimension, pose)
        super().__init__(shape, routing or EM(), pose, std)
        self.window = window
        self.grid = window.out

    def forward(self, children: Capsules, *, trace: bool = False) -> tuple[Capsules, RoutingInfo]:
        """Route children [b h w i d] to parents [b h w j k]; the record's batch axis is (b h w) of the parents."""
        return self._route(children, self.W, trace=trace, window=self.window)


class ClassCapsules(DenseCapsules):
    """One parent per class; children [b h w i d] -> parents [b j k].

    W is shared by all places of a child type; coordinate addition tells the votes where they come from: the center of
    the child's receptive field, in pixels times `coordinate_scale`.

    Args:
        grid: Where the children stand.
        child_types: Capsules at one place below.
        classes: j.
        routing: Settings of a router, `EM()` if none are given.
        pose: "vector" for votes W_ij x_i, "matrix" for M_i W_ij.
        child_dimension: d, the numbers of a child's pose.
        parent_dimension: k, the numbers of a parent's pose.
        coordinate_scale: What a pixel counts in the votes; 0 = off.
        std: Standard deviation of W at the start, normal and cut at two of them.

    Raises:
        ShapeError: If a count is below 1, or matrix poses do not have 16 numbers.
        RecipeError: If `pose` or the router is unknown, or one of its settings out of range.
    """

    offset: Tensor

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        classes: int,
        *,
        routing: RouterSettings | None = None,
        pose: str = "matrix",
        child_dimension: int = 16,
        parent_dimension: int = 16,
        coordinate_scale: float = 0.01,
        std: float = 0.01,
    ) -> None:
        check_positive(child_types=child_types, classes=classes)
        # One W a type; `expanded_weights` repeats it for all places
        super().__init__(
            child_types, classes, child_dimension, parent_dimension, routing=routing or EM(), pose=pose, std=std
        )
        self.grid = grid
        centers = grid.centers(coordinate_scale).repeat_interleave(child_types, 0)  # [(h w i) 2]
        self.register_buffer("offset", add_coordinates(centers, parent_dimension), persistent=False)

    def with_coordinates(self, children: Capsules) -> Capsules:
        """Return the children [b (h w i) d] as they are routed; their coordinates are in `offset`.

        Raises:
            ShapeError: If they do not stand on the layer's grid.
        """
        if tuple(children.pose.shape[1:3]) != (self.grid.height, self.grid.width):
            wanted = f"[b {self.grid.height} {self.grid.width} i d]"
            raise ShapeError(f"children's pose has shape {list(children.pose.shape)}; {wanted} is wanted")
        return children.flat()

    def expanded_weights(self) -> Tensor:
        """Return W [(h w i) j k d], the same at all places."""
        return _at_all_places(self.W, self.grid)


class SharedCapsules(DenseCapsules):
    """Every child votes for every parent by a W that all places of its type share: [b h w i d] -> parents [b j k].

        V_ij = W_ij x_i + a_i (row and column where `add_coordinates` puts them, 0 elsewhere)

    Coordinate addition for routers to which a vote's length says how sure it is: a child that is off must not vote for
    where it stands. The coordinates are those of its receptive field's center from the middle of all, in pixels times
    `coordinate_scale`. They are two more numbers of the child, taken over by two fixed columns of W, so that whatever
    routes vectors routes these.

    Args:
        grid: Where the children stand.
        child_types: Capsules at one place below.
        parents: j.
        child_dimension: d, the numbers of a child's pose.
        parent_dimension: k, the numbers of a parent's pose.
        routing: Settings of a router, `Dynamic()` if none are given.
        coordinate_scale: What a pixel counts in the votes.
        std: Standard deviation of W at the start, normal and cut at two of them.

    Raises:
        ShapeError: If a count is below 1, or a parent's pose is too short for a row and a column.
        RecipeError: If the router is unknown, or one of its settings out of range.
    """

    def __init__(
        self,
        grid: Grid,
        child_types: int,
        parents: int,
        child_dimension: int,
        parent_dimension: int,
        *,
        routing: RouterSettings | None = None,
        coordinate_scale: float = 0.02,
        std: float = 0.1,
    ) -> None:
        check_positive(child_types=child_types)
        super().__init__(child_types, parents, child_dimension, parent_dimension, routing=routing, std=std)
        self.grid = grid
        # Coordinates of the places, and the columns of W that copy them into the vote
        centers = grid.centers(coordinate_scale)  # [(h w) 2]
        coordinate_columns = add_coordinates(torch.eye(2), parent_dimension).T.contiguous()  # [k 2]
        self.centers: Tensor
        self.coordinate_columns: Tensor
        # Relative to the middle of all places, so that coordinates are 0 on average
        self.register_buffer("centers", centers - centers.mean(0), persistent=False)
        self.register_buffer("coordinate_columns", coordinate_columns, persistent=False)

    def with_coordinates(self, children: Capsules) -> Capsules:
        """Return the children [b (h w i) d+2] as they are routed: with where they stand, as far as they are on.

        Raises:
            ShapeError: If they are of other sizes than the layer's.
        """
        # Check the sizes
        x, a = children  # pose [b h w i d], activation [b h w i]
        wanted = [self.grid.height, self.grid.width, self.W.shape[0], self.W.shape[3]]  # h w i d
        if list(x.shape[1:]) != wanted or a.shape != x.shape[:-1]:
            came = f"pose {list(x.shape)} and activation {list(a.shape)}"
            raise ShapeError(f"children came as {came}; [b h w i d] and [b h w i] with {wanted} for h w i d are wanted")
        # Times the activation: a child that is off has no place either
        coordinates = self.centers.view(self.grid.height, self.grid.width, 1, 2) * a.unsqueeze(-1)
        return Capsules(torch.cat([x, coordinates], -1), a).flat()

    def expanded_weights(self) -> Tensor:
        """Return W [(h w i) j k d+2], whose last two columns add the coordinates to the vote."""
        columns = self.coordinate_columns.expand(*self.W.shape[:2], -1, -1)  # [i j k 2]
        return _at_all_places(torch.cat([self.W, columns], -1), self.grid)
