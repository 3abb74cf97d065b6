"""The runs that the page can choose from: listed by their recipes, loaded when they are first asked for.

A request names a run by its number in the registry. No path comes from a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.errors import CheckpointError, DataError, RecipeError, TorchcapsError
from torchcaps.explore.examples import Examples, load_examples
from torchcaps.systems import SYSTEMS, model_name, system_of
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.run import TrainedRun, load_run, shipped_models, weights_path
from torchcaps.utils.files import parse_json, read_regular
from torchcaps.zoo import ModelCard, read_card

__all__ = ["MAX_OPEN", "OpenRun", "RunEntry", "RunRegistry", "find_runs", "shipped_runs"]

MAX_OPEN = 6
"""Runs in memory at a time; to open another, the least recently used one is dropped."""

FIRST_MODEL = "capsnet-digits"
"""The shipped model that comes first, and that a link without a run opens: its routing takes several rounds."""

_MAX_RECIPE_BYTES = 1 << 20
"""Bytes of a recipe.json that are read."""


class RunEntry(NamedTuple):
    """A run that can be opened.

    Attributes:
        name: On the page.
        kind: Name of its system.
        path: Its folder or weights file.
        card: Of a model that ships with the package; None of other runs.
    """

    name: str
    kind: str
    path: Path
    card: ModelCard | None = None

    @property
    def shipped(self) -> bool:
        """True of a model that ships with the package."""
        return self.card is not None


@dataclass(frozen=True)
class OpenRun:
    """A run in memory."""

    entry: RunEntry
    trained: TrainedRun
    view: ExplorerView[Any, Any]
    examples: Examples


@dataclass
class RunRegistry:
    """Runs by number. Call `open` from one thread only; the other methods from any."""

    entries: tuple[RunEntry, ...]
    data_dir: Path | None = None
    _open: OrderedDict[int, OpenRun] = field(default_factory=OrderedDict)

    def is_open(self, number: int) -> bool:
        """Return whether a run is in memory."""
        return number in self._open

    def open(self, number: int) -> OpenRun:
        """Return a run, loaded from its folder if it is not in memory.

        Raises:
            TorchcapsError: the run cannot be loaded.
        """
        if number not in self._open:
            run = self._load(self.entries[number])
            # Loaded first, so that a run that cannot be loaded evicts no other
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)
            self._open[number] = run
        # The order of the dict is the order of use
        self._open.move_to_end(number)
        return self._open[number]

    def _load(self, entry: RunEntry) -> OpenRun:
        # Weights first, then images of the model's shape, then the view, which may need both
        trained = load_run(entry.path)
        examples = load_examples(trained.recipe, trained.model.spec, trained.extra, self.data_dir)
        view = system_of(trained.recipe).explore(trained.model, examples.names, examples.inputs)
        return OpenRun(entry, trained, view, examples)


def find_runs(paths: Sequence[Path], data_dir: Path | None = None, root: Path = Path("runs")) -> RunRegistry:
    """Find the runs to explore; the models that ship with the package are always among them.

    Args:
        paths: run folders, exported weights, folders that contain runs, or names of shipped models; they come first.
            Without any, the shipped models come first and then the runs below `root`.
        data_dir: folder to search for test images first.
        root: folder that is searched without `paths`.

    Raises:
        CheckpointError: one of `paths` holds neither a checkpoint nor runs.
        RecipeError: one of `paths` is a run that cannot be explored, or nothing was found.
        DataError: `data_dir` is not a folder.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"'{data_dir}' is no folder; name one that holds data sets, or leave --data-dir out")
    shipped = shipped_runs()
    # What the user names must be explorable; what is found below `root` may be left out
    named = [entry for path in paths for entry in _entries_at(path, shipped)]
    others = [] if paths else _entries_below(root)
    entries = (*named, *(entry for entry in shipped if entry not in named), *others)
    if not entries:
        raise RecipeError(f"no run under '{root}' can be explored; name the folder of one: torchcaps explore RUN")
    return RunRegistry(entries, data_dir)


def shipped_runs() -> list[RunEntry]:
    """Return the models that ship with the package, `FIRST_MODEL` first; one whose card cannot be read is left out."""
    found = []
    for name, folder in sorted(shipped_models().items(), key=lambda item: item[0] != FIRST_MODEL):
        try:
            card = read_card(folder)
        except DataError:
            continue
        found.append(RunEntry(name, card.system, folder, card))
    return found


def _entries_at(path: Path, shipped: Sequence[RunEntry]) -> list[RunEntry]:
    """Return the run at a path given by the user, or the shipped model of that name, or else the runs below it."""
    weights = weights_path(path)
    if weights.is_file():
        return [entry for entry in shipped if entry.path == weights.parent] or [_read_entry(path)]
    entries = list(_entries_below(path))
    if not entries:
        raise CheckpointError(f"'{path}' holds no checkpoint and no runs; train into it first, or name another folder")
    return entries


def _entries_below(root: Path) -> Iterator[RunEntry]:
    """Find explorable runs in the subfolders of `root` and one level deeper, such as runs/demo/poe-quick."""
    for folder in _subfolders(root):
        # A run is a folder with a checkpoint; its own subfolders are not searched
        if weights_path(folder).is_file():
            candidates = [folder]
        else:
            candidates = [below for below in _subfolders(folder) if weights_path(below).is_file()]
        for candidate in candidates:
            try:
                yield _read_entry(candidate)._replace(name=candidate.relative_to(root).as_posix())
            except (TorchcapsError, OSError):
                continue  # runs of other models, and damaged ones, are not offered


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # no folder, or none that may be read
        return []


def _read_entry(path: Path) -> RunEntry:
    """Describe the run at a path by its recipe, without loading its weights."""
    # The recipe tells the system, and the system whether it can be explored
    model = _model_name(path)
    system = system_of(model)
    if system.explorer_view is None:
        known = ", ".join(other.name for other in SYSTEMS.values() if other.explorer_view is not None)
        raise RecipeError(f"'{path}' is a run of model '{model}', which cannot be explored; these can: {known}")
    return RunEntry(path.resolve().name, system.name, path)


def _model_name(path: Path) -> str:
    """Read the registered name of a run's model from recipe.json or, without one, from the checkpoint."""
    recipe_path = path / "recipe.json"
    # Exported weights are a single file, whose recipe is inside
    if not recipe_path.is_file():
        return model_name(read_checkpoint(weights_path(path)).meta.recipe.model)
    try:
        # Only the model's name is read: a list of runs needs no valid recipes
        recipe: Any = parse_json(read_regular(recipe_path, _MAX_RECIPE_BYTES))
        return str(recipe["model"]["name"])
    except (KeyError, TypeError, IndexError, OSError, ValueError) as error:
        raise RecipeError(f"'{path}' is not the run of a recipe known here: {error!r}") from None
