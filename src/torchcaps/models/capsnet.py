"""CapsNet: dynamic routing between capsules (Sabour 2017).

image -> convolution, ReLU -> primary capsules (a convolution whose channels are poses, squashed) -> class capsules by
routing -> margin loss on their lengths, and a decoder that must redraw the image from the right capsule alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import relu

from torchcaps.config import NonNegativeFloat, Padding, Size, Sizes, check
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers import (
    CapsuleBatchNorm,
    DenseCapsules,
    DenseDecoder,
    PerTypeBatchNorm,
    PrimaryCapsules,
    mask_all_but,
)
from torchcaps.losses import margin_loss, multi_hot, reconstruction_loss
from torchcaps.models.base import Model, check_classes, check_images, is_correct
from torchcaps.models.chunking import in_chunks
from torchcaps.models.conv_stem import build_routed_layer, build_stem, check_norm
from torchcaps.routing import Dynamic, RouterChoice
from torchcaps.types import Batch, Capsules, ImageSpec, RoutingInfo

__all__ = ["CapsNet", "CapsNetConfig", "CapsNetLayers", "CapsNetOutput", "SmallCapsNetConfig"]


class CapsNetLayers(NamedTuple):
    """The layers below the decoder.

    Attributes:
        conv: Images [b c h w] -> features [b c' h' w'].
        primary: Features -> primary capsules.
        classes: Primary capsules -> class capsules.
        norm: Class capsules -> the same with normalized activations, or as they are.
    """

    conv: nn.Module
    primary: PrimaryCapsules
    classes: DenseCapsules
    norm: nn.Module


class ClassCapsulesConfig(Protocol):
    """What `CapsNet` asks of a configuration."""

    @property
    def dimension(self) -> int: ...
    @property
    def reconstruction(self) -> float: ...
    @property
    def decoder(self) -> tuple[int, ...]: ...
    def build_layers(self, spec: ImageSpec) -> CapsNetLayers: ...


@dataclass(frozen=True)
class CapsNetConfig:
    """Sizes and losses; the defaults are the 8.2 M parameters of Sabour 2017 on 28x28 images.

    Attributes:
        channels: Of the first convolution, whose side is `kernel` and whose step is `stride`.
        padding: Zero pixels that the first convolution adds on each side, so that as many capsules see what stands at
            the border of an image as what stands in its middle.
        types: Primary capsules at one place, of `type_dimension` numbers each, made by a convolution with
            `primary_kernel` and `primary_stride`.
        dimension: Numbers of a class capsule's pose.
        shared: All places share one W, and votes say where they come from (our own).
        coordinates: How much a pixel counts there; of `shared` alone.
        routing: Any router of `ROUTERS`.
        reconstruction: Weight of the decoder's loss beside the margin loss.
        decoder: Units of its hidden layers.
        start: Initial weights: "torch", the defaults of its layers, or "authors", see `conv_stem.build_stem`.
        norm: Batch normalization of the log-odds of class capsules, as the paper of variational Bayes routing has it;
            for routers whose activations are not lengths.

    Raises:
        RecipeError: If a setting is out of range, `norm` does not go with the router, or `padding` is not below
            the pixels that a primary capsule sees.
    """

    channels: Size = 256
    kernel: Size = 9
    stride: Size = 1
    padding: Padding = 0
    types: Size = 32
    type_dimension: Size = 8
    primary_kernel: Size = 9
    primary_stride: Size = 2
    dimension: Size = 16
    shared: bool = False
    coordinates: NonNegativeFloat = 0.02
    routing: RouterChoice = field(default_factory=Dynamic)
    reconstruction: NonNegativeFloat = 0.0005
    decoder: Sizes = (512, 1024)
    start: Literal["torch", "authors"] = "torch"
    norm: bool = False

    def __post_init__(self) -> None:
        check(self)
        check_norm(self.norm, self.routing)
        seen = self.kernel + self.stride * (self.primary_kernel - 1)
        if self.padding >= seen:
            raise RecipeError(
                f"padding = {self.padding} is not below {seen}, the pixels that a primary capsule sees; those at the"
                " border would see none of the image"
            )

    def build(self, spec: ImageSpec) -> CapsNet:
        return CapsNet(self, spec)

    def build_layers(self, spec: ImageSpec) -> CapsNetLayers:
        conv, primary = build_stem(self, spec, self.start, self.padding)
        norm = CapsuleBatchNorm(spec.classes, poses=False) if self.norm else nn.Identity()
        return CapsNetLayers(conv, primary, build_routed_layer(self, primary, spec.classes), norm)


@dataclass(frozen=True)
class SmallCapsNetConfig(CapsNetConfig):
    """Sized for two cores: the first convolution takes the step of two pixels that the second takes in the paper.

    So each primary capsule sees the same 17x17 pixels and stands at the same place as there, for 1/22 of the
    multiply-adds.
    """

    channels: Size = 64
    stride: Size = 2
    types: Size = 16
    primary_kernel: Size = 5
    primary_stride: Size = 1
    decoder: Sizes = (256, 512)


class CapsNetOutput(NamedTuple):
    """What a CapsNet computes of images.

    Attributes:
        classes: Class capsules [b j k].
        primary: Primary capsules [b h w i d], which routed into them.
        info: The record of the routing.
    """

    classes: Capsules
    primary: Capsules
    info: RoutingInfo


class CapsNet(Model):
    """Images [b c h w] -> class capsules whose length says whether the class is there and whose pose says how.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def __init__(self, config: ClassCapsulesConfig, spec: ImageSpec) -> None:
        super().__init__()
        check_classes(spec)
        self.config = config
        self.spec = spec
        self.conv, self.primary, self.classes, self.norm = config.build_layers(spec)
        self.decoder = DenseDecoder(spec.classes, config.dimension, spec[:3], config.decoder)
        self.needs_whole_batch = any(isinstance(layer, PerTypeBatchNorm) for layer in self.modules())

    def forward(self, images: Tensor, *, trace: bool = False) -> CapsNetOutput:
        """Compute the capsules of images [b c h w]; with `trace`, the record has every iteration of routing."""
        check_images(images, self.spec)
        primary = self.primary(self.features(images))  # [b h w i d]
        classes, info = self.classes(primary, trace=trace)  # [b j k]
        return CapsNetOutput(self.norm(classes), primary, info)

    def features(self, images: Tensor) -> Tensor:
        """What the primary capsules see [b c' h' w'] of images [b c h w]."""
        return relu(self.conv(images))

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """The class capsules [b j k] and their lengths."""
        out: CapsNetOutput = self(images)
        return out.classes

    @in_chunks
    def scores(self, images: Tensor) -> Tensor:
        return self.encode(images).activation

    @in_chunks
    def reconstruct(self, classes: Capsules, chosen: Tensor | None = None) -> Tensor:
        """Images [b c h w] drawn from one capsule each: the chosen class [b], or the longest capsule."""
        which = classes.activation.argmax(-1) if chosen is None else chosen  # [b]
        images: Tensor = self.decoder(mask_all_but(classes.pose, which))
        return images

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        # Margin loss on the lengths of the class capsules
        out: CapsNetOutput = self(batch.images)
        v = out.classes.activation
        margin = margin_loss(v, batch.labels if batch.labels.ndim == 1 else multi_hot(batch.labels, self.spec.classes))
        # Reconstruction from the right capsule alone
        redrawn = self._redraw(out.classes, batch)
        # For the journal alone
        right = is_correct(v, batch.labels).to(margin.dtype).mean()
        loss = margin + self.config.reconstruction * redrawn
        return {"loss": loss, "margin": margin, "reconstruction": redrawn, "accuracy": right}

    def _redraw(self, classes: Capsules, batch: Batch) -> Tensor:
        """What it costs to draw the image from the right capsule; of several things, each one alone from its own."""
        # One thing in each image
        if batch.labels.ndim == 1:
            return reconstruction_loss(self.reconstruct(classes, batch.labels), batch.images)
        if batch.components is None:
            raise ShapeError("images that show several classes came without their components; each one alone is wanted")
        # Every image m times, each time with another of its classes
        m = batch.labels.shape[1]
        each = Capsules(classes.pose.repeat_interleave(m, 0), classes.activation.repeat_interleave(m, 0))
        drawn = self.reconstruct(each, batch.labels.flatten())  # [(b m) c h w]
        # Times m: the loss is a mean over the (b m) pictures, and each image owes the sum over its m
        return m * reconstruction_loss(drawn, batch.components.flatten(0, 1).unsqueeze(1))
