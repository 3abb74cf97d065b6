"""What a Subject answers with; t counts the iterations of routing, the other letters are those of `torchcaps.types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchcaps.types import Capsules

__all__ = ["CapsuleReading", "Encoded", "Histogram", "RoutingReading", "SampleGrid"]


class CapsuleReading(NamedTuple):
    """What a model makes of an image: activation [j], the capsule that wins, pose [j k], and the image redrawn
    [c h w], which is None without a decoder."""

    activation: Tensor
    winner: int
    pose: Tensor
    drawn: Tensor | None


class SampleGrid(NamedTuple):
    """Samples (rows) of capsules alone (columns): images [n j' c h w], poses [n j' k], and which capsules."""

    images: Tensor
    poses: Tensor
    capsules: tuple[int, ...]


class Encoded(NamedTuple):
    """Of images: the capsules [b j k], which of them wins [b], and the children [b i d] that were routed into them."""

    capsules: Capsules
    winner: Tensor
    children: Capsules


class Histogram(NamedTuple):
    """Figure 2 of Hinton 2018: `counts` [t n], the assignment of the votes whose distance to the parent's mean lies
    between two `edges` [n+1]."""

    edges: Tensor
    counts: Tensor


@dataclass(frozen=True)
class RoutingReading:
    """How a parent got its children.

    maps        [t h w]  what the children of each place sent to the parent; the largest of all is 1
    peak                 what that 1 stands for
    activation  [t j]    of all parents, as if routing had stopped there; the last is the model's own
    agreement   [t j]    as in RoutingInfo
    entropy     [t]      of a child's choice among parents in nats, mean over children
    coupling    [t]      to the parent, mean over children
    cloud       [m 2]    votes of the children that sent it most, on the two principal axes of all votes for it
    index       [m]      which children these are, the one that sent most first
    shares      [t m]    their coupling to the parent
    chosen      [n 2]    votes of the chosen children on the same axes
    weights     [t n]    their coupling to the parent
    mean        [t 2]    the point to which the votes converge, on the same axes
    histogram            of the votes' distances; only of EM routing
    """

    maps: Tensor
    peak: float
    activation: Tensor
    agreement: Tensor
    entropy: Tensor
    coupling: Tensor
    cloud: Tensor
    index: Tensor
    shares: Tensor
    chosen: Tensor
    weights: Tensor
    mean: Tensor
    histogram: Histogram | None
