"""All pictures of a run, whatever its model is: which kinds there are, what each shows, and how it is drawn.

`torchcaps generate` writes them as files, `torchcaps report` into one page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.data import Dataset, subset
from torchcaps.errors import RecipeError
from torchcaps.evaluate.factors import class_capsules
from torchcaps.evaluate.figures import learning_curve
from torchcaps.models import CapsNet, MatrixCaps, PoE
from torchcaps.models.sparse import SparseModel
from torchcaps.systems.capsnet import figures as capsnet_figures
from torchcaps.systems.matrix import figures as matrix_figures
from torchcaps.systems.poe import figures as poe_figures
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.systems.sparse import figures as sparse_figures
from torchcaps.train.journal import read_journal
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun, load_run
from torchcaps.utils.random import permutation

__all__ = ["CAPTIONS", "Figures", "figures_of"]

LOOKED_AT = 10_000
"""Of more test images a classifier, or a sparse network, is shown so many, picked by the seed."""

CAPTIONS: Mapping[str, str] = {
    "curves": "Training, step by step.",
    "samples": "Every capsule alone, a column each.",
    "pairs": "Two capsules drawing together.",
    "wins": "What each capsule wins: the mean of its test images, then its drawings.",
    "reconstructions": "Test images, and what is redrawn from their capsules.",
    "sweeps": "The busiest capsule, each dimension of its pose moved in turn from -2 to 2 deviations: along the "
    "principal axes of the poses it met, then one number at a time.",
    "interpolation": "From the code of one image to that of another.",
    "completion": "Half of an image hidden, and completed by going to and fro between image and capsules.",
    "routing": "Where in the image the winning capsule gets its evidence from.",
    "perturbations": "Each dimension of a class's capsule moved from -.25 to .25.",
    "multimnist": "Two overlapping digits, each redrawn from its own capsule.",
    "calibration": "How often the answer is right when the network is how sure.",
    "votes": "How far the votes for each class capsule are from its mean, iteration by iteration.",
    "parts": "A test image redrawn from each capsule alone, from all but each, and what leaving it out changes.",
    "ranked": "The support of an image's capsules from the largest down.",
    "frequencies": "How often each capsule has each rank.",
    "equivariances": "Each number of the first capsule's pose from -1 to 1.",
}
"""What each kind of picture shows, in one sentence."""


@dataclass(frozen=True)
class Figures:
    """The kinds of pictures to draw, and what draws one: file name (without .png) -> PNG."""

    kinds: list[str]
    draw: Callable[[str], dict[str, bytes]]


def figures_of(
    folder: Path, run: TrainedRun, wish: FigureOptions, what: str = "all", beside: Iterable[Path] = ()
) -> Figures:
    """The pictures of a run in a folder: one kind, or all of its capsules; data are loaded only if they are needed.

    `curves` are drawn of any run. `beside` are folders of other runs, for the figure `ranked` of sparse capsules.
    """
    model = run.model
    recipe = run.recipe
    name = folder.resolve().name
    beside = list(beside)
    if what == "curves":
        return Figures([what], lambda _: _curves(folder, recipe.start))
    if beside and not isinstance(model, SparseModel):
        raise RecipeError("--beside adds curves to those of sparse capsules, and this is another run; leave it out")
    if isinstance(model, PoE):
        return _experts(model, recipe, wish, what)
    if isinstance(model, CapsNet | MatrixCaps):
        return _classes(model, recipe, wish, what)
    if isinstance(model, SparseModel):
        return _sparse(model, recipe, wish, what, name, beside)
    raise RecipeError(
        f"'{name}' is a run of {type(model).__name__}, of which there are no pictures; "
        "name one of a product of experts, of a CapsNet, of matrix or of sparse capsules"
    )


def _experts(model: PoE, recipe: Recipe, wish: FigureOptions, what: str) -> Figures:
    figures = poe_figures.FIGURES
    few = len(wish.capsules or range(model.capsules)) < 2
    skipped = ({"pairs"} if few else set()) | ({"interpolation"} if wish.count < 2 else set())
    kinds = _kinds(what, figures, [kind for kind in figures if kind not in skipped])
    test = _test_images(recipe) if set(kinds) & set(poe_figures.FROM_IMAGES) else None

    def draw(kind: str) -> dict[str, bytes]:
        images = None if test is None else test if kind == "wins" else _some(test, wish.count, wish.seed)
        return poe_figures.picture(kind, model, wish, images)

    return Figures(kinds, draw)


def _classes(model: CapsNet | MatrixCaps, recipe: Recipe, wish: FigureOptions, what: str) -> Figures:
    figures: Any = capsnet_figures if isinstance(model, CapsNet) else matrix_figures
    _kinds(what, figures.FIGURES, [])  # a wrong one is refused before data are loaded
    data = _test_set(recipe, wish.seed)
    kinds = _kinds(what, figures.FIGURES, figures.kinds_of(data))
    seen = class_capsules(model, data) if set(kinds) & set(figures.FROM_ALL) else None
    return Figures(kinds, lambda kind: figures.picture(kind, model, wish, data, seen))


def _sparse(
    model: SparseModel, recipe: Recipe, wish: FigureOptions, what: str, name: str, beside: list[Path]
) -> Figures:
    kinds = _kinds(what, sparse_figures.FIGURES, list(sparse_figures.FIGURES))
    if beside and "ranked" not in kinds:
        raise RecipeError(f"--beside adds curves to the figure ranked, and {what} is drawn; leave it out")
    others = _load_beside(beside, name, wish.seed)
    scene = sparse_figures.SparseFigureContext(model, wish, _test_set(recipe, wish.seed), name, others)
    return Figures(kinds, lambda kind: sparse_figures.picture(kind, scene))


def _kinds(what: str, known: Iterable[str], by_default: list[str]) -> list[str]:
    """The figures wanted: one of those known, or all that are drawn by default."""
    if what not in ("all", *known):
        raise RecipeError(f"--what {what} is no picture of this kind of model; choose: {', '.join(known)}")
    return by_default if what == "all" else [what]


def _load_beside(folders: list[Path], name: str, seed: int) -> dict[str, tuple[CapsNet | SparseModel, Dataset]]:
    """Folder's name -> model and test images of a run to compare with."""
    names = [name, *(folder.resolve().name for folder in folders)]
    if len(set(names)) < len(names):
        raise RecipeError(f"the runs are called {', '.join(names)}; each needs a name of its own")
    found: dict[str, tuple[CapsNet | SparseModel, Dataset]] = {}
    for folder, other in zip(folders, names[1:], strict=True):
        model, recipe, *_ = load_run(folder)
        if not isinstance(model, CapsNet | SparseModel):
            kind = type(model).__name__
            raise RecipeError(f"'{folder}' is a run of {kind}; --beside wants sparse capsules or a CapsNet")
        found[other] = model, _test_set(recipe, seed)
    return found


def _test_images(recipe: Recipe) -> Tensor:
    """[n c h w] as a model is shown them."""
    return recipe.data.load().test.model_input()


def _test_set(recipe: Recipe, seed: int) -> Dataset:
    """The test images, or if there are many some of them."""
    test = recipe.data.load().test
    return test if len(test) <= LOOKED_AT else subset(test, permutation(seed, 0, len(test))[:LOOKED_AT])


def _some(images: Tensor, count: int, seed: int) -> Tensor:
    """Images picked by the seed."""
    return images[permutation(seed, 0, len(images))[:count]]


def _curves(folder: Path, start: str | None) -> dict[str, bytes]:
    """What a run's journal tells, after those of the runs it started from: the loss, and accuracies, of every stage."""
    stages = _before(start)
    for entry in read_journal(folder / "journal.jsonl"):
        stages.setdefault(entry.get("stage", folder.resolve().name), []).append(entry)
    known = {key for lines in stages.values() for entry in lines for key in entry}
    if not known:
        raise RecipeError(f"'{folder}' has no journal, from which curves are drawn; name the folder of a run")
    keys = [key for key in ("loss", "accuracy", "validation_accuracy") if key in known]
    return {f"curve-{key.replace('_', '-')}": learning_curve(list(stages.items()), key) for key in keys}


def _before(start: str | None) -> dict[str, list[dict[str, Any]]]:
    """Folder's name -> journal of the run that another started from, and of those before it, if they are there."""
    found: dict[str, list[dict[str, Any]]] = {}
    while start is not None and Path(start).name not in found:
        folder = Path(start)
        start = None
        if entries := read_journal(folder / "journal.jsonl"):
            found = {folder.name: entries, **found}
            start = json.loads((folder / "recipe.json").read_text(encoding="utf-8")).get("start")
    return found
