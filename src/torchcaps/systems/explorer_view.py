"""What the explorer asks of any capsule network: to look at an image, to show its routing, to draw from a pose.

A Subject answers for one model, in evaluation mode and without gradients; its answers are functions of the questions.
What the kinds of networks share is here, over four methods that each has of its own: `_layer`, `_encode`, `_decode` and
`_range`.
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
from torchcaps.systems.explorer_records import CapsuleReading, Encoded, RoutingReading, SampleGrid
from torchcaps.systems.routing_trace import (
    RoutedLayer,
    Trace,
    compute_votes,
    contributions,
    read_routing,
    trace_routing,
)
from torchcaps.types import Capsules
from torchcaps.utils.random import permutation

__all__ = ["COLUMNS", "ROWS", "ExplorerView"]

COLUMNS = 20
ROWS = 8
"""A wall of samples has so many capsules and samples at most."""

_CHUNK = 50
"""Examples that are looked at together."""

M = TypeVar("M", bound=Model)


class ExplorerView(ABC, Generic[M]):
    """A model under the glass; images are [c h w], as the model is shown them, and drawn in the same units."""

    kind: ClassVar[str]
    draws: ClassVar[bool] = True
    """Whether there is a decoder."""
    by_class: ClassVar[bool] = True
    """Whether a capsule stands for a class of the data."""

    def __init__(self, model: M, names: Sequence[str] = (), examples: Tensor | None = None) -> None:
        self.model = model.eval()
        self.spec = model.spec
        with torch.no_grad():
            self.layer = self._layer(model)
        self.names = self._named(tuple(names))
        self._examples = examples
        self.domains = self._domains()

    @property
    def capsules(self) -> int:
        """J."""
        return int(self.layer.weights.shape[1])

    @property
    def dimension(self) -> int:
        """K, the numbers of a capsule's pose."""
        return self.layer.dimension

    @property
    def iterations(self) -> int:
        """Of routing into these capsules."""
        return int(self.layer.routing.iterations)

    @property
    def children(self) -> int:
        """I, all that vote for these capsules."""
        return len(self.layer.weights)

    @property
    def places(self) -> tuple[int, int]:
        """(h, w) at which the children stand."""
        return self.layer.places

    @property
    def samples(self) -> bool:
        """Whether poses can be drawn that no image gave."""
        return bool(self.domains)

    @torch.inference_mode()
    def infer(self, image: Tensor) -> CapsuleReading:
        """Capsules of an image, and the image redrawn from them."""
        seen = self._encode(image.unsqueeze(0))
        (pose, activation) = (x[0] for x in seen.capsules)
        winner = int(seen.winner)
        return CapsuleReading(activation, winner, pose, self._redrawn(pose, winner) if self.draws else None)

    @torch.inference_mode()
    def draw_each(self, image: Tensor) -> Tensor | None:
        """[j c h w] the image redrawn from each capsule alone."""
        if not self.draws:
            return None
        return self._alone(range(self.capsules), self._encode(image.unsqueeze(0)).capsules.pose[0])

    @torch.inference_mode()
    def routing(self, image: Tensor, parent: int, children: Sequence[int] = ()) -> RoutingReading:
        """How a parent got its children from an image, and what the chosen ones had to do with it."""
        self._check_capsule(parent)
        for child in children:
            if not 0 <= child < self.children:
                raise ShapeError(f"child {child} is wanted; there are 0 to {self.children - 1}")
        below = self._encode(image.unsqueeze(0)).children
        trace = self._trace(below)
        votes = compute_votes(below, self.layer)
        sent = self._sent(below, trace, votes[:, parent], parent)
        return read_routing(trace, self.layer, votes, sent, parent, children)

    @torch.inference_mode()
    def draw(self, capsule: int, pose: Tensor) -> Tensor:
        """[c h w] what a capsule draws alone in a pose [k]."""
        self._check_pose(capsule, pose)
        return self._alone([capsule], pose.unsqueeze(0))[0]

    @torch.inference_mode()
    def sweep(self, capsule: int, pose: Tensor, steps: int = 9) -> Tensor:
        """[k n c h w] the same with each number of the pose set to n values from its lower to its upper limit."""
        if steps < 2:
            raise RecipeError(f"steps = {steps}; a sweep has at least 2, its limits")
        low, high = self.limits(capsule, pose)
        number = torch.arange(self.dimension)
        way = torch.linspace(0, 1, steps, dtype=pose.dtype)
        poses = pose.repeat(self.dimension, steps, 1)  # [k n k]
        poses[number, :, number] = torch.lerp(low.unsqueeze(1), high.unsqueeze(1), way)
        images = self._alone([capsule] * (self.dimension * steps), poses.flatten(0, 1))
        return torch.unflatten(images, 0, (self.dimension, steps))

    @torch.inference_mode()
    def limits(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        """The range [k], [k] in which to move a pose, which lies inside."""
        self._check_pose(capsule, pose)
        low, high = self._range(capsule, pose)
        return torch.minimum(low, pose), torch.maximum(high, pose)

    @torch.inference_mode()
    def sample(self, capsule: int, domain: str, seed: int) -> Tensor:
        """[k] a pose from a domain."""
        self._check_capsule(capsule)
        self._check_domain(domain)
        return self._poses(capsule, 1, domain, seed)[0]

    @torch.inference_mode()
    def sample_grid(self, count: int, domain: str, seed: int) -> SampleGrid:
        """`count` samples of each capsule, of those that are used most if there are many; the first is `sample`'s."""
        self._check_domain(domain)
        if not 1 <= count <= ROWS:
            raise RecipeError(f"count = {count} samples of a capsule are wanted; 1 to {ROWS} make a wall")
        chosen = self._columns()
        poses = torch.stack([self._poses(j, count, domain, seed) for j in chosen], 1)  # [n j' k]
        images = self._alone(list(chosen) * count, poses.flatten(0, 1))
        return SampleGrid(torch.unflatten(images, 0, (count, len(chosen))), poses, chosen)

    # --- What each kind answers for itself --------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _layer(model: M) -> RoutedLayer:
        """The last layer that is routed."""

    @abstractmethod
    def _encode(self, images: Tensor) -> Encoded:
        """Images [b c h w] -> capsules."""

    @abstractmethod
    def _decode(self, pose: Tensor) -> Tensor:
        """Poses [b j k] -> images [b c h w]."""

    @abstractmethod
    def _range(self, capsule: int, pose: Tensor) -> tuple[Tensor, Tensor]:
        """The range [k], [k] that is worth a look."""

    # --- What some kinds answer otherwise ---------------------------------------------------------------------

    def _redrawn(self, pose: Tensor, winner: int) -> Tensor:
        """[c h w] from all capsules [j k]."""
        return self._decode(pose.unsqueeze(0))[0]

    def _trace(self, children: Capsules) -> Trace:
        return trace_routing(children, self.layer)

    def _sent(self, children: Capsules, trace: Trace, votes: Tensor, parent: int) -> Tensor:
        """[t i] what each child, whose votes for the parent are [i k], sent to it; 0 or more."""
        return contributions(children, trace, parent)

    def _domains(self) -> tuple[str, ...]:
        """Poses are those of the examples, if there are any."""
        return ("empirical",) if self.draws and self._examples is not None and len(self._examples) else ()

    def _columns(self) -> tuple[int, ...]:
        """The capsules of a wall: those that win the most examples."""
        wins = torch.tensor([len(own) for own in self._won])
        order = wins.argsort(descending=True, stable=True)[:COLUMNS].sort().values
        return tuple(j for j in order.tolist() if wins[j])

    def _poses(self, capsule: int, count: int, domain: str, seed: int) -> Tensor:
        """[n k] of examples that the capsule wins, none twice before all had their turn."""
        own = self._won[capsule]
        if not len(own):
            raise DataError(f"capsule {capsule} wins none of the examples; choose one that does")
        return own[permutation(seed, capsule, len(own))[torch.arange(count) % len(own)]]

    # --- Shared ----------------------------------------------------------------------------------------------

    def _named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """`names` or their numbers; of capsules without a class, those of the data say nothing."""
        if not self.by_class:
            return tuple(f"capsule {j}" for j in range(self.capsules))
        if names and len(names) != self.capsules:
            raise ShapeError(f"{len(names)} names came for {self.capsules} capsules; one each, or none, is wanted")
        return names or tuple(str(j) for j in range(self.capsules))

    @cached_property
    def _won(self) -> list[Tensor]:
        """Of each capsule, its poses [n k] in the examples that it wins."""
        assert self._examples is not None, "the domain was checked"
        seen = [self._encode(part) for part in torch.split(self._examples, _CHUNK)]
        pose = torch.cat([s.capsules.pose for s in seen])
        winner = torch.cat([s.winner for s in seen])
        return [pose[winner == j, j] for j in range(self.capsules)]

    def _alone(self, capsules: Sequence[int], pose: Tensor) -> Tensor:
        """[b c h w] what each of the capsules draws in its pose [b k], the others being 0."""
        poses = pose.new_zeros(len(pose), self.capsules, self.dimension)
        poses[torch.arange(len(pose)), list(capsules)] = pose
        return self._decode(poses)

    def _check_capsule(self, capsule: int) -> None:
        if not 0 <= capsule < self.capsules:
            raise ShapeError(f"capsule {capsule} is wanted; there are 0 to {self.capsules - 1}")

    def _check_pose(self, capsule: int, pose: Tensor) -> None:
        self._check_capsule(capsule)
        if pose.shape != (self.dimension,):
            raise ShapeError(f"pose has shape {list(pose.shape)}; [{self.dimension}] is wanted")

    def _check_domain(self, domain: str) -> None:
        if domain not in self.domains:
            raise RecipeError(f"unknown domain '{domain}'{suggestion(domain, self.domains) or '; there is none here'}")
