"""What CapsNet and sparse capsules stand on: a convolution, then primary capsules (Sabour 2017, section 4)."""

from __future__ import annotations

from typing import Protocol

from torchcaps.layers import Convolution, PrimaryCapsules
from torchcaps.math.patches import Grid
from torchcaps.models.base import check_spec
from torchcaps.types import ImageSpec

__all__ = ["TrunkConfig", "trunk_of"]


class TrunkConfig(Protocol):
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


def trunk_of(config: TrunkConfig, spec: ImageSpec) -> tuple[Convolution, PrimaryCapsules]:
    """The two layers for images of a shape; images that are too small are refused."""
    check_spec(spec, smallest=config.kernel + config.stride * (config.primary_kernel - 1))
    below = Grid.of_image(spec.height, spec.width).window(config.kernel, config.stride)
    conv = Convolution(spec.channels, config.channels, config.kernel, config.stride)
    primary = PrimaryCapsules(
        below.out, config.channels, config.types, config.type_dimension,
        kernel=config.primary_kernel, stride=config.primary_stride,
    )  # fmt: skip
    return conv, primary
