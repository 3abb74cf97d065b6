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
from torchcaps.models.poe import energy, pose_sampling
from torchcaps.models.poe.config import PoEConfig
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState
from torchcaps.models.poe.stages import CapsuleStage, DecoderStage
from torchcaps.types import Capsules, ImageSpec

__all__ = ["PoE"]


class PoE(Model):
    """An autoencoder, a capsule encoder W and a capsule decoder U, trained one after the other."""

    def __init__(self, config: PoEConfig, spec: ImageSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.capsules = config.capsules
        self.dimension = config.dimension
        channels = config.autoencoder.channels[-1]
        d = config.child_dimension
        if channels % d:
            raise RecipeError(f"child_dimension = {d} does not divide the {channels} channels of the autoencoder")
        self.autoencoder = config.autoencoder.build(spec)
        children = self.autoencoder.grid[0] * self.autoencoder.grid[1] * (channels // d)
        self.autoencoder.fewest = config.capsules
        sizes = (children, config.capsules, d, config.dimension)
        self.energy = CapsuleEnergy(config.energy, *sizes)
        self.decoder = CapsuleDecoder(config.decoder, *sizes)

    def stages(self) -> dict[str, Model]:
        return {
            "autoencoder": self.autoencoder,
            "capsules": CapsuleStage(self.energy, self.features),
            "decoder": DecoderStage(self.decoder, self.energy, self.features, self.draw_images),
        }

    def features(self, images: Tensor) -> Tensor:
        """Images [b c h w] -> children before squash [b i d]: the channels of every place, d at a time."""
        maps: Tensor = self.autoencoder.encode(images)  # [b C h' w']
        return torch.unflatten(maps.permute(0, 2, 3, 1).flatten(1), 1, (-1, self.config.child_dimension))

    def draw_images(self, features: Tensor) -> Tensor:
        """Features [b i d] -> images [b c h w] in [0, 1]."""
        h, w = self.autoencoder.grid
        maps = features.reshape(len(features), h, w, -1).permute(0, 3, 1, 2)
        images: Tensor = self.autoencoder.decode(maps)
        return images

    def infer(self, images: Tensor) -> CapsuleState:
        """What the capsules make of images: coupling, z before squash, gate and ranks."""
        return self.energy.infer(self.energy.visible(self.features(images)))

    @in_chunks
    def encode(self, images: Tensor) -> Capsules:
        """Capsules x_j [b j k] behind the competition's gate, and their lengths: the chance that each is on."""
        seen = self.infer(images)
        on = energy.probability_on(seen.z)
        return Capsules(seen.hidden, on if seen.gate is None else on * seen.gate)

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
        seen = self.infer(images)
        return self.draw_images(self.energy.reconstruct_children(seen.hidden, seen.coupling) + self.energy.offset)

    def free_energy(self, images: Tensor) -> Tensor:
        """F [b] = -sum_j m_j log(1 + |z_j|²), with the coupling and the gate that each image finds: no likelihood."""
        seen = self.infer(images)
        return energy.free_energy(seen.z, seen.gate)

    @torch.no_grad()
    def sample(
        self,
        capsule: int | Sequence[int],
        n: int = 8,
        domain: Literal["empirical", "complete", "restricted"] = "empirical",
        seed: int = 0,
    ) -> Tensor:
        """n images of one capsule, or of several together, in [0, 1]; the other capsules are 0.

        "complete": z_j ~ N(0, 1) in every direction, as in figure 2 (a, c). "restricted": the same on the half that
        training visited, as in figure 2 (b, d). "empirical": a Gaussian with the mean and covariance of z_j over the
        training images that capsule j won.
        """
        chosen = [int(j) for j in (capsule if isinstance(capsule, Sequence) else [capsule])]
        pose_sampling.check_domain(domain)
        for j in chosen:
            if not 0 <= j < self.capsules:
                raise ShapeError(f"capsule {j} is wanted; there are 0 to {self.capsules - 1}")
        if not isinstance(n, int) or n < 1:
            raise ShapeError(f"n = {n} images are wanted; at least 1 makes sense")
        pose = self.energy.W.new_zeros(n, self.capsules, self.dimension)
        for j in chosen:
            pose[:, j] = pose_sampling.sample_poses(self.decoder, j, n, domain, seed)
        was = self.training
        self.eval()
        images = self.decode(pose)
        self.train(was)
        return images
