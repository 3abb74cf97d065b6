"""Efficient-CapsNet (Mazzia 2021): a CapsNet of few primary capsules, with attention instead of iterations.

image -> convolutions, each with ReLU and batch normalization -> one depthwise convolution as large as what is left ->
a few primary capsules at one place -> class capsules by attention routing -> margin loss and decoder, as in CapsNet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from torchcaps.config import NonNegativeFloat, Size, Sizes
from torchcaps.errors import RecipeError
from torchcaps.layers import DenseCapsules, PerTypeBatchNorm, PrimaryCapsules
from torchcaps.math.grid import Grid
from torchcaps.models.base import check_spec
from torchcaps.models.capsnet import CapsNet, CapsNetLayers
from torchcaps.routing import Attention, RouterChoice
from torchcaps.types import ImageSpec

__all__ = ["EfficientCapsNet", "EfficientCapsNetConfig"]


@dataclass(frozen=True)
class EfficientCapsNetConfig:
    """Sizes and losses; the defaults are the network of Mazzia 2021 on 28x28 images, 161,824 parameters and a decoder.

    Attributes:
        channels: Of the convolutions, one after the other. The last is also the number of all primary capsules'
            numbers, a multiple of `type_dimension`.
        kernels: Their sides.
        strides: Their steps.
        type_dimension: Numbers of a primary capsule's pose.
        dimension: Numbers of a class capsule's pose.
        routing: Any router of `ROUTERS`.
        reconstruction: Weight of the decoder's loss beside the margin loss.
        decoder: Units of its hidden layers.

    Raises:
        RecipeError: If the lists differ in length, or the last convolution's channels do not make whole capsules.
    """

    channels: Sizes = (32, 64, 64, 128)
    kernels: Sizes = (5, 3, 3, 3)
    strides: Sizes = (1, 1, 1, 2)
    type_dimension: Size = 8
    dimension: Size = 16
    routing: RouterChoice = field(default_factory=Attention)
    reconstruction: NonNegativeFloat = 0.0005
    decoder: Sizes = (512, 1024)

    def __post_init__(self) -> None:
        lengths = (len(self.channels), len(self.kernels), len(self.strides))
        if len(set(lengths)) > 1 or not self.channels:
            raise RecipeError(f"{lengths} channels, kernels and strides; give one of each for every convolution")
        if self.channels[-1] % self.type_dimension:
            raise RecipeError(
                f"{self.channels[-1]} channels of the last convolution are no multiple of type_dimension ="
                f" {self.type_dimension}; they become primary capsules of that many numbers"
            )

    def build(self, spec: ImageSpec) -> EfficientCapsNet:
        return EfficientCapsNet(self, spec)

    def build_layers(self, spec: ImageSpec) -> CapsNetLayers:
        # The side that leaves one place after the last convolution
        smallest = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            smallest = (smallest - 1) * stride + kernel
        check_spec(spec, smallest=smallest)
        # Convolutions, each with ReLU and normalization
        layers: list[nn.Module] = []
        grid = Grid.of_image(spec.height, spec.width)
        below = spec.channels
        for width, kernel, stride in zip(self.channels, self.kernels, self.strides, strict=True):
            conv = nn.Conv2d(below, width, kernel, stride)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)
            layers += [conv, nn.ReLU(), PerTypeBatchNorm(width, 1)]
            grid = grid.window(kernel, stride).out
            below = width
        # Primary capsules that see all that is left, of square images at one place
        types = below // self.type_dimension
        side = min(grid.height, grid.width)
        primary = PrimaryCapsules(
            grid, below, types, self.type_dimension, kernel=side, activation="exponential", depthwise=True
        )
        classes = DenseCapsules(primary.count, spec.classes, self.type_dimension, self.dimension, routing=self.routing)
        return CapsNetLayers(nn.Sequential(*layers), primary, classes, nn.Identity())


class EfficientCapsNet(CapsNet):
    """Images [b c h w] -> class capsules, as `CapsNet`, in one pass of attention.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def features(self, images: Tensor) -> Tensor:
        features: Tensor = self.conv(images)
        return features
