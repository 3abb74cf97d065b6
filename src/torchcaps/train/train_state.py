"""The state of a training: what a step changes and a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchcaps.config import Table
from torchcaps.errors import CheckpointError, DataError, TorchcapsError, TrainingError
from torchcaps.models import Model
from torchcaps.train.checkpoint import Checkpoint, CheckpointMeta, DataFingerprints
from torchcaps.train.model_sizes import check_memory, check_stored, model_outline
from torchcaps.train.recipe import Recipe, TrainConfig, stage_names, stage_of
from torchcaps.train.state_packing import pack_state, unpack_state
from torchcaps.train.weight_average import WeightAverage
from torchcaps.types import ImageSpec
from torchcaps.utils.notices import notice
from torchcaps.utils.random import seed_of

__all__ = [
    "TrainState",
    "build_model",
    "build_training",
    "check_sizes",
    "flushed_denormals",
    "keep_past_epochs",
    "load_weights",
    "restore_training",
    "shrink_batches",
    "stage_seed",
    "start_stage",
]


@dataclass
class TrainState:
    """All that changes as a run goes on, and so all that a checkpoint holds.

    Attributes:
        model: The whole model.
        stages: Its stages in the order of training.
        stage: The name of the stage that is being trained.
        images: The number of training images, on which the length of a schedule depends.
        optimizer: None for a stage that does not learn by gradients.
        schedule: None if the learning rate is constant.
        step: The number of steps of this stage so far.
        steps_before: The number of steps of the stages before it.
        seconds: How long the whole run has taken so far.
        finished: True if the stage's `finish` has been called.
        stopped_early: True if the stage ended because the validation accuracy reached `train.stop_at`.
        fingerprints: Name the images of the run.
        average: The moving average of the weights, if `train.ema_decay` asks for one.
    """

    model: Model
    stages: Mapping[str, Model]
    stage: str
    images: int
    optimizer: Optimizer | None
    schedule: LRScheduler | None
    step: int = 0
    steps_before: int = 0
    seconds: float = 0.0
    finished: bool = False
    stopped_early: bool = False
    fingerprints: DataFingerprints = field(default_factory=DataFingerprints)
    average: WeightAverage | None = None

    @property
    def result(self) -> Model:
        """The model that is evaluated: the average of the weights if there is one, else the model itself."""
        return self.average.model if self.average else self.model

    @property
    def stage_model(self) -> Model:
        """The stage that is being trained."""
        return self.stages[self.stage]

    @property
    def stage_index(self) -> int:
        """The stage's place among the stages, from 0."""
        return list(self.stages).index(self.stage)

    @property
    def is_last(self) -> bool:
        """True in the stage after which there is none."""
        return self.stage_index == len(self.stages) - 1

    @property
    def label(self) -> str | None:
        """The stage's name where there is more than one."""
        return self.stage if len(self.stages) > 1 else None

    @property
    def steps(self) -> int:
        """The steps of the whole run so far."""
        return self.steps_before + self.step

    def checkpoint(self, recipe: Recipe) -> Checkpoint:
        """Whole model, its average, optimizer, schedule, position; the recipe and image shape they belong to."""
        # What torch calls a state is nested; the file holds flat tensors and a skeleton.
        state = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "schedule": self.schedule.state_dict() if self.schedule else None,
        }
        if self.average:
            # Running statistics that were measured for the end of training stay; before it they are the model's own.
            if not self.finished:
                self.average.copy_buffers()
            state["average"] = dict(self.average.model.state_dict())
        tensors, skeleton = pack_state(state, "state")
        meta = CheckpointMeta(
            recipe=recipe,
            spec=self.model.spec,
            stage=self.stage,
            step=self.steps,
            steps_before=self.steps_before,
            seconds=self.seconds,
            finished=self.finished,
            stopped_early=self.stopped_early,
            threads=torch.get_num_threads(),
            data_fingerprint=self.fingerprints.train,
            validation_fingerprint=self.fingerprints.validation,
            test_fingerprint=self.fingerprints.test,
        )
        return Checkpoint(tensors, meta, skeleton)

    def next_stage(self, recipe: Recipe, stage: str) -> TrainState:
        """Start another stage with the weights, steps and seconds of this one."""
        following = start_stage(recipe, self.model, self.stages, stage, self.images)
        following.steps_before = self.steps
        following.seconds = self.seconds
        following.fingerprints = self.fingerprints
        return following

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to where a checkpoint of the same recipe was made in this stage."""
        meta = checkpoint.meta
        # Weights, optimizer, schedule.
        self.model.load_state_dict(_unpack_entry(checkpoint, "model"))
        if self.average and not meta.weights_only:
            self.average.model.load_state_dict(_unpack_entry(checkpoint, "average"))
        if self.optimizer:
            if meta.weights_only:
                raise ValueError("it holds weights alone; to train further, start another run from it (--start)")
            self.optimizer.load_state_dict(_unpack_entry(checkpoint, "optimizer"))
            _lay_out_like_parameters(self.optimizer)
        if self.schedule:
            self.schedule.load_state_dict(_unpack_entry(checkpoint, "schedule"))
        # Position; the file counts the steps of all stages together.
        self.steps_before = meta.steps_before
        self.step = meta.step - meta.steps_before
        self.seconds = meta.seconds
        self.finished = meta.finished
        self.stopped_early = meta.stopped_early

    def eval_all(self) -> None:
        """Put the whole model, and whatever its stages hold besides, into evaluation mode."""
        for module in (self.model, *self.stages.values()):
            module.eval()

    def check_weights(self) -> None:
        """A step with a finite loss can still leave weights that are not; such ones are never saved."""
        if not all(bool(torch.isfinite(x).all()) for x in (*self.model.parameters(), *self.model.buffers())):
            raise self.diverged("the weights are not finite")

    def diverged(self, what: str) -> TrainingError:
        """The error that ends a training whose numbers are no longer numbers."""
        where = f" (stage '{self.stage}')" if self.label else ""
        return TrainingError(
            f"{what} at step {self.steps}{where}; the last checkpoint is from before: "
            "lower optimizer.lr or set train.clip, and start anew"
        )


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers below the smallest normal one count as 0: squash makes many near 0, and CPUs take ten times as long with
    them. It holds for this thread and for worker threads started inside; those that run already keep their own way."""
    # torch has no way to ask: the smallest denormal number, times 1, is 0 if they are flushed.
    before = float(torch.tensor(5e-324, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def build_model(recipe: Recipe, spec: ImageSpec, device: torch.device | None = None) -> Model:
    """Build the recipe's model with its initial weights, which are a function of the recipe's seed.

    Args:
        recipe: Which model, and in which memory layout its stages are trained.
        spec: The shape of the images and the number of classes.
        device: Where the model is moved to; the CPU by default.
    """
    # Initial weights depend on the recipe's seed alone, and the caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, 0))
        model = recipe.model.build(spec)
    model.recipe = recipe
    model.to(device)
    # Configuration and model must agree: recipes name stages before any model is built.
    stages = model.stages()
    names = stage_names(recipe.model)
    if tuple(stages) != names:
        raise TypeError(f"{type(model).__name__}.stages() are {tuple(stages)}, its configuration's STAGES {names}")
    # Memory layout, before optimizers copy it for their moments.
    for name, stage in stages.items():
        if stage_of(recipe, name).train.channels_last:
            _lay_out_channels_last(stage)
    return model


def shrink_batches(recipe: Recipe, images: int, processes: int = 1) -> Recipe:
    """Return a recipe none of whose batches is larger than the number of training images; a change is said aloud.

    Args:
        recipe: The recipe.
        images: The number of training images.
        processes: The number of processes, each of which takes at least one image or micro-batch.

    Raises:
        DataError: if there are fewer images than processes.
    """

    def shrunk(train: TrainConfig) -> TrainConfig:
        unit = train.micro_batch or 1
        largest = images // unit * unit
        if largest < processes * unit:
            needed = f"{train.micro_batch} for each of" if train.micro_batch else "the"
            raise DataError(
                f"{images} training images are fewer than {needed} {processes} processes; use fewer processes"
            )
        return train if train.batch <= largest else replace(train, batch=largest)

    # The recipe's own settings are those of every stage that has none.
    own = any(name not in recipe.stages for name in stage_names(recipe.model))
    before = {"": recipe.train} if own else {}
    before |= {f"stages.{name}.": stage.train for name, stage in recipe.stages.items()}
    after = {where: shrunk(train) for where, train in before.items()}
    # One line for all stages: they train on the same images.
    changed = [where for where in before if after[where] != before[where]]
    if changed:
        given = ", ".join(f"{where}train.batch = {before[where].batch}" for where in changed)
        used = " and ".join(str(size) for size in sorted({after[where].batch for where in changed}))
        verb = "is" if len(changed) == 1 else "are"
        notice(f"{given} {verb} more than the {images} training images; {used} is used")
    stages = {name: replace(stage, train=after[f"stages.{name}."]) for name, stage in recipe.stages.items()}
    return replace(recipe, train=after.get("", recipe.train), stages=stages)


def build_training(recipe: Recipe, spec: ImageSpec, images: int, device: torch.device | None = None) -> TrainState:
    """Build a fresh model at the start of its first stage; `images` is the number of training images."""
    check_memory(model_outline(recipe, spec), device or torch.device("cpu"))
    model = build_model(recipe, spec, device)
    stages = model.stages()
    return start_stage(recipe, model, stages, next(iter(stages)), images)


def start_stage(recipe: Recipe, model: Model, stages: Mapping[str, Model], stage: str, images: int) -> TrainState:
    """Start a stage: its own optimizer over its own parameters, and a schedule as long as its epochs."""
    settings = stage_of(recipe, stage)
    optimizer = None
    schedule = None
    if stages[stage].by_gradient:
        optimizer = settings.optimizer.build(stages[stage].parameters())
        schedule = settings.schedule.build(optimizer, settings.train.steps(images))
    decay = settings.train.ema_decay
    average = None if decay is None else WeightAverage(model, decay)
    return TrainState(model, stages, stage, images, optimizer, schedule, average=average)


def restore_training(training: TrainState, recipe: Recipe, checkpoint: Checkpoint) -> TrainState:
    """Go to where a checkpoint of the same recipe was made, in whichever stage; the model of `training` is filled."""
    with _refusing_foreign():
        restored = start_stage(recipe, training.model, training.stages, checkpoint.meta.stage, training.images)
        restored.restore(checkpoint)
    restored.fingerprints = training.fingerprints
    return restored


def keep_past_epochs(training: TrainState, before: Recipe, after: Recipe) -> Recipe:
    """Return the recipe to go on by, with the epochs that stages which are over have had, and say what is changed.

    Args:
        training: Where the run stands.
        before: Its recipe so far.
        after: The recipe that was asked for.
    """
    for index, name in enumerate(list(training.stages)[: training.stage_index + 1]):
        stage = stage_of(after, name)
        epochs = stage_of(before, name).train.epochs
        is_over = index < training.stage_index or training.finished
        if not is_over or stage.train.epochs == epochs:
            continue
        # The last stage may go on after its end
        is_present = index == training.stage_index
        goes_on = is_present and training.is_last and not training.stopped_early
        if goes_on and stage.train.steps(training.images) > training.step:
            notice(f"the run was finished after {epochs:g} epochs; it goes on to {stage.train.epochs:g}")
            continue
        kept = replace(stage.train, epochs=epochs)
        if len(training.stages) == 1:
            after = replace(after, train=kept)
        else:
            after = replace(after, stages={**after.stages, name: replace(stage, train=kept)})
        where = f"stage '{name}'" if training.label else "the run"
        notice(
            f"{where} is over after {epochs:g} epochs, which stay in its recipe; {stage.train.epochs:g} are not trained"
        )
    return after


def check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose recipe asks for other tensors than it holds, before anything is allocated for them.

    Raises:
        CheckpointError: It does, or its recipe cannot be built at all.
    """
    meta = checkpoint.meta
    try:
        outline = model_outline(meta.recipe, meta.image_spec)
    except TorchcapsError as error:
        raise CheckpointError(f"the recipe in the checkpoint cannot be built: {error}") from None
    with _refusing_foreign():
        stored = _unpack_entry(checkpoint, "model")
    check_stored(outline, stored)


def load_weights(model: Model, checkpoint: Checkpoint) -> None:
    """Fill a model with the weights of a checkpoint to evaluate it: their moving average if there is one.

    The state of the optimizer is not read.
    """
    skeleton = checkpoint.state
    averaged = isinstance(skeleton, Mapping) and skeleton.get("average") is not None
    with _refusing_foreign():
        model.load_state_dict(_unpack_entry(checkpoint, "average" if averaged else "model"))


def _unpack_entry(checkpoint: Checkpoint, name: str) -> Table:
    """Return the state of the model, the optimizer or the schedule out of a checkpoint."""
    skeleton = checkpoint.state
    if not isinstance(skeleton, Mapping) or skeleton.get(name) is None:
        raise ValueError(f"it holds no state of the {name}")
    state = unpack_state(skeleton[name], checkpoint.tensors)
    if not isinstance(state, dict):
        raise ValueError(f"the state of the {name} is a {type(state).__name__}")
    return state


@contextmanager
def _refusing_foreign() -> Iterator[None]:
    """Turn what torch raises for a state that does not fit into one line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        # torch lists every key that does not fit; the first ones are enough for a line.
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the checkpoint belongs to another kind of run: {reason}") from None


def stage_seed(seed: int, number: int) -> int:
    """What everything random in a stage is seeded by: the recipe's own seed in the first, hashes of it after that."""
    return seed if number == 0 else seed_of(seed, 2, number)


def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Moments come from a file in rows; fused optimizers read them in the memory order of their parameter."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()


def _lay_out_channels_last(model: nn.Module) -> None:
    """Convolution filters in the layout that runs fastest on CPUs; capsule weights, also of four axes, stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
