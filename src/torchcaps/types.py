"""The records that cross the borders of torchcaps, and THE axis legend.

Every signature, einsum and shape comment in this package uses these letters:

    b  batch                        i  child (a capsule of the layer below)
    h w  place in the image         j  parent (a capsule of the layer above)
    t  routing iteration            d  dimension of a child's pose
    n  place inside a window        k  dimension of a parent's pose

No tensor has more than five axes: where a computation would need a sixth, space is folded into the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch", "Capsules", "ImageSpec", "RoutingInfo"]


class Capsules(NamedTuple):
    """A layer of capsules: a pose each, and the probability that what it stands for is there.

    Attributes:
        pose: [b i d] of a layer without places, [b h w i d] of one with places.
        activation: The same shape without the last axis, in [0, 1].
    """

    pose: Tensor
    activation: Tensor

    @property
    def has_places(self) -> bool:
        """True for [b h w i d], a layer in which each type of capsule stands at every place."""
        return self.pose.ndim == 5

    def flat(self) -> Capsules:
        """Drop the places: [b h w i d] -> [b (h w i) d], each capsule a child of its own."""
        if not self.has_places:
            return self
        return Capsules(self.pose.flatten(1, 3), self.activation.flatten(1))


@dataclass(frozen=True)
class RoutingInfo:
    """Record of one call of a router, for figures, the explorer and tests; detached, never part of a gradient.

    The first axis is the iteration. A router called with `trace=False` keeps only the coupling of the last one: the
    other fields are None, since they would cost memory or an extra pass over the votes. Where space is folded into
    the batch, as in a convolutional layer, b stands for (b p), with p the positions of the parents.

    Attributes:
        coupling: [t b i j], the share of child i that parent j received in the iteration.
        agreement: [t b j], how well the votes for j agree with its pose, weighted by the coupling (dynamic: mean dot
            product or cosine; em: mean log density).
        free_energy: [t b], what the iteration lowered, where the router has such a quantity.
        parents: pose [t b j k] and activation [t b j] of the parents as if routing had stopped after the iteration;
            the last ones equal what the router returned.
    """

    coupling: Tensor
    agreement: Tensor | None = None
    free_energy: Tensor | None = None
    parents: Capsules | None = None

    @property
    def entropy(self) -> Tensor:
        """[t b i] entropy in nats of each child's choice among parents: 0 = decided, log J = undecided."""
        c = self.coupling
        share = c / c.sum(-1, keepdim=True).clamp_min(1e-30)  # [t b i j]
        return -(share * share.clamp_min(1e-30).log()).sum(-1)


class Batch(NamedTuple):
    """One batch of training images.

    Attributes:
        images: [b c h w] in [0, 1], or standardized.
        labels: Class numbers [b], or [b m] where an image shows m things.
        indices: [b], numbers of the images in the data set.
        components: [b m h w], each of the m things alone, if that is known.
        shares: [b j], how much of each class an image shows, where mixup or label smoothing made several of one.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    components: Tensor | None = None
    shares: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """What a classifier is to say: the shares [b j] if there are any, else the labels."""
        return self.labels if self.shares is None else self.shares


class ImageSpec(NamedTuple):
    """The shape of an image, and how many classes there are: all that a model must know of a data set.

    Attributes:
        channels: 1 for gray images, 3 for color, 2 for stereo pairs.
        height: In pixels.
        width: In pixels.
        classes: Number of classes.
    """

    channels: int
    height: int
    width: int
    classes: int
