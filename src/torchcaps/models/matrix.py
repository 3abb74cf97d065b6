"""Matrix capsules with EM routing (Hinton 2018).

image -> convolution, ReLU (A channels) -> primary capsules (B types, 4x4 pose and a logistic switch)
      -> convolutional capsules (C types) -> convolutional capsules (D types) -> class capsules, coordinates added
      -> spread loss on their switches, with a margin that grows

The defaults are those of the authors' released code where the paper is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from torchcaps.config import Count, NonNegativeFloat, PositiveFloat, SignedFloat, Size, check
from torchcaps.layers import CapsuleBatchNorm, ClassCapsules, ConvCapsules, PerTypeBatchNorm, PrimaryCapsules
from torchcaps.losses import LOSSES, spread_loss, spread_margin
from torchcaps.math.gaussian import LOG_2PI
from torchcaps.math.grid import Grid
from torchcaps.math.pose import MATRIX
from torchcaps.models.base import Model, check_images, check_spec
from torchcaps.models.chunking import in_chunks
from torchcaps.models.conv_stem import check_norm
from torchcaps.routing import EM, RouterChoice, RouterSettings, router_of
from torchcaps.types import Batch, Capsules, ImageSpec, RoutingInfo

__all__ = [
    "ActivationBias",
    "MatrixCaps",
    "MatrixConfig",
    "MatrixInit",
    "MatrixOutput",
    "SmallMatrixConfig",
    "TinyMatrixConfig",
]


def _authors_routing() -> EM:
    """lambda is .01 in their code, where it multiplies log sigma^2; here it multiplies log sigma, hence .02."""
    return EM(final_inverse_temperature=0.02, damping=0.1)


@dataclass(frozen=True)
class MatrixInit:
    """How training starts. Weights are normal, cut at two standard deviations; these are the deviations.

    Attributes:
        conv: Of the first convolution; its bias is `conv_bias`.
        pose: Of the primary capsules' poses.
        on: Of the primary capsules' activations sigmoid(x - 1); their bias is `on_bias`.
        capsules: Of W of the convolutional capsules.
        classes: Of W of the class capsules.
        switch: (s, a), the activation bias of the convolutional capsules, see `ActivationBias`.
        switch_classes: (s, a), the activation bias of the class capsules.
        identity: W of the convolutional capsules starts around the identity instead of around 0: all votes of a window
            are then about the same thing from the first step on.
    """

    conv: PositiveFloat = 0.05
    conv_bias: SignedFloat = 0.1
    pose: PositiveFloat = 0.5
    on: PositiveFloat = 3.0
    on_bias: SignedFloat = -1.0
    capsules: PositiveFloat = 0.3
    classes: PositiveFloat = 0.01
    switch: tuple[SignedFloat, SignedFloat] = (0.5, 0.5)
    switch_classes: tuple[SignedFloat, SignedFloat] = (2.0, 1.0)
    identity: bool = False


@dataclass(frozen=True)
class MatrixConfig:
    """Sizes, routing and loss; the defaults are those of Hinton 2018, 317,194 parameters on 32x32 stereo pairs.

    The paper says 310 K and does not count them one by one; ours are 2 % more. The rows of its table 1 are `routing`
    (iterations; switch = "mixing"), `pose`, `loss` and `coordinates`.

    Attributes:
        sizes: (A, B, C, D).
        kernel: Side of the first convolution, whose step is `stride`.
        capsule_kernel: Side of the windows of both convolutional layers of capsules, whose steps are `capsule_strides`.
        pose: Poses are 4x4 "matrix"es, V = M W, or "vector"s of 16 with W of 16x16.
        routing: Any router of `ROUTERS`. To change one setting in Python, keep the others:
            replace(MatrixConfig().routing, iterations=2).
        class_cooling: What the inverse temperature of the class capsules is divided by; of EM routing alone.
        coordinates: Scale of the pixel coordinates that are added to the votes for classes; 0 = off.
        loss: "spread", or one of the other two of table 1.
        margin: The rule by which the spread loss's margin grows, see `losses.spread_margin`.
        ramp: The steps over which it grows.
        norm: Batch normalization after the convolution and after every layer of capsules; the paper has none. It takes
            beta_a back, which therefore stays where it starts: moved, it would drag the log-odds' mean along.
        init: How training starts.

    Raises:
        RecipeError: If a setting is out of range, or `norm` does not go with the router.
    """

    sizes: tuple[Size, Size, Size, Size] = (32, 32, 32, 32)
    kernel: Size = 5
    stride: Size = 2
    capsule_kernel: Size = 3
    capsule_strides: tuple[Size, Size] = (2, 1)
    pose: Literal["matrix", "vector"] = "matrix"
    routing: RouterChoice = field(default_factory=_authors_routing)
    class_cooling: PositiveFloat = 4.0
    coordinates: NonNegativeFloat = 0.01
    loss: Literal["spread", "margin", "cross-entropy"] = "spread"
    margin: Literal["sigmoid", "linear"] = "sigmoid"
    ramp: Count = 50_000
    norm: bool = False
    init: MatrixInit = field(default_factory=MatrixInit)

    def __post_init__(self) -> None:
        check(self)
        check_norm(self.norm, self.routing)

    @property
    def class_routing(self) -> RouterSettings:
        """The routing into the class capsules: EM at a higher temperature, where classes always compete."""
        if not isinstance(self.routing, EM):
            return self.routing
        cooled = self.routing.final_inverse_temperature / self.class_cooling
        return replace(self.routing, final_inverse_temperature=cooled, competition="all")

    @property
    def smallest(self) -> int:
        """The side of the smallest image in which every window fits once."""
        # From the last layer back to the pixels: one place there needs one window here
        side = 1
        for stride in reversed(self.capsule_strides):
            side = (side - 1) * stride + self.capsule_kernel
        return (side - 1) * self.stride + self.kernel

    def build(self, spec: ImageSpec) -> MatrixCaps:
        return MatrixCaps(self, spec)


@dataclass(frozen=True)
class SmallMatrixConfig(MatrixConfig):
    """The smaller network of Hinton 2018, section 5: 68,754 parameters on 32x32 stereo pairs, 68 K in the paper."""

    sizes: tuple[Size, Size, Size, Size] = (64, 8, 16, 16)


@dataclass(frozen=True)
class TinyMatrixConfig(MatrixConfig):
    """Every layer of matrix capsules at the smallest size, for tests and first tries on images from 11x11 pixels.

    Its activation biases start where capsules switch on at once; the authors' keep them off for thousands of steps.
    """

    sizes: tuple[Size, Size, Size, Size] = (8, 2, 4, 4)
    capsule_strides: tuple[Size, Size] = (1, 1)
    kernel: Size = 3
    routing: RouterChoice = field(default_factory=lambda: EM(2, 0.1))
    class_cooling: PositiveFloat = 1.0
    margin: Literal["sigmoid", "linear"] = "linear"
    ramp: Count = 100
    init: MatrixInit = field(
        default_factory=lambda: MatrixInit(on=0.5, classes=0.3, switch=(0.5, 0.0), switch_classes=(0.5, 0.0))
    )


class MatrixOutput(NamedTuple):
    """What a network of matrix capsules computes of images.

    Attributes:
        classes: Class capsules [b j 16].
        below: The three layers below them, [b h w i 16].
        infos: The records of the three routings from layer to layer.
    """

    classes: Capsules
    below: tuple[Capsules, ...]
    infos: tuple[RoutingInfo, ...]


_UNITS = {"beta_a": -2500.0, "beta_u": (LOG_2PI + 1) / 2}


class ActivationBias(nn.ParameterDict):
    """The two learned biases of each parent type, in the units of the authors' code.

    Their switch is logit = lambda' (mass (-sum_h log sigma_h^2 - s H (log 2 pi + 1)) - 5000 a), for H pose elements.
    With lambda = 2 lambda' that is `routing.em`'s lambda (beta_a - mass sum_h (beta_u + log sigma_h)) where

        beta_a = -2500 a        beta_u = s (log 2 pi + 1) / 2

    The parameters are a and s themselves: an optimizer such as Adam moves all parameters by steps of one size, in
    which beta_a alone, whose scale is thousands, would hardly move.
    """

    @staticmethod
    def create(count: int, start: tuple[float, float]) -> ActivationBias:
        """Return the biases of `count` parent types, which start at (s, a)."""
        s, a = start
        values = {"beta_a": torch.full((count,), a), "beta_u": torch.full((count,), s)}
        return ActivationBias({name: nn.Parameter(value) for name, value in values.items()})

    def __getitem__(self, name: str) -> Tensor:
        own: Tensor = super().__getitem__(name)  # [j]
        return _UNITS[name] * own


def _primary_activation(routing: RouterSettings) -> Literal["length", "logistic"]:
    """A unit of its own, or the pose's length for routers that would not read such a unit."""
    return "length" if router_of(routing).activation_is_length else "logistic"


class MatrixCaps(Model):
    """Images [b c h w] -> class capsules: a switch that says whether the class is there, a pose that says how.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    takes_shares = True

    def __init__(self, config: MatrixConfig, spec: ImageSpec) -> None:
        super().__init__()
        check_spec(spec, smallest=config.smallest)
        self.config = config
        self.spec = spec
        self.needs_whole_batch = config.norm
        # Types of capsules, layer by layer: convolution, primary, two convolutional
        A, B, C, D = config.sizes
        init = config.init
        # Layers, from the pixels up: each hands its grid of places to the next
        kernel = config.capsule_kernel
        (first, second) = config.capsule_strides
        # Convolution and primary capsules
        trunk = Grid.of_image(spec.height, spec.width).window(config.kernel, config.stride).out
        self.conv = nn.Conv2d(spec.channels, A, config.kernel, config.stride)
        self.primary = PrimaryCapsules(trunk, A, B, MATRIX**2, activation=_primary_activation(config.routing))
        # Convolutional capsules, whose windows share W
        self.first = ConvCapsules(
            self.primary.grid,
            B,
            C,
            kernel=kernel,
            stride=first,
            routing=config.routing,
            pose=config.pose,
            std=init.capsules,
        )
        self.second = ConvCapsules(
            self.first.grid,
            C,
            D,
            kernel=kernel,
            stride=second,
            routing=config.routing,
            pose=config.pose,
            std=init.capsules,
        )
        # Class capsules, which also read where each vote comes from
        self.classes = ClassCapsules(
            self.second.grid,
            D,
            spec.classes,
            routing=config.class_routing,
            pose=config.pose,
            coordinate_scale=config.coordinates,
            std=init.classes,
        )
        # Batch normalization, if there is any
        self.features_norm = PerTypeBatchNorm(A, 1) if config.norm else nn.Identity()
        self.norms = nn.ModuleList(  # of the four layers of capsules; no loss asks for the classes' poses
            CapsuleBatchNorm(types, poses=layer is not self.classes) if config.norm else nn.Identity()
            for layer, types in ((self.primary, B), (self.first, C), (self.second, D), (self.classes, spec.classes))
        )
        self._initialize(init)

    def _initialize(self, init: MatrixInit) -> None:
        """Set what the layers do not start at by themselves: convolutions, W around the identity, activation biases."""
        # Convolutions: features, poses and, with a unit of their own, activations
        convolutions = [(self.conv, init.conv, init.conv_bias), (self.primary.pose, init.pose, 0.0)]
        if self.primary.on is not None:
            convolutions.append((self.primary.on, init.on, init.on_bias))
        # Convolutions: truncated normal weights, constant biases
        for conv, std, bias in convolutions:
            nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std)
            if conv.bias is not None:
                nn.init.constant_(conv.bias, bias)
        # Votes that start near the poses themselves
        if init.identity:
            with torch.no_grad():
                for W in (self.first.W, self.second.W):
                    W.add_(torch.eye(W.shape[-1]))
        # Activation biases; those of the classes start elsewhere
        self._initialize_activation_bias(self.first, init.switch)
        self._initialize_activation_bias(self.second, init.switch)
        self._initialize_activation_bias(self.classes, init.switch_classes)

    def _initialize_activation_bias(self, layer: ConvCapsules | ClassCapsules, start: tuple[float, float]) -> None:
        """Give a layer with EM routing biases in the authors' units; other routers keep the layer's own scalars."""
        if not isinstance(layer.routing, EM):
            return
        # A mixing switch has no biases: the dictionary is empty then
        learns = layer.routing.switch == "cost"
        layer.activation_bias = ActivationBias.create(layer.W.shape[1], start) if learns else nn.ParameterDict()
        for name, bias in layer.activation_bias.named_parameters():
            # A norm takes beta_a back: moved, it would drag the mean of the log-odds along.
            bias.requires_grad_(not (self.config.norm and name == "beta_a"))

    def forward(self, images: Tensor, *, trace: bool = False) -> MatrixOutput:
        """Compute the capsules of images [b c h w]; with `trace`, the records have every iteration of routing."""
        check_images(images, self.spec)
        # Features and primary capsules
        features = relu(self.features_norm(self.conv(images)))  # [b A h w]
        capsules: list[Capsules] = [self.norms[0](self.primary(features))]  # [b h w B 16]
        infos: list[RoutingInfo] = []
        # Three routed layers, each normalized
        for layer, norm in zip((self.first, self.second, self.classes), self.norms[1:], strict=True):
            parents, info = layer(capsules[-1], trace=trace)  # [b h w j 16], of classes [b j 16]
            capsules.append(norm(parents))
            infos.append(info)
        # The class capsules are the output, the layers below are for figures and probes
        *below, classes = capsules
        return MatrixOutput(classes, tuple(below), tuple(infos))

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """The class capsules [b j 16] and their activations."""
        out: MatrixOutput = self(images)
        return out.classes

    @in_chunks
    def scores(self, images: Tensor) -> Tensor:
        return self.encode(images).activation

    def margin_at(self, step: int) -> float:
        """The margin of the spread loss at a training step."""
        return spread_margin(step, rule=self.config.margin, ramp=self.config.ramp)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        a = self.scores(batch.images)  # [b j]
        right = (a.argmax(-1) == batch.labels).to(a.dtype).mean()
        # Only the spread loss has a margin to report
        if self.config.loss != "spread":
            return {"loss": LOSSES[self.config.loss](a, batch.targets), "accuracy": right}
        margin = self.margin_at(step)
        return {"loss": spread_loss(a, batch.targets, margin), "margin": a.new_tensor(margin), "accuracy": right}
