"""The training loop, in the open.

Nothing here knows what is trained: a model states a scalar, the loop lowers it. Every step is a function of the recipe
and of its own number alone (order, augmentation and dropout are seeded by it), so that a run cut off at any moment and
resumed ends with the very weights of one that was not. A model that is trained in stages goes through them in turn, and
each ends with a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcaps.data import Dataset, Splits
from torchcaps.errors import DataError, RecipeError, TrainingError
from torchcaps.kernels.compilation import when_compiling
from torchcaps.models import Model
from torchcaps.train.batches import BatchRequest, BatchSource, DatasetSource
from torchcaps.train.checkpoint import DataFingerprints
from torchcaps.train.initial_weights import load_stage
from torchcaps.train.journal import Journal
from torchcaps.train.loss_watch import LossWatch
from torchcaps.train.model_sizes import refusing_lack_of_memory
from torchcaps.train.precision import check_precision
from torchcaps.train.recipe import BatchShare, Recipe, TrainConfig, stage_names, stage_of, with_absolute_path
from torchcaps.train.run import Resume, Run, open_run
from torchcaps.train.running_statistics import (
    has_running_statistics,
    measure_running_statistics,
    training_batches,
)
from torchcaps.train.start import agree_on_recipe, check_micro_batches, data_facts, locked_folder, starting_state
from torchcaps.train.train_state import (
    TrainState,
    build_training,
    flushed_denormals,
    shrink_batches,
    stage_seed,
)
from torchcaps.train.validation import (
    FinalScore,
    check_regularization,
    check_validation,
    final_images,
    final_score,
    validation_accuracy,
)
from torchcaps.types import Batch
from torchcaps.utils.distributed import ProcessGroup, process_group, weighting_means
from torchcaps.utils.progress import TrainingProgress
from torchcaps.utils.random import seed_of
from torchcaps.utils.signals import StopFlag, stop_signal

__all__ = ["Callback", "Outcome", "TrainingData", "train"]

_VALIDATION_BATCHES = 32
"""Training batches on which running statistics of averaged weights are measured before a validation."""
_JOURNAL_KEYS = {"step", "stage", "epoch", "lr", "seconds", "validation_accuracy"}
"""Names in a line of the journal, beside the terms of the loss."""


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when the loop returns, all stages together.

    Attributes:
        model: The model.
        step: The number of steps, of all stages.
        seconds: How long training took.
        finished: False if it was interrupted.
        test: How well a classifier that was trained to its end does on test images; None for others, and in processes
            that do not write.
    """

    model: Model
    step: int
    seconds: float
    finished: bool
    test: FinalScore | None = None


Callback = Callable[[Model, int], Mapping[str, float] | None]
"""Called after each epoch with the model, in evaluation mode, and the number of steps; its result is written down."""


class TrainingData(NamedTuple):
    """What a run is trained on, where a Python program gives it instead of the recipe.

    Attributes:
        source: Where batches come from.
        validation: Images to validate by, if there are any.
        test: Images to test on at the end, if there are any.
    """

    source: BatchSource
    validation: Dataset | None = None
    test: Dataset | None = None


class _Objective(nn.Module):
    """A stage's objective as a forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, stage: Model) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return self.stage.objective(batch, step)


@dataclass(frozen=True)
class _Job:
    """What stays the same from a run's first step to its last."""

    recipe: Recipe
    run: Run
    source: BatchSource
    validation: Dataset | None
    test: Dataset | None
    group: ProcessGroup
    stop: StopFlag
    journal: Journal | None
    quiet: bool
    callback: Callback | None = None


def train(
    recipe: Recipe | Callable[[], Recipe],
    folder: Path,
    *,
    resume: Resume = False,
    quiet: bool = False,
    tensorboard: bool = False,
    given: Mapping[str, nn.Module] = {},
    data: TrainingData | None = None,
    weights: nn.Module | None = None,
    callback: Callback | None = None,
) -> Outcome:
    """Train a recipe into a folder: `checkpoint.safetensors`, `journal.jsonl`, `recipe.json`.

    Ctrl-C and SIGTERM finish the step, save, and return with `finished=False`.

    Args:
        recipe: What is trained; or a function that reads it, which is called in process 0 alone.
        folder: Where the run is written; of several processes, only process 0 reads or writes there.
        resume: False refuses a folder that holds a run. True goes on from its last checkpoint (or from the start, if it
            has none yet) and refuses a folder without a run. "auto" goes on or starts, as the folder is.
        quiet: Show no progress bar.
        tensorboard: Also write TensorBoard events.
        given: Names of stages -> modules trained elsewhere. Such a stage takes over the module's state and is not
            trained. A run that is resumed before it has got past that stage must be given it again.
        data: What to train on instead of the recipe's data.
        weights: A model of the same kind whose weights a new run starts from.
        callback: Called after every epoch.

    Returns:
        The model and where the run stands.

    Raises:
        TorchcapsError: Something in the recipe, the data or the folder is wrong, or the loss is not finite.
    """
    with flushed_denormals(), refusing_lack_of_memory(), process_group() as group:
        # Process 0 decides what is trained; a process that would train something else is refused.
        recipe = with_absolute_path(agree_on_recipe(recipe, group))
        with group.raising_together():
            # Data, and whatever can be refused before anything is written.
            for name in stage_names(recipe.model):
                settings = stage_of(recipe, name).train
                settings.share(group.rank, group.size)
                check_precision(settings.precision, group.device)
            source, validation, test = data or _loaded(recipe.data.load())
            recipe = shrink_batches(recipe, source.images, group.size)

            # The model with its initial weights.
            training = build_training(recipe, source.spec, source.images, group.device)
            training.fingerprints = DataFingerprints(
                train=source.fingerprint(),
                validation=None if validation is None else validation.fingerprint(),
                test=None if test is None else test.fingerprint(),
            )
            check_validation(recipe, training.model, validation)
            check_regularization(recipe, training.model)
            check_micro_batches(recipe, training)
            # Refuse now what does not fit; each stage is filled again in its turn.
            load_stage(training.stages, given)
            # Only process 0 has or needs the folder.
            run = open_run(folder, recipe, resume=resume) if group.is_main else Run(folder, recipe)
        fingerprint = run.fingerprint if group.is_main else None
        group.check_same(data_facts(source, training.fingerprints.train))

        # The weights as the last checkpoint of this run or the run to start from left them.
        training, recipe, changed = starting_state(training, recipe, run, group, weights)
        run = replace(run, recipe=recipe)
        group.check_same({"the stage": training.stage, "the step": training.steps})

        # The steps, with the folder locked.
        with (
            locked_folder(run, group, fingerprint),
            stop_signal() as stop,
            run.journal(training.steps, tensorboard, write=group.is_main) as journal,
        ):
            job = _Job(recipe, run, source, validation, test, group, stop, journal, quiet, callback)
            # A run that is finished takes no step that would store what was changed
            if changed:
                _save(job, training)
            return _all_stages(job, training, given)


def _loaded(splits: Splits) -> TrainingData:
    """Return the data of a recipe; of the test images, only those that are looked at in the end are kept."""
    return TrainingData(DatasetSource(splits.train), splits.validation, final_images(splits.test))


def _all_stages(job: _Job, training: TrainState, given: Mapping[str, nn.Module]) -> Outcome:
    """From the stage that training stands in to the last, unless it is interrupted on the way."""
    # Stages before the current one are complete: their weights came with the checkpoint.
    for name in list(training.stages)[training.stage_index :]:
        if name != training.stage:
            training = training.next_stage(job.recipe, name)
        # A stage that was trained elsewhere is filled and saved as if it had been.
        if name in given and not training.finished:
            load_stage(training.stages, {name: given[name]})
            training.finished = True
            _save(job, training)
        else:
            _one_stage(job, training)
        # A signal that came while a stage ended stops the run before the next one.
        if not training.finished or job.group.any(job.stop.is_set):
            break
    finished = training.finished and training.is_last
    model = training.result
    is_tested = finished and job.group.is_main and model.is_classifier and job.test is not None
    test = final_score(model.eval(), job.test, job.group.device) if is_tested and job.test is not None else None
    return Outcome(model, training.steps, training.seconds, finished, test)


def _one_stage(job: _Job, training: TrainState) -> None:
    """Train from the step that the stage stands at to its end, or until a signal asks to stop.

    A stage ends with its epochs, or at a validation that finds the accuracy asked for.
    """
    # Settings of this stage, and how far it is.
    group = job.group
    seed = stage_seed(job.recipe.seed, training.stage_index)
    settings = stage_of(job.recipe, training.stage).train
    total = settings.steps(job.source.images)
    per_epoch = max(1, job.source.images // settings.batch)
    ends = training.step >= total
    stopped = False
    # A finished stage is entered again only if it is the last one and its epochs were raised.
    if training.finished and (ends or training.stopped_early or not training.is_last):
        return
    training.finished = False
    # Time of earlier sessions counts, so the clock starts in the past.
    started = time.monotonic() - training.seconds
    # Order and augmentation are functions of seed and step, so that a resumed run gets the same batches.
    pixels = training.stage_model.uses_images
    request = BatchRequest(settings, seed, group, first=training.step, total=total, pixels=pixels)
    share = _share(job, settings)
    watch = LossWatch(training.label)
    with (
        _display(job, training, settings.batch, total) as display,
        when_compiling(display.compiling),
        job.source.stream(request) as next_batch,
        weighting_means(share.weight),
    ):
        # Preparation may take long, so the speed that is displayed counts only after it.
        objective = _prepare(job, training, seed)
        display.restart()
        while not ends and not stopped:
            epoch, batch = next_batch()
            batches = _micro_batches(job, training, seed, batch, share)

            # Update: forward, backward, clip, optimizer, schedule.
            terms = _step(settings, objective, training, batches, share)
            training.step += 1
            training.seconds = time.monotonic() - started

            # Validation, and whether this step is the last one.
            checked = _check(job, training, settings, seed) if settings.validates_at(training.step) else {}
            if job.callback is not None and training.step % per_epoch == 0:
                checked |= _call_back(job.callback, training, taken=terms.keys() | _JOURNAL_KEYS)
            logs = training.step % settings.log_every == 0
            ends = training.step >= total or training.stopped_early
            # Asking all processes costs a message, so several of them ask only when they log.
            stopped = (logs or group.size == 1) and group.any(job.stop.is_set)
            saves = training.step % settings.save_every == 0 or stopped

            # Journal, progress bar, checkpoint.
            if logs or saves or ends or checked:
                values = _report(terms, training, group) | checked
                watch.see(training.step, values["loss"])
                display.update(training.step, values, is_last=ends)
                _write_down(job.journal, training, values, epoch)
            if saves and not ends:
                _save(job, training)
        # The end of the stage: its conclusions, and its last checkpoint.
        if ends:
            _finish(job, training, seed)
            training.seconds = time.monotonic() - started
            _save(job, training)


def _share(job: _Job, settings: TrainConfig) -> BatchShare:
    """Which images of every batch this process takes; batches of a loader are its own, and count as those of others."""
    share = settings.share(job.group.rank, job.group.size)
    return share if job.source.dataset is not None else share._replace(weight=1.0)


def _display(job: _Job, training: TrainState, batch: int, total: int) -> TrainingProgress:
    name = f"{job.recipe.name}: {training.stage}" if training.label else job.recipe.name
    return TrainingProgress(name, total, training.step, batch, quiet=job.quiet or not job.group.is_main)


def _prepare(job: _Job, training: TrainState, seed: int) -> nn.Module:
    """Let the stage look at all images; its objective, ready for steps, with all outside the stage at rest."""
    # All in evaluation mode, of which only the stage leaves below; all processes start with the weights of process 0.
    training.eval_all()
    job.group.broadcast(training.model)
    if training.average:
        job.group.broadcast(training.average.model)
    # The second argument tells purposes apart: 1 a step, 3 this preparation, 4 the finish, 5 a validation, 6 running
    # statistics for one.
    torch.manual_seed(seed_of(seed, 3))
    with torch.no_grad():
        if job.source.dataset is not None:
            training.stage_model.prepare(job.source.dataset.cropped)
        elif type(training.stage_model).prepare is not Model.prepare:
            kind = type(training.stage_model).__name__
            raise DataError(f"{kind} looks at all images before its first step; give tensors or a Dataset, not batches")
    objective = _Objective(training.stage_model.train())
    # DistributedDataParallel averages gradients; without an optimizer there are none.
    return job.group.wrap(objective) if training.optimizer else objective


def _finish(job: _Job, training: TrainState, seed: int) -> None:
    """Let the stage draw its conclusions, from the average of its weights, too, if there is one."""
    training.eval_all()
    torch.manual_seed(seed_of(seed, 4))
    with torch.no_grad():
        training.stage_model.finish()
        if training.average:
            _complete_average(job, training, seed, count=None)
            training.average.model.finish()
    training.finished = True


def _complete_average(job: _Job, training: TrainState, seed: int, count: int | None) -> None:
    """Make the average of the weights ready for evaluation: buffers, and running statistics of its own.

    All processes must call it: they measure statistics together.

    Args:
        job: What is trained on.
        training: Whose average it is.
        seed: Seed of the stage.
        count: The number of training batches that statistics are measured on; None for one pass over all of them.
    """
    average = training.average
    assert average is not None, "only called where weights are averaged"
    average.copy_buffers()
    if not has_running_statistics(average.model):
        return
    if job.source.dataset is None:
        raise RecipeError("train.ema_decay of batch normalization goes through all images; give tensors or a Dataset")
    settings = stage_of(job.recipe, training.stage).train
    batches = training_batches(job.source.dataset, settings, seed, count=count, group=job.group)
    moved = (_to(batch, job.group.device, settings.channels_last) for batch in batches)
    measure_running_statistics(average.model, moved)


def _micro_batches(job: _Job, training: TrainState, seed: int, batch: Batch, share: BatchShare) -> Iterator[Batch]:
    """Yield the parts of this process's share of a batch, one unless `train.micro_batch` is set.

    Random numbers of a part depend on its number in the whole batch, so that they are the same on any number of
    processes.
    """
    settings = stage_of(job.recipe, training.stage).train
    rows = torch.arange(len(batch.labels)).tensor_split(share.parts)
    for number, some in enumerate(rows, share.first_part):
        part = _rows(batch, some) if share.parts > 1 else batch
        torch.manual_seed(seed_of(seed, 1, training.step, number))
        yield _to(part, job.group.device, settings.channels_last)


def _step(
    settings: TrainConfig, objective: nn.Module, training: TrainState, batches: Iterable[Batch], share: BatchShare
) -> dict[str, Tensor]:
    """One update, of parameters by the optimizer or of buffers by the objective itself."""
    optimizer = training.optimizer
    if optimizer:
        optimizer.zero_grad(set_to_none=True)
    results: list[dict[str, Tensor]] = []
    for number, batch in enumerate(batches):
        # Gradients of the parts add up; processes exchange them once, with the last part.
        is_last = number == share.parts - 1
        with nullcontext() if is_last or not isinstance(objective, DistributedDataParallel) else objective.no_sync():
            # Forward pass; a stage without an optimizer updates its own buffers here.
            with (
                torch.autocast(batch.images.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"),
                torch.set_grad_enabled(optimizer is not None),
            ):
                terms: dict[str, Tensor] = objective(batch, training.step)
            # Backward pass outside of autocast, as torch advises.
            if optimizer:
                # The mean over processes and parts is that of the images of the batch
                scale = share.weight / share.parts
                torch.autograd.backward(terms["loss"] * scale if scale != 1 else terms["loss"])
        results.append({name: value.detach() for name, value in terms.items()})
    if optimizer:
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(training.stage_model.parameters(), settings.clip)
        optimizer.step()
    if training.average:
        training.average.update(training.step)
    if training.schedule:
        training.schedule.step()
    return {name: torch.stack([one[name] for one in results]).mean(0) for name in results[0]}


def _check(job: _Job, training: TrainState, settings: TrainConfig, seed: int) -> dict[str, float]:
    """The validation accuracy of process 0, which alone measures it; all hear whether it is what training stops at."""
    found = 0.0
    if training.average:
        torch.manual_seed(seed_of(seed, 6, training.step))
        _complete_average(job, training, seed, count=_VALIDATION_BATCHES)
    if job.group.is_main and job.validation is not None:
        training.eval_all()
        torch.manual_seed(seed_of(seed, 5, training.step))
        found = validation_accuracy(training.result, job.validation, job.group.device)
        training.stage_model.train()
    training.stopped_early = job.group.any(settings.stop_at is not None and found >= settings.stop_at)
    return {"validation_accuracy": found}


def _call_back(callback: Callback, training: TrainState, taken: Set[str]) -> dict[str, float]:
    """Let the user measure the model, which is then as it was.

    Args:
        callback: What measures it.
        training: Whose model it is.
        taken: Names that the journal has already.

    Raises:
        TrainingError: It returned something other than numbers by name.
    """
    training.eval_all()
    with torch.no_grad():
        found = callback(training.model, training.steps)
    training.stage_model.train()
    if found is None:
        return {}
    try:
        numbers = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        shown = " ".join(repr(found).split())[:60]
        raise TrainingError(f"the callback returned {shown}; numbers by name, or None, are wanted") from None
    for name in sorted(numbers.keys() & taken):
        raise TrainingError(f"the callback returned {name!r}, which the journal has already; choose another name")
    return numbers


def _save(job: _Job, training: TrainState) -> None:
    if job.group.is_main:
        training.check_weights()
        job.run.save(training.checkpoint(job.run.recipe))


def _rows(batch: Batch, rows: Tensor) -> Batch:
    components = None if batch.components is None else batch.components[rows]
    shares = None if batch.shares is None else batch.shares[rows]
    return Batch(batch.images[rows], batch.labels[rows], batch.indices[rows], components, shares)


def _to(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    # Images in the layout of the convolution filters, which `build_model` chose by the same setting.
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = batch.images.to(device, non_blocking=True, memory_format=layout)
    components = None if batch.components is None else batch.components.to(device)
    shares = None if batch.shares is None else batch.shares.to(device)
    return Batch(images, batch.labels.to(device), batch.indices, components, shares)


def _report(terms: dict[str, Tensor], training: TrainState, group: ProcessGroup) -> dict[str, float]:
    """The terms of the loss, averaged over the processes; training ends here if the loss is not a finite number."""
    # Stacked, so that the processes exchange one message for all terms.
    means = group.mean(torch.stack([value.detach().float() for value in terms.values()]))
    values = dict(zip(terms, means.tolist(), strict=True))
    if not math.isfinite(values["loss"]):
        raise training.diverged(f"the loss is {values['loss']}")
    return values


def _write_down(journal: Journal | None, training: TrainState, values: dict[str, float], epoch: int) -> None:
    if journal:
        rate = {"lr": float(training.optimizer.param_groups[0]["lr"])} if training.optimizer else {}
        entry = {"epoch": epoch, **values, **rate, "seconds": training.seconds}
        journal.write(training.steps, entry, training.label)
