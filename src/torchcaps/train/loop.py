"""The training loop, in the open.

Nothing here knows what is trained: a model states a scalar, the loop lowers it. Every step is a function of the recipe
and of its own number alone (order, augmentation and dropout are seeded by it), so that a run cut off at any moment and
resumed ends with the very weights of one that was not.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.config import to_dict
from torchcaps.data import Dataset, epoch_order, place_of, take
from torchcaps.errors import TorchcapsError, TrainingError
from torchcaps.math.random import seed_of
from torchcaps.models import Model
from torchcaps.train.display import Display
from torchcaps.train.distributed import Team, team
from torchcaps.train.journal import Journal
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import Run, open_run
from torchcaps.train.stop import stop_signal
from torchcaps.train.training import Training, flushed_denormals, set_up
from torchcaps.types import Batch

__all__ = ["Outcome", "total_steps", "train"]


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when the loop returns; `finished` is false if it was interrupted."""

    model: Model
    step: int
    seconds: float
    finished: bool


class _Objective(nn.Module):
    """The model's objective as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return self.model.objective(batch, step)


def train(
    recipe: Recipe, folder: Path, *, resume: bool = False, quiet: bool = False, tensorboard: bool = False
) -> Outcome:
    """Train a recipe into a folder: `checkpoint.safetensors`, `journal.jsonl`, `recipe.json`.

    A folder that holds a run is refused unless `resume`, which goes on from its last checkpoint (or from the start,
    if it has none yet). Ctrl-C and SIGTERM finish the step, save, and return with `finished=False`.
    """
    with flushed_denormals(), team() as crew:
        crew.check_batch(recipe.train.batch)
        data = recipe.data.load().train
        place_of(0, len(data), recipe.train.batch)  # refuses a batch larger than the set
        training = set_up(recipe, data.spec, crew.device)
        run = _open(folder, recipe, resume, crew)
        if run.has_checkpoint:
            training.restore(run.checkpoint())
        if crew.leads:
            run.write_recipe()
        return _loop(recipe, run, data, training, crew, quiet=quiet, tensorboard=tensorboard)


def _open(folder: Path, recipe: Recipe, resume: bool, crew: Team) -> Run:
    """Process 0 looks at the folder and prepares it; the others start only when it has."""
    run, error = Run(folder, to_dict(recipe)), None
    if crew.leads:
        try:
            run = open_run(folder, recipe, resume=resume)
        except TorchcapsError as caught:
            error = caught
    crew.agree(error)
    return run


def total_steps(recipe: Recipe, images: int) -> int:
    """How many steps the recipe's epochs are."""
    return max(1, round(recipe.train.epochs * (images // recipe.train.batch)))


def _loop(
    recipe: Recipe, run: Run, data: Dataset, training: Training, crew: Team, *, quiet: bool, tensorboard: bool
) -> Outcome:
    settings, total = recipe.train, total_steps(recipe, len(data))
    objective = crew.wrap(_Objective(training.model.train()))
    display = Display(recipe.name, total, training.step, settings.batch, quiet=quiet or not crew.leads)
    started = time.monotonic() - training.seconds
    with stop_signal() as stop, run.journal(training.step, tensorboard, write=crew.leads) as journal, display:
        epoch, order = -1, torch.empty(0)
        stopped = False
        while training.step < total and not stopped:
            place = place_of(training.step, len(data), settings.batch)
            if place.epoch != epoch:
                epoch, order = place.epoch, epoch_order(recipe.seed, place.epoch, len(data))
            batch = take(
                data, order, place, settings.batch, seed=recipe.seed, max_shift=settings.max_shift,
                part=crew.rank, parts=crew.size,
            )  # fmt: skip
            terms = _step(recipe, objective, training, _to(batch, crew.device, settings.channels_last), crew.rank)
            training.step += 1
            training.seconds = time.monotonic() - started
            logs = training.step % settings.log_every == 0
            stopped = (logs or crew.size == 1) and crew.any(stop.is_set)
            saves = training.step % settings.save_every == 0 or training.step == total or stopped
            if logs or saves:
                values = _report(terms, training, crew)
                display.update(training.step, values["loss"])
                _write_down(journal, training, values, place.epoch)
            if saves and crew.leads:
                _check_weights(training)
                run.save(training.checkpoint(run.recipe))
    return Outcome(training.model, training.step, training.seconds, finished=training.step >= total)


def _step(recipe: Recipe, objective: nn.Module, training: Training, batch: Batch, rank: int) -> dict[str, Tensor]:
    """One update; dropout and other noise inside the model depend on (seed, step, rank) only."""
    torch.manual_seed(seed_of(recipe.seed, 1, training.step, rank))
    with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=recipe.train.precision == "bfloat16"):
        terms: dict[str, Tensor] = objective(batch, training.step)
    training.optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(terms["loss"])
    if recipe.train.clip is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), recipe.train.clip)
    training.optimiser.step()
    if training.schedule:
        training.schedule.step()
    return terms


def _to(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = batch.images.to(device, non_blocking=True, memory_format=layout)
    return Batch(images, batch.labels.to(device), batch.indices)


def _report(terms: dict[str, Tensor], training: Training, crew: Team) -> dict[str, float]:
    """The terms of the loss, averaged over the team; training ends here if the loss is not a finite number."""
    means = crew.mean(torch.stack([value.detach().float() for value in terms.values()]))
    values = dict(zip(terms, means.tolist(), strict=True))
    if not math.isfinite(values["loss"]):
        raise _diverged(f"the loss is {values['loss']}", training)
    return values


def _check_weights(training: Training) -> None:
    """A step with a finite loss can still leave weights that are not; such ones are never saved."""
    if not all(bool(torch.isfinite(p).all()) for p in training.model.parameters()):
        raise _diverged("the weights are not finite", training)


def _diverged(what: str, training: Training) -> TrainingError:
    return TrainingError(
        f"{what} at step {training.step}; the last checkpoint is from before: "
        "lower optimiser.lr or set train.clip, and start anew"
    )


def _write_down(journal: Journal | None, training: Training, values: dict[str, float], epoch: int) -> None:
    if journal:
        rate = training.optimiser.param_groups[0]["lr"]
        journal.write(training.step, {"epoch": epoch, **values, "lr": float(rate), "seconds": training.seconds})
