"""Attacks on the folders of runs: several models on the same images, as plain data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from torchcaps.data import Dataset
from torchcaps.errors import DataError, RecipeError
from torchcaps.evaluate.attacks.curves import (
    EPSILONS,
    FREE,
    GRADIENT,
    AttackCurves,
    attack_curves,
    find_masking,
    select_attacks,
)
from torchcaps.evaluate.results import versions
from torchcaps.systems.image_sources import load_test_images
from torchcaps.systems.registry import system_of
from torchcaps.systems.run_folders import find_run
from torchcaps.train.run import TrainedRun, load_run

__all__ = [
    "AttackRuns",
    "AttackSettings",
    "AttackedRun",
    "attack_rows",
    "attack_runs",
    "curves_of",
    "load_attack_runs",
    "to_plain_data",
    "verdicts",
]


class AttackedRun(NamedTuple):
    """A run to attack: its model is a classifier, and `test` are the images to change."""

    run: TrainedRun
    test: Dataset


@dataclass(frozen=True)
class AttackRuns:
    """Runs that are attacked on the same images.

    Attributes:
        runs: Label -> run.
        source: The run on which the images of the attack "transfer" are made.
    """

    runs: Mapping[str, AttackedRun]
    source: TrainedRun | None


class AttackSettings(NamedTuple):
    """What `attack_curves` is asked for.

    Attributes:
        attacks: Names of attacks; None for all, "transfer" only where there is a source.
        epsilons: Largest changes of a pixel, in [0, 1].
        images: How many test images.
        seed: Picks the images and the random numbers.
        loss: What attacks along the gradient climb.
        queries: How often the attack "square" may ask about an image.
    """

    attacks: Sequence[str] | None = None
    epsilons: Sequence[float] = EPSILONS
    images: int = 500
    seed: int = 0
    loss: Literal["cross-entropy", "own"] = "cross-entropy"
    queries: int = 300


def load_attack_runs(folders: Sequence[Path], source: Path | None = None) -> AttackRuns:
    """Load and check the runs to attack; models that are no classifiers become such as their system says.

    Args:
        folders: Folders of runs that were tested on the same images.
        source: Folder of the run on which the images of "transfer" are made.

    Returns:
        The runs by their recipe, and by their seed too where a recipe has several.

    Raises:
        RecipeError: If they cannot be compared.
        DataError: If their images have several labels.
    """
    # All runs must have been tested on the same images with one label each.
    runs = [_load(folder) for folder in folders]
    first = load_test_images(runs[0])
    if first.labels.ndim != 1:
        raise DataError(f"'{folders[0]}' tells several things in an image apart; attacks need one label an image")
    tests = [_test_images(run, folder, first, runs[0]) for run, folder in zip(runs, folders, strict=True)]
    labels = _labels([(run.recipe.name, run.recipe.seed) for run in runs])
    if len(set(labels)) < len(labels):
        raise RecipeError(f"the runs are {', '.join(labels)}; each recipe and seed is attacked once")
    # Images that are made on the source must mean the same to all runs.
    source_run = None if source is None else _load(source)
    if source_run is not None and source is not None:
        for test in (_test_images(source_run, source, first, runs[0]), *tests):
            _check_same_preprocessing(test, tests[0])
    # Only now: an SVM may take minutes to fit.
    attacked = [AttackedRun(_classifier(run), test) for run, test in zip(runs, tests, strict=True)]
    return AttackRuns(dict(zip(labels, attacked, strict=True)), None if source_run is None else _classifier(source_run))


def _load(folder: Path) -> TrainedRun:
    found = find_run(folder)
    run = load_run(found)
    system_of(run.recipe).check_classifier(run, found)
    return run


def _classifier(run: TrainedRun) -> TrainedRun:
    return system_of(run.recipe).classifier(run)


def attack_runs(attacked: AttackRuns, settings: AttackSettings) -> dict[str, AttackCurves]:
    """Attack every run with the same settings; nothing is transferred to the source itself.

    Returns:
        Label of a run -> its curves.

    Raises:
        RecipeError: If attacks shall climb a loss that a model does not have.
    """
    # Check all runs before the first is attacked.
    source = attacked.source
    systems = [system_of(one.run.recipe) for one in attacked.runs.values()]
    if settings.loss == "own" and not all(system.attacked_by_own_loss for system in systems):
        raise RecipeError("an SVM on codes was trained by no loss that an attack could climb; leave --loss out")
    names = {label: _attacks_on(label, one.run, source, settings.attacks) for label, one in attacked.runs.items()}
    # All runs by the same settings; the source is passed only where something is transferred from it.
    curves = {}
    for label, (run, test) in attacked.runs.items():
        curves[label] = attack_curves(
            run.model,
            test,
            names[label],
            settings.epsilons,
            images=settings.images,
            seed=settings.seed,
            source=source.model if source is not None and "transfer" in names[label] else None,
            queries=settings.queries,
            loss=settings.loss,
        )
    return curves


def to_plain_data(
    attacked: AttackRuns, curves: Mapping[str, AttackCurves], settings: AttackSettings
) -> dict[str, object]:
    """Return all that is known of the attacks, for JSON: the settings, then each run with its numbers."""
    runs = [
        {**_origin(run), **asdict(curves[label]), "masked": _masked(curves[label])}
        for label, (run, _) in attacked.runs.items()
    ]
    source = None if attacked.source is None else _origin(attacked.source)
    return {**settings._asdict(), "source": source, "runs": runs, "versions": versions()}


def curves_of(plain: Mapping[str, Any]) -> dict[str, AttackCurves]:
    """Return the curves that `to_plain_data` was given, by the same labels."""
    # `to_plain_data` added further entries, which are no fields.
    names = [field.name for field in fields(AttackCurves)]
    runs = plain["runs"]
    labels = _labels([(run["recipe"], run["seed"]) for run in runs])
    return {label: AttackCurves(**{n: run[n] for n in names}) for label, run in zip(labels, runs, strict=True)}


def attack_rows(curves: Mapping[str, AttackCurves]) -> list[list[str]]:
    """Lay out curves as a table: a row for each model and attack, shares of images in percent by epsilon.

    The last column is the share of images without a gradient, for attacks that follow it.
    """
    # All models were attacked at the same epsilons.
    first = next(iter(curves.values()))
    epsilons = list(next(iter((first.attack_accuracy | first.attack_success).values())))
    rows = [["right (%) at epsilon", *epsilons, "zero gradients (%)"]]
    for label, one in curves.items():
        named = {name: f"{label}, {name}" for name in one.attack_accuracy}
        named |= {name: f"{label}, {name}: success (%)" for name in one.attack_success}
        for name, curve in (one.attack_accuracy | one.attack_success).items():
            # Attacks without gradients have no entry.
            zero = one.zero_gradients.get(name)
            rows.append(
                [named[name], *(f"{100 * v:.1f}" for v in curve.values()), "-" if zero is None else f"{100 * zero:.1f}"]
            )
    return rows


def verdicts(curves: Mapping[str, AttackCurves]) -> list[str]:
    """Say of each model in one line whether its gradients are masked, and by how much at the worst epsilon."""
    return [f"{label}: {_verdict(one)}" for label, one in curves.items()]


def _verdict(one: AttackCurves) -> str:
    # Masking shows where an attack without gradients does better than those along them: it takes both.
    made = set(one.attack_accuracy)
    if not made & set(FREE) or not made & set(GRADIENT):
        return "masking unknown; it takes an attack along the gradient and one without (square, transfer)"
    found = find_masking(one.attack_accuracy)
    if not found:
        return "no sign of gradient masking: no attack without gradients does better"
    # Report the epsilon with the largest difference.
    e, worst = max(found.items(), key=lambda item: item[1].gradient_accuracy - item[1].accuracy)
    return (
        f"gradient masking at epsilon {', '.join(found)}: at {e}, {worst.free} leaves "
        f"{worst.accuracy * one.images:.0f} of {one.images} images right, "
        f"{worst.gradient}, the best along the gradient, {worst.gradient_accuracy * one.images:.0f}"
    )


def _attacks_on(label: str, run: TrainedRun, source: TrainedRun | None, attacks: Sequence[str] | None) -> list[str]:
    """The attacks on one run: without "transfer" from the run itself, which would be FGSM again."""
    names = select_attacks(attacks, source is not None)
    if source is not None and run.recipe == source.recipe:
        names = [name for name in names if name != "transfer"]
    if not names:
        raise RecipeError(f"'{label}' is the source itself; nothing can be transferred to it")
    return names


def _labels(runs: Sequence[tuple[str, int]]) -> list[str]:
    """Name runs by their recipe, and by their seed where a recipe has several."""
    counts = Counter(recipe for recipe, _ in runs)
    return [recipe + (f" seed {seed}" if counts[recipe] > 1 else "") for recipe, seed in runs]


def _masked(one: AttackCurves) -> dict[str, dict[str, object]]:
    return {e: found._asdict() for e, found in find_masking(one.attack_accuracy).items()}


def _origin(run: TrainedRun) -> dict[str, object]:
    return {"recipe": run.recipe.name, "model": type(run.model).__name__, "seed": run.recipe.seed, "steps": run.step}


def _test_images(run: TrainedRun, folder: Path, first: Dataset, reference: TrainedRun) -> Dataset:
    """The run's test images, if they are those of the first run."""
    # Runs with the same settings share one copy of the images.
    test = first if run.recipe.data == reference.recipe.data else run.recipe.data.load().test
    if not (torch.equal(test.cropped, first.cropped) and torch.equal(test.labels, first.labels)):
        raise RecipeError(f"'{folder}' is tested on other images than the first run; attack it by itself")
    return test


def _check_same_preprocessing(test: Dataset, other: Dataset) -> None:
    # Views of different size may still show the same images, which is compared elsewhere.
    if replace(test.preprocess, view=None) != replace(other.preprocess, view=None):
        raise RecipeError("two runs see images standardized in different ways; transfer needs runs that see the same")
