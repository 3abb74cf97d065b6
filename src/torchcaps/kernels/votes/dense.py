"""Votes in one tensor: the reference that the other implementations are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.kernels.votes.base import Moments, Slots, Votes, VotesInput
from torchcaps.math.pose import as_matrix

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

    @classmethod
    def cast(cls, given: VotesInput) -> DenseVotes:
        """Compute the votes of children with weights."""
        # Children and weights of each slot; rows of W repeat where all places share them
        x = given.pose[:, given.slots.child]  # [b p i d]
        rows = torch.arange(given.slots.size, device=x.device) % len(given.weights)
        W = given.weights[rows]  # [i j k d] or [i j 4 4]
        if given.matrix:
            votes = torch.einsum("bpirc,ijcq->bpijrq", as_matrix(x), W).flatten(-2)
        else:
            votes = torch.einsum("bpid,ijkd->bpijk", x, W)
        if given.offset is not None:
            votes = votes + given.offset.unsqueeze(1)
        return cls(votes, given.activation, given.slots)

    def moments(self, log_weight: Tensor) -> Moments:
        # Normalized in log space, where tiny activations lose no digits
        log_w = log_weight + self.log_activation.unsqueeze(-1)  # [b p i j]
        w = log_w.softmax(2)
        mean = torch.einsum("bpij,bpijk->bpjk", w, self.votes)
        away = self.votes - mean.unsqueeze(2)  # [b p i j k]
        variance = torch.einsum("bpij,bpijk->bpjk", w, away.square())
        return Moments(log_w.logsumexp(2), mean, variance)

    def log_likelihood(self, mean: Tensor, precision: Tensor, bias: Tensor) -> Tensor:
        far = ((self.votes - mean.unsqueeze(2)).square() * precision.unsqueeze(2)).sum(-1)
        return bias.unsqueeze(2) - 0.5 * far

    def total(self, weight: Tensor) -> Tensor:
        return torch.einsum("bpij,bpijk->bpjk", weight, self.votes)

    def dot(self, parent: Tensor) -> Tensor:
        return torch.einsum("bpijk,bpjk->bpij", self.votes, parent)

    def squared_lengths(self) -> Tensor:
        return self.votes.square().sum(-1)

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
    # The largest logit of each child, without a gradient: what is subtracted before the exponential.
    child = slots.child.flatten()  # [(p i)]
    flat = logits.flatten(1, 2)  # [b (p i) j]
    rivals = flat.amax(2, keepdim=True) if across_parents else flat  # [b (p i) 1|j]
    index = child[None, :, None].expand_as(rivals)
    empty = rivals.new_full((len(rivals), slots.children, rivals.shape[2]), -torch.inf)
    top = empty.scatter_reduce(1, index, rivals.detach(), "amax")  # [b n 1|j]
    if background is not None:
        top = top.clamp_min(background)
    # Exponentials above it are added up by child; the log-softmax is the distance from the logarithm of that sum.
    above = flat - top[:, child]
    e = above.exp()
    mass = torch.zeros_like(top).index_add(1, child, e.sum(2, keepdim=True) if across_parents else e)
    if background is not None:
        mass = mass + (background - top).exp()
    return (above - mass[:, child].log()).view_as(logits)
