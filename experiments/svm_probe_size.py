"""Tabulate the accuracy of an SVM probe on affNIST (protocol a) by the number of images it is fitted to.

    python experiments/svm_probe_size.py NAME runs/sparse runs/dense [--images 2500 5000 10000 20000]

Rows: sparse capsules behind and before their mask, the dense control, principal components; and an SVM that is fitted
to the test digits themselves under other transforms, as the authors' code does. Columns: numbers of training images.
Written to results/lab-NAME.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.data import AffnistConfig, Dataset, MnistConfig
from torchcaps.data.affnist import affnist
from torchcaps.errors import RecipeError
from torchcaps.evaluate.baselines import fit_pca
from torchcaps.evaluate.svm_probe import GAMMA, build_probe_data, fit_svm
from torchcaps.models.sparse import SparseModel
from torchcaps.systems import system_of
from torchcaps.systems.sparse.metrics import ImageCodes, ImageEncoder, capsule_encoder, encode_dataset
from torchcaps.train.run import TrainedRun, load_run
from torchcaps.utils.progress import progress

COUNTS = (2500, 5000, 10_000, 20_000)
TRANSFORM_SEED = 1_000
"""A seed that no recipe draws its test images by."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("sparse", type=Path, help="folder of a run of sparse capsules on affNIST")
    parser.add_argument("dense", type=Path, help="folder of its dense control")
    parser.add_argument("--images", nargs="+", type=int, default=COUNTS, help="how many images the SVM is fitted to")
    arguments = parser.parse_args(words)

    # Both runs must be of sparse capsules on the same images.
    numbers = list(arguments.images)
    folders = [arguments.sparse, arguments.dense]
    runs = [load_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if system_of(run.recipe).name != "sparse" or not isinstance(run.recipe.data, AffnistConfig):
            raise RecipeError(f"'{folder}' holds {run.recipe.name}; a run of sparse capsules on affNIST is wanted")
    if runs[0].recipe.data != runs[1].recipe.data:
        raise RecipeError("the two runs have different data; give two runs on the same images")
    # One row an encoder, and last the one that is fitted to the test digits.
    material = build_probe_data(runs[0].recipe, max(numbers))
    if max(numbers) > material.train_count:
        raise RecipeError(f"--images {max(numbers)} came; there are only {material.train_count} images to fit to")
    train, test = (material.sets[name] for name in material.protocols[material.main])
    rows = [["accuracy (%) after", *(f"{count:,} images" for count in numbers)]]
    for title, encoder, gamma in progress(list(_encoders(runs, material.augmented)), "fitting"):
        rows.append([title, *_curve(encoder, gamma, train, test, numbers)])
    before = _before(cast(SparseModel, runs[0].model))
    same = _moved_again(runs[0], max(numbers))
    rows.append(
        [f"{runs[0].recipe.name}, before the mask, of test digits", *_curve(before, GAMMA, same, test, numbers)]
    )
    write_rows(arguments.name, rows, runs=[run.recipe.name for run in runs], seeds=[run.recipe.seed for run in runs])


@torch.no_grad()
def _encoders(runs: list[TrainedRun], shown: Tensor) -> Iterator[tuple[str, ImageEncoder, float | None]]:
    """Yield row label, encoder and the kernel that suits its codes, as in torchcaps.systems.sparse.metrics."""
    sparse, dense = (cast(SparseModel, run.model.eval()) for run in runs)
    yield f"{runs[0].recipe.name}, behind the mask", capsule_encoder(sparse), GAMMA
    yield f"{runs[0].recipe.name}, before the mask", _before(sparse), GAMMA
    yield runs[1].recipe.name, capsule_encoder(dense), GAMMA
    axes = fit_pca(shown.flatten(1), *sparse.encode(shown[:1]).pose.shape[1:])
    yield "principal components", lambda images: ImageCodes(axes.codes(images.flatten(1)), None), None


def _before(model: SparseModel) -> ImageEncoder:
    """Encode by the capsules before their mask."""
    return lambda images: capsule_encoder(model)(images).before_mask()


def _moved_again(run: TrainedRun, count: int) -> Dataset:
    """Draw `count` images of the test digits under transforms other than those of the test."""
    data = cast(AffnistConfig, run.recipe.data)
    digits = MnistConfig(data_dir=data.data_dir).load().test
    images, _ = affnist(digits.images, TRANSFORM_SEED, torch.arange(count), data.size)
    return replace(digits, images=images, labels=digits.labels[torch.arange(count) % len(digits)])


@torch.no_grad()
def _curve(encoder: ImageEncoder, gamma: float | None, train: Dataset, test: Dataset, numbers: list[int]) -> list[str]:
    """Fit an SVM to the first images of `train`, for each number of them; accuracies (%) on `test`."""
    codes, asked = (cast(Tensor, encode_dataset(encoder, data).codes) for data in (train, test))
    machines = (fit_svm(codes[:count], train.labels[:count], gamma=gamma) for count in numbers)
    return [f"{100 * machine.accuracy(asked, test.labels):.1f}" for machine in machines]


if __name__ == "__main__":
    main()
