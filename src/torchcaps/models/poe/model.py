"""Products of expert capsules (Hauser 2019): capsules that learn objects without labels, and draw them.

image --autoencoder--> features [b i d] --squash--> children --W, routing, competition--> capsules [b j k]
image <--autoencoder-- features [b i d] <----------------------- U ---------------------- capsules [b j k]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError
from torchcaps.models.base import Model
from torchcaps.models.chunking import in_chunks
from torchcaps.models.poe import pose_sampling
from torchcaps.models.poe.config import PoEConfig
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState
from torchcaps.models.poe.stages import CapsuleStage, DecoderStage
from torchcaps.types import Capsules, ImageSpec

__all__ = ["PoE"]


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
        # Children are groups of the autoencoder's channels at one place
        channels = config.autoencoder.channels[-1]
        d = config.child_dimension
        if channels % d:
            raise RecipeError(f"child_dimension = {d} does not divide the {channels} channels of the autoencoder")
        self.autoencoder = config.autoencoder.build(spec)
        children = self.autoencoder.grid[0] * self.autoencoder.grid[1] * (channels // d)
        # Each capsule needs an image of its own to learn from
        self.autoencoder.fewest = config.capsules
        # Encoder W and decoder U between children and capsules
        sizes = (children, config.capsules, d, config.dimension)
        self.energy = CapsuleEnergy(config.energy, *sizes)
        self.decoder = CapsuleDecoder(config.decoder, *sizes, slab=config.energy.slab)

    def stages(self) -> dict[str, Model]:
        return {
            "autoencoder": self.autoencoder,
            "capsules": CapsuleStage(self.energy, self.features),
            "decoder": DecoderStage(self.decoder, self.energy, self.features, self.draw_images),
        }

    def features(self, images: Tensor) -> Tensor:
        """Images [b c h w] -> children before squash [b i d]: the channels of every place, d at a time."""
        # Channels last, so that the d numbers of a child come from one place
        maps: Tensor = self.autoencoder.encode(images)  # [b C h' w']
        return torch.unflatten(maps.permute(0, 2, 3, 1).flatten(1), 1, (-1, self.config.child_dimension))

    def draw_images(self, features: Tensor) -> Tensor:
        """Features [b i d] -> images [b c h w] in [0, 1]."""
        h, w = self.autoencoder.grid
        maps = features.reshape(len(features), h, w, -1).permute(0, 3, 1, 2)  # [b C h' w']
        images: Tensor = self.autoencoder.decode(maps)
        return images

    def infer(self, images: Tensor) -> CapsuleState:
        """Infer the capsules of images [b c h w]: coupling, z before squash, gate and ranks."""
        return self.energy.infer(self.energy.visible(self.features(images)))

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """Capsules x_j [b j k] behind the competition's gate, and their lengths: the chance that each is on."""
        state = self.infer(images)
        return Capsules(state.hidden, state.on)

    def decode(self, pose: Tensor) -> Tensor:
        """Capsules [b j k] -> images [b c h w] in [0, 1]."""
        if pose.ndim != 3 or pose.shape[1:] != (self.capsules, self.dimension):
            raise ShapeError(f"pose has shape {list(pose.shape)}; [b {self.capsules} {self.dimension}] is wanted")
        return self.draw_images(self.decoder(pose))

    @in_chunks
    def reconstruct(self, images: Tensor) -> Tensor:
        """Images from their codes alone: J K numbers are all that passes."""
        return self.decode(self.encode(images).pose)

    def reconstruct_tied(self, images: Tensor) -> Tensor:
        """Images by W in reverse, with each image's own coupling: where that was routed, I J numbers leak."""
        # W knows the children without their offset: it is added back before drawing
        state = self.infer(images)
        return self.draw_images(self.energy.reconstruct_children(state.hidden, state.coupling) + self.energy.offset)

    def free_energy(self, images: Tensor) -> Tensor:
        """F [b] = -sum_j m_j log(1 + |z_j|²), with the coupling and the gate that each image finds: no likelihood."""
        return self.infer(images).free_energy

    @torch.no_grad()
    def sample(
        self,
        capsule: int | Sequence[int],
        n: int = 8,
        domain: Literal["empirical", "gaussian", "complete", "restricted"] = "empirical",
        seed: int = 0,
    ) -> Tensor:
        """Draw images of one capsule, or of several together; the other capsules are 0.

        Args:
            capsule: Number of the capsule, or of several.
            n: How many images.
            domain: Where z_j comes from. "complete": N(0, 1) in every direction, as in figure 2 (a, c). "restricted":
                the same on the half that training visited, as in figure 2 (b, d). "empirical": a smoothed bootstrap of
                z_j over the training images that capsule j won, each sample one of these poses and some noise, so that
                mean and covariance are theirs (`utils.random.resample`). "gaussian": a normal distribution with this
                mean and covariance. See `pose_sampling.sample_poses` for capsules with a slab.
            seed: Sample m of capsule j is a function of (seed, j, m).

        Returns:
            Images [n c h w] in [0, 1].

        Raises:
            ShapeError: If there is no such capsule, or `n` is below 1.
            RecipeError: If there is no such domain.
        """
        # Check what is asked for
        chosen = [int(j) for j in (capsule if isinstance(capsule, Sequence) else [capsule])]
        pose_sampling.check_domain(domain)
        for j in chosen:
            if not 0 <= j < self.capsules:
                raise ShapeError(f"capsule {j} is wanted; there are 0 to {self.capsules - 1}")
        if not isinstance(n, int) or n < 1:
            raise ShapeError(f"n = {n} images are wanted; at least 1 makes sense")
        # Sample poses of the chosen capsules, and decode them as in evaluation
        pose = self.energy.W.new_zeros(n, self.capsules, self.dimension)
        for j in chosen:
            pose[:, j] = pose_sampling.sample_poses(self.decoder, j, n, domain, seed)
        in_training = self.training
        self.eval()
        images = self.decode(pose)
        self.train(in_training)
        return images
