"""What stands in a row of the table of products of expert capsules: capsules, or a baseline, as an encoder.

An `Encoder` encodes the features f [n i d] of images as J groups of numbers, and samples from each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.evaluate.baselines import Baseline
from torchcaps.models.poe import PoE
from torchcaps.models.poe.encoder import CapsuleState
from torchcaps.models.poe.energy import hidden
from torchcaps.models.poe.frames import Frame
from torchcaps.systems.poe.generation import Domain
from torchcaps.utils.random import resample_near

__all__ = ["CHUNK", "BaselineEncoder", "DrawnOnly", "EncodedFeatures", "Encoder", "PoEEncoder"]

CHUNK = 250
"""Images that are encoded at once."""


class EncodedFeatures(NamedTuple):
    """Codes of n images, as one encoder computes them from their features.

    Attributes:
        codes: [n ...] the numbers that stand for each image.
        poses: [n j k] what each group says of every image, whether or not it wins.
        winners: [n] the group that each image belongs to.
        rebuilt: [n i d] features from the codes alone.
        rebuilt_tied: [n i d] features through W transposed, None where there is no such way.
    """

    codes: Tensor
    poses: Tensor
    winners: Tensor
    rebuilt: Tensor
    rebuilt_tied: Tensor | None


class Encoder(Protocol):
    """Anything that encodes the features of an image as J groups of numbers, and samples from each group."""

    def codes(self, f: Tensor) -> Tensor:
        """Encode features [n i d] as numbers [n ...], and nothing else."""

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode features [n i d]."""

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each group alone."""


@dataclass(frozen=True)
class PoEEncoder:
    """A product of expert capsules as an encoder."""

    model: PoE

    def codes(self, f: Tensor) -> Tensor:
        """[n j k] poses behind the gate."""
        return torch.cat([self._infer(chunk).hidden for chunk in torch.split(f, CHUNK)])

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode features [n i d], with one inference for all that is asked of them."""
        energy = self.model.energy
        chunks = []
        for chunk in torch.split(f, CHUNK):
            state = self._infer(chunk)
            # Two ways back to features: through W transposed, and from the codes alone.
            tied = energy.reconstruct_children(state.hidden, state.coupling) + energy.offset
            rebuilt = self.model.decoder(state.hidden)
            ungated = hidden(state.z, slab=state.slab)
            chunks.append((state.hidden, ungated, energy.winners(state), rebuilt, tied))
        return EncodedFeatures(*(torch.cat(field) for field in zip(*chunks, strict=True)))

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each capsule, in poses as training saw them."""
        return self.samples_from("empirical", n, seed)

    def samples_from(self, domain: Domain, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each capsule from a domain."""
        return torch.stack([self.model.sample(j, n, domain, seed) for j in range(self.model.capsules)])

    def _infer(self, f: Tensor) -> CapsuleState:
        return self.model.energy.infer(self.model.energy.visible(f))


@dataclass(frozen=True)
class BaselineEncoder:
    """A baseline on the flattened features of a model, whose autoencoder draws for it.

    Attributes:
        baseline: Fitted to the features, or to those that the autoencoder draws alone.
        model: Whose features these are.
        frames: [n 4] numbers of the frames of the images that it was fitted to, None if the model has none.
        members: [n] the group of each of these images.
    """

    baseline: Baseline
    model: PoE
    frames: Tensor | None = None
    members: Tensor | None = None

    def codes(self, f: Tensor) -> Tensor:
        """Encode features [n i d] as the numbers [n ...] of the baseline."""
        return self.baseline.codes(f.flatten(1))

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode features [n i d]."""
        flat = f.flatten(1)
        codes = self.baseline.codes(flat)
        rebuilt = self.baseline.rebuild(flat).view_as(f)
        return EncodedFeatures(codes, self.baseline.poses(flat), self.baseline.winners(flat), rebuilt, None)

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each group alone, by the autoencoder of the run."""
        # Rows then differ in the codes alone
        features = self.baseline.samples(n, seed)  # [j n p]
        d = self.model.config.child_dimension
        drawn = [
            self.model.draw_images(group.view(n, -1, d), self._frames(j, n, seed)) for j, group in enumerate(features)
        ]
        return torch.stack(drawn)

    def _frames(self, j: int, n: int, seed: int) -> Frame | None:
        """Sample frames of the images of a group, as capsules do; of all images if the group has none."""
        if self.frames is None or self.members is None:
            return None
        own = self.frames[self.members == j]
        return Frame.of_numbers(resample_near(own if len(own) else self.frames, seed, j, torch.arange(n)))


@dataclass(frozen=True)
class DrawnOnly:
    """A baseline that knows the drawn columns alone, as an encoder of all columns."""

    encoder: BaselineEncoder

    def codes(self, f: Tensor) -> Tensor:
        """Encode the drawn columns of features [n i d]."""
        return self.encoder.codes(self._drawn(f))

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode the drawn columns of features [n i d]."""
        return self.encoder.encode(self._drawn(f))

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each group alone."""
        return self.encoder.samples(n, seed)

    def _drawn(self, f: Tensor) -> Tensor:
        return f[:, : self.encoder.model.decoder.U.shape[1]]
