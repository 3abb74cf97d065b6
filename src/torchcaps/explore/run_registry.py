"""The table of runs that the page may choose from: their names at once, their models when they are asked for.

A request names a run by its number in the table. No path comes from a request.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.errors import CheckpointError, DataError, RecipeError, TorchcapsError
from torchcaps.explore import ExplorerView, explorer_view
from torchcaps.explore.examples import Examples, examples_of
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.run import TrainedRun, checkpoint_path, load_run

__all__ = ["KINDS", "OPEN", "Entry", "OpenRun", "RunRegistry", "find_runs", "shipped_run"]

KINDS = {
    "capsnet": "capsnet",
    "capsnet-small": "capsnet",
    "matrix": "matrix",
    "matrix-small": "matrix",
    "matrix-test": "matrix",
    "sparse": "sparse",
    "sparse-small": "sparse",
    "sparse-matrix": "sparse",
    "poe": "poe",
}
"""The name in a recipe's [model] table -> the kind of subject."""

OPEN = 6
"""Runs that are kept in memory; of more, the one that was not asked for longest makes room."""

_LONGEST = 1 << 20
"""Bytes of a recipe.json that is read."""


class Entry(NamedTuple):
    """A run that can be opened."""

    name: str
    kind: str
    folder: Path
    shipped: bool = False


@dataclass(frozen=True)
class OpenRun:
    """A run that is in memory."""

    entry: Entry
    run: TrainedRun
    subject: ExplorerView[Any]
    examples: Examples


@dataclass
class RunRegistry:
    """Runs by number. `open` belongs to one thread; the rest may be asked from any."""

    entries: tuple[Entry, ...]
    data_dir: Path | None = None
    _open: OrderedDict[int, OpenRun] = field(default_factory=OrderedDict)

    def is_open(self, number: int) -> bool:
        """Whether a run is in memory."""
        return number in self._open

    def open(self, number: int) -> OpenRun:
        """The run, read from its folder if it is not in memory."""
        if number not in self._open:
            opened = self._read(self.entries[number])
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)
            self._open[number] = opened
        self._open.move_to_end(number)
        return self._open[number]

    def _read(self, entry: Entry) -> OpenRun:
        run = load_run(entry.folder)
        examples = examples_of(run.recipe, run.model.spec, run.extra, self.data_dir)
        return OpenRun(entry, run, explorer_view(run.model, examples.names, examples.shown), examples)


def find_runs(runs: Sequence[Path], data_dir: Path | None = None, root: Path = Path("runs")) -> RunRegistry:
    """The named runs, each of which must be one to look into; without any, the shipped one and those under `root`."""
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"'{data_dir}' is no folder; name one that holds data sets, or leave --data-dir out")
    if runs:
        return RunRegistry(tuple(_named(folder) for folder in runs), data_dir)
    shipped = shipped_run()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    found = [entry for folder in folders if (entry := _found(folder))]
    entries = (*([shipped] if shipped else []), *found)
    if not entries:
        raise RecipeError(f"no run under '{root}' can be looked into; name the folder of one: torchcaps explore RUN")
    return RunRegistry(entries, data_dir)


def shipped_run() -> Entry | None:
    """The run that comes with the package."""
    home = Path(str(resources.files("torchcaps"))) / "explore" / "shipped"
    folders = sorted(home.iterdir()) if home.is_dir() else []
    found = (_found(folder) for folder in folders)
    return next((entry._replace(shipped=True) for entry in found if entry), None)


def _found(folder: Path) -> Entry | None:
    """The run in a folder, if it is one to look into."""
    try:
        return _named(folder)
    except (TorchcapsError, OSError):
        return None


def _named(folder: Path) -> Entry:
    """The run in a folder, or one line."""
    if not checkpoint_path(folder).is_file():
        raise CheckpointError(f"'{folder}' holds no checkpoint; train into it first, or name the folder of a run")
    model = _model(folder)
    if model not in KINDS:
        known = ", ".join(dict.fromkeys(KINDS.values()))
        raise RecipeError(f"'{folder}' is a run of model '{model}', which cannot be explored; these can: {known}")
    return Entry(folder.resolve().name, KINDS[model], folder)


def _model(folder: Path) -> str:
    """The name of a run's model by its recipe, which is in its checkpoint too."""
    path = folder / "recipe.json"
    try:
        if path.is_file():
            with path.open("rb") as file:
                recipe = json.loads(file.read(_LONGEST))
        else:
            recipe = read_checkpoint(checkpoint_path(folder)).meta["recipe"]
        return str(recipe["model"]["name"])
    except (KeyError, TypeError, RecursionError, OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecipeError(f"'{folder}' is not the run of a recipe known here: {error!r}") from None
