"""Products of expert capsules (Hauser 2019): capsules that learn objects without labels, and draw them.

image --autoencoder--> features [b i d] --squash--> children --W, routing, competition--> capsules [b j k]
image <--autoencoder-- features [b i d] <----------------------- U ---------------------- capsules [b j k]

With frames, image stands for the image in its frame. Edges, where there are any, are children behind those of the
autoencoder; U goes to the latter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError
from torchcaps.models.autoencoder import Autoencoder
from torchcaps.models.base import Model, check_images
from torchcaps.models.chunking import in_chunks
from torchcaps.models.poe import pose_sampling
from torchcaps.models.poe.config import PoEConfig
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.models.poe.edges import edge_children, edge_grid
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState
from torchcaps.models.poe.frames import Frame, find_frame, from_frame, into_frame
from torchcaps.models.poe.stages import CapsuleStage, DecoderStage
from torchcaps.types import Batch, Capsules, ImageSpec

__all__ = ["PoE"]


class FramedAutoencoder(Autoencoder):
    """An autoencoder that learns images in their frames; it encodes and decodes images that are in theirs already."""

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the loss of `Autoencoder.objective` for the batch's images in their frames."""
        return super().objective(batch._replace(images=into_frame(batch.images, find_frame(batch.images))), step)


class PoE(Model):
    """An autoencoder, a capsule encoder W and a capsule decoder U, trained one after the other.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def __init__(self, config: PoEConfig, spec: ImageSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.capsules = config.capsules
        self.dimension = config.dimension
        self.framed = config.frames != "none"
        self.training_sums = ("decoder.gram", "decoder.cross")
        # Children are groups of the autoencoder's channels at one place
        channels = config.autoencoder.channels[-1]
        d = config.child_dimension
        if channels % d:
            raise RecipeError(f"child_dimension = {d} does not divide the {channels} channels of the autoencoder")
        self.autoencoder = (FramedAutoencoder if self.framed else Autoencoder)(config.autoencoder, spec)
        drawn = math.prod(self.autoencoder.grid) * (channels // d)
        # Each capsule needs an image of its own to learn from
        self.autoencoder.fewest = config.capsules
        # Encoder W and decoder U between children and capsules
        edges = math.prod(edge_grid(spec.height, spec.width)) if config.children == "edges" else 0
        sizes = (config.capsules, d, config.dimension)
        self.energy = CapsuleEnergy(config.energy, drawn, *sizes, ranking=edges)
        self.decoder = CapsuleDecoder(config.decoder, drawn, *sizes, slab=config.energy.slab, frames=self.framed)

    def stages(self) -> dict[str, Model]:
        frames = find_frame if self.framed else None
        return {
            "autoencoder": self.autoencoder,
            "capsules": CapsuleStage(self.energy, self.features),
            "decoder": DecoderStage(self.decoder, self.energy, self.features, self.draw_images, frames),
        }

    def find_frame(self, images: Tensor) -> Frame | None:
        """Find the frames of images [b c h w]; None if the model has none."""
        return find_frame(images) if self.framed else None

    def features(self, images: Tensor) -> Tensor:
        """Compute the features of images, in their frames if the model has any.

        Args:
            images: [b c h w] in [0, 1].

        Returns:
            Children before squash [b i d]: the channels of every place of the autoencoder, d at a time; and edges, if
            these are children, behind them.
        """
        framed = self._into_frame(images)
        # Channels last, so that the d numbers of a child come from one place
        maps: Tensor = self.autoencoder.encode(framed)  # [b C h' w']
        d = self.config.child_dimension
        drawn = torch.unflatten(maps.permute(0, 2, 3, 1).flatten(1), 1, (-1, d))
        return torch.cat([drawn, edge_children(framed, d)], 1) if self.energy.ranking else drawn

    def _into_frame(self, images: Tensor) -> Tensor:
        """Images in their frames, or as they are if the model has none."""
        if not self.framed:
            return images
        check_images(images, self.spec)
        return into_frame(images, find_frame(images))

    def draw_images(self, features: Tensor, frame: Frame | None = None) -> Tensor:
        """Draw images from features.

        Args:
            features: [b i d]; those of the autoencoder are read.
            frame: Where to draw; None for an image in its frame.

        Returns:
            [b c h w] in [0, 1].
        """
        h, w = self.autoencoder.grid
        drawn = features[:, : self.decoder.U.shape[1]]
        maps = drawn.reshape(len(features), h, w, -1).permute(0, 3, 1, 2)  # [b C h' w']
        images: Tensor = self.autoencoder.decode(maps)
        return images if frame is None else from_frame(images, frame)

    def infer(self, images: Tensor) -> CapsuleState:
        """Infer the capsules of images [b c h w]: coupling, z before squash, gate and ranks."""
        return self.energy.infer(self.energy.visible(self.features(images)))

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """Capsules x_j [b j k] behind the competition's gate, and their lengths: the chance that each is on."""
        state = self.infer(images)
        return Capsules(state.hidden, state.on)

    def decode(self, pose: Tensor, frame: Frame | None = None) -> Tensor:
        """Capsules [b j k] -> images [b c h w] in [0, 1], in their frames unless these are given."""
        if pose.ndim != 3 or pose.shape[1:] != (self.capsules, self.dimension):
            raise ShapeError(f"pose has shape {list(pose.shape)}; [b {self.capsules} {self.dimension}] is wanted")
        return self.draw_images(self.decoder(pose), frame)

    @in_chunks
    def reconstruct(self, images: Tensor) -> Tensor:
        """Images from their codes alone: J K numbers are all that passes, and with frames those four of the frame."""
        return self.decode(self.encode(images).pose, self.find_frame(images))

    def reconstruct_tied(self, images: Tensor) -> Tensor:
        """Images by W in reverse, with each image's own coupling: where that was routed, I J numbers leak."""
        # W knows the children without their offset: it is added back before drawing
        state = self.infer(images)
        features = self.energy.reconstruct_children(state.hidden, state.coupling) + self.energy.offset
        return self.draw_images(features, self.find_frame(images))

    def free_energy(self, images: Tensor) -> Tensor:
        """F [b] = -sum_j m_j log(1 + |z_j|²), with the coupling and the gate that each image finds: no likelihood."""
        return self.infer(images).free_energy

    @torch.no_grad()
    def sample(
        self,
        capsule: int | Sequence[int],
        n: int = 8,
        domain: Literal["empirical", "mixture", "gaussian", "complete", "restricted"] = "empirical",
        seed: int = 0,
    ) -> Tensor:
        """Draw images of one capsule, or of several together; the other capsules are 0.

        Args:
            capsule: Number of the capsule, or of several.
            n: How many images.
            domain: Where z_j comes from. "complete": N(0, 1) in every direction, as in figure 2 (a, c). "restricted":
                the same on the half that training visited, as in figure 2 (b, d). "empirical": near stored
                z_j of training images that capsule j won, from a normal distribution with the mean and the covariance
                of sixteen that are near to each other (`utils.random.resample_near`). "mixture": a mixture of at
                most eight Gaussians, fitted to them (`math.mixture`). "gaussian": a normal distribution with the mean
                and the covariance of all of them. See `pose_sampling.sample_poses` for capsules with a
                slab.
            seed: Sample m of capsule j is a function of (seed, j, m).

        Returns:
            Images [n c h w] in [0, 1].

        Raises:
            ShapeError: If there is no such capsule, or `n` is below 1.
            RecipeError: If there is no such domain.
        """
        # Check what is asked for
        named = capsule if isinstance(capsule, Sequence) else [capsule]
        pose_sampling.check_domain(domain)
        for j in named:
            if not hasattr(j, "__index__") or not 0 <= operator.index(j) < self.capsules:
                raise ShapeError(f"capsule {j!r} is wanted; there are 0 to {self.capsules - 1}")
        chosen = [operator.index(j) for j in named]
        if not isinstance(n, int) or n < 1:
            raise ShapeError(f"n = {n} images are wanted; at least 1 makes sense")
        # Sample poses of the chosen capsules, and decode them as in evaluation
        pose = self.energy.W.new_zeros(n, self.capsules, self.dimension)
        for j in chosen:
            pose[:, j] = pose_sampling.sample_poses(self.decoder, j, n, domain, seed)
        # All are drawn in one frame: that of the first
        frame = pose_sampling.sample_frames(self.decoder, chosen[0], n, domain, seed) if self.framed else None
        in_training = self.training
        self.eval()
        images = self.decode(pose, frame)
        self.train(in_training)
        return images
