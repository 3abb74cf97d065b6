"""The explorer's views of sparse capsules, which compete by rank: above primary and above matrix capsules."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from torchcaps.layers import DenseCapsules
from torchcaps.layers.rank_mask import rank_mask
from torchcaps.models import SparseCaps, SparseMatrixCaps
from torchcaps.models.sparse import SparseModel, SparseOutput, assigned, support
from torchcaps.routing import RouterSettings
from torchcaps.systems.explorer_records import Competition, Encoded, LayerSummary, PoseRange, RoutingTrace
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.matrix.explorer import trace_classes
from torchcaps.systems.routing_trace import describe_layer, route_again, trace_layer

__all__ = ["SparseMatrixView", "SparseView"]

S = TypeVar("S", bound=SparseModel)

_WEAK = 0.5
"""Mask below which a capsule is shown by what it stands for."""


class _SparseModelView(ExplorerView[S, SparseOutput]):
    """View of sparse capsules: the capsule of rank 0 wins; poses are those behind the mask, which the decoder gets."""

    kind = "sparse"
    has_class_capsules = False

    def _forward(self, images: Tensor, *, trace: bool) -> SparseOutput:
        out: SparseOutput = self.model(images, trace=trace)
        return out

    def _encoded(self, out: SparseOutput) -> Encoded:
        return Encoded(out.masked, out.ranks.argmin(-1))

    def _competition(self, out: SparseOutput) -> Competition:
        """Read support, boost and rank as `SparseMask` computes them."""
        mask = self.model.mask
        ranks = out.ranks[0]
        return Competition(
            support=out.support[0],
            boost=mask.boost,
            score=mask.score(out.support)[0],
            rank=ranks,
            mask=rank_mask(ranks, mask.gamma, mask.cut),
            frequency=mask.frequency,
        )

    def _silent(self, pose: Tensor, competition: Competition | None) -> Tensor:
        """Count capsules with less than half a mask as silent, too: on its own, such a pose decodes to black."""
        silent = super()._silent(pose, competition)
        return silent if competition is None else silent | (competition.mask < _WEAK)

    @abstractmethod
    def _routed_layer(self) -> DenseCapsules:
        """The layer whose capsules compete."""

    def _own_routing(self) -> RouterSettings:
        return self._routed_layer().routing

    def _reroute(self, out: SparseOutput, routing: RouterSettings) -> SparseOutput:
        return out._replace(info=route_again(self._routed_layer(), out.primary, routing))

    def _decode(self, pose: Tensor) -> Tensor:
        return self.model.decode(pose)

    def _pose_range(self, capsule: int, pose: Tensor) -> PoseRange:
        """Return the range of figure 5 of Rawlinson 2018."""
        return PoseRange(torch.full_like(pose, -1), torch.ones_like(pose))

    def _mask_parents(self, trace: RoutingTrace, final: Tensor | None = None) -> RoutingTrace:
        """Mask the parents of each iteration as the model would have if routing had stopped there.

        Args:
            trace: The iterations.
            final: [j] the mask of the last one, where it does not depend on the coupling.
        """
        # The support of each iteration, as the model computes it from the last one
        h, w = self.places
        held = assigned(trace.coupling, trace.child_activation, self.model.config.routing)  # [t i j]
        mask, _ = self.model.mask(support(held, self.children // (h * w)))  # [t j]
        # Where routing does not rank, the mask is the same for all iterations
        mask = mask if final is None else final.expand_as(mask)
        return trace._replace(parents=trace.parents._replace(activation=trace.parents.activation * mask))


class SparseView(_SparseModelView[SparseCaps]):
    """View of sparse capsules above primary capsules."""

    @staticmethod
    def _describe_layer(model: SparseCaps) -> LayerSummary:
        return describe_layer(model.latent, model.primary.grid)

    def _routed_layer(self) -> DenseCapsules:
        return self.model.latent

    def _trace(self, out: SparseOutput) -> RoutingTrace:
        trace = trace_layer(self.model.latent, out.primary, out.info)
        if self.model.config.rank_by == "support":
            return self._mask_parents(trace)
        return self._mask_parents(trace, self.model.mask(out.support[:1])[0][0])


class SparseMatrixView(_SparseModelView[SparseMatrixCaps]):
    """View of sparse capsules above matrix capsules."""

    @staticmethod
    def _describe_layer(model: SparseMatrixCaps) -> LayerSummary:
        return describe_layer(model.matrix.classes, model.matrix.classes.grid)

    def _routed_layer(self) -> DenseCapsules:
        return self.model.matrix.classes

    def _trace(self, out: SparseOutput) -> RoutingTrace:
        return self._mask_parents(trace_classes(self.model.matrix, out.primary, out.info))
