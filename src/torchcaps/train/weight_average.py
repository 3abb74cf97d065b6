"""An exponential moving average of the weights, kept beside those that are trained."""

from __future__ import annotations

from copy import deepcopy

import torch

from torchcaps.models import Model

__all__ = ["WeightAverage"]


class WeightAverage:
    """A model whose parameters are the moving average of those of another one, the model that is trained.

        w' <- d w' + (1 - d) w        d = min(decay, (1 + n) / (10 + n)) after n steps

    The second term lets the first steps, whose weights are far from any that matter, be forgotten quickly. Buffers are
    not averaged: they are copies of the trained model's, except running statistics where these were measured anew
    (`measure_running_statistics`).

    Args:
        trained: The model that is trained; its weights at this moment are the first average.
        decay: d, below 1.
    """

    def __init__(self, trained: Model, decay: float) -> None:
        self.trained = trained
        self.decay = decay
        self.model = deepcopy(trained).requires_grad_(False).eval()

    def restart(self) -> None:
        """Make the weights of the trained model, which were set from outside, the first average."""
        self.model.load_state_dict(self.trained.state_dict())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step of the given number, from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for average, weight in zip(self.model.parameters(), self.trained.parameters(), strict=True):
            average.lerp_(weight, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Take over the buffers of the trained model."""
        for own, other in zip(self.model.buffers(), self.trained.buffers(), strict=True):
            own.copy_(other)
