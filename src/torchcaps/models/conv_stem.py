"""What CapsNet and sparse capsules share: a convolution, primary capsules, and what is routed from them (Sabour 2017,
section 4)."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import nn

from torchcaps.errors import RecipeError
from torchcaps.layers import Convolution, DenseCapsules, PrimaryCapsules, SharedCapsules
from torchcaps.math.grid import Grid
from torchcaps.models.base import check_spec
from torchcaps.routing import RouterSettings, router_of
from torchcaps.types import ImageSpec

__all__ = ["StemConfig", "build_routed_layer", "build_stem", "check_norm"]


class StemConfig(Protocol):
    """The sizes that a configuration must have."""

    @property
    def channels(self) -> int: ...
    @property
    def kernel(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def types(self) -> int: ...
    @property
    def type_dimension(self) -> int: ...
    @property
    def primary_kernel(self) -> int: ...
    @property
    def primary_stride(self) -> int: ...
    @property
    def dimension(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def coordinates(self) -> float: ...
    @property
    def routing(self) -> RouterSettings: ...


def build_stem(
    config: StemConfig, spec: ImageSpec, start: Literal["torch", "authors"] = "torch", padding: int = 0
) -> tuple[Convolution, PrimaryCapsules]:
    """Build the two layers for images of a shape.

    Args:
        config: Sizes.
        spec: Shape of the images; images that are too small are refused.
        start: Initial values. "torch": those of `nn.Conv2d`. "authors": those of the authors' code of Sabour 2017,
            where primary capsules are the mean over their types: weights of N(0, .1) whose convolution is divided by
            the number of types, biases of .1.
        padding: Zero pixels that the convolution adds on each side of an image.

    Returns:
        The convolution and the primary capsules.
    """
    check_spec(spec, smallest=max(1, config.kernel + config.stride * (config.primary_kernel - 1) - 2 * padding))
    # The capsules stand on the grid of the convolution's output
    below = Grid.of_image(spec.height, spec.width, padding).window(config.kernel, config.stride)
    conv = Convolution(spec.channels, config.channels, config.kernel, config.stride, padding)
    primary = PrimaryCapsules(
        below.out,
        config.channels,
        config.types,
        config.type_dimension,
        kernel=config.primary_kernel,
        stride=config.primary_stride,
        scale=1 / config.types if start == "authors" else 1.0,
    )
    if start == "authors":
        nn.init.normal_(primary.pose.weight, std=0.1)
        for layer in (conv, primary.pose):
            if layer.bias is not None:
                nn.init.constant_(layer.bias, 0.1)
    return conv, primary


def build_routed_layer(config: StemConfig, primary: PrimaryCapsules, parents: int) -> DenseCapsules:
    """The layer above primary capsules: each place has its own W, or all places share one and votes say where from."""
    d = config.type_dimension
    k = config.dimension
    if config.shared:
        return SharedCapsules(
            primary.grid, config.types, parents, d, k, routing=config.routing, coordinate_scale=config.coordinates
        )
    return DenseCapsules(primary.count, parents, d, k, routing=config.routing)


def check_norm(norm: bool, routing: RouterSettings) -> None:
    """Refuse to normalize activations that are lengths: a norm would change the length of a pose.

    Args:
        norm: Whether batch normalization of activations is wanted.
        routing: Settings of the router.

    Raises:
        RecipeError: If it is wanted and the router's activations are the lengths of its poses.
    """
    if norm and router_of(routing).activation_is_length:
        raise RecipeError(
            f"norm = true does not go with the router {type(routing).__name__}, to which the length of a"
            " pose is the activation; use norm = false, or a router that reads activations, such as em"
        )
