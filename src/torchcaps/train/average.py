"""The mean of the weights of several runs of one network.

Where a learning rate falls and rises again, each cycle ends at another point near the rim of one wide valley; their
mean lies further inside, and errs less often on other images (Izmailov 2018). Runs that never had weights in common lie
in different valleys: the mean of theirs is nothing.

Running statistics of batch normalization are not averaged but measured: one pass over the training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.train.checkpoint import Checkpoint
from torchcaps.train.recipe import Recipe, stage_of
from torchcaps.train.run import TrainedRun, find_checkpoint, open_run, run_of
from torchcaps.train.running_statistics import has_running_statistics, measure_running_statistics, training_batches
from torchcaps.train.train_state import flushed_denormals
from torchcaps.train.weights_export import strip_to_weights
from torchcaps.utils.progress import progress

__all__ = ["average"]


def average(folders: Sequence[Path], out: Path, *, name: str | None = None) -> Recipe:
    """Write the mean of the runs' weights as a run of its own.

    It loads as any run does, and others may `start` from it; the state of the optimizers is gone: it cannot be resumed.

    Args:
        folders: Folders of two or more runs of one network, of which all but one started from another's weights.
        out: The folder of the new run.
        name: The name of the new run; by default the last one's and "-mean".

    Returns:
        The recipe of the new run: the last one's with another name.

    Raises:
        RecipeError: The runs have no mean.
        DataError: The runs have batch normalization, and the training images are not here to measure its statistics.
        TrainingError: `out` holds something already.
    """
    # Runs of one network, related by their weights: whatever has no mean is refused before anything is written.
    if len(folders) < 2:
        raise RecipeError(f"{len(folders)} run to average; name two or more, as in: torchcaps average runs/a runs/b")
    checkpoints = [find_checkpoint(folder) for folder in folders]
    runs = [run_of(checkpoint) for checkpoint in checkpoints]  # all of it is checked before anything is written
    _check_related(runs, folders)
    last = runs[-1].recipe
    for run, folder in zip(runs, folders, strict=True):
        if run.recipe.model != last.model or run.model.spec != runs[-1].model.spec:
            raise RecipeError(
                f"'{folder}' is a run of another network than '{folders[-1]}'; only equal ones have a mean"
            )
    # The recipe of the mean is the last run's, under another name.
    about = f"The mean of the weights of {', '.join(run.recipe.name for run in runs)}."
    recipe = replace(last, name=name or f"{last.name}-mean", about=about)

    # The weights alone: what the optimizers knew has no mean.
    weights = [strip_to_weights(checkpoint) for checkpoint in checkpoints]
    # The mean has taken as many steps as the run that took the most.
    longest = max(weights, key=lambda one: one.meta.step)
    mean = replace(longest, tensors=_mean([one.tensors for one in weights])).with_recipe(recipe)
    target = open_run(out, recipe, resume=False)
    if has_running_statistics(runs[-1].model):
        mean = _with_measured_statistics(mean)
    with target.lock():
        target.write_recipe()
        target.save(mean)
    return recipe


def _with_measured_statistics(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with running statistics of its own weights, measured on the training images."""
    recipe = checkpoint.meta.recipe
    model = run_of(checkpoint).model
    data = recipe.data.load().train
    settings = stage_of(recipe, checkpoint.meta.stage).train
    batches = training_batches(data, settings, recipe.seed)
    total = len(data) // settings.batch
    with flushed_denormals():
        measure_running_statistics(model, progress(batches, "measuring running statistics", total=total))
    # The same names as before, with the model's tensors.
    state = {f"state.model.{name}": value for name, value in model.state_dict().items()}
    return replace(checkpoint, tensors={name: state[name] for name in checkpoint.tensors})


def _check_related(runs: Sequence[TrainedRun], folders: Sequence[Path]) -> None:
    """Each run counts once, and all but one of them started from another's weights."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecipeError("a run is named twice; each counts once in a mean")
    fresh = [str(folder) for run, folder in zip(runs, folders, strict=True) if run.recipe.start is None]
    if len(fresh) > 1:
        raise RecipeError(
            f"'{fresh[0]}' and '{fresh[1]}' each began with weights of their own, whose mean is nothing; name "
            "runs that started from one another (--start)"
        )


def _mean(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of every tensor of the state; those of whole numbers, which count something, are the last one's."""
    return {
        # In double precision, so that the mean is rounded once.
        name: torch.stack([one[name].double() for one in several]).mean(0).to(tensor)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in several[-1].items()
        if name.startswith("state.")
    }
