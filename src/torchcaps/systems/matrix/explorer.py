"""Matrix capsules under the glass: class capsules by EM routing, which nothing can draw."""

from __future__ import annotations

from torch import Tensor

from torchcaps.errors import ShapeError
from torchcaps.models import MatrixCaps
from torchcaps.models.matrix import MatrixOutput
from torchcaps.systems.capsnet.figures import REACH
from torchcaps.systems.explorer_records import Encoded
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.routing_trace import RoutedLayer

__all__ = ["MatrixView", "class_layer"]


def class_layer(model: MatrixCaps) -> RoutedLayer:
    """The layer of class capsules, its W at every place."""
    layer = model.classes
    how = {"pose": layer.pose, "offset": layer.offset, **layer.learned}
    weights = layer.W.detach().repeat(layer.grid.places, 1, 1, 1)  # [(h w i) j 4 4]
    return RoutedLayer(weights, layer.routing, how, (layer.grid.height, layer.grid.width), model.norms[-1])


class MatrixView(ExplorerView[MatrixCaps]):
    """The capsule whose switch is most surely on wins."""

    kind = "matrix"
    draws = False

    @staticmethod
    def _layer(model: MatrixCaps) -> RoutedLayer:
        return class_layer(model)

    def _encode(self, images: Tensor) -> Encoded:
        out: MatrixOutput = self.model(images)
        return Encoded(out.classes, out.classes.activation.argmax(-1), out.below[-1].flat())

    def _decode(self, pose: Tensor) -> Tensor:
        raise ShapeError("matrix capsules have no decoder, so nothing is drawn; explore a CapsNet to draw from poses")

    def _range(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        return pose - REACH, pose + REACH
