"""Records that an `ExplorerView` returns; t counts routing iterations, other letters are those of `torchcaps.types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchcaps.types import Capsules

__all__ = [
    "CapsuleReading",
    "Competition",
    "Encoded",
    "FrameSliders",
    "Histogram",
    "LayerSummary",
    "PoseRange",
    "RoutingReading",
    "RoutingTrace",
    "SampleGrid",
]


class LayerSummary(NamedTuple):
    """The last routed layer of a model.

    Attributes:
        children: I, the number of children.
        capsules: J, the number of parents.
        dimension: K, the numbers of a parent's pose.
        places: (h, w) of the grid of children, i = (h w types).
        iterations: of its router.
        is_em: whether the router is EM, whose parents' poses are means of votes.
    """

    children: int
    capsules: int
    dimension: int
    places: tuple[int, int]
    iterations: int
    is_em: bool = False


class Encoded(NamedTuple):
    """Capsules of a batch of images.

    Attributes:
        capsules: pose [b j k] and activation [b j], as the decoder gets them.
        winner: [b] the capsule that each image belongs to.
    """

    capsules: Capsules
    winner: Tensor


class Competition(NamedTuple):
    """How capsules that compete were ranked for one image.

    Attributes:
        support: [j] what routing gave each capsule, or how well it explains the image.
        boost: [j] factor of the support, from how seldom the capsule came first in training.
        score: [j] that is ranked: support times boost, over the usual support where that is how capsules compete.
        rank: [j] 0 = the first.
        mask: [j] in [0, 1], what is left of each capsule.
        frequency: [j] share of training images in which the capsule came first lately.
    """

    support: Tensor
    boost: Tensor
    score: Tensor
    rank: Tensor
    mask: Tensor
    frequency: Tensor


class FrameSliders(NamedTuple):
    """The numbers of a frame that images are drawn into.

    Attributes:
        names: of the numbers, for people.
        low: lower limit of each.
        high: upper limit of each.
        rest: what changes nothing.
    """

    names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    rest: tuple[float, ...]


class CapsuleReading(NamedTuple):
    """Capsules of one image.

    Attributes:
        activation: [j]
        winner: the capsule that the image belongs to.
        pose: [j k]
        reconstruction: [c h w] decoded from all capsules, or from the winner where the decoder gets one capsule only;
            None without a decoder.
        capsule_images: [j c h w] decoded from each capsule alone, from a silent one in its typical pose; without a
            decoder, the example of the nearest pose, or None without examples.
        silent: [j] which capsules were turned off, so that their pose is 0; None without a decoder.
        nearest: [j n c h w] without a decoder, the examples of the nearest poses that each capsule wins, the nearest
            first and blanks behind the last; None with a decoder, or without examples.
        competition: how the capsules were ranked; None where nothing competes.
        frame: the numbers of the image's frame; None if the model has no frames.
    """

    activation: Tensor
    winner: int
    pose: Tensor
    reconstruction: Tensor | None
    capsule_images: Tensor | None
    silent: Tensor | None = None
    nearest: Tensor | None = None
    competition: Competition | None = None
    frame: Tensor | None = None


class PoseRange(NamedTuple):
    """Lower and upper limits [k] between which a pose is moved."""

    low: Tensor
    high: Tensor


class SampleGrid(NamedTuple):
    """Random samples of single capsules.

    Attributes:
        images: [n j' c h w], a row a sample, a column a capsule.
        poses: [n j' k]
        capsules: which capsules the columns are.
    """

    images: Tensor
    poses: Tensor
    capsules: tuple[int, ...]


class RoutingTrace(NamedTuple):
    """Routing of one image into the last layer of capsules, iteration by iteration.

    Attributes:
        child_activation: [i]
        votes: [i j k]
        parents: pose [t j k] and activation [t j] as if routing had stopped after each iteration.
        coupling: [t i j]
        agreement: [t j] as in `RoutingInfo`; None if the router has no such quantity.
        entropy: [t] of a child's choice among parents in nats, mean over children.
    """

    child_activation: Tensor
    votes: Tensor
    parents: Capsules
    coupling: Tensor
    agreement: Tensor | None
    entropy: Tensor


class Histogram(NamedTuple):
    """Distances of votes to a parent's mean, weighted by the assignment (figure 2 of Hinton 2018).

    Attributes:
        edges: [n+1] of the bins.
        counts: [t n] sum of the assignments of the votes in each bin.
    """

    edges: Tensor
    counts: Tensor


@dataclass(frozen=True)
class RoutingReading:
    """How one parent got its children.

    Attributes:
        maps: [t h w] contributions of the children at each place; the largest of all is 1.
        peak: the contribution that this 1 stands for.
        activation: [t j] of all parents, as if routing had stopped there; the last is the model's own.
        agreement: [t j] as in `RoutingInfo`, None if the router has no such quantity.
        entropy: [t] of a child's choice among parents in nats, mean over children.
        coupling: [t] to the parent, mean over children.
        votes: [m 2] votes of the children that contribute most, on the two principal axes of all votes for the parent.
        vote_children: [m] which children these are, the largest contribution first.
        vote_coupling: [t m] their coupling to the parent.
        chosen_votes: [n 2] votes of the chosen children on the same axes.
        chosen_coupling: [t n] their coupling to the parent.
        mean: [t 2] the point to which the votes converge, on the same axes.
        histogram: of the votes' distances; None unless routed by EM.
    """

    maps: Tensor
    peak: float
    activation: Tensor
    agreement: Tensor | None
    entropy: Tensor
    coupling: Tensor
    votes: Tensor
    vote_children: Tensor
    vote_coupling: Tensor
    chosen_votes: Tensor
    chosen_coupling: Tensor
    mean: Tensor
    histogram: Histogram | None
