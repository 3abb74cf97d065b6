"""Optimizers and schedules by their names in torch, tried out when a recipe is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchcaps.config import Options, Range
from torchcaps.errors import RecipeError, suggestion

__all__ = ["OptimizerConfig", "ScheduleConfig"]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    n: c
    for n, c in vars(torch.optim).items()
    if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer
}
SCHEDULES: dict[str, type[LRScheduler]] = {
    n: c
    for n, c in vars(torch.optim.lr_scheduler).items()
    if isinstance(c, type) and issubclass(c, LRScheduler) and not n.startswith("_") and n != "LRScheduler"
}


@dataclass(frozen=True)
class OptimizerConfig:
    """Any optimizer of torch.optim by its name there; `options` are its further arguments."""

    name: str = "Adam"
    lr: Annotated[float, Range(0, 1e6, open_low=True)] = 1e-3
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise RecipeError(f"unknown optimizer '{self.name}'{suggestion(self.name, OPTIMIZERS)}")
        self._try()

    def _try(self) -> None:
        """One step on a small weight: what refuses it would refuse the first step of a run."""
        weight = torch.nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.ones(2, 2)
        try:
            self.build([weight]).step()
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(f"optimizer {self.name} cannot be used here: {' '.join(str(error).split())}") from None

    def build(self, parameters: Any) -> Optimizer:
        make: Any = OPTIMIZERS[self.name]
        try:
            optimizer: Optimizer = make(parameters, lr=self.lr, **self.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"optimizer {self.name} refuses {self.options}: {error}") from None
        return optimizer


@dataclass(frozen=True)
class ScheduleConfig:
    """Any schedule of torch.optim.lr_scheduler by its name there, moved on after every step; "constant" is none."""

    name: str = "constant"
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name != "constant" and self.name not in SCHEDULES:
            raise RecipeError(f"unknown schedule '{self.name}'{suggestion(self.name, ['constant', *SCHEDULES])}")
        self._try()

    def _try(self) -> None:
        """One step of a schedule, as after the first step of a run."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
        schedule = self.build(optimizer)
        try:
            optimizer.step()
            if schedule:
                schedule.step()
        except Exception as error:
            raise RecipeError(f"schedule {self.name} cannot be used here: {' '.join(str(error).split())}") from None

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        if self.name == "constant":
            return None
        make: Any = SCHEDULES[self.name]
        try:
            schedule: LRScheduler = make(optimizer, **self.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"schedule {self.name} refuses {self.options}: {error}") from None
        return schedule
