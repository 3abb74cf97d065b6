"""What an SVM reads of affNIST by protocol (a), as it learns from more images: of sparse capsules behind and before
their mask, of the dense control and of principal components. One row learns from the test digits themselves,
moved otherwise, as the authors' code does.

    python experiments/readout.py NAME runs/sparse runs/dense [COUNT ...]

Written to results/lab-NAME.json: a row of each, a column a number of training images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from lab import store
from torch import Tensor

from torchcaps.data import AffnistConfig, Dataset, MnistConfig
from torchcaps.data.affnist import affnist
from torchcaps.errors import RecipeError
from torchcaps.evaluate.baselines import fit_pca
from torchcaps.evaluate.svm_probe import GAMMA, build_probe_data, fit_svm
from torchcaps.models import SparseConfig
from torchcaps.models.sparse import SparseModel
from torchcaps.systems.sparse.metrics import Look, Seen, capsules, encode_dataset
from torchcaps.train.run import TrainedRun, load_run
from torchcaps.utils.progress import progress

COUNTS = (2500, 5000, 10_000, 20_000)
OTHER = 1_000
"""A seed that no recipe draws its test images by."""


def main(arguments: list[str]) -> int:
    name, sparse, dense, *counts = arguments
    numbers = [int(count) for count in counts] or list(COUNTS)
    runs = [load_run(Path(folder)) for folder in (sparse, dense)]
    for folder, run in zip((sparse, dense), runs, strict=True):
        if not isinstance(run.recipe.model, SparseConfig) or not isinstance(run.recipe.data, AffnistConfig):
            raise RecipeError(f"'{folder}' holds {run.recipe.name}; a run of sparse capsules on affNIST is wanted")
    if runs[0].recipe.data != runs[1].recipe.data:
        raise RecipeError("the two runs saw other images; those of one data set are wanted")
    material = build_probe_data(runs[0].recipe, max(numbers))
    if max(numbers) > material.read:
        raise RecipeError(f"{max(numbers)} images are asked for; there are {material.read} to learn from")
    train, test = (material.sets[name] for name in material.protocols[material.main])
    rows = [["accuracy (%) after", *(f"{count:,} images" for count in numbers)]]
    for title, look, gamma in progress(list(_looks(runs, material.shown)), "reading"):
        rows.append([title, *_curve(look, gamma, train, test, numbers)])
    before = _before(cast(SparseModel, runs[0].model))
    same = _moved_again(runs[0], max(numbers))
    rows.append(
        [f"{runs[0].recipe.name}, before the mask, of test digits", *_curve(before, GAMMA, same, test, numbers)]
    )
    return store(name, rows, runs=[run.recipe.name for run in runs], seeds=[run.recipe.seed for run in runs])


@torch.no_grad()
def _looks(runs: list[TrainedRun], shown: Tensor) -> Iterator[tuple[str, Look, float | None]]:
    """What is read, by name, with the kernel that suits it, as in torchcaps.systems.sparse.metrics."""
    sparse, dense = (cast(SparseModel, run.model.eval()) for run in runs)
    yield f"{runs[0].recipe.name}, behind the mask", capsules(sparse), GAMMA
    yield f"{runs[0].recipe.name}, before the mask", _before(sparse), GAMMA
    yield runs[1].recipe.name, capsules(dense), GAMMA
    axes = fit_pca(shown.flatten(1), *sparse.encode(shown[:1]).pose.shape[1:])
    yield "principal components", lambda images: Seen(axes.codes(images.flatten(1)), None), None


def _before(model: SparseModel) -> Look:
    return lambda images: capsules(model)(images).before()


def _moved_again(run: TrainedRun, count: int) -> Dataset:
    """So many images of the test digits, under other maps than those of the test."""
    data = cast(AffnistConfig, run.recipe.data)
    digits = MnistConfig(data_dir=data.data_dir).load().test
    images, _ = affnist(digits.images, OTHER, torch.arange(count), data.size)
    return replace(digits, images=images, labels=digits.labels[torch.arange(count) % len(digits)])


@torch.no_grad()
def _curve(look: Look, gamma: float | None, train: Dataset, test: Dataset, numbers: list[int]) -> list[str]:
    codes, asked = (cast(Tensor, encode_dataset(look, data).codes) for data in (train, test))
    machines = (fit_svm(codes[:count], train.labels[:count], gamma=gamma) for count in numbers)
    return [f"{100 * machine.accuracy(asked, test.labels):.1f}" for machine in machines]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
