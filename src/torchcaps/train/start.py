"""What comes before the first step of a run: processes agree on it, and its state, recipe and folder are made ready."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from torchcaps import __version__
from torchcaps.config import flatten, from_dict, to_dict
from torchcaps.errors import RecipeError, TorchcapsError, TrainingError
from torchcaps.train.batches import BatchSource
from torchcaps.train.checkpoint import decode, encode
from torchcaps.train.initial_weights import warm_start
from torchcaps.train.recipe import Recipe, stage_of
from torchcaps.train.run import Run, load_run
from torchcaps.train.train_state import TrainState, keep_past_epochs, restore_training
from torchcaps.utils.distributed import ProcessGroup

__all__ = ["Start", "agree_on_recipe", "check_micro_batches", "data_facts", "locked_folder", "starting_state"]


def agree_on_recipe(recipe: Recipe | Callable[[], Recipe], group: ProcessGroup) -> Recipe:
    """Return the recipe of process 0; a process with other settings or versions is refused, one without gets it."""
    own = recipe if isinstance(recipe, Recipe) else None
    with group.raising_together():
        if own is None and (group.is_main or group.size == 1):
            own = recipe()  # type: ignore[operator]
    sent = group.send(json.dumps(to_dict(own)).encode() if own is not None else b"")
    agreed = own or from_dict(Recipe, json.loads(sent))
    group.check_same({"the version of torchcaps": __version__, "that of torch": torch.__version__, **_shared(agreed)})
    return agreed


def _shared(recipe: Recipe) -> dict[str, object]:
    """Return the settings in which processes must agree: all that decide what a step does, and no paths."""
    settings = flatten(to_dict(recipe))
    own = ("about", "start", "data.data_dir", "data.path")
    return {key: value for key, value in settings.items() if key not in own and not key.startswith("paper.")}


def data_facts(source: BatchSource, fingerprint: str | None) -> dict[str, object]:
    """Return in which respects the training images must be the same in all processes."""
    facts: dict[str, object] = {"the number of training images": source.images, "their shape": list(source.spec)}
    return facts | {"the fingerprint of the data": fingerprint}


def check_micro_batches(recipe: Recipe, training: TrainState) -> None:
    """Refuse micro-batches where a step would not do the same as with the whole batch."""
    for name, stage in training.stages.items():
        whole = stage.needs_whole_batch or not stage.by_gradient
        if whole and stage_of(recipe, name).train.micro_batch is not None:
            raise RecipeError(
                f"train.micro_batch does not go with {type(stage).__name__}, which uses statistics of the whole batch; "
                "leave it out, and lower train.batch if memory is short"
            )


class Start(NamedTuple):
    """What a run goes on with.

    Attributes:
        training: The state.
        recipe: What is trained, with the epochs that are over as they were.
        changed: True if the checkpoint has another recipe.
    """

    training: TrainState
    recipe: Recipe
    changed: bool


def starting_state(
    training: TrainState, recipe: Recipe, run: Run, group: ProcessGroup, weights: nn.Module | None
) -> Start:
    """Let process 0 restore the last checkpoint or the run to start from, and give its whole state to the others.

    Args:
        training: The state with the initial weights.
        recipe: What is trained.
        run: Where its checkpoints are.
        group: The processes that train.
        weights: A model whose weights a new run starts from, None for the initial ones.
    """
    state = b""
    changed = False
    with group.raising_together():
        if group.is_main and run.has_checkpoint:
            checkpoint = run.checkpoint(training.fingerprints)
            training = restore_training(training, recipe, checkpoint)
            recipe = keep_past_epochs(training, checkpoint.meta.recipe, recipe)
            changed = recipe != checkpoint.meta.recipe
        elif group.is_main and recipe.start is not None:
            before = load_run(recipe.start)
            warm_start(training, before.model, steps=before.step, seconds=before.seconds)
        elif weights is not None:
            warm_start(training, weights, steps=0, seconds=0.0)
        if group.is_main and group.size > 1 and (run.has_checkpoint or recipe.start is not None):
            state = encode(training.checkpoint(recipe))
    state = group.send(state)
    # Nothing was sent where every process starts with the same weights, those of the seed.
    if state and not group.is_main:
        training = restore_training(training, recipe, decode(state))
    return Start(training, recipe, changed)


@contextmanager
def locked_folder(run: Run, group: ProcessGroup, fingerprint: tuple[int, int] | None) -> Iterator[None]:
    """Let process 0 keep other trainings out of the folder and write the recipe; if it cannot, nobody goes on.

    Nor does anybody if another training has written a checkpoint since the one of that fingerprint was read.
    """
    with ExitStack() as stack:
        error = None
        if group.is_main:
            try:
                stack.enter_context(run.lock())
                if run.fingerprint != fingerprint:
                    raise TrainingError(f"another process has just trained into '{run.folder}'; try again")
                run.write_recipe()
            except TorchcapsError as caught:
                error = caught
        group.raise_on_any(error)
        yield
