"""Votes in one tensor: the reference that the other implementations are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.kernels.votes.base import Moments, Slots, Votes, VotesInput
from torchcaps.math.pose import matrix_votes, vector_votes
from torchcaps.math.squash import norm

__all__ = ["DenseVotes", "compete_in_slots"]


class DenseVotes(Votes):
    """Votes stored as one tensor.

    Args:
        votes: [b p i j k].
        activation: Activations of the children in [0, 1], [b n].
        slots: Which child stands in which slot.
    """

    def __init__(self, votes: Tensor, activation: Tensor, slots: Slots) -> None:
        super().__init__(activation, slots, parents=votes.shape[3], dimension=votes.shape[4])
        self.votes = votes
        self.activation = activation

    @classmethod
    def at_one_place(cls, votes: Tensor, activation: Tensor) -> DenseVotes:
        """Return the votes [b i j k] of a layer without places, and activations [b i], as an object."""
        return cls(votes.unsqueeze(1), activation, Slots.at_one_place(votes.shape[1], votes.device))

    @classmethod
    def cast(cls, given: VotesInput) -> DenseVotes:
        """Compute the votes of children with weights."""
        # Children and weights of each slot; rows of W repeat where all places share them
        x = given.pose[:, given.slots.child]  # [b p i d]
        m = len(given.weights)
        W = given.weights if m == given.slots.size else given.weights.repeat(given.slots.size // m, 1, 1, 1)
        votes = (matrix_votes if given.matrix else vector_votes)(x.flatten(0, 1), W)  # [(b p) i j k]
        if given.offset is not None:
            votes = votes + given.offset.unsqueeze(1)
        return cls(torch.unflatten(votes, 0, x.shape[:2]), given.activation, given.slots)

    def detach(self) -> DenseVotes:
        return DenseVotes(self.votes.detach(), self.activation.detach(), self.slots)

    def moments(self, log_weight: Tensor) -> Moments:
        # Relative to the largest activation of a window: children that are all off keep their digits.
        log_a = self.log_activation  # [b p i]
        most = log_a.detach().amax(-1, keepdim=True)
        log_w = log_weight + (log_a - most).unsqueeze(-1)  # [b p i j]
        w = log_w.softmax(2)
        mean = torch.einsum("bpij,bpijk->bpjk", w, self.votes)
        # About the mean, not E[V^2] - mean^2: votes that agree would lose all digits.
        away = self.votes - mean.unsqueeze(2)  # [b p i j k]
        variance = torch.einsum("bpij,bpijk->bpjk", w, away * away)
        return Moments(log_w.logsumexp(2) + most, mean, variance)

    def log_likelihood(self, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        z = (self.votes - mean.unsqueeze(2)) * scale.unsqueeze(2)  # [b p i j k]
        return bias.unsqueeze(2) - 0.5 * (z * z).sum(-1)

    def total(self, weight: Tensor) -> Tensor:
        return torch.einsum("bpij,bpijk->bpjk", weight, self.votes)

    def dot(self, parent: Tensor) -> Tensor:
        return torch.einsum("bpijk,bpjk->bpij", self.votes, parent)

    def squared_lengths(self) -> Tensor:
        return self.votes.square().sum(-1)

    def lengths(self) -> Tensor:
        return norm(self.votes)  # which scales long votes before it squares them

    def compete(self, logits: Tensor, *, across_parents: bool = True, background: float | None = None) -> Tensor:
        return compete_in_slots(logits, self.slots, across_parents=across_parents, background=background)

    def _expand_pairs(self, values: Tensor) -> Tensor:
        return values[None, :, :, None].expand(self.batch, -1, -1, self.parents)


def compete_in_slots(logits: Tensor, slots: Slots, *, across_parents: bool, background: float | None) -> Tensor:
    """Return the log-softmax of logits [b p i j] over all parents whose window shows the same child.

    Args:
        logits: [b p i j].
        slots: Which child stands in which slot.
        across_parents: Whether different parent types compete, or only the places of one type.
        background: One more logit that competes for every child, or None.
    """
    # A layer without places: a log-softmax over j in two steps, whose gradient torch 2.13 can compile.
    if slots.places == 1 and background is None:
        if not across_parents:
            return logits - logits  # nobody competes: every share is 1, and the gradient 0
        away = logits - logits.detach().amax(-1, keepdim=True)
        return away - away.logsumexp(-1, keepdim=True)
    # The largest logit of each child, without a gradient: what is subtracted before the exponential.
    child = slots.child.flatten()  # [(p i)]
    flat = logits.flatten(1, 2)  # [b (p i) j]
    competing = flat.amax(2, keepdim=True) if across_parents else flat  # [b (p i) 1|j]
    index = child[None, :, None].expand_as(competing)
    empty = competing.new_full((competing.shape[0], slots.children, competing.shape[2]), -torch.inf)
    top = empty.scatter_reduce(1, index, competing.detach(), "amax")  # [b n 1|j]
    if background is not None:
        top = top.clamp_min(background)
    # Exponentials above it are added up by child; the log-softmax is the distance from the logarithm of that sum.
    above = flat - top[:, child]
    e = above.exp()
    mass = torch.zeros_like(top).index_add(1, child, e.sum(2, keepdim=True) if across_parents else e)
    if background is not None:
        mass = mass + (background - top).exp()
    return (above - mass[:, child].log()).view_as(logits)
