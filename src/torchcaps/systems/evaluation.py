"""From the folders of runs to one result: the metrics of every seed beside the controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from torchcaps.errors import RecipeError
from torchcaps.evaluate.results import UNFINISHED, UNFINISHED_LABEL, Result, versions
from torchcaps.evaluate.viewpoints import VIEWS
from torchcaps.systems.base import EvaluatedRun, EvaluationOptions, Measurements
from torchcaps.systems.registry import SYSTEMS, system_of
from torchcaps.systems.run_folders import find_run
from torchcaps.train.recipe import Recipe, without_folders
from torchcaps.train.run import load_run

__all__ = ["evaluate_runs"]


def evaluate_runs(
    folders: Sequence[Path],
    controls: Sequence[Path] = (),
    *,
    images: int | None = None,
    only: Sequence[str] | None = None,
    reference: Path | None = None,
    views: int = VIEWS,
    unmasked: bool = False,
) -> Result:
    """Measure runs of one recipe beside runs of others and the controls of their system.

    Args:
        folders: Folders of runs of one recipe, one a seed.
        controls: Folders of runs of other recipes, to compare with.
        images: How many images to measure on. Products of expert capsules: test images (2000). Sparse capsules:
            training images of the SVM (10,000).
        only: Names of the controls to measure; None for all.
        reference: Products of expert capsules: folder of the reference classifier, trained there if it is not
            yet; None for a folder beside the first run.
        views: How many views to average, of images that are larger than the model's input; 1 for none.
        unmasked: Sparse capsules: the rows are of codes before the mask.

    Returns:
        The result. Runs that are not trained to their end are counted in its budget, see `UNFINISHED`.

    Raises:
        RecipeError: If the runs are not of one recipe, or an option is not one of their system.
    """
    if not 1 <= views <= VIEWS:
        raise RecipeError(f"{views} views of an image are to be averaged; ask for 1 to {VIEWS}")
    # Load and check everything before the first measurement.
    names = None if only is None else tuple(only)
    options = EvaluationOptions(images, names, reference, views, unmasked=unmasked or None)
    runs = [_load(folder) for folder in folders]
    _check_one_recipe(runs)
    system = runs[0].system
    _check_options(options, runs[0])
    others = [_load(folder) for folder in controls]
    _check_rows(runs[0], others)
    # The system knows what its models are measured by.
    found = system.evaluate(runs, others, options)
    return _result(runs, _with_marked_controls(found, others))


def _load(folder: Path) -> EvaluatedRun:
    """Load the run that a path means."""
    found = find_run(folder)
    run = load_run(found)
    return EvaluatedRun(run, found, system_of(run.recipe))


def _check_one_recipe(runs: Sequence[EvaluatedRun]) -> None:
    """Refuse runs that differ in more than the seed, and two runs of one seed."""
    first = runs[0].run.recipe
    for one in runs[1:]:
        recipe = one.run.recipe
        if recipe.name != first.name:
            raise RecipeError(
                f"'{one.folder}' is a run of '{recipe.name}', not of '{first.name}'; evaluate one recipe at a time, "
                "or name the other run with --control"
            )
        if _differs(recipe, first):
            raise RecipeError(
                f"'{one.folder}' and '{runs[0].folder}' differ in more than the seed; evaluate them apart"
            )
    # A seed that came twice would make the deviation over seeds too small.
    seeds = [one.run.recipe.seed for one in runs]
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"the runs have the seeds {seeds}; name one run of each seed")


def _check_rows(first: EvaluatedRun, others: Sequence[EvaluatedRun]) -> None:
    """Refuse runs that would share a row of the table although they differ in more than the seed."""
    known = {first.run.recipe.name: first}
    for one in others:
        recipe = one.run.recipe
        same = known.setdefault(recipe.name, one)
        if same is first or _differs(recipe, same.run.recipe):
            raise RecipeError(
                f"'{one.folder}' and '{same.folder}' are both runs of '{recipe.name}', and a row has one name; train "
                "one of them under another (--name)"
            )


def _differs(recipe: Recipe, other: Recipe) -> bool:
    """Whether two runs differ in more than the seed; the text about a recipe has no influence on a run."""
    return replace(recipe, seed=other.seed, about=other.about) != other


def _check_options(options: EvaluationOptions, first: EvaluatedRun) -> None:
    """Refuse options that the runs' system does not have."""
    for name in sorted(options.given() - first.system.evaluation_options):
        others = [system.title or system.name for system in SYSTEMS.values() if name in system.evaluation_options]
        raise RecipeError(
            f"'{first.folder}' is a run of {first.system.title or first.system.name}; --{name} is for "
            f"{' and '.join(others)}: leave it out"
        )


def _with_marked_controls(found: Measurements, others: Sequence[EvaluatedRun]) -> Measurements:
    """Say in the name of a row that it has runs which are not trained to their end."""
    unfinished = {one.run.recipe.name for one in others if not one.run.finished}
    named = {
        f"{name} ({UNFINISHED_LABEL})" if name in unfinished else name: row for name, row in found.controls.items()
    }
    return found._replace(controls=named)


def _result(evaluated: Sequence[EvaluatedRun], found: Measurements) -> Result:
    """Put measurements together with the recipe, its paper's numbers, and what training cost."""
    runs = [one.run for one in evaluated]
    first = runs[0].recipe
    # Runs of one recipe may differ in time and threads.
    budget = {
        "steps": max(run.step for run in runs),
        "seconds": round(sum(run.seconds for run in runs) / len(runs), 1),
        "threads": max(run.threads or torch.get_num_threads() for run in runs),
        "parameters": sum(p.numel() for p in runs[0].model.parameters()),
        **found.budget,
    }
    # The entry is absent if all runs are finished.
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        budget[UNFINISHED] = unfinished
    return Result(
        recipe=first.name,
        config=without_folders(first),
        seeds=[run.recipe.seed for run in runs],
        metrics=found.metrics,
        controls=found.controls,
        paper=first.paper.metrics,
        budget=budget,
        versions=versions(),
    )
