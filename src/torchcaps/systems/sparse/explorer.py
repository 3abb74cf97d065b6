"""Sparse capsules under the glass: latent capsules that compete by rank, of dynamic and of EM routing."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from torchcaps.models import SparseCaps, SparseMatrixCaps
from torchcaps.models.sparse import SparseModel, SparseOutput, support
from torchcaps.systems.capsnet.explorer import dense_layer
from torchcaps.systems.explorer_records import Encoded
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.matrix.explorer import class_layer
from torchcaps.systems.routing_trace import RoutedLayer, Trace
from torchcaps.types import Capsules

__all__ = ["SparseMatrixView", "SparseView"]

C = TypeVar("C", bound=SparseModel)


class _SparseModelView(ExplorerView[C]):
    """The capsule of rank 0 wins; poses are those behind the mask, which the decoder sees."""

    kind = "sparse"
    by_class = False

    def _encode(self, images: Tensor) -> Encoded:
        out: SparseOutput = self.model(images)
        return Encoded(out.masked, out.ranks.argmin(-1), self._placed(out.primary))

    def _placed(self, children: Capsules) -> Capsules:
        """The children [b i d] as they are routed."""
        return children.flat()

    def _decode(self, pose: Tensor) -> Tensor:
        return self.model.decode(pose)

    def _range(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        """As far as in figure 5 of Rawlinson 2018."""
        return torch.full_like(pose, -1), torch.ones_like(pose)

    def _masked(self, trace: Trace, held: Tensor) -> Trace:
        """The parents behind the mask that the support held [t i j] would have made in each iteration."""
        h, w = self.places
        mask, _ = self.model.mask(support(held, self.children // (h * w)))  # [t j]
        return trace._replace(parents=trace.parents._replace(activation=trace.parents.activation * mask))


class SparseView(_SparseModelView[SparseCaps]):
    """Dynamic routing: support is coupling."""

    @staticmethod
    def _layer(model: SparseCaps) -> RoutedLayer:
        return dense_layer(model.latent, model.primary.grid)

    def _placed(self, children: Capsules) -> Capsules:
        return self.model.latent.with_coordinates(children)

    def _trace(self, children: Capsules) -> Trace:
        trace = super()._trace(children)
        return self._masked(trace, trace.coupling)


class SparseMatrixView(_SparseModelView[SparseMatrixCaps]):
    """EM routing: support is coupling times activation."""

    @staticmethod
    def _layer(model: SparseMatrixCaps) -> RoutedLayer:
        return class_layer(model.matrix)

    def _trace(self, children: Capsules) -> Trace:
        trace = super()._trace(children)
        return self._masked(trace, trace.coupling * children.activation[0].unsqueeze(-1))
