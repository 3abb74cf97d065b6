"""What the explorer can ask of any capsule network: its capsules, its routing, images decoded from a pose.

An `ExplorerView` wraps one model in evaluation mode, without gradients; its results are functions of its arguments.
This module holds what all systems share, over six methods that each system implements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError, suggestion
from torchcaps.models import Model
from torchcaps.routing import EM, RouterSettings, iterations_of, router_of, settings_of
from torchcaps.routing import ROUTERS as ALL_ROUTERS
from torchcaps.systems.explorer_records import (
    CapsuleReading,
    Competition,
    Encoded,
    FrameSliders,
    LayerSummary,
    PoseRange,
    RoutingReading,
    RoutingTrace,
    SampleGrid,
)
from torchcaps.systems.routing_trace import contributions, read_routing
from torchcaps.types import Capsules
from torchcaps.utils.random import permutation

__all__ = ["MAX_GRID_CAPSULES", "MAX_GRID_SAMPLES", "ExplorerView"]

MAX_GRID_CAPSULES = 20
MAX_GRID_SAMPLES = 8
"""The most columns and rows of a grid of samples."""

NEAREST = 4
"""Examples that show what a capsule without a decoder believes."""

_CHUNK = 50
"""Examples that are encoded together."""

_SILENT = 0.1
"""Below this length a capsule counts as turned off: a decoder draws much the same of all such."""

M = TypeVar("M", bound=Model)
O = TypeVar("O")
"""What a view needs of one forward pass of its model."""


class ExplorerView(ABC, Generic[M, O]):
    """What the explorer shows of one model. Images [c h w] are in the format of the model's input.

    The forward pass of the last image is kept: further questions about it, such as its routing, cost no other.

    Args:
        model: a model of the system that the subclass is for; it is put into evaluation mode.
        names: names of the classes, one for each capsule; empty for numbers. Without effect where capsules have no
            class.
        examples: images [n c h w] whose poses serve as samples where the model has no distribution of its own.

    Attributes:
        kind: name of the system, by which the page chooses its texts.
        has_decoder: whether images can be decoded from poses.
        has_class_capsules: whether each capsule stands for a class of the data.
        names: a name for each capsule.
        domains: names of the distributions that poses can be sampled from; empty if there are none.
    """

    kind: ClassVar[str]
    has_decoder: ClassVar[bool] = True
    has_class_capsules: ClassVar[bool] = True

    def __init__(self, model: M, names: Sequence[str] = (), examples: Tensor | None = None) -> None:
        self.model = model.eval()
        self.spec = model.spec
        with torch.no_grad():
            self.layer = self._describe_layer(model)
        self.names = self._capsule_names(tuple(names))
        self._examples = examples
        self._last: tuple[Tensor, O] | None = None
        # Last, since it may depend on the examples.
        self.domains = self._domains()

    @property
    def capsules(self) -> int:
        """J, the number of capsules."""
        return self.layer.capsules

    @property
    def dimension(self) -> int:
        """K, the numbers of a capsule's pose."""
        return self.layer.dimension

    @property
    def iterations(self) -> int:
        """Iterations of routing into these capsules."""
        return self.layer.iterations

    @property
    def children(self) -> int:
        """I, the number of capsules that vote for these."""
        return self.layer.children

    @property
    def places(self) -> tuple[int, int]:
        """(h, w) of the grid of children."""
        return self.layer.places

    @torch.inference_mode()
    def infer(self, image: Tensor) -> CapsuleReading:
        """Compute the capsules of an image [c h w], and the images decoded from all and from each of them."""
        out = self._forward_once(image)
        encoded = self._encoded(out)
        pose = encoded.capsules.pose[0]  # [j k]
        activation = encoded.capsules.activation[0]  # [j]
        winner = int(encoded.winner)
        competition = self._competition(out)
        if not self.has_decoder:
            nearest = self._nearest_examples(pose)
            first = None if nearest is None else nearest[:, 0]
            return CapsuleReading(activation, winner, pose, None, first, None, nearest, competition)
        # Decode all capsules together, and each alone; one that is silent shows what it stands for.
        silent = self._silent(pose, competition)  # [j]
        shown = torch.where(silent.unsqueeze(-1), self._typical_poses, pose) if bool(silent.any()) else pose
        each = self._decode_alone(range(self.capsules), shown)
        frame = self._frame_of(image)
        drawn = self._reconstruct(pose, winner, frame)
        return CapsuleReading(activation, winner, pose, drawn, each, silent, competition=competition, frame=frame)

    @torch.inference_mode()
    def routing(
        self, image: Tensor, parent: int, children: Sequence[int] = (), router: str | None = None
    ) -> RoutingReading:
        """Trace how a parent got its children from an image.

        Args:
            image: [c h w]
            parent: index of the parent.
            children: indices of children whose votes are returned in any case.
            router: one of `routers`, which routes the same children by the same weights; None for the model's own.

        Raises:
            RecipeError: there is no such router here.
            ShapeError: there is no such parent or child.
        """
        self._check_capsule(parent)
        for child in children:
            if not 0 <= child < self.children:
                raise ShapeError(f"there is no child {child}; there are 0 to {self.children - 1}")
        out = self._forward_once(image)
        layer = self.layer
        if router is not None and router != self.router:
            if router not in self.routers:
                raise RecipeError(f"unknown router '{router}'{suggestion(router, self.routers) or '; leave it out'}")
            settings = settings_of(router)
            out = self._reroute(out, settings)
            layer = layer._replace(iterations=iterations_of(settings), is_em=isinstance(settings, EM))
        trace = self._trace(out)
        return read_routing(trace, layer, self._contributions(trace, parent), parent, children)

    @torch.inference_mode()
    def draw(self, capsule: int, pose: Tensor, frame: Sequence[float] = ()) -> Tensor:
        """Decode one capsule in a pose, all others being 0.

        Args:
            capsule: index of the capsule.
            pose: [k]
            frame: numbers of the frame to draw into, as `self.frame` names them; none for an upright image.

        Returns:
            [c h w]

        Raises:
            ShapeError: there is no such capsule, or pose or frame have another length or are out of range.
        """
        self._check_pose(capsule, pose)
        image = self._decode_alone([capsule], pose.unsqueeze(0))[0]
        if not frame:
            return image
        self._check_frame(frame)
        return self._into_frame(image, frame)

    @torch.inference_mode()
    def sweep(self, capsule: int, pose: Tensor, steps: int = 9) -> Tensor:
        """Decode one capsule with each number of its pose moved from its lower to its upper limit.

        Args:
            capsule: index of the capsule.
            pose: [k] that the other numbers keep.
            steps: values of each number, limits included.

        Returns:
            Images [k n c h w], n = steps.

        Raises:
            RecipeError: fewer than 2 steps.
            ShapeError: there is no such capsule, or the pose has another length.
        """
        if steps < 2:
            raise RecipeError(f"steps = {steps}; a sweep has at least 2, its limits")
        # Each number in turn takes n values, while the others stay
        limits = self.limits(capsule, pose)
        number = torch.arange(self.dimension)
        fraction = torch.linspace(0, 1, steps, dtype=pose.dtype)
        poses = pose.repeat(self.dimension, steps, 1)  # [k n k]
        poses[number, :, number] = torch.lerp(limits.low.unsqueeze(1), limits.high.unsqueeze(1), fraction)
        images = self._decode_alone([capsule] * (self.dimension * steps), poses.flatten(0, 1))  # [(k n) c h w]
        return torch.unflatten(images, 0, (self.dimension, steps))

    @torch.inference_mode()
    def limits(self, capsule: int, pose: Tensor) -> PoseRange:
        """Return the range in which to move a capsule's pose [k], which lies inside."""
        self._check_pose(capsule, pose)
        limits = self._pose_range(capsule, pose)
        # A pose outside the range widens it, so that a slider can start there.
        return PoseRange(torch.minimum(limits.low, pose), torch.maximum(limits.high, pose))

    @torch.inference_mode()
    def sample(self, capsule: int, domain: str, seed: int) -> Tensor:
        """Draw a random pose [k] of a capsule.

        Args:
            capsule: index of the capsule.
            domain: one of `domains`.
            seed: the pose is a function of it.

        Raises:
            DataError: no example belongs to the capsule.
            RecipeError: there is no such domain.
            ShapeError: there is no such capsule.
        """
        self._check_capsule(capsule)
        self._check_domain(domain)
        return self._sample_poses(capsule, 1, domain, seed)[0]

    @torch.inference_mode()
    def sample_grid(self, count: int, domain: str, seed: int) -> SampleGrid:
        """Draw `count` random samples of each capsule, the first of which are those of `sample`.

        Of many capsules, the `MAX_GRID_CAPSULES` that are used most have a column.

        Raises:
            RecipeError: there is no such domain, or `count` is out of range.
        """
        self._check_domain(domain)
        if not 1 <= count <= MAX_GRID_SAMPLES:
            raise RecipeError(f"count = {count} samples of a capsule; choose 1 to {MAX_GRID_SAMPLES}")
        # All samples of all capsules are decoded as one batch
        chosen = self._grid_capsules()
        poses = torch.stack([self._sample_poses(j, count, domain, seed) for j in chosen], 1)  # [n j' k]
        images = self._decode_alone(list(chosen) * count, poses.flatten(0, 1))  # [(n j') c h w]
        return SampleGrid(torch.unflatten(images, 0, (count, len(chosen))), poses, chosen)

    # --- Implemented by each system ---------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _describe_layer(model: M) -> LayerSummary:
        """Describe the last layer that is routed."""

    @abstractmethod
    def _forward(self, images: Tensor, *, trace: bool) -> O:
        """Run the model on images [b c h w]; with `trace`, record how its last layer was routed."""

    @abstractmethod
    def _encoded(self, out: O) -> Encoded:
        """Read the capsules of all images from a forward pass."""

    @abstractmethod
    def _trace(self, out: O) -> RoutingTrace:
        """Read the routing of the one image of a forward pass that recorded it."""

    @abstractmethod
    def _decode(self, pose: Tensor) -> Tensor:
        """Decode poses [b j k] to images [b c h w]."""

    @abstractmethod
    def _pose_range(self, capsule: int, pose: Tensor) -> PoseRange:
        """Return the range [k], [k] in which moving a pose is instructive."""

    # --- Defaults that some systems replace -------------------------------------------------------------------

    def _reconstruct(self, pose: Tensor, winner: int, frame: Tensor | None) -> Tensor:
        """Decode all capsules [j k] together to an image [c h w], in the image's frame if there are any."""
        return self._decode(pose.unsqueeze(0))[0]

    def _competition(self, out: O) -> Competition | None:
        """Read how the capsules of one image were ranked; None where nothing competes."""
        return None

    def _frame_of(self, image: Tensor) -> Tensor | None:
        """Find the numbers of the frame of an image [c h w]; None without frames."""
        return None

    def _into_frame(self, image: Tensor, frame: Sequence[float]) -> Tensor:
        """Draw an upright image [c h w] into a frame."""
        raise ShapeError("this model draws without frames; leave the frame out")

    def _own_routing(self) -> RouterSettings | None:
        """Return the settings of the router of the last layer, if others can take its place; None if they cannot."""
        return None

    def _reroute(self, out: O, routing: RouterSettings) -> O:
        """Route the children of a forward pass again, by another router with the same weights."""
        raise RecipeError("this model has one router; leave it out")

    def _contributions(self, trace: RoutingTrace, parent: int) -> Tensor:
        """Compute what each child contributes to a parent in each iteration [t i], 0 or more."""
        return contributions(trace, parent)

    def _domains(self) -> tuple[str, ...]:
        """Name the distributions of poses: those of the examples, if there are any."""
        return ("empirical",) if self.has_decoder and self._examples is not None and len(self._examples) else ()

    def _grid_capsules(self) -> tuple[int, ...]:
        """Choose the capsules of a grid of samples: those that win the most examples."""
        # Stable sorting, so that capsules with equally many wins are chosen by index
        wins = torch.tensor([len(poses) for poses in self._winning_poses])
        order = wins.argsort(descending=True, stable=True)[:MAX_GRID_CAPSULES].sort().values
        return tuple(j for j in order.tolist() if wins[j])

    @cached_property
    def _typical_poses(self) -> Tensor:
        """What each capsule stands for: its mean pose [j k] in the examples that it wins, 0 without any."""
        typical = torch.zeros(self.capsules, self.dimension)
        if self._examples is None or not len(self._examples):
            return typical
        for j, poses in enumerate(self._winning_poses):
            if len(poses):
                typical[j] = poses.mean(0)
        return typical

    def _sample_poses(self, capsule: int, count: int, domain: str, seed: int) -> Tensor:
        """Draw poses [n k] of examples that the capsule wins, none twice before all were drawn."""
        poses = self._winning_poses[capsule]
        if not len(poses):
            raise DataError(f"capsule {capsule} wins none of the examples; choose one that does")
        # One order for each seed; it starts over when all poses were drawn.
        return poses[permutation(seed, capsule, len(poses))[torch.arange(count) % len(poses)]]

    # --- Shared by all ----------------------------------------------------------------------------------------

    @property
    def frame(self) -> FrameSliders | None:
        """The numbers of the frame that single capsules can be drawn into; None if the model has no frames."""
        return None

    @property
    def router(self) -> str | None:
        """Name of the model's own router; None where no other can take its place."""
        own = self._own_routing()
        return None if own is None else next(name for name, known in ALL_ROUTERS.items() if known is router_of(own))

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the routers that the last layer can be routed by, the model's own first."""
        own = self.router
        return () if own is None else (own, *(name for name in ALL_ROUTERS if name != own))

    def _capsule_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if not self.has_class_capsules:
            return tuple(f"capsule {j}" for j in range(self.capsules))
        if names and len(names) != self.capsules:
            raise ShapeError(f"{len(names)} names came for {self.capsules} capsules; give one each, or none")
        return names or tuple(str(j) for j in range(self.capsules))

    def _silent(self, pose: Tensor, competition: Competition | None) -> Tensor:
        """Return which capsules [j] are too weak to draw anything on their own, from their poses [j k]."""
        silent: Tensor = pose.norm(dim=-1) < _SILENT
        return silent

    def _forward_once(self, image: Tensor) -> O:
        """Run the model on an image [c h w], unless the last question was about the same one."""
        if self._last is None or not torch.equal(self._last[0], image):
            # Kept as it came, since the caller may change it
            self._last = (image.clone(), self._forward(image.unsqueeze(0), trace=True))
        return self._last[1]

    @cached_property
    def winners(self) -> Tensor:
        """The capsule [n] that wins each example; none without examples."""
        return self._encoded_examples.winner

    @cached_property
    @torch.inference_mode()
    def _encoded_examples(self) -> Encoded:
        """Capsules of all examples, computed in chunks that fit into memory."""
        if self._examples is None or not len(self._examples):
            none = torch.zeros(0, self.capsules)
            return Encoded(Capsules(none.unsqueeze(-1), none), torch.zeros(0, dtype=torch.int64))
        encoded = [self._encoded(self._forward(chunk, trace=False)) for chunk in torch.split(self._examples, _CHUNK)]
        capsules = [one.capsules for one in encoded]
        pose = torch.cat([one.pose for one in capsules])  # [n j k]
        activation = torch.cat([one.activation for one in capsules])  # [n j]
        return Encoded(Capsules(pose, activation), torch.cat([one.winner for one in encoded]))

    @cached_property
    def _winning_poses(self) -> list[Tensor]:
        """For each capsule, its poses [n k] in the examples that it wins."""
        pose = self._encoded_examples.capsules.pose  # [n j k]
        return [pose[self.winners == j, j] for j in range(self.capsules)]

    def _nearest_examples(self, pose: Tensor) -> Tensor | None:
        """Return for each capsule's pose [j k] the examples [j n c h w] that it wins with the nearest poses.

        They show what a capsule believes where there is no decoder: the nearest first, blanks behind the last, None
        without examples.
        """
        if self._examples is None or not len(self._examples):
            return None
        known = self._encoded_examples.capsules.pose  # [n j k]
        distance = (known - pose).square().sum(-1)  # [n j]
        own = self.winners.unsqueeze(-1) == torch.arange(self.capsules)  # [n j]
        distance = distance.masked_fill(~own, torch.inf)
        # The image itself, if it is an example, would say nothing
        distance = distance.masked_fill(distance < 1e-8, torch.inf)
        nearest = distance.sort(dim=0, stable=True)
        count = min(NEAREST, len(known))
        found = self._examples[nearest.indices[:count].T]  # [j n c h w]
        is_found = nearest.values[:count].T.isfinite()  # [j n]
        return torch.where(is_found.view(*is_found.shape, 1, 1, 1), found, torch.zeros_like(found))

    def _decode_alone(self, capsules: Sequence[int], pose: Tensor) -> Tensor:
        """Decode single capsules, each in its pose [b k], all others being 0, to images [b c h w]."""
        poses = pose.new_zeros(len(pose), self.capsules, self.dimension)  # [b j k]
        poses[torch.arange(len(pose)), list(capsules)] = pose
        return self._decode(poses)

    def _check_capsule(self, capsule: int) -> None:
        if not 0 <= capsule < self.capsules:
            raise ShapeError(f"there is no capsule {capsule}; there are 0 to {self.capsules - 1}")

    def _check_pose(self, capsule: int, pose: Tensor) -> None:
        self._check_capsule(capsule)
        if pose.shape != (self.dimension,):
            raise ShapeError(f"pose has shape {list(pose.shape)}; [{self.dimension}] is wanted")

    def _check_frame(self, frame: Sequence[float]) -> None:
        if self.frame is None:
            raise ShapeError("this model draws without frames; leave the frame out")
        wanted = ", ".join(self.frame.names)
        if len(frame) != len(self.frame.names):
            raise ShapeError(f"frame has {len(frame)} numbers; {len(self.frame.names)} are wanted: {wanted}")
        if not all(low <= x <= high for x, low, high in zip(frame, self.frame.low, self.frame.high, strict=True)):
            raise ShapeError(f"frame is out of range: {wanted} from {list(self.frame.low)} to {list(self.frame.high)}")

    def _check_domain(self, domain: str) -> None:
        if domain not in self.domains:
            raise RecipeError(f"unknown domain '{domain}'{suggestion(domain, self.domains) or '; there is none here'}")
