"""Sparse unsupervised capsules (Rawlinson 2018): CapsNet without labels, whose latent capsules compete.

image -> convolution, ReLU -> primary capsules -> latent capsules v by dynamic routing
      -> mask m by the rank of the support that routing gave them, v' = v m -> decoder that must redraw the image
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu

from torchcaps.config import Count, NonNegativeFloat, NonNegativeInt, PositiveFloat, Share, Size, Sizes, check
from torchcaps.errors import RecipeError
from torchcaps.layers import DenseDecoder, FrameDecoder, PrototypeDecoder, SparseMask, draw_each
from torchcaps.losses import reconstruction_loss
from torchcaps.models.base import Model, check_images
from torchcaps.models.chunking import in_chunks
from torchcaps.models.conv_stem import build_routed_layer, build_stem
from torchcaps.routing import Dynamic, RouterChoice, RouterSettings, router_of
from torchcaps.types import Batch, Capsules, ImageSpec, RoutingInfo
from torchcaps.utils.distributed import mean_over_processes
from torchcaps.utils.random import normal

__all__ = [
    "SmallSparseConfig",
    "SparseCaps",
    "SparseConfig",
    "SparseConfigBase",
    "SparseModel",
    "SparseOutput",
    "assigned",
    "build_mask",
    "reconstruction_support",
    "scaled_by_activation",
    "support",
]


_LEAST_ERROR = 1e-6
"""Squared error of an image below which capsules do not differ in support."""
_RESTART_EVERY = 50
"""Training batches from one look for capsules to restart to the next."""
_RESTART_NOISE = 0.1
"""Deviation of the noise in a copy, in units of that of the weights."""


@dataclass(frozen=True)
class SparseConfigBase:
    """How latent capsules compete, and how they redraw the image, whatever network makes them.

    Attributes:
        capsules: L, how many there are.
        sparse: False for the dense control, whose capsules all reach the decoder.
        gamma: Of the mask exp(-gamma rank / (L - 1)).
        cut: The least mask that counts; below it the mask is 0.
        alpha: Of the moving average of how often each capsule comes first.
        boost: Step of the boost.
        every: Training batches from one boost to the next.
        band: Lifetime frequencies in which a boost stays; none = (.64, 1.6) / L, the paper's [.04, .1] at L = 16 (the
            authors' code has [.03, .12]).
        relative: Rank by the support over its own moving average, for routing that always supports some capsules.
        ramp: Training batches over which gamma rises from 0 (our own); 0 = none. In evaluation all of gamma counts, so
            that within the ramp images are redrawn from fewer capsules than in training.
        reconstruction: Weight of the sum of squared errors.
        decoder: Units of its hidden layers.
        routing: Any router of `ROUTERS`.

    Raises:
        RecipeError: If a setting is out of range.
    """

    capsules: Size = 16
    sparse: bool = True
    gamma: NonNegativeFloat = 12.0
    cut: Share = 0.01
    alpha: Share = 0.99
    boost: NonNegativeFloat = 0.1
    every: Count = 50
    band: tuple[Share, Share] | None = None
    relative: bool = False
    ramp: NonNegativeInt = 0
    reconstruction: PositiveFloat = 0.005
    decoder: Sizes = (512, 1024)
    routing: RouterChoice = field(default_factory=Dynamic)

    def __post_init__(self) -> None:
        check(self)
        if self.band is not None and self.band[0] > self.band[1]:
            raise RecipeError(f"band = {list(self.band)}; the lower frequency first is wanted")


@dataclass(frozen=True)
class SparseConfig(SparseConfigBase):
    """Sizes and competition; the defaults are those of Rawlinson 2018, which trains on 40x40 images.

    Attributes:
        dimension: Numbers of a latent capsule's pose.
        channels: Of the first convolution, whose side is `kernel` and whose step is `stride`.
        types: Primary capsules at one place, of `type_dimension` numbers each, made by a convolution with
            `primary_kernel` and `primary_stride`.
        shared: All places share one W, and votes say where they come from (our own).
        coordinates: How much a pixel counts there; of `shared` alone.
        frames: Each capsule draws a picture of its own, into a frame of its own (our own).
        side: Pixels of such a picture; of `frames` alone.
        prototypes: Each capsule has one picture, and its pose decides the frame alone; of `frames` alone.
        frame_steps: Training batches after which frames may shift; after as many again, they may turn and stretch, too.
            0 = all from the start; of `prototypes` alone.
        rank_by: What capsules are ranked by: the "support" of routing, as in the paper, or "reconstruction", the
            reciprocal of the squared error of the image that a capsule draws alone (our own).
        restart: A capsule that comes first in less than this share of an even part of the images starts anew, as a
            noisy copy of the one that comes first most often; 0 = never; of `prototypes` alone.
        restart_until: Training batches after which none does any more.
    """

    dimension: Size = 16
    channels: Size = 256
    kernel: Size = 9
    stride: Size = 1
    types: Size = 32
    type_dimension: Size = 8
    primary_kernel: Size = 9
    primary_stride: Size = 2
    shared: bool = False
    coordinates: NonNegativeFloat = 0.02
    frames: bool = False
    side: Size = 28
    prototypes: bool = False
    frame_steps: NonNegativeInt = 0
    rank_by: Literal["support", "reconstruction"] = "support"
    restart: Share = 0.0
    restart_until: NonNegativeInt = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames and not self.decoder:
            raise RecipeError("decoder = []; with frames, the units of one hidden layer or more are wanted")
        if self.prototypes and not self.frames:
            raise RecipeError("prototypes = true needs frames to draw into; set frames = true")
        for name in ("frame_steps", "restart"):
            if getattr(self, name) and not self.prototypes:
                raise RecipeError(
                    f"{name} = {getattr(self, name)} has a meaning for prototypes only; set prototypes = true"
                )

    def build(self, spec: ImageSpec) -> SparseCaps:
        return SparseCaps(self, spec)


@dataclass(frozen=True)
class SmallSparseConfig(SparseConfig):
    """Sized for two cores: both convolutions take steps of two pixels, so that 40x40 images have 6x6 places."""

    channels: Size = 64
    stride: Size = 2
    types: Size = 16
    primary_kernel: Size = 5
    decoder: Sizes = (256, 512)


class SparseOutput(NamedTuple):
    """What a network with a mask computes of images.

    Attributes:
        latent: Latent capsules [b j k] as routing left them.
        unmasked: v, whose poses vanish with their activations.
        masked: v' = v m.
        ranks: [b j] that made the mask.
        support: [b j] that made the ranks.
        primary: The capsules below, [b h w i d].
        info: The record of the routing.
    """

    latent: Capsules
    unmasked: Capsules
    masked: Capsules
    ranks: Tensor
    support: Tensor
    primary: Capsules
    info: RoutingInfo


def support(coupling: Tensor, types: int) -> Tensor:
    """Sum over places the largest coupling among the types there (psi of Rawlinson 2018).

    Args:
        coupling: [b (h w i) j], as `assigned` returns it.
        types: i, capsules at one place.

    Returns:
        [b j].
    """
    # Largest over i, sum over (h w): a place counts once, however many of its types agree
    return torch.unflatten(coupling, 1, (-1, types)).amax(2).sum(1)


@torch.no_grad()
def reconstruction_support(decode: Callable[[Tensor], Tensor], pose: Tensor, images: Tensor) -> Tensor:
    """Return 1 / |image - what capsule j draws alone|²: the larger, the better it explains the image.

    Args:
        decode: Poses [b j k] -> images [b c h w].
        pose: [b j k].
        images: [b c h w].

    Returns:
        [b j].
    """
    away = draw_each(decode, pose) - images.unsqueeze(1)  # [b j c h w]
    return 1 / away.square().flatten(2).sum(-1).clamp_min(_LEAST_ERROR)


def assigned(coupling: Tensor, activation: Tensor, routing: RouterSettings) -> Tensor:
    """Return how much of each child every parent holds: the coupling, times the activation if the router reads it.

    Args:
        coupling: [... i j] of one iteration or of all.
        activation: Of the children, [... i] or what expands to it.
        routing: Settings of the router that found the coupling.

    Returns:
        [... i j], detached.
    """
    # As in the paper, whose router has no activations of its own: the coupling alone
    if router_of(routing).activation_is_length:
        return coupling
    return coupling * activation.detach().unsqueeze(-1)


def scaled_by_activation(capsules: Capsules, routing: RouterSettings) -> Capsules:
    """Multiply poses [b j k] by activations [b j], unless their lengths are the activations already.

    Args:
        capsules: Parents as a router returned them.
        routing: Settings of that router.

    Returns:
        Capsules of the same shapes, whose poses vanish with their activations: what a decoder can draw from.
    """
    if router_of(routing).activation_is_length:
        return capsules
    return Capsules(capsules.pose * capsules.activation.unsqueeze(-1), capsules.activation)


def build_mask(config: SparseConfigBase) -> SparseMask:
    """The mask by which capsules compete; that of the dense control lets all through and boosts none."""
    return SparseMask(
        config.capsules,
        gamma=config.gamma if config.sparse else 0.0,
        cut=config.cut,
        alpha=config.alpha,
        delta=config.boost if config.sparse else 0.0,
        every=config.every,
        band=config.band,
        relative=config.relative,
        ramp=config.ramp,
    )


class SparseModel(Model):
    """Base of networks with a mask and a decoder, which learn without labels; `forward` returns a SparseOutput."""

    config: SparseConfigBase
    mask: SparseMask
    needs_whole_batch = True  # the share of images in which each capsule comes first
    decoder: DenseDecoder | FrameDecoder | PrototypeDecoder

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """Return the latent capsules v' [b j k] behind the mask, the input of decoder and probes."""
        out: SparseOutput = self(images)
        return out.masked

    def compete(
        self, latent: Capsules, held: Tensor, below: Capsules, info: RoutingInfo, images: Tensor
    ) -> SparseOutput:
        """Rank the latent capsules by their support and mask all but the first.

        Args:
            latent: Pose [b j k] and activation [b j], as routing left them.
            held: [b (h w i) j] how much of each child they hold, as `assigned` returns it.
            below: The children, [b h w i d].
            info: The record of the routing.
            images: [b c h w], of which these are the capsules.

        Returns:
            Everything that the network computed of its images.
        """
        # Capsules that the decoder can draw from, before the mask
        unmasked = scaled_by_activation(latent, self.config.routing)
        # The mask, from the ranks of the support
        psi = self._support(unmasked, held, below, images)  # [b j]
        m, ranks = self.mask(psi)  # [b j]
        masked = Capsules(unmasked.pose * m.unsqueeze(-1), unmasked.activation * m)
        return SparseOutput(latent, unmasked, masked, ranks, psi, below, info)

    def _support(self, unmasked: Capsules, held: Tensor, below: Capsules, images: Tensor) -> Tensor:
        """What capsules are ranked by [b j]: the support that routing gave them."""
        return support(held, below.pose.shape[3])

    def decode(self, pose: Tensor) -> Tensor:
        """Poses [b j k] of what is left of the capsules -> images [b c h w]."""
        images: Tensor = self.decoder(pose)
        return images

    @in_chunks
    def reconstruct(self, images: Tensor) -> Tensor:
        """Images redrawn from their masked capsules alone."""
        return self.decode(self.encode(images).pose)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        if self.training:
            self._before_batch()
        out: SparseOutput = self(batch.images)
        error = reconstruction_loss(self.decode(out.masked.pose), batch.images)
        # Statistics belong to training: evaluation must not move the boosts
        if self.training:
            _update_statistics(out, self.mask)
        return {
            "loss": self.config.reconstruction * error,
            "reconstruction": error,
            "capsules_in_band": self.mask.count_in_band(self.mask.frequency).to(error.dtype),
        }

    def _before_batch(self) -> None:
        """Change what depends on the number of training batches before, and on who came first in them."""


@torch.no_grad()
def _update_statistics(out: SparseOutput, mask: SparseMask) -> None:
    """Lifetime statistics of the whole batch, the same in every process."""
    # Before the share: in the first batch this sets the usual support, and `observe_share` counts the batch
    mask.observe_support(mean_over_processes(out.support.mean(0)))
    first = (out.ranks == 0).to(mask.frequency.dtype).mean(0)  # [j]
    mask.observe_share(mean_over_processes(first))


def _build_decoder(config: SparseConfig, spec: ImageSpec) -> DenseDecoder | FrameDecoder | PrototypeDecoder:
    sizes = (config.capsules, config.dimension, spec[:3])
    if config.prototypes:
        return PrototypeDecoder(*sizes, side=config.side)
    if config.frames:
        return FrameDecoder(*sizes, config.decoder, side=config.side)
    return DenseDecoder(*sizes, config.decoder)


class SparseCaps(SparseModel):
    """Images [b c h w] -> latent capsules, few of which stay on; labels are never looked at.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def __init__(self, config: SparseConfig, spec: ImageSpec) -> None:
        super().__init__()
        self.config: SparseConfig = config
        self.spec = spec
        self.conv, self.primary = build_stem(config, spec)
        self.latent = build_routed_layer(config, self.primary, config.capsules)
        self.mask = build_mask(config)
        self.decoder = _build_decoder(config, spec)

    def forward(self, images: Tensor, *, trace: bool = False) -> SparseOutput:
        """Compute the capsules of images [b c h w] and their mask; with `trace`, the record has every iteration."""
        check_images(images, self.spec)
        primary = self.primary(relu(self.conv(images)))  # [b h w i d]
        latent, info = self.latent(primary, trace=trace)  # [b j k]
        held = assigned(info.coupling[-1], primary.flat().activation, self.config.routing)  # [b (h w i) j]
        return self.compete(latent, held, primary, info, images)

    def _support(self, unmasked: Capsules, held: Tensor, below: Capsules, images: Tensor) -> Tensor:
        if self.config.rank_by == "support":
            return super()._support(unmasked, held, below, images)
        return reconstruction_support(self.decode, unmasked.pose, images)

    @torch.no_grad()
    def _before_batch(self) -> None:
        if not isinstance(self.decoder, PrototypeDecoder):
            return
        batches = int(self.mask.batches)
        self._allow_frames(batches)
        due = 0 < batches <= self.config.restart_until and batches % _RESTART_EVERY == 0
        if self.config.restart and due:
            self._restart_losers(batches)

    def _allow_frames(self, batches: int) -> None:
        """Switch on what frames may do after so many batches."""
        steps = self.config.frame_steps
        assert isinstance(self.decoder, PrototypeDecoder)
        self.decoder.allow(shift=batches >= steps, affine=batches >= 2 * steps)

    def _restart_losers(self, batches: int) -> None:
        """Make capsules that come first too seldom noisy copies of the one that does most often.

        Moments of the optimizer are left alone: those of a capsule without images have decayed to 0.
        """
        assert isinstance(self.decoder, PrototypeDecoder)
        for j, source in self.mask.pick_restarts(self.config.restart):
            self.latent.copy_parent(j, source, _noise(batches, j, self.latent.W[:, j]))
            self.decoder.copy_capsule(j, source, _noise(batches, j, self.decoder.T[j]))


def _noise(batches: int, j: int, like: Tensor) -> Tensor:
    """Noise of the shape of `like`, a function of the number of batches and of the capsule."""
    made = normal(0, batches, j, count=like.numel(), dtype=like.dtype)
    return _RESTART_NOISE * made.view(like.shape).to(like.device)
