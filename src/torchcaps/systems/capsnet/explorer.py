"""The explorer's view of CapsNets: class capsules by dynamic routing, decoded one at a time."""

from __future__ import annotations

from torch import Tensor

from torchcaps.models import CapsNet
from torchcaps.models.capsnet import CapsNetOutput
from torchcaps.routing import RouterSettings
from torchcaps.systems.capsnet.figures import REACH
from torchcaps.systems.explorer_records import Encoded, LayerSummary, PoseRange, RoutingTrace
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.routing_trace import describe_layer, route_again, trace_layer

__all__ = ["CapsNetView"]


class CapsNetView(ExplorerView[CapsNet, CapsNetOutput]):
    """View of a CapsNet: the longest capsule wins, and the decoder gets one capsule only, as in training."""

    kind = "capsnet"

    @staticmethod
    def _describe_layer(model: CapsNet) -> LayerSummary:
        return describe_layer(model.classes, model.primary.grid)

    def _forward(self, images: Tensor, *, trace: bool) -> CapsNetOutput:
        out: CapsNetOutput = self.model(images, trace=trace)
        return out

    def _encoded(self, out: CapsNetOutput) -> Encoded:
        return Encoded(out.classes, out.classes.activation.argmax(-1))

    def _trace(self, out: CapsNetOutput) -> RoutingTrace:
        return trace_layer(self.model.classes, out.primary, out.info)

    def _decode(self, pose: Tensor) -> Tensor:
        images: Tensor = self.model.decoder(pose)
        return images

    def _own_routing(self) -> RouterSettings:
        return self.model.classes.routing

    def _reroute(self, out: CapsNetOutput, routing: RouterSettings) -> CapsNetOutput:
        return out._replace(info=route_again(self.model.classes, out.primary, routing))

    def _reconstruct(self, pose: Tensor, winner: int, frame: Tensor | None) -> Tensor:
        return self._decode_alone([winner], pose[winner].unsqueeze(0))[0]

    def _pose_range(self, capsule: int, pose: Tensor) -> PoseRange:
        """Return the range of figure 4 of Sabour 2017."""
        return PoseRange(pose - REACH, pose + REACH)
