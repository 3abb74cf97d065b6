"""Attacks on the folders of runs: several models on the same images, as plain data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torchcaps.data import Dataset
from torchcaps.errors import DataError, RecipeError
from torchcaps.evaluate.attacks.curves import FREE, GRADIENT, AttackCurves, attack_curves, find_masking, select_attacks
from torchcaps.evaluate.results import versions
from torchcaps.systems.sparse.svm_classifier import SVMClassifier, load_classifier_or_sparse, with_svm
from torchcaps.train.run import TrainedRun

__all__ = ["AttackRuns", "attack_rows", "attack_runs", "curves_of", "load_attack_runs", "to_plain_data", "verdicts"]


@dataclass(frozen=True)
class AttackRuns:
    """Runs by their labels, each with its test set, all of the same images; and the run that transfer comes from."""

    runs: Mapping[str, tuple[TrainedRun, Dataset]]
    source: TrainedRun | None


def load_attack_runs(folders: Sequence[Path], source: Path | None = None) -> AttackRuns:
    """Load and check runs; they are called by their recipe, and by their seed too where a recipe has several."""
    runs = [load_classifier_or_sparse(folder) for folder in folders]
    first = runs[0].recipe.data.load().test
    if first.labels.ndim != 1:
        raise DataError(f"'{folders[0]}' tells several things in an image apart; attacks need one label an image")
    tests = [_test(run, folder, first, runs[0]) for run, folder in zip(runs, folders, strict=True)]
    labels = _labels([(run.recipe.name, run.recipe.seed) for run in runs])
    if len(set(labels)) < len(labels):
        raise RecipeError(f"the runs are {', '.join(labels)}; each recipe and seed is attacked once")
    maker = None if source is None else load_classifier_or_sparse(source)
    if maker is not None and source is not None:
        for test in (_test(maker, source, first, runs[0]), *tests):
            _check_shown_alike(test, tests[0])
    readers = [with_svm(run) for run in runs]
    return AttackRuns(dict(zip(labels, zip(readers, tests, strict=True), strict=True)), maker and with_svm(maker))


def attack_runs(contest: AttackRuns, attacks: Sequence[str] | None = None, **settings: Any) -> dict[str, AttackCurves]:
    """`attack_curves` of every run by its label, with its settings; nothing is transferred to the source itself."""
    source = contest.source
    found = {}
    if settings.get("loss") == "own" and any(isinstance(run.model, SVMClassifier) for run, _ in contest.runs.values()):
        raise RecipeError("a read-out was trained by no loss that an attack could climb; leave --loss out")
    wanted = {label: _own_attacks(label, run, source, attacks) for label, (run, _) in contest.runs.items()}
    for label, (run, test) in contest.runs.items():
        model = source.model if source is not None and "transfer" in wanted[label] else None
        found[label] = attack_curves(run.model, test, wanted[label], source=model, **settings)
    return found


def to_plain_data(
    contest: AttackRuns, curves: Mapping[str, AttackCurves], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """All that is known of the attacks, for JSON: the settings, then each run with its numbers."""
    runs = [
        {**_origin(run), **asdict(curves[label]), "masked": _masked(curves[label])}
        for label, (run, _) in contest.runs.items()
    ]
    source = None if contest.source is None else _origin(contest.source)
    return {**settings, "source": source, "runs": runs, "versions": versions()}


def curves_of(found: Mapping[str, Any]) -> dict[str, AttackCurves]:
    """The curves that `plain` was given, by the same labels."""
    own = [field.name for field in fields(AttackCurves)]
    labels = _labels([(run["recipe"], run["seed"]) for run in found["runs"]])
    return {label: AttackCurves(**{n: run[n] for n in own}) for label, run in zip(labels, found["runs"], strict=True)}


def attack_rows(curves: Mapping[str, AttackCurves]) -> list[list[str]]:
    """Header, and a row for each model and attack: shares of images in percent by epsilon, and without a gradient."""
    first = next(iter(curves.values()))
    epsilons = list(next(iter((first.attack_accuracy | first.attack_success).values())))
    rows = [["right (%) at epsilon", *epsilons, "zero gradients (%)"]]
    for label, one in curves.items():
        named = {name: f"{label}, {name}" for name in one.attack_accuracy}
        named |= {name: f"{label}, {name}: success (%)" for name in one.attack_success}
        for name, curve in (one.attack_accuracy | one.attack_success).items():
            zero = one.zero_gradients.get(name)
            rows.append(
                [named[name], *(f"{100 * v:.1f}" for v in curve.values()), "-" if zero is None else f"{100 * zero:.1f}"]
            )
    return rows


def verdicts(curves: Mapping[str, AttackCurves]) -> list[str]:
    """One line a model: whether its gradients are masked, and by how much at the worst epsilon."""
    return [f"{label}: {_verdict(one)}" for label, one in curves.items()]


def _verdict(one: AttackCurves) -> str:
    made = set(one.attack_accuracy)
    if not made & set(FREE) or not made & set(GRADIENT):
        return "masking unknown; it takes an attack along the gradient and one without (square, transfer)"
    found = find_masking(one.attack_accuracy)
    if not found:
        return "no sign of gradient masking: no attack without gradients does better"
    e, worst = max(found.items(), key=lambda item: item[1].gradient_accuracy - item[1].accuracy)
    return (
        f"gradient masking at epsilon {', '.join(found)}: at {e}, {worst.free} leaves "
        f"{worst.accuracy * one.images:.0f} of {one.images} images right, "
        f"{worst.gradient}, the best along the gradient, {worst.gradient_accuracy * one.images:.0f}"
    )


def _own_attacks(label: str, run: TrainedRun, source: TrainedRun | None, attacks: Sequence[str] | None) -> list[str]:
    """The attacks on one run: images made on the run itself would be those of FGSM."""
    names = select_attacks(attacks, source is not None)
    if source is not None and run.recipe == source.recipe:
        names = [name for name in names if name != "transfer"]
    if not names:
        raise RecipeError(f"'{label}' is the source itself; nothing can be transferred to it")
    return names


def _labels(runs: Sequence[tuple[str, int]]) -> list[str]:
    """Of recipes and seeds."""
    named = Counter(recipe for recipe, _ in runs)
    return [recipe + (f" seed {seed}" if named[recipe] > 1 else "") for recipe, seed in runs]


def _masked(one: AttackCurves) -> dict[str, dict[str, Any]]:
    return {e: found._asdict() for e, found in find_masking(one.attack_accuracy).items()}


def _origin(run: TrainedRun) -> dict[str, Any]:
    return {"recipe": run.recipe.name, "model": type(run.model).__name__, "seed": run.recipe.seed, "steps": run.step}


def _test(run: TrainedRun, folder: Path, first: Dataset, reference: TrainedRun) -> Dataset:
    """The run's test set, if it shows the same images as the first run's."""
    test = first if run.recipe.data == reference.recipe.data else run.recipe.data.load().test
    if not (torch.equal(test.cropped, first.cropped) and torch.equal(test.labels, first.labels)):
        raise RecipeError(f"'{folder}' is tested on other images than the first run; attack it by itself")
    return test


def _check_shown_alike(test: Dataset, other: Dataset) -> None:
    if test.preprocess.standardize != other.preprocess.standardize:
        raise RecipeError("one run sees standardized images, another not; transfer needs runs that see the same")
