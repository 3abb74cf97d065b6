"""The explorer's view of products of experts: capsules decoded together or alone, poses sampled from three domains.

A pose here is z_j, which squash maps to the code x_j: any numbers are a pose, and their distribution in training is
known. The pose of an image is unsquash(x_j) behind the gate, so that it decodes as in the model; capsules that lost
the competition are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from torchcaps.kernels import contrastive_ops
from torchcaps.layers.rank_mask import rank, rank_mask
from torchcaps.math.pose import vector_votes
from torchcaps.math.squash import norm
from torchcaps.models import PoE
from torchcaps.models.poe import pose_sampling
from torchcaps.models.poe.encoder import CapsuleState
from torchcaps.models.poe.energy import hidden, probability_on, unhide
from torchcaps.models.poe.frames import Frame, find_frame, from_frame
from torchcaps.routing import iterations_of, route
from torchcaps.systems.explorer_records import Encoded, FrameSliders, LayerSummary, PoseRange, RoutingTrace
from torchcaps.systems.explorer_view import MAX_GRID_CAPSULES, ExplorerView
from torchcaps.systems.poe.generation import most_used
from torchcaps.systems.routing_trace import read_trace
from torchcaps.types import Capsules

__all__ = ["PoEView"]

_REACH = 2.5
"""Standard deviations by which a number is moved, as in `pose_sampling.sweep_poses`."""

_SIZE = (0.5, 1.6)
_SLANT = 1.0
_SHIFT = 0.3
"""Limits of a frame's sliders: size, slant, and shift as a share of the image's side."""


class PoEView(ExplorerView[PoE, CapsuleState]):
    """View of products of experts: the capsule of rank 0 wins or, without competition, the most probable one."""

    kind = "poe"
    has_class_capsules = False

    @staticmethod
    def _describe_layer(model: PoE) -> LayerSummary:
        children, capsules, dimension, _ = model.energy.W.shape
        iterations = iterations_of(model.energy.config.routing)
        return LayerSummary(children, capsules, dimension, model.autoencoder.grid, iterations)

    def _forward(self, images: Tensor, *, trace: bool) -> CapsuleState:
        return self.model.infer(images)

    def _encoded(self, state: CapsuleState) -> Encoded:
        # The gate turns off what lost the competition; without competition there is none.
        capsules = Capsules(unhide(state.hidden, state.slab), state.on)
        return Encoded(capsules, self.model.energy.winners(state))

    def _trace(self, state: CapsuleState) -> RoutingTrace:
        """Trace the routing; parents are z_j and the probability of being on, behind each iteration's gate."""
        energy = self.model.energy
        x = state.x  # [1 i d]
        activation = norm(x)
        _, info = route(Capsules(x, activation), energy.W, energy.config.routing, trace=True)
        trace = read_trace(activation[0], vector_votes(x, energy.W)[0], info)
        # The hidden capsules add a bias that the router does not know, and compete
        repeated = x.repeat(self.iterations, 1, 1)  # [t i d]
        z = contrastive_ops.forward(repeated, energy.W, trace.coupling) + energy.bias  # [t j k]
        on = probability_on(z, energy.slab)
        if energy.mask is not None:
            on = on * rank_mask(rank(energy.support(repeated, z)), energy.config.sharpness)
        # Other children rank the capsules once for all iterations
        if energy.ranker is not None and state.gate is not None:
            on = on * state.gate
        return trace._replace(parents=Capsules(z, on))

    def _contributions(self, trace: RoutingTrace, parent: int) -> Tensor:
        """Compute |c_ij V_ij . z_j|, what child i adds to |z_j|²: coupling alone says nothing where it is uniform."""
        along = trace.parents.pose[:, parent] @ trace.votes[:, parent].T  # [t i]
        return (trace.coupling[..., parent] * along).abs()

    def _decode(self, pose: Tensor) -> Tensor:
        return self.model.decode(hidden(pose, slab=self.model.energy.slab))

    @property
    def frame(self) -> FrameSliders | None:
        """Size, slant and place of what is drawn, if the model draws into frames."""
        if not self.model.framed:
            return None
        reach = _SHIFT * self.spec.height
        low = (_SIZE[0], -_SLANT, -reach, -reach)
        return FrameSliders(
            ("size", "slant", "right", "down"), low, (_SIZE[1], _SLANT, reach, reach), (1.0, 0.0, 0.0, 0.0)
        )

    def _frame_of(self, image: Tensor) -> Tensor | None:
        if not self.model.framed:
            return None
        frame = find_frame(image.unsqueeze(0))
        # How much smaller the image is than in its frame, clipped to where the sliders go
        numbers = torch.cat([1 / frame.scale, frame.slant, frame.center[0]])
        assert self.frame is not None, "the model has frames"
        return torch.clamp(numbers, numbers.new_tensor(self.frame.low), numbers.new_tensor(self.frame.high))

    def _into_frame(self, image: Tensor, frame: Sequence[float]) -> Tensor:
        size, slant, right, down = torch.tensor(frame, dtype=image.dtype)
        place = Frame(1 / size.view(1), slant.view(1), torch.stack([right, down]).unsqueeze(0))
        return from_frame(image.unsqueeze(0), place)[0]

    def _reconstruct(self, pose: Tensor, winner: int, frame: Tensor | None) -> Tensor:
        image = self._decode(pose.unsqueeze(0))[0]
        return image if frame is None else self._into_frame(image, frame.tolist())

    def _pose_range(self, capsule: int, pose: Tensor) -> PoseRange:
        """Return a range around the mean of z_j over the images that the capsule took part in; N(0, 1) without any."""
        # Statistics that the decoder stage collected; a capsule without images has none
        decoder = self.model.decoder
        mean = decoder.pose_mean()[capsule]
        variance = decoder.pose_covariance()[capsule].diagonal()
        if not decoder.weight[capsule] > 0:
            variance = torch.ones_like(variance)
        reach = _REACH * variance.clamp_min(0).sqrt()
        return PoseRange((mean - reach).to(pose.dtype), (mean + reach).to(pose.dtype))

    @cached_property
    def _typical_poses(self) -> Tensor:
        """The mean [j k] of z_j over the training images that each capsule took part in."""
        return self.model.decoder.pose_mean().float()

    def _domains(self) -> tuple[str, ...]:
        return pose_sampling.DOMAINS

    def _grid_capsules(self) -> tuple[int, ...]:
        """Choose the capsules that took part in the most training images."""
        return tuple(sorted(most_used(self.model, MAX_GRID_CAPSULES)))

    def _sample_poses(self, capsule: int, count: int, domain: str, seed: int) -> Tensor:
        poses = pose_sampling.sample_poses(self.model.decoder, capsule, count, domain, seed)
        return unhide(poses, self.model.energy.slab)
