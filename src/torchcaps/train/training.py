"""The state of a training: what a step changes and a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchcaps.errors import CheckpointError
from torchcaps.math.random import seed_of
from torchcaps.models import Model
from torchcaps.train.checkpoint import Checkpoint
from torchcaps.train.recipe import Recipe
from torchcaps.train.state import pack_state, unpack_state
from torchcaps.types import ImageSpec

__all__ = ["Training", "flushed_denormals", "set_up"]


@dataclass
class Training:
    """All that changes as a run goes on, and so all that a checkpoint holds."""

    model: Model
    optimiser: Optimizer
    schedule: LRScheduler | None
    step: int = 0
    seconds: float = 0.0

    def checkpoint(self, recipe: dict[str, Any]) -> Checkpoint:
        """Model, optimiser, schedule and position, beside the recipe and the image shape they belong to."""
        state = {
            "model": dict(self.model.state_dict()),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
        }
        tensors, skeleton = pack_state(state, "state")
        spec = list(self.model.spec)
        meta = {"recipe": recipe, "spec": spec, "step": self.step, "seconds": self.seconds, "state": skeleton}
        return Checkpoint(tensors, meta)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a checkpoint of the same recipe was made."""
        try:
            state = unpack_state(checkpoint.meta["state"], checkpoint.tensors)
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            _lay_out_like_parameters(self.optimiser)
            if self.schedule:
                self.schedule.load_state_dict(state["schedule"])
            self.step, self.seconds = int(checkpoint.meta["step"]), float(checkpoint.meta["seconds"])
            if self.step < 0 or not math.isfinite(self.seconds):
                raise ValueError(f"step {self.step}, seconds {self.seconds}")
        except Exception as error:  # whatever a file can make torch raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"the checkpoint belongs to another kind of run: {reason}") from None


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below the smallest normal one count as 0: squash makes many near 0, and CPUs take ten times as long with
    them. It holds for this thread and for worker threads started inside; those that run already keep their own way."""
    before = float(torch.tensor(5e-324, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def set_up(recipe: Recipe, spec: ImageSpec, device: torch.device | None = None) -> Training:
    """A fresh model, a function of the recipe's seed, with its optimiser and schedule."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, 0))
        model = recipe.model.build(spec)
    if recipe.train.channels_last:
        _lay_out_channels_last(model)
    model.to(device)
    optimiser = recipe.optimiser.build(model.parameters())
    return Training(model, optimiser, recipe.schedule.build(optimiser))


def _lay_out_like_parameters(optimiser: Optimizer) -> None:
    """Moments come from a file in rows; fused optimisers read them in the memory order of their parameter."""
    for parameter, state in optimiser.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()


def _lay_out_channels_last(model: nn.Module) -> None:
    """Convolution filters in the layout that runs fastest on CPUs; capsule weights, also of four axes, stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
