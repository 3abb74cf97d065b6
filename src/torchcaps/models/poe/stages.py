"""The second and third stage of training: the encoder W by contrastive divergence, then the decoder U."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from torchcaps.math.pixels import to_float
from torchcaps.models.base import Model
from torchcaps.models.poe.decoder import CapsuleDecoder, decoder_coupling, paper_update
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState, SampleDraws
from torchcaps.models.poe.frames import Frame, into_frame
from torchcaps.types import Batch
from torchcaps.utils.distributed import mean_over_processes
from torchcaps.utils.files import cache_dir
from torchcaps.utils.mapped import release, scratch, take
from torchcaps.utils.notices import notice

__all__ = ["CapsuleStage", "DecoderStage", "collect"]

CHUNK = 500
"""Images whose features are computed at once."""


REFINED_FROM = 20_000
"""Images, evenly spaced, whose least squares the rule "refined" starts from."""

IN_MEMORY = 1 << 30
"""Bytes of features that are kept in memory; more go to a mapped file in the cache."""


def collect(features: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Compute the features of all images, a chunk at a time, in half precision: 553 MB for all of MNIST.

    Args:
        features: Images [b c h w] in [0, 1] -> features [b i d].
        images: [n c h w] as bytes, in memory or mapped from a file.

    Returns:
        [n i d], in a file without a name if there are more than `IN_MEMORY` bytes; its space is free again when the
        tensor is gone.
    """
    n = len(images)
    stored: Tensor | None = None
    for start in range(0, n, CHUNK):
        chunk = features(to_float(take(images, slice(start, start + CHUNK)))).half()  # [b i d]
        if stored is None:
            stored = _features_like(chunk, n)
        stored[start : start + CHUNK] = chunk
        release(stored)
    assert stored is not None, "a data set has images"
    return stored


def _features_like(chunk: Tensor, n: int) -> Tensor:
    """Make room for the features of n images, on the disk if they are large and it can be written."""
    shape = (n, *chunk.shape[1:])
    if chunk[0].nbytes * n > IN_MEMORY and chunk.device.type == "cpu":
        try:
            return scratch(cache_dir() / "scratch", shape, chunk.dtype)
        except OSError as error:
            notice(f"the cache cannot hold the features ({error.strerror or error}); they stay in memory")
    return chunk.new_empty(shape)


class CapsuleStage(Model):
    """Stage that trains W on the features of the autoencoder, which does not change; they are computed once.

    Args:
        energy: The encoder whose W is trained.
        features: Images [b c h w] in [0, 1] -> features [b i d].
    """

    uses_images = False
    needs_whole_batch = True  # how often each capsule wins, and the chains of the negative phase

    def __init__(self, energy: CapsuleEnergy, features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.energy = energy
        self._features = features
        self._cache: Tensor | None = None
        self._seed = 0

    def prepare(self, images: Tensor) -> None:
        """Compute the features of all images [n c h w], and from them the offset; choose the seed of the draws."""
        self._cache = collect(self._features, images)
        self.energy.fit_offset(self._cache)
        # The run's seed decides this number, and it is the same after a resumption and in every process.
        self._seed = int(torch.randint(2**31, ()))

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the loss of a step of contrastive divergence; of the batch, only the indices are read."""
        with torch.autocast(self.energy.W.device.type, enabled=False):  # products without votes know one precision
            x = self.energy.visible(self._cached_features(batch))
            return self.energy.contrast(x, step, SampleDraws(self._seed, batch.indices))

    def finish(self) -> None:
        """Forget the features."""
        self._cache = None

    def _cached_features(self, batch: Batch) -> Tensor:
        assert self._cache is not None, "a stage is prepared before its first step"
        return take(self._cache, batch.indices).to(self.energy.W.dtype)


class DecoderStage(Model):
    """Stage that trains U, and gathers the distribution of each capsule's poses on the way.

    Args:
        decoder: The decoder whose U is trained.
        energy: The trained encoder.
        features: Images [b c h w] in [0, 1] -> features [b n d]. The decoder draws the first of the n, as many as it
            has.
        draw: Features [b i d] -> images [b c h w] in [0, 1], in their frames if there are any.
        frames: Images -> their frames, None if there are none.
    """

    def __init__(
        self,
        decoder: CapsuleDecoder,
        energy: CapsuleEnergy,
        features: Callable[[Tensor], Tensor],
        draw: Callable[[Tensor], Tensor],
        frames: Callable[[Tensor], Frame] | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        # In a tuple, where nn.Module does not find it: its parameters are not this stage's to train
        self._frozen = (energy,)
        self._features = features
        self._draw = draw
        self._frames = frames
        self.by_gradient = decoder.config.rule != "least squares"
        self._images: Tensor | None = None
        self._least_support: Tensor | None = None  # [j] below which an image is not covered; None = all are

    def prepare(self, images: Tensor) -> None:
        """Store poses of evenly spaced images, enough for an average capsule to find as many as it may store."""
        self._images = images
        some = _evenly(images, self.decoder.config.examples * len(self.decoder.kept))
        chunks = [to_float(chunk) for chunk in torch.split(some, CHUNK)]
        frames = None if self._frames is None else torch.cat([self._frames(chunk).numbers for chunk in chunks])
        self.store_features([self._features(chunk) for chunk in chunks], frames)

    @torch.no_grad()
    def store_features(self, features: Sequence[Tensor], frames: Tensor | None = None) -> None:
        """Store the poses of features, given as chunks [b i d] of [n i d], and the numbers [n 4] of their frames."""
        (energy,) = self._frozen
        states = [energy.infer(energy.visible(chunk)) for chunk in features]
        z = torch.cat([s.z for s in states])
        taken = torch.cat([_takes_part(s) for s in states])
        coverage = self.decoder.config.coverage
        if coverage < 1:
            support = torch.cat([energy.support(s.x, s.z) for s in states])
            self._least_support = _least_support(support, taken, coverage)
            taken &= support >= self._least_support
        self.decoder.store_poses(z, taken, frames)
        self.decoder.fit_axes()

    def _covered(self, state: CapsuleState) -> Tensor:
        """[b j] true where an image counts for the distribution of a capsule's poses."""
        taken = _takes_part(state)
        if self._least_support is None:
            return taken
        (energy,) = self._frozen
        return taken & (energy.support(state.x, state.z) >= self._least_support)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the loss of the decoder's rule; gather sums on the way."""
        # Sums and normal equations need full precision
        with torch.autocast(batch.images.device.type, enabled=False):
            return self._learn(batch, step)

    def _learn(self, batch: Batch, step: int) -> dict[str, Tensor]:
        (energy,) = self._frozen
        # Encoder and autoencoder do not change
        with torch.no_grad():
            features = self._features(batch.images)
            state = energy.infer(energy.visible(features))
            if step == 0:
                self._reset_sums(energy)
                if self.decoder.config.rule == "refined":
                    self._start_from_least_squares()
            self._gather(state)
            drawn = features[:, : self.decoder.U.shape[1]]
            images = batch.images
            if self._frames is not None and self.decoder.config.rule in ("gradient", "refined"):
                images = into_frame(images, self._frames(images))
        # Loss of the configured rule
        rules = {
            "least squares": self._least_squares,
            "gradient": self._gradient,
            "refined": self._gradient,
            "paper": self._paper,
        }
        return rules[self.decoder.config.rule](state.hidden, drawn, images)

    def _start_from_least_squares(self) -> None:
        """Solve for U on evenly spaced images; every process does so on the same."""
        assert self._images is not None, "a stage is prepared before its first step"
        (energy,) = self._frozen
        for chunk in torch.split(_evenly(self._images, REFINED_FROM), CHUNK):
            images = to_float(chunk)
            features = self._features(images)
            pose = energy.infer(energy.visible(features)).hidden
            self._least_squares(pose, features[:, : self.decoder.U.shape[1]], images)
        self._solve()

    def _reset_sums(self, energy: CapsuleEnergy) -> None:
        """Empty all sums before the first step; the intercept starts at the offset unless least squares finds it."""
        d = self.decoder
        for sums in (d.gram, d.cross, d.weight, d.first, d.second):
            sums.zero_()
        if d.config.rule != "least squares":
            d.intercept.copy_(energy.offset[: len(d.intercept)])

    def _gather(self, state: CapsuleState) -> None:
        """Add up means over the batch, of which only ratios are used: first and second moments of each capsule's z."""
        d = self.decoder
        z = state.z.double()
        weight = self._covered(state).double()  # [b j]
        d.weight.add_(mean_over_processes(weight.mean(0)))
        d.first.add_(mean_over_processes(torch.einsum("bj,bjk->jk", weight, z) / len(z)))
        d.second.add_(mean_over_processes(torch.einsum("bj,bjk,bjl->jkl", weight, z, z) / len(z)))

    def _least_squares(self, pose: Tensor, features: Tensor, images: Tensor) -> dict[str, Tensor]:
        """Sums for the normal equations; the loss reported is the variance of the features."""
        d = self.decoder
        code = torch.cat([d.code(pose), pose.new_ones(len(pose), 1)], 1).double()  # [b (j k) + (j p) + 1]
        # Means over the batch, so that the share of each process counts the same
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
            e = decoder_coupling(pose, U)  # [b j i]
            update = paper_update(U, pose, target, e)
            error = (self.decoder(pose) - features).square().mean()
        # Linear in U: its gradient is -update, which any optimizer can take
        return {"loss": -(update * U).sum(), "error": error}

    def finish(self) -> None:
        """Solve the normal equations, if that is the rule; say so if there are capsules without images."""
        self._images = None
        unused = int((self.decoder.weight == 0).sum())
        if unused:
            notice(
                f"{unused} of {len(self.decoder.weight)} capsules took part in no training image and draw nothing of "
                "use; try a smaller model.capsules"
            )
        if self.decoder.config.rule == "least squares":
            self._solve()

    def _solve(self) -> None:
        """Set U and the intercept by the sums gathered so far."""
        d = self.decoder
        j, _, _, k = d.U.shape
        d.set_weights(_solve(d.gram, d.cross, d.config.ridge, j * k))


def _evenly(images: Tensor, count: int) -> Tensor:
    """At most `count` of the images, evenly spaced."""
    return images[torch.linspace(0, len(images) - 1, min(len(images), count)).long()]


def _takes_part(state: CapsuleState) -> Tensor:
    """[b j] true where a capsule takes part in an image: everywhere if nothing competes."""
    return state.z.new_ones(state.z.shape[:2]).bool() if state.gate is None else state.gate > 0.5


def _least_support(support: Tensor, taken: Tensor, coverage: float) -> Tensor:
    """Return the support [j] that a share `coverage` of the images of each capsule reaches; 0 for one without images.

    Args:
        support: [n j].
        taken: [n j] true where the capsule takes part in the image.
        coverage: In (0, 1].
    """
    least = support.new_zeros(support.shape[1])
    for j, own in enumerate(taken.T):
        if bool(own.any()):
            least[j] = support[own, j].quantile(1 - coverage)
    return least


def _solve(gram: Tensor, cross: Tensor, ridge: float, poses: int) -> Tensor:
    """Solve the normal equations with a ridge on all but the intercept, the last row; the first `poses` are poses."""
    # Relative to the mean square of poses and to that of products, which are smaller
    power = gram.diagonal()
    weights = torch.zeros_like(power)
    for rows in (slice(0, poses), slice(poses, -1)):
        if len(power[rows]):
            weights[rows] = ridge * power[rows].mean().clamp_min(torch.finfo(torch.float32).tiny)
    # gelsd (SVD) and not Cholesky: capsules that never win make the Gram matrix all but singular
    solution: Tensor = torch.linalg.lstsq(gram + torch.diag(weights), cross, driver="gelsd").solution
    return solution
