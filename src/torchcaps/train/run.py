"""A run is a folder: `recipe.json` (what was asked), `journal.jsonl` (how it went), `checkpoint.safetensors`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple, cast

from torch import Tensor

from torchcaps.config import Table, flatten, from_dict, to_dict
from torchcaps.errors import CheckpointError, TrainingError, suggestion
from torchcaps.models import Model
from torchcaps.train.checkpoint import Checkpoint, DataFingerprints
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.checkpoint import save as write_checkpoint
from torchcaps.train.journal import Journal
from torchcaps.train.recipe import Recipe, ScheduleConfig, load_recipe, stage_of, with_all_stages
from torchcaps.train.train_state import build_model, check_sizes, load_weights
from torchcaps.types import ImageSpec
from torchcaps.utils.files import folder_lock, make_folder, parse_json, read_regular, write_atomically

__all__ = [
    "Resume",
    "Run",
    "TrainedRun",
    "checkpoint_path",
    "create",
    "find_checkpoint",
    "load",
    "load_run",
    "open_run",
    "recipe_in",
    "run_of",
    "shipped_models",
    "weights_path",
]

_MAX_RECIPE_BYTES = 1 << 20

GIVEN_AWAY = "model.safetensors"
"""Name of the weights in the folder of a model that is given away, as other libraries have it."""

Resume = bool | Literal["auto"]

RESUMABLE_CHANGES = {"about", "data.data_dir", "data.path", "train.epochs", "train.save_every", "train.log_every"}
"""Settings that may change between the start of a run and its resumption: they do not change what a step does.

Data may lie in another place, since their fingerprint says whether they are the same.

The same holds for those of a single stage, `stages.NAME.train.epochs` and so on. The epochs may not change where the
learning rate of every step depends on them (`ScheduleConfig.depends_on_length`).
"""


@dataclass(frozen=True)
class Run:
    """The folder of a run and the recipe that is trained in it.

    Attributes:
        folder: Where recipe, journal and checkpoint are.
        recipe: What is trained.
    """

    folder: Path
    recipe: Recipe

    @property
    def has_checkpoint(self) -> bool:
        return checkpoint_path(self.folder).exists()

    @property
    def fingerprint(self) -> tuple[int, int] | None:
        """When the last checkpoint was written, and its size, to tell it from a later one; None without one."""
        try:
            found = checkpoint_path(self.folder).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def checkpoint(self, fingerprints: DataFingerprints) -> Checkpoint:
        """Read the last checkpoint.

        Args:
            fingerprints: Name the data that training would go on with.

        Raises:
            CheckpointError: The file is not whole.
            TrainingError: It was made by another recipe or on other data. A checkpoint that names no data, of a version
                before these were named, is accepted.
        """
        path = checkpoint_path(self.folder)
        checkpoint = read_checkpoint(path)
        _check_same(checkpoint.meta.recipe, self.recipe, path)
        _check_same_data(checkpoint.meta.fingerprints, fingerprints, self.folder)
        return checkpoint

    def lock(self) -> AbstractContextManager[None]:
        """Make the folder and keep other trainings out of it."""
        make_folder(self.folder)
        return folder_lock(self.folder)

    def write_recipe(self) -> None:
        """Make the folder and say in it what is trained; the last thing before the first step."""
        make_folder(self.folder)
        text = json.dumps(to_dict(self.recipe), indent=2) + "\n"
        write_atomically(self.folder / "recipe.json", [text.encode()])

    def save(self, checkpoint: Checkpoint) -> None:
        write_checkpoint(checkpoint_path(self.folder), checkpoint)

    def journal(self, step: int, tensorboard: bool, *, write: bool) -> AbstractContextManager[Journal | None]:
        return Journal(self.folder, step, tensorboard=tensorboard) if write else nullcontext()


def open_run(folder: Path, recipe: Recipe, *, resume: Resume) -> Run:
    """Examine the folder of a run before anything is written.

    Args:
        folder: Where the run is or will be.
        recipe: What is trained in it.
        resume: False starts a run, True goes on with one, "auto" does what the folder allows.

    Raises:
        TrainingError: The folder holds a run and should not, or the other way round; its run has other settings; or it
            holds something else.
    """
    if resume not in (True, False, "auto"):
        raise TrainingError(f"resume = {resume!r}; True, False or 'auto' is wanted")
    path = folder / "recipe.json"
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"'{folder}' is a file; a folder for the run is wanted: choose another folder (--out)")
    # A run is there, or should be: go on with it.
    if resume is True or (path.exists() and _has_content(folder)):
        if not resume:
            raise TrainingError(
                f"'{folder}' already holds a run; resume it (--resume {folder}; in Python, resume=True), or choose "
                "another folder (--out)"
            )
        _check_same(recipe_in(folder), recipe, folder)
    # A folder of something else is never written into.
    elif folder.exists() and any(not _is_ours(p.name) for p in folder.iterdir()):
        raise TrainingError(f"'{folder}' is not empty and holds no run of torchcaps; choose another folder (--out)")
    elif path.exists():
        recipe_in(folder)  # a recipe.json that is not ours is somebody's
    return Run(folder, recipe)


def recipe_in(folder: Path) -> Recipe:
    """Read the recipe of the run in a folder.

    Raises:
        TrainingError: The folder holds no run, or its recipe is not one that is known here.
    """
    path = folder / "recipe.json"
    if not path.exists():
        raise TrainingError(
            f"'{folder}' holds no run to go on with; name another folder, or start a run there (--resume auto)"
        )
    try:
        # Whether it is a table at all, `from_dict` checks.
        tables = cast(Table, parse_json(read_regular(path, _MAX_RECIPE_BYTES)))
        return from_dict(Recipe, tables, where=str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainingError(f"cannot read '{path}': {reason}; name another folder") from None


class TrainedRun(NamedTuple):
    """A trained model with the recipe it came from and how far it got.

    Attributes:
        model: The model, in evaluation mode.
        recipe: What was trained.
        step: The number of steps, of all stages.
        seconds: How long training took.
        stopped_early: True if the last stage that ran ended at `train.stop_at`, before its epochs ran out.
        threads: The number of threads it was trained with, if known.
        extra: The checkpoint's tensors beside the state: examples that were given along.
        stage: The last stage that ran; "all" for models without stages.
        finished: True if the last stage of the model came to its end.
        class_names: Names of the classes, if the file has them.
    """

    model: Model
    recipe: Recipe
    step: int
    seconds: float
    stopped_early: bool = False
    threads: int | None = None
    extra: Mapping[str, Tensor] = {}
    stage: str = "all"
    finished: bool = True
    class_names: tuple[str, ...] = ()


def create(recipe: Recipe | str, spec: ImageSpec | None = None) -> Model:
    """Build a model with random weights.

    Args:
        recipe: A recipe, or the name of one (`torchcaps list`).
        spec: Shape and classes of its images; those of the recipe's data if not given, which are loaded for it.

    Returns:
        The model, in training mode.
    """
    if isinstance(recipe, str):
        recipe = load_recipe(recipe)
    return build_model(recipe, spec or recipe.data.load().train.spec)


def load(folder: Path | str) -> Model:
    """Load the model of a trained run.

    Args:
        folder: The folder of a run, the path of weights alone (`torchcaps export RUN model.safetensors`), or the name
            of a model that ships with the package (`torchcaps zoo`).

    Returns:
        The model, in evaluation mode.
    """
    return load_run(folder).model


def load_run(folder: Path | str) -> TrainedRun:
    """Load a trained model with its recipe and how far the run got; everything is checked, nothing is executed.

    Args:
        folder: The folder of a run, the path of weights alone (`torchcaps export RUN model.safetensors`), or the name
            of a model that ships with the package (`torchcaps zoo`).

    Returns:
        The model in evaluation mode, its recipe, its steps and seconds, and examples that were exported with it.

    Raises:
        CheckpointError: There is no checkpoint, or it is not whole, or of no recipe known here.
    """
    return run_of(find_checkpoint(Path(folder)))


def find_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint of a run's folder, the file of weights at that path, or the shipped model of that name."""
    path = weights_path(folder)
    if folder.is_dir() and not path.exists():
        raise CheckpointError(f"'{folder}' holds no checkpoint; train into it first, or name the folder of a run")
    # A single word that is no path was meant as the name of a shipped model
    if len(folder.parts) == 1 and not folder.suffix and not path.exists():
        known = suggestion(folder.name, shipped_models())
        raise CheckpointError(f"'{folder}' is neither a run nor a model that ships with torchcaps{known}")
    return read_checkpoint(path)


def run_of(checkpoint: Checkpoint) -> TrainedRun:
    """Build the model of a checkpoint and fill in its weights; the state of the optimizer is not read."""
    # Everything that the model depends on stands in the checkpoint; recipe.json is not read.
    meta = checkpoint.meta
    check_sizes(checkpoint)
    model = build_model(meta.recipe, meta.image_spec)
    load_weights(model, checkpoint)
    return TrainedRun(
        model=model.eval(),
        recipe=meta.recipe,
        step=meta.step,
        seconds=meta.seconds,
        stopped_early=meta.stopped_early,
        threads=meta.threads,
        extra={name: value for name, value in checkpoint.tensors.items() if not name.startswith("state.")},
        stage=meta.stage,
        finished=meta.is_complete,
        class_names=meta.class_names,
    )


def checkpoint_path(folder: Path) -> Path:
    """Where training writes the checkpoint of a run; a file, weights alone, stands for itself."""
    return folder if folder.is_file() else folder / "checkpoint.safetensors"


def weights_path(folder: Path) -> Path:
    """Find the file to read a trained model from.

    Args:
        folder: The folder of a run, one with `model.safetensors` as models are given away, a file of weights, or the
            name of a shipped model. What is on the disk comes before a shipped model of the same name.

    Returns:
        The path of the file; it need not exist.
    """
    path = checkpoint_path(folder)
    shipped = shipped_models().get(str(folder))
    candidates = [path, folder / GIVEN_AWAY, *([shipped / GIVEN_AWAY] if shipped else [])]
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def shipped_models() -> dict[str, Path]:
    """Return the folders of the trained models that ship with the package, by name."""
    # Found by the package's own place, since a model is data and imports nothing
    home = Path(str(resources.files("torchcaps"))) / "zoo" / "models"
    return {path.parent.name: path.parent for path in sorted(home.glob(f"*/{GIVEN_AWAY}"))}


def _is_ours(name: str) -> bool:
    """True for a file that the start of a run leaves behind, also one that was killed while it wrote."""
    return name in ("recipe.json", "journal.jsonl") or name.startswith(".torchcaps-")


def _has_content(folder: Path) -> bool:
    """True if there is more than the recipe: a start that failed before its first step may be tried again."""
    journal = folder / "journal.jsonl"
    return checkpoint_path(folder).exists() or (journal.exists() and journal.stat().st_size > 0)


def _settings(recipe: Recipe) -> dict[str, object]:
    """Return every setting of a recipe by its dotted key, those of each stage too, whether or not it had its own."""
    return flatten(to_dict(with_all_stages(recipe)))


def _is_free(key: str) -> bool:
    return key.startswith("paper.") or re.sub(r"^stages\.[^.]+\.", "", key) in RESUMABLE_CHANGES


def _schedule_of(recipe: Recipe, key: str) -> ScheduleConfig:
    """The schedule of the stage that a key such as `stages.NAME.train.epochs` belongs to."""
    tables = key.split(".")
    return stage_of(recipe, tables[1]).schedule if tables[0] == "stages" else recipe.schedule


def _check_same_data(old: DataFingerprints, new: DataFingerprints, folder: Path) -> None:
    """Refuse to go on with other data than a run was started on, to stop by, or to be judged by."""
    if new.train is None:
        raise TrainingError(
            f"'{folder}' cannot be resumed on batches of a loader, whose order is unknown; give tensors or a Dataset, "
            "or start another run from its weights"
        )
    parts = {"data": (old.train, new.train), "validation images": (old.validation, new.validation)}
    for what, (before, now) in (parts | {"test images": (old.test, new.test)}).items():
        if before is not None and now is not None and before != now:
            raise TrainingError(
                f"'{folder}' was started on other {what} (fingerprint {before[:12]}, now {now[:12]}); put the old ones "
                "back to resume, or choose another folder (--out)"
            )


def _check_same(old: Recipe, new: Recipe, folder: Path) -> None:
    before = _settings(old)
    after = _settings(new)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key):
            continue
        # Other epochs would change the learning rate of steps that were already taken.
        if key.endswith("train.epochs") and _schedule_of(new, key).depends_on_length:
            raise TrainingError(
                f"'{folder}' was started with {key} = {before.get(key)!r}, now it is {after.get(key)!r}; its schedule "
                f"{_schedule_of(new, key).name} ends with its epochs: take the old value, or --start another from it"
            )
        if not _is_free(key):
            raise TrainingError(
                f"'{folder}' was started with {key} = {before.get(key)!r}, now it is {after.get(key)!r}; "
                "take the old value to resume, or choose another folder (--out)"
            )
