"""Optimizers and learning-rate schedules by their names in torch, checked when a recipe is read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchcaps.config import Options, Range
from torchcaps.errors import RecipeError, suggestion

__all__ = ["LENGTH_OPTIONS", "OptimizerConfig", "ScheduleConfig"]


# The loop calls `step()` without a closure and with dense gradients.
_NO_OPTIMIZERS = {"Optimizer", "LBFGS", "SparseAdam"}
# These need functions, other schedules or a metric, which a recipe cannot state.
_NO_SCHEDULES = {
    "LRScheduler",
    "LambdaLR",
    "MultiplicativeLR",
    "SequentialLR",
    "ChainedScheduler",
    "ReduceLROnPlateau",
}

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in _NO_OPTIMIZERS
}
SCHEDULES: Mapping[str, Callable[..., LRScheduler]] = {
    name: kind
    for name, kind in vars(torch.optim.lr_scheduler).items()
    if isinstance(kind, type)
    and issubclass(kind, LRScheduler)
    and not name.startswith("_")
    and name not in _NO_SCHEDULES
}

LENGTH_OPTIONS: Mapping[str, str] = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "LinearLR": "total_iters",
    "PolynomialLR": "total_iters",
}
"""The option of each schedule that says how many steps it lasts; left out, it is the number of steps of the stage."""

# Of a cycle that is shorter than training torch raises an error in the middle of it, so its length is not for recipes.
_LOOP_OPTIONS = {"OneCycleLR": {"total_steps", "epochs", "steps_per_epoch"}}
_NEVER_OPTIONS = {"self", "params", "lr", "optimizer", "last_epoch", "scale_fn", "capturable", "differentiable"}
# Optimizers whose fused form is several times as fast on a CPU, and the options that choose a form.
_FUSED = {"Adam", "AdamW"}
_FORMS = {"fused", "foreach"}
_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Literal": str,
    "tuple": tuple,
    "list": tuple,
    "Iterable": tuple,
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
        _check_options(f"optimizer {self.name}", OPTIMIZERS[self.name], self.options)
        # A trial, so that torch refuses wrong values when the recipe is read; on a matrix, since Muon takes no others.
        self.build([nn.Parameter(torch.zeros(2, 2))])

    def build(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer of these parameters.

        On a CPU, torch's fused form of Adam and AdamW is taken unless `options` choose a form: one pass over memory
        instead of a dozen, the same step but for the last digit.

        Raises:
            RecipeError: torch refuses a value of an option.
        """
        options = dict(self.options)
        given = list(parameters)
        if self.name in _FUSED and not options.keys() & _FORMS and all(_has_fused_step(each) for each in given):
            options["fused"] = True
        try:
            return OPTIMIZERS[self.name](given, lr=self.lr, **options)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise _refused(f"optimizer {self.name}", self.options, error) from None


@dataclass(frozen=True)
class ScheduleConfig:
    """Any schedule of torch.optim.lr_scheduler by its name there, stepped after every update; or "constant".

    The training loop knows how many steps a stage takes, so a recipe leaves the length of a schedule out: the options
    of `LENGTH_OPTIONS` are filled in, and a schedule always ends where training ends. Fractions, such as `pct_start`,
    stay fractions of that length.
    """

    name: str = "constant"
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "constant":
            if self.options:
                raise RecipeError(f"schedule constant has no options; leave {', '.join(self.options)} out")
            return
        if self.name not in SCHEDULES:
            raise RecipeError(f"unknown schedule '{self.name}'{suggestion(self.name, ['constant', *SCHEDULES])}")
        # Options: known, of the right type, none missing.
        for key in self.options:
            if key in _LOOP_OPTIONS.get(self.name, ()):
                raise RecipeError(f"schedule {self.name}: leave {key} out; the number of steps is known to the loop")
        filled = LENGTH_OPTIONS.get(self.name)
        _check_options(f"schedule {self.name}", SCHEDULES[self.name], self.options, filled=filled)
        # A trial; with momentum, since cyclic schedules change it, too.
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
        self.build(optimizer, steps=100)

    @property
    def depends_on_length(self) -> bool:
        """True if the learning rate at a step depends on the number of steps of the whole stage."""
        return self.name in LENGTH_OPTIONS and LENGTH_OPTIONS[self.name] not in self.options

    def build(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Make the schedule of an optimizer that will take so many steps; None if the rate is constant.

        Args:
            optimizer: The optimizer whose learning rate is scheduled.
            steps: The number of steps of the stage, at least 1.

        Raises:
            RecipeError: torch refuses a value of an option.
        """
        if self.name == "constant":
            return None
        # Fill in the length, which only the loop knows.
        options: dict[str, object] = dict(self.options)
        if self.depends_on_length:
            options[LENGTH_OPTIONS[self.name]] = steps
        if self.name == "OneCycleLR":
            options["pct_start"] = _rise(self.options.get("pct_start", 0.3), steps)
        try:
            return SCHEDULES[self.name](optimizer, **options)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise _refused(f"schedule {self.name}", self.options, error) from None


def _has_fused_step(parameter: nn.Parameter) -> bool:
    """Whether torch's fused optimizers take a parameter, on the device for which their speed is known."""
    return parameter.device.type == "cpu" and parameter.dtype in (torch.float32, torch.float64)


def _rise(share: object, steps: int) -> object:
    """Change `pct_start` by a billionth where the rise or the fall would last 0 steps: torch divides by that."""
    if share == 1:
        return 1 - 1e-9
    return share * (1 + 1e-9) if isinstance(share, float) and share * steps == 1 else share


def _check_options(what: str, make: Callable[..., object], options: Options, filled: str | None = None) -> None:
    """Compare options with the signature of what they are for: their names, their types, and that none is missing."""
    # torch's own signatures are the schema, so that new optimizers need no change here.
    parameters = inspect.signature(make).parameters
    known = {name: parameter for name, parameter in parameters.items() if name not in _NEVER_OPTIONS}
    for name, value in options.items():
        if name not in known:
            raise RecipeError(f"{what} has no option '{name}'{suggestion(name, known)}")
        _check_type(f"{what}: option {name}", value, known[name])
    # `filled` is the option that the loop sets.
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options and name != filled:
            raise RecipeError(f"{what} needs the option '{name}'; add options = {{ {name} = ... }}")


def _check_type(what: str, value: object, parameter: inspect.Parameter) -> None:
    """Refuse a value whose type is not among those of the parameter's annotation, and a count below 1."""
    # Names of the outermost types that the annotation allows.
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    while "[" in text:  # only the outermost types count: `tuple[float, float] | None` is a tuple or None
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    names = [name for name in text.split(" | ") if name in _TYPES]
    # A whole number may stand for a float, a bool for neither.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    matches = isinstance(value, tuple(_TYPES[name] for name in names if is_number or name not in ("int", "float")))
    if not matches and not ("float" in names and is_number):
        raise RecipeError(f"{what} = {value!r}; wanted: {' or '.join(names)}")
    if "int" in names and isinstance(value, int) and value < 1:
        raise RecipeError(f"{what} = {value!r}; wanted: 1 or more")


def _refused(what: str, options: Options, error: Exception) -> RecipeError:
    return RecipeError(f"{what} refuses {options}: {' '.join(str(error).split())}")
