"""Everything that can be wrong with the shapes at the front door, said in one line each."""

from __future__ import annotations

from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError
from torchcaps.math.patches import Window
from torchcaps.types import Capsules

__all__ = ["check_shapes"]


def check_shapes(children: Capsules, weights: Tensor, pose: str, window: Window | None, offset: Tensor | None) -> None:
    """Raise for children, weights and offset that do not fit each other; the arguments are those of `route`."""
    if pose not in ("vector", "matrix"):
        raise RecipeError(f"pose '{pose}' is neither 'vector' nor 'matrix'")
    _check_children(children, window)
    _check_weights(children, weights, pose, window)
    i, k = weights.shape[0], 16 if pose == "matrix" else weights.shape[2]
    if offset is not None and tuple(offset.shape) != (i, k):
        raise ShapeError(f"offset has shape {list(offset.shape)}; [i k] = [{i}, {k}] is wanted")


def _check_children(children: Capsules, window: Window | None) -> None:
    x, a = children
    if x.ndim != (5 if window else 3):
        wanted = "[b h w i d]" if window else "[b i d]"
        raise ShapeError(f"children's pose has shape {list(x.shape)}; {wanted} is wanted")
    if a.shape != x.shape[:-1]:
        raise ShapeError(f"activation has shape {list(a.shape)}; pose {list(x.shape)} wants {list(x.shape[:-1])}")
    if x.numel() == 0:
        raise ShapeError(f"empty batch or no capsules: the children's pose has shape {list(x.shape)}")
    if window and tuple(x.shape[1:3]) != (window.grid.height, window.grid.width):
        here, wanted = f"{x.shape[1]}x{x.shape[2]}", f"{window.grid.height}x{window.grid.width}"
        raise ShapeError(f"children stand at {here} places; the window is for {wanted}")


def _check_weights(children: Capsules, weights: Tensor, pose: str, window: Window | None) -> None:
    x = children.pose
    i, d = x.shape[-2] * (window.kernel**2 if window else 1), x.shape[-1]
    if not x.dtype.is_floating_point or x.dtype != weights.dtype:
        raise ShapeError(f"pose is {x.dtype}, weights are {weights.dtype}; one floating type is wanted for both")
    if weights.ndim != 4 or weights.shape[0] != i or weights.numel() == 0:
        raise ShapeError(f"weights have shape {list(weights.shape)}; {i} children want [{i}, j, k, d]")
    if pose == "vector" and weights.shape[3] != d:
        raise ShapeError(f"weights {list(weights.shape)} take poses of {weights.shape[3]} numbers; these have {d}")
    if pose == "matrix" and (d != 16 or tuple(weights.shape[2:]) != (4, 4)):
        raise ShapeError(f"matrix poses have 16 numbers, weights [i, j, 4, 4]; got {d} and {list(weights.shape)}")
