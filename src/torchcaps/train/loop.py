"""The training loop, in the open.

Nothing here knows what is trained: a model states a scalar, the loop lowers it. Every step is a function of the recipe
and of its own number alone (order, augmentation and dropout are seeded by it), so that a run cut off at any moment and
resumed ends with the very weights of one that was not. A model that is trained in stages goes through them in turn, and
each ends with a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.config import to_dict
from torchcaps.data import Dataset, epoch_order, place_of, take
from torchcaps.errors import TorchcapsError, TrainingError
from torchcaps.models import Model
from torchcaps.train.journal import Journal
from torchcaps.train.recipe import Loop, Recipe, stage_names, stage_of
from torchcaps.train.run import Run, load_run, open_run
from torchcaps.train.train_state import (
    Training,
    begin,
    flushed_denormals,
    go_on_from,
    resumed,
    set_up,
    stage_seed,
    take_over,
)
from torchcaps.train.validation import check_validation, validation_accuracy
from torchcaps.types import Batch
from torchcaps.utils.process_group import Team, team
from torchcaps.utils.progress import Display
from torchcaps.utils.random import seed_of
from torchcaps.utils.signals import Flag, stop_signal

__all__ = ["Outcome", "total_steps", "train"]


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when the loop returns, all stages together; `finished` is false if it was interrupted."""

    model: Model
    step: int
    seconds: float
    finished: bool


class _Objective(nn.Module):
    """A stage's objective as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, part: Model) -> None:
        super().__init__()
        self.part = part

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return self.part.objective(batch, step)


@dataclass(frozen=True)
class _Job:
    """What stays the same from a run's first step to its last."""

    recipe: Recipe
    run: Run
    data: Dataset
    validation: Dataset | None
    crew: Team
    stop: Flag
    journal: Journal | None
    quiet: bool


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    tensorboard: bool = False,
    given: Mapping[str, nn.Module] = {},
) -> Outcome:
    """Train a recipe into a folder: `checkpoint.safetensors`, `journal.jsonl`, `recipe.json`.

    A folder that holds a run is refused unless `resume`, which goes on from its last checkpoint (or from the start,
    if it has none yet). Ctrl-C and SIGTERM finish the step, save, and return with `finished=False`.

    `given` maps names of stages to modules trained elsewhere: such a stage takes over the module's state and is not
    trained. A run that is resumed before it has got past that stage must be given it again.
    """
    with flushed_denormals(), team() as crew:
        batches = [stage_of(recipe, name).train.batch for name in stage_names(recipe.model)]
        for batch in batches:
            crew.check_batch(batch)
        data, _, validation = recipe.data.load()
        del _  # memory that training has no use for
        for batch in batches:
            place_of(0, len(data), batch)  # refuses a batch larger than the set
        training = set_up(recipe, data.spec, crew.device)
        check_validation(recipe, training.model, validation)
        take_over(training.parts, given)
        run = _open(folder, recipe, resume, crew)
        stamp = run.stamp
        if run.has_checkpoint:
            training = resumed(training, recipe, run.checkpoint())
        elif recipe.start is not None:
            before = load_run(recipe.start)
            go_on_from(training, before.model, steps=before.step, seconds=before.seconds)
        crew.agree(None)  # nobody writes before all have read
        with (
            _claimed(run, crew, stamp),
            stop_signal() as stop,
            run.journal(training.steps, tensorboard, write=crew.leads) as journal,
        ):
            return _all_stages(_Job(recipe, run, data, validation, crew, stop, journal, quiet), training, given)


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


@contextmanager
def _claimed(run: Run, crew: Team, stamp: tuple[int, int] | None) -> Iterator[None]:
    """Process 0 keeps other trainings out of the folder and writes the recipe; if it cannot, nobody goes on.

    Nor if another training has been there since the checkpoint, of that stamp, was read.
    """
    with ExitStack() as stack:
        error = None
        if crew.leads:
            try:
                stack.enter_context(run.claim())
                if run.stamp != stamp:
                    raise TrainingError(f"another process has just trained into '{run.folder}'; try again")
                run.write_recipe()
            except TorchcapsError as caught:
                error = caught
        crew.agree(error)
        yield


def total_steps(recipe: Recipe, images: int) -> int:
    """How many steps the recipe's epochs are, over all stages."""
    return sum(_steps(stage_of(recipe, name).train, images) for name in stage_names(recipe.model))


def _steps(settings: Loop, images: int) -> int:
    return max(1, round(settings.epochs * (images // settings.batch)))


def _all_stages(job: _Job, training: Training, given: Mapping[str, nn.Module]) -> Outcome:
    """From the stage that training stands in to the last, unless it is interrupted on the way."""
    for name in list(training.parts)[training.number :]:
        if name != training.stage:
            training = begin(
                job.recipe, training.model, training.parts, name, before=training.steps, seconds=training.seconds
            )
        if name in given and not training.finished:
            take_over(training.parts, {name: given[name]})
            training.finished = True
            _save(job, training)
        else:
            _one_stage(job, training)
        if not training.finished or job.crew.any(job.stop.is_set):
            break
    finished = training.finished and training.is_last
    return Outcome(training.model, training.steps, training.seconds, finished)


def _one_stage(job: _Job, training: Training) -> None:
    """From the step that the stage stands at to its end, or until somebody asks to stop.

    It ends with its epochs, or at a check that finds the accuracy asked for.
    """
    crew, data, seed = job.crew, job.data, stage_seed(job.recipe.seed, training.number)
    settings = stage_of(job.recipe, training.stage).train
    total = _steps(settings, len(data))
    ends, stopped = training.step >= total, False
    if training.finished and (ends or training.reached or not training.is_last):
        return
    training.finished = False
    started = time.monotonic() - training.seconds
    with _display(job, training, settings.batch, total) as display:
        objective = _prepare(job, training, seed)
        display.restart()
        epoch, order = -1, torch.empty(0)
        while not ends and not stopped:
            place = place_of(training.step, len(data), settings.batch)
            if place.epoch != epoch:
                epoch, order = place.epoch, epoch_order(seed, place.epoch, len(data))
            batch = take(
                data, order, place, settings.batch, seed=seed, max_shift=settings.max_shift,
                part=crew.rank, parts=crew.size,
            )  # fmt: skip
            torch.manual_seed(seed_of(seed, 1, training.step, crew.rank))
            terms = _step(settings, objective, training, _to(batch, crew.device, settings.channels_last))
            training.step += 1
            training.seconds = time.monotonic() - started
            checked = _check(job, training, settings, seed) if settings.checks(training.step) else {}
            logs, ends = training.step % settings.log_every == 0, training.step >= total or training.reached
            stopped = (logs or crew.size == 1) and crew.any(job.stop.is_set)
            saves = training.step % settings.save_every == 0 or stopped
            if logs or saves or ends or checked:
                values = _report(terms, training, crew) | checked
                display.update(training.step, values, is_last=ends)
                _write_down(job.journal, training, values, place.epoch)
            if saves and not ends:
                _save(job, training)
        if ends:
            _finish(training, seed)
            training.seconds = time.monotonic() - started
            _save(job, training)


def _display(job: _Job, training: Training, batch: int, total: int) -> Display:
    name = f"{job.recipe.name}: {training.stage}" if training.label else job.recipe.name
    return Display(name, total, training.step, batch, quiet=job.quiet or not job.crew.leads)


def _prepare(job: _Job, training: Training, seed: int) -> nn.Module:
    """Let the stage look at all images; its objective, ready for steps, with all outside the stage at rest."""
    training.rest()
    job.crew.share(training.model)
    torch.manual_seed(seed_of(seed, 3))
    with torch.no_grad():
        training.part.prepare(job.data.seen)
    objective = _Objective(training.part.train())
    return job.crew.wrap(objective) if training.optimiser else objective


def _finish(training: Training, seed: int) -> None:
    """Let the stage draw its conclusions."""
    training.rest()
    torch.manual_seed(seed_of(seed, 4))
    with torch.no_grad():
        training.part.finish()
    training.finished = True


def _step(settings: Loop, objective: nn.Module, training: Training, batch: Batch) -> dict[str, Tensor]:
    """One update, of parameters by the optimiser or of buffers by the objective itself."""
    device, optimiser = batch.images.device.type, training.optimiser
    with (
        torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bfloat16"),
        torch.set_grad_enabled(optimiser is not None),
    ):
        terms: dict[str, Tensor] = objective(batch, training.step)
    if optimiser:
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(terms["loss"])
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(training.part.parameters(), settings.clip)
        optimiser.step()
    if training.schedule:
        training.schedule.step()
    return terms


def _check(job: _Job, training: Training, settings: Loop, seed: int) -> dict[str, float]:
    """The validation accuracy of process 0, which alone measures it; all hear whether it is what training stops at."""
    found = 0.0
    if job.crew.leads and job.validation is not None:
        training.rest()
        torch.manual_seed(seed_of(seed, 5, training.step))
        found = validation_accuracy(training.model, job.validation, job.crew.device)
        training.part.train()
    training.reached = job.crew.any(settings.stop_at is not None and found >= settings.stop_at)
    return {"validation_accuracy": found}


def _save(job: _Job, training: Training) -> None:
    if job.crew.leads:
        training.check_weights()
        job.run.save(training.checkpoint(job.run.recipe))


def _to(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = batch.images.to(device, non_blocking=True, memory_format=layout)
    parts = None if batch.parts is None else batch.parts.to(device)
    return Batch(images, batch.labels.to(device), batch.indices, parts)


def _report(terms: dict[str, Tensor], training: Training, crew: Team) -> dict[str, float]:
    """The terms of the loss, averaged over the team; training ends here if the loss is not a finite number."""
    means = crew.mean(torch.stack([value.detach().float() for value in terms.values()]))
    values = dict(zip(terms, means.tolist(), strict=True))
    if not math.isfinite(values["loss"]):
        raise training.diverged(f"the loss is {values['loss']}")
    return values


def _write_down(journal: Journal | None, training: Training, values: dict[str, float], epoch: int) -> None:
    if journal:
        rate = {"lr": float(training.optimiser.param_groups[0]["lr"])} if training.optimiser else {}
        entry = {"epoch": epoch, **values, **rate, "seconds": training.seconds}
        journal.write(training.steps, entry, training.label)
