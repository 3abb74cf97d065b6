"""The explorer's view of matrix capsules: class capsules by EM routing, without a decoder."""

from __future__ import annotations

from torch import Tensor

from torchcaps.errors import ShapeError
from torchcaps.models import MatrixCaps
from torchcaps.models.matrix import MatrixOutput
from torchcaps.routing import RouterSettings
from torchcaps.systems.capsnet.figures import REACH
from torchcaps.systems.explorer_records import Encoded, LayerSummary, PoseRange, RoutingTrace
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.routing_trace import describe_layer, route_again, trace_layer
from torchcaps.types import Capsules, RoutingInfo

__all__ = ["MatrixView", "trace_classes"]


def trace_classes(model: MatrixCaps, children: Capsules, info: RoutingInfo) -> RoutingTrace:
    """Read the routing of one image into the class capsules, normalized as the model normalizes them.

    Args:
        model: the model that made the record.
        children: pose [1 h w i 16] and activation [1 h w i] of the layer below.
        info: record of the class layer's routing.
    """
    trace = trace_layer(model.classes, children, info)
    return trace._replace(parents=model.norms[-1](trace.parents))


class MatrixView(ExplorerView[MatrixCaps, MatrixOutput]):
    """View of matrix capsules: the capsule of the highest activation wins."""

    kind = "matrix"
    has_decoder = False

    @staticmethod
    def _describe_layer(model: MatrixCaps) -> LayerSummary:
        return describe_layer(model.classes, model.classes.grid)

    def _forward(self, images: Tensor, *, trace: bool) -> MatrixOutput:
        out: MatrixOutput = self.model(images)
        if not trace:
            return out
        # Only the classes are looked into; a record of the large layers below would take most of the time
        parents, info = self.model.classes(out.below[-1], trace=True)
        return out._replace(classes=self.model.norms[-1](parents), infos=(*out.infos[:-1], info))

    def _encoded(self, out: MatrixOutput) -> Encoded:
        return Encoded(out.classes, out.classes.activation.argmax(-1))

    def _trace(self, out: MatrixOutput) -> RoutingTrace:
        return trace_classes(self.model, out.below[-1], out.infos[-1])

    def _own_routing(self) -> RouterSettings:
        return self.model.classes.routing

    def _reroute(self, out: MatrixOutput, routing: RouterSettings) -> MatrixOutput:
        info = route_again(self.model.classes, out.below[-1], routing)
        return out._replace(infos=(*out.infos[:-1], info))

    def _decode(self, pose: Tensor) -> Tensor:
        raise ShapeError("matrix capsules have no decoder, so nothing is drawn; explore a CapsNet to draw from poses")

    def _pose_range(self, capsule: int, pose: Tensor) -> PoseRange:
        return PoseRange(pose - REACH, pose + REACH)
