"""CapsNet under the glass: class capsules by dynamic routing, drawn one at a time."""

from __future__ import annotations

from torch import Tensor

from torchcaps.layers import DenseCapsules
from torchcaps.math.grid import Grid
from torchcaps.models import CapsNet
from torchcaps.models.capsnet import CapsNetOutput
from torchcaps.systems.capsnet.figures import REACH
from torchcaps.systems.explorer_records import Encoded
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.routing_trace import RoutedLayer

__all__ = ["CapsNetView", "dense_layer"]


def dense_layer(capsules: DenseCapsules, below: Grid) -> RoutedLayer:
    """A layer in which every child votes for every parent, above children on a grid."""
    how = {"pose": capsules.pose, **capsules.learned}
    return RoutedLayer(capsules.expanded_weights().detach(), capsules.routing, how, (below.height, below.width))


class CapsNetView(ExplorerView[CapsNet]):
    """The longest capsule wins; the decoder sees one capsule only, as in training."""

    kind = "capsnet"

    @staticmethod
    def _layer(model: CapsNet) -> RoutedLayer:
        return dense_layer(model.classes, model.primary.grid)

    def _encode(self, images: Tensor) -> Encoded:
        out: CapsNetOutput = self.model(images)
        return Encoded(out.classes, out.classes.activation.argmax(-1), self.model.classes.with_coordinates(out.primary))

    def _decode(self, pose: Tensor) -> Tensor:
        images: Tensor = self.model.decoder(pose)
        return images

    def _redrawn(self, pose: Tensor, winner: int) -> Tensor:
        return self._alone([winner], pose[winner].unsqueeze(0))[0]

    def _range(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        """As far as in figure 4 of Sabour 2017."""
        return pose - REACH, pose + REACH
