"""All figures of a run, whatever its model is: which kinds there are, what each shows, and how it is drawn.

`torchcaps generate` writes them as files, `torchcaps report` into one page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchcaps.errors import RecipeError
from torchcaps.evaluate.figures import learning_curve
from torchcaps.systems.base import System
from torchcaps.systems.figure_context import ComparedRun, FigureOptions, draw_figure
from torchcaps.systems.image_sources import figure_images
from torchcaps.systems.registry import SYSTEMS, system_of
from torchcaps.systems.run_folders import find_run
from torchcaps.systems.sparse.figures import RANKINGS
from torchcaps.train.journal import read_journal
from torchcaps.train.run import TrainedRun, load_run, recipe_in

__all__ = ["CURVES", "PlannedFigure", "figures_of"]

CURVES = "curves"
"""The one kind of figure that every run has."""

JournalLines = list[dict[str, float]]


class PlannedFigure(NamedTuple):
    """A figure of a run that can be drawn.

    Attributes:
        kind: What the user calls it.
        caption: What it shows, in one sentence.
        draw: Draws it: file name (without .png) -> PNG.
    """

    kind: str
    caption: str
    draw: Callable[[], dict[str, bytes]]


def figures_of(
    folder: Path, run: TrainedRun, options: FigureOptions, what: str = "all", beside: Sequence[Path] = ()
) -> list[PlannedFigure]:
    """Plan the figures of a run; the test images are loaded when a figure needs them.

    Args:
        folder: The run's folder.
        run: The run in it.
        options: What the figures shall show.
        what: A kind of figure, "curves" for how training went, or "all" for those that its system draws by default.
        beside: Folders of other runs, for the figure `ranked` of sparse capsules.

    Returns:
        The figures in the order in which they are to be drawn.

    Raises:
        RecipeError: If the run's system has no such figure, or not one of the options.
    """
    # Refuse what cannot be drawn before any data are loaded.
    system = system_of(run.recipe)
    name = folder.resolve().name
    _check_kind(system, what, name, run)
    _check_options(system, what, options, beside)
    if what == CURVES:
        return [PlannedFigure(CURVES, "Training, step by step.", partial(_draw_curves, folder, run.recipe.start))]
    # One context for all figures: images are loaded and encoded once.
    load = partial(figure_images, system, run, options.seed)
    compared = _load_compared(beside, name, options.seed)
    context = system.figure_context(run.model, options, load, name, compared)
    # "all" leaves out what these options or data do not allow.
    kinds = [what]
    if what == "all":
        kinds = [kind for kind, one in system.figures.items() if one.by_default and not one.obstacle(context)]
    return [
        PlannedFigure(kind, system.figures[kind].caption, partial(draw_figure, system.figures, kind, context))
        for kind in kinds
    ]


def _check_kind(system: System, what: str, name: str, run: TrainedRun) -> None:
    """Refuse a run without figures, and a kind that its system does not draw."""
    if not system.figures and what != CURVES:
        titles = [one.title for one in SYSTEMS.values() if one.figures]
        raise RecipeError(
            f"'{name}' is a run of {type(run.model).__name__}, of which there are no figures but {CURVES}; there are "
            f"some of {', '.join(titles)}"
        )
    kinds = (*system.figures, CURVES, "all")
    if what not in kinds:
        raise RecipeError(f"--what {what} is no figure of {system.title or system.name}; choose: {', '.join(kinds)}")


def _check_options(system: System, what: str, options: FigureOptions, beside: Sequence[Path]) -> None:
    """Refuse options that the figures do not depend on."""
    given = {"capsule": bool(options.capsules), "domain": options.domain is not None, "beside": bool(beside)}
    for option in (name for name, was_given in given.items() if was_given):
        kinds = _kinds_with(option, system)
        if not kinds:
            titles = " and ".join(one.title for one in SYSTEMS.values() if _kinds_with(option, one))
            raise RecipeError(
                f"--{option} is for {titles}, and this is a run of {system.title or system.name}; leave it out"
            )
        if what not in ("all", *kinds):
            raise RecipeError(f"--{option} changes {' and '.join(kinds)}, and {what} is drawn; leave it out")


def _kinds_with(option: str, system: System) -> list[str]:
    """Return the kinds of figures of a system that depend on an option."""
    return [kind for kind, one in system.figures.items() if option in one.options]


def _load_compared(folders: Sequence[Path], name: str, seed: int) -> list[ComparedRun]:
    """Load the runs to show beside the run that is called `name`, each with its own test images."""
    folders = [find_run(folder) for folder in folders]
    # Legends tell runs apart by these names.
    names = [name, *(folder.resolve().name for folder in folders)]
    if len(set(names)) < len(names):
        raise RecipeError(f"the runs are called {', '.join(names)}; each needs a name of its own")
    found = []
    for folder, other in zip(folders, names[1:], strict=True):
        # Each with its own test images: runs on other data may be compared, too.
        run = load_run(folder)
        system = system_of(run.recipe)
        if system.name not in RANKINGS:
            titles = " or ".join(SYSTEMS[one].title for one in RANKINGS)
            raise RecipeError(f"'{folder}' is a run of {type(run.model).__name__}; --beside wants {titles}")
        found.append(ComparedRun(other, system.name, run.model, figure_images(system, run, seed)))
    return found


def _draw_curves(folder: Path, start: str | None) -> dict[str, bytes]:
    """Draw the losses and accuracies in a run's journal, after those of the runs it started from, stage by stage."""
    # A stage of the run follows those of the runs it started from.
    stages = _earlier_journals(start)
    for entry in read_journal(folder / "journal.jsonl"):
        stages.setdefault(entry.get("stage", folder.resolve().name), []).append(entry)
    known = {key for lines in stages.values() for entry in lines for key in entry}
    if not known:
        raise RecipeError(f"'{folder}' has no journal, from which curves are drawn; name the folder of a run")
    # A picture for each value that any stage recorded.
    keys = [key for key in ("loss", "accuracy", "validation_accuracy") if key in known]
    return {f"curve-{key.replace('_', '-')}": learning_curve(list(stages.items()), key) for key in keys}


def _earlier_journals(start: str | None) -> dict[str, JournalLines]:
    """Read the journals of the run that another started from and of those before it, by folder name, if they exist."""
    found: dict[str, JournalLines] = {}
    # Follow warm starts back; a name that was met before would be a loop.
    while start is not None and Path(start).name not in found:
        folder = Path(start)
        start = None
        if entries := read_journal(folder / "journal.jsonl"):
            # The earliest run comes first.
            found = {folder.name: entries, **found}
            start = recipe_in(folder).start
    return found
