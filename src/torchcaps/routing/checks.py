"""Checks of the arguments of `route`: one line for each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.math.grid import Window
from torchcaps.routing.base import Router
from torchcaps.types import Capsules

__all__ = ["check_input", "check_values"]

ROUNDING = 2**-6
"""By how much an activation may exceed 1: lengths of squashed poses do, by rounding, in bfloat16 by up to .01."""


def check_input(
    children: Capsules,
    weights: Tensor,
    pose: str,
    window: Window | None,
    offset: Tensor | None,
    learned: Mapping[str, Tensor],
    router: Router,
) -> None:
    """Refuse tensors that do not fit each other.

    Args:
        children: Those of `route`, as the arguments that follow.
        weights: [i j k d], or [i j 4 4] of matrix poses.
        pose: "vector" or "matrix".
        window: The positions at which parents stand, or None.
        offset: [i k] or None.
        learned: Name -> scalars [j] or numbers [i j].
        router: The router that learns them.

    Raises:
        ShapeError: If something is not a tensor, of another type or of another shape than it should be.
        RecipeError: If `pose` is unknown.
    """
    if pose not in ("vector", "matrix"):
        raise RecipeError(f"pose '{pose}' is neither 'vector' nor 'matrix'")
    if not isinstance(children, Capsules):
        raise ShapeError(f"children came as {type(children).__name__}; Capsules(pose, activation) is wanted")
    added = {} if offset is None else {"offset": offset}
    _check_types({"pose": children.pose, "activation": children.activation, "weights": weights, **added, **learned})
    _check_children(children, window)
    _check_weights(children, weights, pose, window)
    i = weights.shape[0]
    j = weights.shape[1]
    k = 16 if pose == "matrix" else weights.shape[2]
    if offset is not None and tuple(offset.shape) != (i, k):
        raise ShapeError(f"offset has shape {list(offset.shape)}; [i k] = [{i}, {k}] is wanted")
    for name, value in learned.items():
        if name in router.learned and tuple(value.shape) != (j,):
            raise ShapeError(f"{name} has shape {list(value.shape)}; one per parent [{j}] is wanted")
        if name in router.learned_pairs and tuple(value.shape) != (i, j):
            raise ShapeError(f"{name} has shape {list(value.shape)}; one per child and parent [{i}, {j}] is wanted")


def check_values(children: Capsules) -> None:
    """Refuse poses and activations that are not finite, and activations outside [0, 1].

    Costs one pass over each tensor. Inside `torch.compile`, where no value is known, nothing is checked.

    Args:
        children: Pose [... i d] and activation [... i].

    Raises:
        DataError: If there is such a value.
    """
    if torch.compiler.is_compiling():
        return
    x = children.pose.detach()
    low, high = children.activation.detach().aminmax()  # NaN if one of them is
    # A sum is finite only if all its terms are; where finite terms overflow, the slow path finds nothing wrong.
    if bool(x.sum().isfinite() & (low >= 0) & (high <= 1 + ROUNDING)):
        return
    for name, values in (("pose", x), ("activation", children.activation.detach())):
        wrong = int((~values.isfinite()).sum())
        if wrong:
            raise DataError(
                f"the children's {name} has {wrong} NaN or infinite values of {values.numel()};"
                " finite numbers are wanted: check the layer or data they come from"
            )
    if not bool((low >= 0) & (high <= 1 + ROUNDING)):
        raise DataError(
            f"the children's activation runs from {float(low):.4g} to {float(high):.4g}; [0, 1] is wanted:"
            " pass probabilities, not logits"
        )


def _check_types(tensors: Mapping[str, object]) -> None:
    """All of them tensors, and of one floating type."""
    types: dict[str, torch.dtype] = {}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ShapeError(f"{name} came as {type(value).__name__}; a tensor is wanted")
        types[name] = value.dtype
    if len(set(types.values())) > 1 or not types["pose"].is_floating_point:
        came = ", ".join(f"{name} {dtype}" for name, dtype in types.items()).replace("torch.", "")
        raise ShapeError(f"one floating type is wanted for all; got {came}")


def _check_children(children: Capsules, window: Window | None) -> None:
    """Pose [b i d] and activation [b i], or [b h w i d] and [b h w i] on the window's grid; not empty."""
    x, a = children
    if x.ndim != (5 if window else 3):
        wanted = "[b h w i d]" if window else "[b i d]"
        raise ShapeError(f"children's pose has shape {list(x.shape)}; {wanted} is wanted")
    if a.shape != x.shape[:-1]:
        raise ShapeError(f"activation has shape {list(a.shape)}; pose {list(x.shape)} wants {list(x.shape[:-1])}")
    if x.numel() == 0:
        raise ShapeError(f"empty batch or no capsules: the children's pose has shape {list(x.shape)}")
    if window and tuple(x.shape[1:3]) != (window.grid.height, window.grid.width):
        here = f"{x.shape[1]}x{x.shape[2]}"
        wanted = f"{window.grid.height}x{window.grid.width}"
        raise ShapeError(f"children stand at {here} places; the window is for {wanted}")


def _check_weights(children: Capsules, weights: Tensor, pose: str, window: Window | None) -> None:
    """[i j k d] for as many children as a parent has, with poses of as many numbers."""
    x = children.pose
    i = x.shape[-2] * (window.kernel**2 if window else 1)
    d = x.shape[-1]
    if weights.ndim != 4 or weights.shape[0] != i or weights.numel() == 0:
        raise ShapeError(f"weights have shape {list(weights.shape)}; {i} children want [{i}, j, k, d]")
    if pose == "vector" and weights.shape[3] != d:
        raise ShapeError(f"weights {list(weights.shape)} take poses of {weights.shape[3]} numbers; these have {d}")
    if pose == "matrix" and (d != 16 or tuple(weights.shape[2:]) != (4, 4)):
        raise ShapeError(f"matrix poses have 16 numbers, weights [i, j, 4, 4]; got {d} and {list(weights.shape)}")
