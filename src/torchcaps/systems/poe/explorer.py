"""Products of expert capsules under the glass: what each draws, in poses from three domains.

A pose here is z_j, of which squash makes the code x_j: any numbers are a pose, and what training saw of them is known.
Of an image it is unsquash(x_j) behind the gate, so that it draws what the model draws; capsules that lost are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.kernels import contrastive_ops
from torchcaps.layers.rank_mask import rank, rank_mask
from torchcaps.math.squash import norm, squash, unsquash
from torchcaps.models import PoE
from torchcaps.models.poe import pose_sampling
from torchcaps.models.poe.energy import probability_on
from torchcaps.systems.explorer_records import Encoded
from torchcaps.systems.explorer_view import COLUMNS, ExplorerView
from torchcaps.systems.poe.generation import most_used
from torchcaps.systems.routing_trace import RoutedLayer, Trace
from torchcaps.types import Capsules

__all__ = ["PoEView"]

_REACH = 2.5
"""Deviations of a number, as far as `poses.sweep` moves it."""


class PoEView(ExplorerView[PoE]):
    """The capsule of rank 0 wins, or without competition the one most surely on."""

    kind = "poe"
    by_class = False

    @staticmethod
    def _layer(model: PoE) -> RoutedLayer:
        energy = model.energy
        return RoutedLayer(energy.W.detach(), energy.config.routing, {}, model.autoencoder.grid)

    def _encode(self, images: Tensor) -> Encoded:
        seen = self.model.infer(images)
        on = probability_on(seen.z)
        capsules = Capsules(unsquash(seen.hidden), on if seen.gate is None else on * seen.gate)
        return Encoded(capsules, self.model.energy.winners(seen), Capsules(seen.x, norm(seen.x)))

    def _decode(self, pose: Tensor) -> Tensor:
        return self.model.decode(squash(pose))

    def _range(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        """Around the mean of z_j over the images that the capsule took part in; N(0, 1) if there were none."""
        decoder = self.model.decoder
        mean = decoder.pose_mean()[capsule]
        spread = decoder.pose_covariance()[capsule].diagonal()
        reach = _REACH * (spread if decoder.weight[capsule] > 0 else torch.ones_like(spread)).clamp_min(0).sqrt()
        return (mean - reach).to(pose.dtype), (mean + reach).to(pose.dtype)

    def _trace(self, children: Capsules) -> Trace:
        """z_j and the chance that a capsule is on, behind the gate that the competition would set in each iteration."""
        energy = self.model.energy
        trace = super()._trace(children)
        x = children.pose.repeat(self.iterations, 1, 1)  # [t i d]
        z = contrastive_ops.forward(x, energy.W, trace.coupling) + energy.bias  # [t j k]
        on = probability_on(z)
        if energy.mask is not None:
            on = on * rank_mask(rank(energy.support(x, z)), energy.config.sharpness)
        return trace._replace(parents=Capsules(z, on))

    def _sent(self, children: Capsules, trace: Trace, votes: Tensor, parent: int) -> Tensor:
        """|c_ij V_ij . z_j|, what child i adds to |z_j|²: where the coupling is uniform, it alone says nothing."""
        return (trace.coupling[..., parent] * (trace.parents.pose[:, parent] @ votes.T)).abs()

    def _domains(self) -> tuple[str, ...]:
        return pose_sampling.DOMAINS

    def _columns(self) -> tuple[int, ...]:
        """The capsules that took part in the most training images."""
        return tuple(sorted(most_used(self.model, COLUMNS)))

    def _poses(self, capsule: int, count: int, domain: str, seed: int) -> Tensor:
        return unsquash(pose_sampling.sample_poses(self.model.decoder, capsule, count, domain, seed))
