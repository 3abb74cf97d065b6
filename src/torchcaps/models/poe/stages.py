"""The second and third stage of training: W by contrastive divergence, then U."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from torchcaps.math.pixels import to_float
from torchcaps.models.base import Model
from torchcaps.models.poe.decoder import EXAMPLES, CapsuleDecoder, decoder_coupling, paper_update
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState
from torchcaps.types import Batch
from torchcaps.utils.distributed import mean_over_processes

__all__ = ["CapsuleStage", "DecoderStage", "collect"]

CHUNK = 500
"""Images whose features are computed at once."""


def collect(features: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The features [n i d] of images [n c h w] as bytes, in half precision: 553 MB for all of MNIST."""
    return torch.cat([features(to_float(part)).half() for part in torch.split(images, CHUNK)])


class CapsuleStage(Model):
    """Trains W on the features of the autoencoder, which stands still; they are computed once."""

    def __init__(self, energy: CapsuleEnergy, features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.energy = energy
        self._features = features
        self._cache: Tensor | None = None

    def prepare(self, images: Tensor) -> None:
        self._cache = collect(self._features, images)
        self.energy.fit_offset(self._cache)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        with torch.autocast(batch.images.device.type, enabled=False):  # the products without votes know one precision
            x = self.energy.visible(self._of(batch))
            return self.energy.contrast(x, step, (0, batch.indices))

    def finish(self) -> None:
        self._cache = None

    def _of(self, batch: Batch) -> Tensor:
        assert self._cache is not None, "a stage is prepared before its first step"
        return self._cache[batch.indices].to(self.energy.W.dtype)


class DecoderStage(Model):
    """Trains U, and gathers the distribution of each capsule's poses on the way."""

    def __init__(
        self,
        decoder: CapsuleDecoder,
        energy: CapsuleEnergy,
        features: Callable[[Tensor], Tensor],
        draw: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self._frozen = (energy,)
        self._features = features
        self._draw = draw
        self.by_gradient = decoder.config.rule != "least squares"

    def prepare(self, images: Tensor) -> None:
        """Look at evenly spaced images, so many that an average capsule finds as many poses as it may keep."""
        count = min(len(images), EXAMPLES * len(self.decoder.kept))
        some = images[torch.linspace(0, len(images) - 1, count).long()]
        self.store_features([self._features(to_float(part)) for part in torch.split(some, CHUNK)])

    @torch.no_grad()
    def store_features(self, features: Sequence[Tensor]) -> None:
        """Keep poses of features, parts of [n i d]."""
        (energy,) = self._frozen
        seen = [energy.infer(energy.visible(part)) for part in features]
        self.decoder.store_poses(torch.cat([s.z for s in seen]), torch.cat([_taken(s) for s in seen]))

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        with torch.autocast(batch.images.device.type, enabled=False):
            return self._learn(batch, step)

    def _learn(self, batch: Batch, step: int) -> dict[str, Tensor]:
        (energy,) = self._frozen
        with torch.no_grad():
            features = self._features(batch.images)
            seen = energy.infer(energy.visible(features))
            if step == 0:
                self._begin(energy)
            self._gather(seen)
        rules = {"least squares": self._least_squares, "gradient": self._gradient, "paper": self._paper}
        return rules[self.decoder.config.rule](seen.hidden, features, batch.images)

    def _begin(self, energy: CapsuleEnergy) -> None:
        d = self.decoder
        for sums in (d.gram, d.cross, d.weight, d.first, d.second):
            sums.zero_()
        if d.config.rule != "least squares":
            d.intercept.copy_(energy.offset)

    def _gather(self, seen: CapsuleState) -> None:
        """Means over the batch, added up: their ratios are what counts."""
        d = self.decoder
        z = seen.z.double()
        taken = _taken(seen).double()
        d.weight.add_(mean_over_processes(taken.mean(0)))
        d.first.add_(mean_over_processes(torch.einsum("bj,bjk->jk", taken, z) / len(z)))
        d.second.add_(mean_over_processes(torch.einsum("bj,bjk,bjl->jkl", taken, z, z) / len(z)))

    def _least_squares(self, pose: Tensor, features: Tensor, images: Tensor) -> dict[str, Tensor]:
        """Sums for the normal equations; the loss reported is the variance of the features."""
        code = torch.cat([pose.flatten(1), pose.new_ones(len(pose), 1)], 1).double()  # [b (j k) + 1]
        d = self.decoder
        d.gram.add_(mean_over_processes(code.T @ code / len(code)))
        d.cross.add_(mean_over_processes(code.T @ features.flatten(1).double() / len(code)))
        return {"loss": features.var()}

    def _gradient(self, pose: Tensor, features: Tensor, images: Tensor) -> dict[str, Tensor]:
        """Cross entropy of the pixels that the frozen autoencoder draws."""
        drawn = self._draw(self.decoder(pose))
        loss = binary_cross_entropy(drawn, images)
        return {"loss": loss, "mse": (drawn.detach() - images).square().mean()}

    def _paper(self, pose: Tensor, features: Tensor, images: Tensor) -> dict[str, Tensor]:
        """A loss whose gradient is minus the paper's update."""
        U = self.decoder.U
        target = features - self.decoder.intercept
        with torch.no_grad():
            e = decoder_coupling(pose, U)
            update = paper_update(U, pose, target, e)
            error = (self.decoder(pose) - features).square().mean()
        return {"loss": -(update * U).sum(), "error": error}

    def finish(self) -> None:
        d = self.decoder
        if d.config.rule == "least squares":
            d.U.data.copy_(_solve(d.gram, d.cross, d.config.ridge, d.U.shape, d.intercept))


def _taken(seen: CapsuleState) -> Tensor:
    """[b j] which capsules take part in which image: all where nothing competes."""
    return seen.z.new_ones(seen.z.shape[:2]).bool() if seen.gate is None else seen.gate > 0.5


def _solve(gram: Tensor, cross: Tensor, ridge: float, shape: torch.Size, intercept: Tensor) -> Tensor:
    """U [j i d k] from the normal equations with a ridge on all but the intercept, which is written in place."""
    j, i, d, k = shape
    weights = torch.ones(len(gram), dtype=gram.dtype)
    weights[-1] = 0
    power = gram.diagonal()[:-1].mean().clamp_min(torch.finfo(torch.float32).tiny)
    solution = torch.linalg.lstsq(gram + torch.diag(ridge * power * weights), cross, driver="gelsd").solution
    intercept.copy_(solution[-1].view(i, d))
    U: Tensor = solution[:-1].view(j, k, i, d).permute(0, 2, 3, 1)
    return U
