"""Begin with weights that were trained elsewhere: those of a whole run, or of the modules of single stages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torchcaps.config import flatten, to_dict
from torchcaps.config.formatting import value_text
from torchcaps.errors import RecipeError, TrainingError, suggestion
from torchcaps.models import Model
from torchcaps.train.recipe import Recipe
from torchcaps.train.train_state import TrainState
from torchcaps.types import ImageSpec

__all__ = ["load_stage", "warm_start"]

_MAX_DIFFERENCES = 5
"""Settings that an error names; of two networks that differ in more, these say enough."""


def warm_start(training: TrainState, model: nn.Module, *, steps: int, seconds: float) -> None:
    """Begin with the weights of a model trained before, whose steps and seconds count as spent.

    Raises:
        TrainingError: The weights do not fit; the text names the settings in which the two recipes differ.
    """
    _fill(training.model, model, "the run to start from", _differences(model, training.model))
    if training.average:
        training.average.restart()
    training.steps_before = steps
    training.seconds = seconds


def load_stage(stages: Mapping[str, Model], given: Mapping[str, nn.Module]) -> None:
    """Fill stages with the state of modules of the same kind that were trained elsewhere."""
    for name, module in given.items():
        if name not in stages:
            raise RecipeError(f"a module was given for the stage '{name}'{suggestion(name, stages)}")
        _fill(stages[name], module, f"what was given for the stage '{name}'")


def _fill(target: nn.Module, source: nn.Module, what: str, reason: str = "") -> None:
    """Copy weights; where they do not fit, the error gives the reason, or else what torch says."""
    try:
        target.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reason = reason or " ".join(str(error).split())[:300]
        raise TrainingError(f"{what} does not fit: {reason}") from None


def _differences(source: nn.Module, target: Model) -> str:
    """Say in which settings of their recipes two models differ, and in which images; "" if in none, or without one."""
    old = getattr(source, "recipe", None)
    new = target.recipe
    if not isinstance(source, Model) or not isinstance(old, Recipe) or not isinstance(new, Recipe):
        return ""
    before = _model_settings(old)
    after = _model_settings(new)
    # Settings of two kinds of model have nothing in common
    keys = [key for key in before if before[key] != after.get(key)]
    if "model.name" in keys:
        keys = ["model.name"]
    keys = keys[:_MAX_DIFFERENCES]
    theirs = [f"{key} = {before[key]}" for key in keys]
    ours = [after[key] for key in keys]
    if source.spec != target.spec:
        theirs.append(_images(source.spec))
        ours.append(_images(target.spec))
    if not theirs:
        return ""
    who = f"'{new.start}'" if new.start else "it"
    return f"{who} has {_listed(theirs)}, this run {_listed(ours)}; take those settings, or start from another run"


def _model_settings(recipe: Recipe) -> dict[str, str]:
    """Return the settings of [model] by dotted key, as they are typed."""
    return {key: value_text(value) for key, value in flatten({"model": to_dict(recipe)["model"]}).items()}


def _images(spec: ImageSpec) -> str:
    return f"images of {spec.channels}x{spec.height}x{spec.width} in {spec.classes} classes"


def _listed(words: list[str]) -> str:
    """Join words as a sentence does.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
