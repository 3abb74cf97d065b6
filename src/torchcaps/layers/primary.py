"""Primary capsules: a convolution whose channels are grouped into poses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.layers.capsules import check_positive
from torchcaps.layers.convolution import Convolution
from torchcaps.math.grid import Grid
from torchcaps.math.squash import norm, squash, squash_exponential
from torchcaps.types import Capsules

__all__ = ["PrimaryCapsules", "group_channels"]

ACTIVATIONS = ("length", "exponential", "logistic")
"""How a primary capsule's activation comes about."""


def group_channels(features: Tensor, types: int) -> Tensor:
    """Group channels into capsules: the d numbers of a capsule are d channels at ONE place.

    Channels of one type lie together. A plain reshape of [b c h w] would build capsules from neighboring pixels of
    one channel instead, a frequent mistake in ports.

    Args:
        features: [b (i d) h w].
        types: i.

    Returns:
        [b h w i d].
    """
    return torch.unflatten(features, 1, (types, -1)).permute(0, 3, 4, 1, 2)


class PrimaryCapsules(nn.Module):
    """Features [b c h w] -> Capsules [b h w i d] by one convolution.

    Args:
        grid: The places of the features; `self.grid` are those of the capsules.
        channels: c.
        types: i, capsules at one place.
        dimension: d, the numbers of a pose.
        kernel: Side of the convolution.
        stride: Its step.
        activation: "length": poses are squashed, and a capsule's activation is its length (Sabour 2017).
            "exponential": the same with the squash of Mazzia 2021. "logistic": poses are linear, and the activation is
            a logistic unit of its own (Hinton 2018).
        depthwise: Every channel has a kernel of its own and becomes one number of a pose, c = i d (Mazzia 2021).
        scale: Factor of the convolution before the squash. Below 1, weights are larger for the same poses, and a step
            of Adam is a smaller share of them.

    Raises:
        ShapeError: If a size is below 1, the kernel does not fit the grid, or depthwise channels are not i d.
        RecipeError: If `activation` is unknown.
    """

    def __init__(
        self,
        grid: Grid,
        channels: int,
        types: int,
        dimension: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        activation: Literal["length", "exponential", "logistic"] = "length",
        depthwise: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive(channels=channels, types=types, dimension=dimension)
        if activation not in ACTIVATIONS:
            raise RecipeError(f"unknown activation '{activation}'{suggestion(activation, ACTIVATIONS)}")
        if depthwise and channels != types * dimension:
            raise ShapeError(
                f"{channels} channels for {types} depthwise capsules of {dimension} numbers;"
                f" {types * dimension} are wanted"
            )
        # Places of the capsules
        self.window = grid.window(kernel, stride)
        self.grid = self.window.out
        self.types = types
        self.dimension = dimension
        self.activation = activation
        self.scale = scale
        # One convolution for poses, another for the activations that are units of their own
        groups = channels if depthwise else 1
        self.pose = Convolution(channels, types * dimension, kernel, stride, groups=groups)
        self.on = nn.Conv2d(channels, types, kernel, stride) if activation == "logistic" else None

    @property
    def count(self) -> int:
        """How many capsules there are, at all places together."""
        return self.grid.places * self.types

    def forward(self, features: Tensor) -> Capsules:
        """Make capsules [b h w i d] of features [b c h w].

        Raises:
            ShapeError: If the features are of another shape.
        """
        wanted = self.pose.in_channels, self.window.grid.height, self.window.grid.width
        if features.ndim != 4 or tuple(features.shape[1:]) != wanted:
            c, h, w = wanted
            raise ShapeError(f"features have shape {list(features.shape)}; [b {c} {h} {w}] is wanted")
        pose = group_channels(self.pose(features), self.types)  # [b h w i d]
        if self.scale != 1:
            pose = pose * self.scale
        # Length of the squashed pose, or a logistic unit
        if self.on is None:
            pose = squash(pose) if self.activation == "length" else squash_exponential(pose)
            return Capsules(pose, norm(pose))
        on = self.on(features).to(self.on.weight.dtype)  # bfloat16 has no numbers between .996 and 1
        return Capsules(pose, on.sigmoid().permute(0, 2, 3, 1))
