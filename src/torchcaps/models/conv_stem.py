"""What CapsNet and sparse capsules share: a convolution, primary capsules, and what is routed from them (Sabour 2017,
section 4)."""

from __future__ import annotations

from typing import Protocol

from torchcaps.layers import Convolution, DenseCapsules, PrimaryCapsules, SharedCapsules
from torchcaps.math.grid import Grid
from torchcaps.models.base import check_spec
from torchcaps.routing import RouterSettings
from torchcaps.types import ImageSpec

__all__ = ["StemConfig", "build_routed_layer", "build_stem"]


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


def build_stem(config: StemConfig, spec: ImageSpec) -> tuple[Convolution, PrimaryCapsules]:
    """The two layers for images of a shape; images that are too small are refused."""
    check_spec(spec, smallest=config.kernel + config.stride * (config.primary_kernel - 1))
    # The capsules stand on the grid of the convolution's output
    below = Grid.of_image(spec.height, spec.width).window(config.kernel, config.stride)
    conv = Convolution(spec.channels, config.channels, config.kernel, config.stride)
    primary = PrimaryCapsules(
        below.out,
        config.channels,
        config.types,
        config.type_dimension,
        kernel=config.primary_kernel,
        stride=config.primary_stride,
    )
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
