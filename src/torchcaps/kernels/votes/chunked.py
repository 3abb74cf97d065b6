"""Votes of one parent type at a time, recomputed in the backward pass: tensor operations for any device and dtype.

The compiled loops exist for the CPU only. This is what other devices take; it is tested on CPU tensors, and its speed
on other devices has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.kernels.votes.base import Moments, Votes, VotesInput
from torchcaps.kernels.votes.dense import DenseVotes, compete_in_slots

__all__ = ["ChunkedVotes"]

R = TypeVar("R")


class ChunkedVotes(Votes):
    """Votes that exist for one parent type at a time, forwards and backwards."""

    def __init__(self, given: VotesInput) -> None:
        super().__init__(given.activation, given.slots, given.weights.shape[1], given.dimension)
        self.given = given

    def detach(self) -> ChunkedVotes:
        return ChunkedVotes(self.given.detach())

    def moments(self, log_weight: Tensor) -> Moments:
        parts = self._each(lambda votes, log_w: tuple(votes.moments(log_w)), torch.split(log_weight, 1, 3))
        return Moments(*(torch.cat(part, 2) for part in zip(*parts, strict=True)))

    def log_likelihood(self, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        given = (torch.split(mean, 1, 2), torch.split(scale, 1, 2), torch.split(bias, 1, 2))
        return torch.cat(self._each(lambda votes, m, s, b: votes.log_likelihood(m, s, b), *given), 3)

    def total(self, weight: Tensor) -> Tensor:
        return torch.cat(self._each(lambda votes, w: votes.total(w), torch.split(weight, 1, 3)), 2)

    def dot(self, parent: Tensor) -> Tensor:
        return torch.cat(self._each(lambda votes, p: votes.dot(p), torch.split(parent, 1, 2)), 3)

    def squared_lengths(self) -> Tensor:
        return torch.cat(self._each(lambda votes: votes.squared_lengths()), 3)

    def compete(self, logits: Tensor, *, across_parents: bool = True, background: float | None = None) -> Tensor:
        return compete_in_slots(logits, self.slots, across_parents=across_parents, background=background)

    def _expand_pairs(self, values: Tensor) -> Tensor:
        return values[None, :, :, None].expand(self.batch, -1, -1, self.parents)

    def _each(self, operation: Callable[..., R], *given: tuple[Tensor, ...]) -> list[R]:
        """Return operation(votes of parent j, given[0][j], ...) for every parent j; votes are not kept for the backward
        pass but computed again."""

        def of_one_parent(pose: Tensor, activation: Tensor, weights: Tensor, *more: Tensor) -> R:
            one = self.given._replace(pose=pose, activation=activation, weights=weights)
            return operation(DenseVotes.cast(one), *more)

        found = []
        for j in range(self.parents):
            mine = (each[j] for each in given)
            inputs = (self.given.pose, self.given.activation, self.given.weights[:, j : j + 1])
            # Checkpointed: the votes of one parent exist at a time in the backward pass too
            found.append(checkpoint(of_one_parent, *inputs, *mine, use_reentrant=False))
        return found
