"""From the folders of runs to one result: the metrics of every seed beside the controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from torchcaps.config import to_dict
from torchcaps.errors import RecipeError
from torchcaps.evaluate.classification import classification, nearest_mean, untrained
from torchcaps.evaluate.results import Metrics, Result, gather, versions
from torchcaps.train.run import Loaded, load_run

__all__ = ["evaluate_runs"]


def evaluate_runs(folders: Sequence[Path], controls: Sequence[Path] = ()) -> Result:
    """Runs of one recipe (several seeds) and runs of others to compare with -> one result.

    The controls that every classifier gets are its own network untrained, and the nearest mean image.
    """
    runs = [load_run(folder) for folder in folders]
    first = runs[0].recipe
    seeds = [run.recipe.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"the runs have the seeds {seeds}; a seed counts once")
    for run, folder in zip(runs, folders, strict=True):
        if replace(run.recipe, seed=first.seed, about=first.about) != first and run.recipe.name == first.name:
            raise RecipeError(f"'{folder}' and '{folders[0]}' differ in more than the seed; evaluate them apart")
        if run.recipe.name != first.name:
            raise RecipeError(
                f"'{folder}' is a run of '{run.recipe.name}', not of '{first.name}'; name it as a control"
            )
    splits = first.data.load()
    metrics = gather(classification(run.model, splits.test) for run in runs)
    rows: dict[str, Metrics] = _trained([load_run(folder) for folder in controls])
    rows["untrained"] = gather(untrained(run.recipe, splits.test) for run in runs)
    rows["nearest mean"] = gather([nearest_mean(splits)])
    budget = {
        "steps": max(run.step for run in runs),
        "seconds": round(sum(run.seconds for run in runs) / len(runs), 1),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in runs[0].model.parameters()),
    }
    return Result(first.name, to_dict(first), [run.recipe.seed for run in runs], metrics, rows, {}, budget, versions())


def _trained(runs: Sequence[Loaded]) -> dict[str, Metrics]:
    """One row a recipe, its runs being its seeds."""
    rows: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        test = run.recipe.data.load().test
        rows.setdefault(run.recipe.name, []).append(classification(run.model, test))
    return {name: gather(values) for name, values in rows.items()}
