"""The interface of votes, the record of their moments, and which child stands in which slot of a window.

Axes: b batch, p place of a parent, i slot of its window (a child), j parent type, d and k numbers of a child's and of a
parent's pose. A layer without places has p = 1, and its slots are its children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.math.grid import Window
from torchcaps.math.logspace import log_floor
from torchcaps.math.squash import length_from_square

__all__ = ["Moments", "Slots", "Votes", "VotesInput"]


class Moments(NamedTuple):
    """Statistics of the votes for each parent under normalized weights.

    Attributes:
        log_mass: Logarithm of the sum of the weights over the children, less `Votes.log_scale`, [b p j].
        mean: Weighted mean of the votes, [b p j k].
        variance: Weighted mean of their squared distance from that mean, element by element, [b p j k].
    """

    log_mass: Tensor
    mean: Tensor
    variance: Tensor


class Slots:
    """Which child stands in each slot of each parent's window.

    Attributes:
        child: Index of the child, place * types + type, [p i], int64.
        children: Number of children.
        places: Number of places p.
        size: Number of slots i of one window.
        windows: Number of windows that show each child, [children], at least 1.
        order: (place, slot) of every slot, sorted by the child that stands in it, [(p i) 2].
        ends: Where each child's entries of `order` begin, and the last ones end, [children + 1].
    """

    def __init__(self, child: Tensor, children: int) -> None:
        # Everything is computed here, not when it is first asked for, and by operations whose shapes are known:
        # torch.compile cannot trace anything else.
        flat = child.flatten()
        count = torch.zeros(children, dtype=flat.dtype, device=flat.device).index_add(0, flat, torch.ones_like(flat))
        order = flat.argsort(stable=True)
        self.child = child.contiguous()
        self.children = children
        self.places, self.size = child.shape
        self.windows = count.clamp_min(1)
        self.order = torch.stack([order // self.size, order % self.size], 1).contiguous()
        self.ends = torch.cat([count.new_zeros(1), count.cumsum(0)])

    def to(self, device: torch.device) -> Slots:
        """Return the slots with their tensors on a device."""
        return self if self.child.device == device else Slots(self.child.to(device), self.children)

    @staticmethod
    def of_window(window: Window, types: int, device: torch.device) -> Slots:
        """Return the slots of a window over a grid with `types` children at each place."""
        make = _slots_of_window if _may_cache() else _slots_of_window.__wrapped__
        return make(window, types).to(device)

    @staticmethod
    def at_one_place(children: int, device: torch.device) -> Slots:
        """Return the slots of a layer in which every parent sees every child."""
        make = _slots_at_one_place if _may_cache() else _slots_at_one_place.__wrapped__
        return make(children).to(device)


def _may_cache() -> bool:
    """Whether tensors made now are ordinary ones: not those of a compiler, nor of a transform of `torch.func`."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _slots_of_window(window: Window, types: int) -> Slots:
    # Types of one place come one after another: child = place * types + type
    covered = window.covered(torch.device("cpu"))  # [p n]
    child = (covered.unsqueeze(-1) * types + torch.arange(types, device="cpu")).flatten(1)
    return Slots(child, window.grid.places * types)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _slots_at_one_place(children: int) -> Slots:
    return Slots(torch.arange(children, device="cpu").unsqueeze(0), children)


class VotesInput(NamedTuple):
    """What votes are made of.

    Attributes:
        pose: Poses of the children, [b n d]; n children of all places, as `slots` counts them.
        activation: Their activations in [0, 1], [b n].
        weights: W_ij, [m j k d] for vector poses or [m j 4 4] for matrices; slot i takes row i % m.
        slots: Which child stands in which slot.
        matrix: True for 4x4 poses, V_ij = M_i W_ij; False for V_ij = W_ij x_i.
        offset: Added to every vote of a slot, [i k], or None.
    """

    pose: Tensor
    activation: Tensor
    weights: Tensor
    slots: Slots
    matrix: bool = False
    offset: Tensor | None = None

    @property
    def dimension(self) -> int:
        """K, the numbers of a vote."""
        return 16 if self.matrix else self.weights.shape[2]

    def detach(self) -> VotesInput:
        """Return the same input without gradients."""
        offset = None if self.offset is None else self.offset.detach()
        return self._replace(
            pose=self.pose.detach(), activation=self.activation.detach(), weights=self.weights.detach(), offset=offset
        )


class Votes(ABC):
    """Votes V_ij of all children for all parents, which need not be stored.

    Every operation is exact and differentiable by its tensor arguments, the children's poses and activations, and the
    weights W. The shapes of tensors end as documented; their leading axes, written [b], are the implementation's own:
    `split_batch` and `join_batch` translate. Write routers with negative axes.

    Attributes:
        batch, places, children, parents, dimension: Sizes b, p, i, j and k.
        slots: Which child stands in which slot of which place.
        log_scale: Logarithm of the largest activation of each sample, [b 1 1], without gradient.
    """

    def __init__(self, activation: Tensor, slots: Slots, parents: int, dimension: int) -> None:
        self.batch = activation.shape[0]  # len() would fix the batch of an exported model
        self.places = slots.places
        self.children = slots.size
        self.parents = parents
        self.dimension = dimension
        self.slots = slots
        self.dtype = activation.dtype
        # Activations count relative to the largest one of a sample: children that are all off keep their digits.
        log_a = log_floor(activation)  # [b n]
        scale = log_a.detach().amax(1, keepdim=True)  # [b 1]
        self._relative = log_a - scale
        self.log_scale = self.split_batch(scale.unsqueeze(-1))

    @property
    def log_activation(self) -> Tensor:
        """Logarithm of the activation of the child in each slot, less `log_scale`, [b p i]; finite also for 0."""
        return self.split_batch(self._relative[:, self.slots.child])

    def uniform_log_share(self, *, across_parents: bool = True) -> Tensor:
        """Return log R_ij, [b p i j], where all parents that compete for a child have equal shares of it.

        Args:
            across_parents: Whether different parent types compete, or only the places of one type.
        """
        # Number of parents that share the child
        count = self.slots.windows * (self.parents if across_parents else 1)  # [children]
        log_share = -count.to(self.dtype).log()[self.slots.child]  # [p i]
        return self._expand_pairs(log_share)

    @abstractmethod
    def moments(self, log_weight: Tensor) -> Moments:
        """Return log mass, mean and variance of the votes under the weights exp(log_weight) a_i.

        Args:
            log_weight: [b p i j], finite.
        """

    @abstractmethod
    def log_likelihood(self, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Return bias_j - 1/2 sum_k (scale_jk (V_ijk - mean_jk))^2, [b p i j].

        Args:
            mean: [b p j k].
            scale: Inverse standard deviation of each number, the root of the precision, [b p j k].
            bias: [b p j].
        """

    @abstractmethod
    def total(self, weight: Tensor) -> Tensor:
        """Return sum_i weight_ij V_ij, [b p j k], for weights [b p i j]."""

    @abstractmethod
    def dot(self, parent: Tensor) -> Tensor:
        """Return the dot products V_ij . parent_j, [b p i j], with vectors [b p j k]."""

    @abstractmethod
    def squared_lengths(self) -> Tensor:
        """Return |V_ij|^2, [b p i j]."""

    @abstractmethod
    def compete(self, logits: Tensor, *, across_parents: bool = True, background: float | None = None) -> Tensor:
        """Return the log-softmax of logits [b p i j] over all parents that can have the same child.

        Args:
            logits: [b p i j].
            across_parents: Whether different parent types compete, or only the places of one type.
            background: One more logit that competes for every child, or None.
        """

    def lengths(self) -> Tensor:
        """Return |V_ij|, [b p i j]; value and gradient are finite at 0, where the gradient is 0."""
        return length_from_square(self.squared_lengths())

    @abstractmethod
    def detach(self) -> Votes:
        """Return the same votes without a gradient."""

    def new_pairs(self, value: float) -> Tensor:
        """Return a number for each pair of child and parent, [b p i j], all equal to `value`."""
        everywhere = self.slots.child.new_full(self.slots.child.shape, value, dtype=self.dtype)
        return self._expand_pairs(everywhere)

    def split_batch(self, x: Tensor) -> Tensor:
        """Return a tensor [b ...] with the leading axes that the operations want."""
        return x

    def join_batch(self, x: Tensor) -> Tensor:
        """Return a tensor with the leading axes of the operations as [b ...]."""
        return x

    @abstractmethod
    def _expand_pairs(self, values: Tensor) -> Tensor:
        """Return values [p i] as a tensor [b p i j] in the layout that the operations want."""
