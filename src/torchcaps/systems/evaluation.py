"""From the folders of runs to one result: the metrics of every seed beside the controls."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from torchcaps.config import to_dict
from torchcaps.data import Splits
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.classification import (
    check_classifier,
    classifier_metrics,
    load_classifier,
    nearest_mean_metrics,
    pose_controls,
    untrained_metrics,
)
from torchcaps.evaluate.reference_classifier import RATE, reference_probabilities, train_reference_classifier
from torchcaps.evaluate.results import Metrics, Result, gather, versions
from torchcaps.evaluate.sample_metrics import sample_confidence
from torchcaps.evaluate.svm_probe import READ, require_sklearn
from torchcaps.evaluate.svm_probe import build_probe_data as read_material
from torchcaps.evaluate.viewpoints import VIEWS
from torchcaps.metrics import accuracy
from torchcaps.models import CNN, PoE, PoEConfig
from torchcaps.models.sparse import SparseConfigBase
from torchcaps.systems.poe.metrics import (
    IMAGES,
    EvaluationData,
    PoEEncoder,
    build_evaluation_data,
    measure,
    run_and_controls,
    select_controls,
)
from torchcaps.systems.sparse import metrics as sparse_metrics
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun, load_run

__all__ = ["evaluate_runs", "judge_folder"]

JUDGE_STEPS = 300
"""A judge of few images sees them more than five times: so many steps of 128 images it takes at least."""


def evaluate_runs(
    folders: Sequence[Path],
    controls: Sequence[Path] = (),
    *,
    images: int | None = None,
    only: Sequence[str] | None = None,
    judge: Path | None = None,
    views: int = VIEWS,
) -> Result:
    """Runs of one recipe (several seeds) and runs of others to compare with -> one result.

    The controls that every classifier gets are its own network untrained, and the nearest mean image; of images larger
    than what it sees, so many `views` are averaged, too, and 1 leaves that out. Those of products of expert capsules
    are `capsules.CONTROLS`, or what `only` names of them; `images` is how many test images are measured (2000), and
    `judge` the folder of the judge, which is trained if it is not there. Those of sparse capsules are
    `sparse.CONTROLS`, and `images` is how many training images the read-out learns from (10,000).
    """
    if not 1 <= views <= VIEWS:
        raise RecipeError(f"{views} views of an image are to be averaged; ask for 1 to {VIEWS}")
    runs = [load_run(folder) for folder in folders]
    first = runs[0].recipe
    _check_same(runs, folders)
    if isinstance(first.model, PoEConfig):
        return _capsules(runs, folders, controls, IMAGES if images is None else images, select_controls(only), judge)
    if isinstance(first.model, SparseConfigBase):
        if judge is not None:
            raise RecipeError(f"'{folders[0]}' draws no samples to judge; judge is for products of expert capsules")
        return _sparse(runs, controls, READ if images is None else images, sparse_metrics.chosen(only))
    if images is not None or only is not None or judge is not None:
        raise RecipeError(
            f"'{folders[0]}' is a classifier; images, only and judge are for capsules that learn without labels"
        )
    for run, folder in zip(runs, folders, strict=True):
        check_classifier(run, folder)
    splits = first.data.load()
    metrics = gather(classifier_metrics(run.model, run.recipe, splits, views) for run in runs)
    rows: dict[str, Metrics] = _trained([load_classifier(folder) for folder in controls], views)
    rows["untrained"] = gather(untrained_metrics(run.recipe, splits) for run in runs)
    rows["nearest mean"] = gather([nearest_mean_metrics(first, splits)])
    for name, values in pose_controls(runs[0].model, splits.test).items():
        rows.setdefault(name, gather([values]))
    return _result(runs, metrics, rows, {})


def judge_folder(recipe: Recipe, folder: Path) -> Path:
    """Beside a run's folder: one judge for all runs on the same data, whatever their models; older judges stay."""
    data = _data_of(recipe)
    digest = zlib.crc32(json.dumps([data, RATE], sort_keys=True).encode())
    return folder.parent / f"judge-{data['name']}-{digest:08x}"


def _check_same(runs: Sequence[TrainedRun], folders: Sequence[Path]) -> None:
    """One recipe, and each seed once."""
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


def _result(
    runs: Sequence[TrainedRun], metrics: Metrics, rows: dict[str, Metrics], more_budget: dict[str, float]
) -> Result:
    first = runs[0].recipe
    budget = {
        "steps": max(run.step for run in runs),
        "seconds": round(sum(run.seconds for run in runs) / len(runs), 1),
        "threads": max(run.threads or torch.get_num_threads() for run in runs),
        "parameters": sum(p.numel() for p in runs[0].model.parameters()),
        **more_budget,
    }
    seeds = [run.recipe.seed for run in runs]
    return Result(first.name, _config(first), seeds, metrics, rows, first.paper.metrics, budget, versions())


def _config(recipe: Recipe) -> dict[str, Any]:
    """The recipe, but for where this machine keeps its data."""
    config = to_dict(recipe)
    if "data_dir" in config["data"]:
        config["data"]["data_dir"] = "none"
    return config


def _trained(runs: Sequence[TrainedRun], views: int) -> dict[str, Metrics]:
    """One row a recipe, its runs being its seeds."""
    rows: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        rows.setdefault(run.recipe.name, []).append(
            classifier_metrics(run.model, run.recipe, run.recipe.data.load(), views)
        )
    return {name: gather(values) for name, values in rows.items()}


def _capsules(
    runs: Sequence[TrainedRun],
    folders: Sequence[Path],
    controls: Sequence[Path],
    images: int,
    names: Sequence[str],
    judge: Path | None,
) -> Result:
    """Products of expert capsules. Peak memory (MB) and the judge's accuracy on test images are in the budget."""
    first = runs[0].recipe
    if images < 1:
        raise RecipeError(f"{images} images are to be measured; at least 1 is wanted")
    others = [load_run(folder) for folder in controls]
    for run, folder in zip([*runs, *others], [*folders, *controls], strict=True):
        _check_comparable(run, folder, first)
    splits = first.data.load()
    steps = len(splits.train) // min(128, len(splits.train))
    cnn = train_reference_classifier(
        first.data, judge or judge_folder(first, folders[0]), epochs=max(5.0, JUDGE_STEPS / steps)
    )
    own = []
    beside = []
    for run, folder in zip(runs, folders, strict=True):
        material = _material(run, splits, cnn, images)
        row, rows = run_and_controls(run.recipe, folder, material, names)
        own.append(row)
        beside.append(rows)
    named: dict[str, list[dict[str, float]]] = {}
    for run in others:
        named.setdefault(run.recipe.name, []).append(
            measure(PoEEncoder(cast(PoE, run.model)), _material(run, splits, cnn, images))
        )
    table = {name: gather(rows) for name, rows in named.items()}
    table |= {name: gather(rows[name] for rows in beside) for name in beside[0]}
    verdicts = reference_probabilities(cnn, material.images)
    table["real images"] = {"confident_fraction": [sample_confidence(verdicts.unsqueeze(0))["confident_fraction"]]}
    right = accuracy(verdicts, material.labels)
    return _result(runs, gather(own), table, {"judge_accuracy": right, **_peak_memory()})


def _material(run: TrainedRun, splits: Splits, cnn: CNN, images: int) -> EvaluationData:
    return build_evaluation_data(cast(PoE, run.model), splits, cnn, images)


def _sparse(runs: Sequence[TrainedRun], controls: Sequence[Path], images: int, names: Sequence[str]) -> Result:
    """Sparse capsules, however far they are trained. How many images the read-out learned from is in the budget."""
    first = runs[0].recipe
    require_sklearn()
    others = [load_run(folder) for folder in controls]
    for run, folder in zip(others, controls, strict=True):
        _check_alike(run, folder, first, SparseConfigBase)
    material = read_material(first, images)
    metrics, rows = sparse_metrics.rows_of_runs(runs, others, material, names)
    return _result(runs, metrics, rows, {"read_images": material.read, **_peak_memory()})


def _check_alike(run: TrainedRun, folder: Path, first: Recipe, kind: type) -> None:
    """The same kind of model on the same data."""
    if not isinstance(run.recipe.model, kind) or _data_of(run.recipe) != _data_of(first):
        raise RecipeError(
            f"'{folder}' is a run of another kind of model or on other data; it cannot stand beside '{first.name}'"
        )


def _check_comparable(run: TrainedRun, folder: Path, first: Recipe) -> None:
    """Products of expert capsules on the same data, trained to their end."""
    _check_alike(run, folder, first, PoEConfig)
    if not run.finished:
        raise TrainingError(
            f"'{folder}' is not trained to its end (stage '{run.stage}'); go on with: torchcaps train --resume {folder}"
        )


def _data_of(recipe: Recipe) -> dict[str, Any]:
    """The [data] of a recipe, without where it lies."""
    return {key: value for key, value in to_dict(recipe)["data"].items() if key != "data_dir"}


def _peak_memory() -> dict[str, float]:
    """The most memory that this process has held so far, in MB, where the system tells."""
    try:
        import resource
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory": round(peak / (2**20 if sys.platform == "darwin" else 2**10))}
