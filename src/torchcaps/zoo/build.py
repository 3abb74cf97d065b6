"""Make the folder of a model to give away from a finished run: weights in half precision, test images, card."""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.config import Choice, flatten, to_dict
from torchcaps.data import DATASETS, Dataset
from torchcaps.data.status import overview
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.results import Result, read_result
from torchcaps.math.pixels import to_bytes
from torchcaps.systems import evaluate_runs, system_of
from torchcaps.train.checkpoint import save
from torchcaps.train.recipe import Recipe, load_recipe, recipe_names
from torchcaps.train.run import GIVEN_AWAY, TrainedRun, find_checkpoint, load_run, run_of
from torchcaps.train.stored_examples import stored_examples
from torchcaps.train.weights_export import FACTOR_PREFIX, strip_to_weights
from torchcaps.utils.files import make_folder, write_atomically
from torchcaps.zoo.card import CARD, README, RESULT, ModelCard, Origin, Picture, card_text, encode_card
from torchcaps.zoo.spot_check import spot_check

__all__ = ["BuildSettings", "build_model_folder", "choose_examples", "training_command"]

_PICTURE_IMAGES = 10
"""Images of a card's picture."""


@dataclass(frozen=True)
class BuildSettings:
    """What the run itself does not know about the model that is made of it.

    Attributes:
        summary: One sentence about what the model does.
        commit: Of the repository, by whose code the run was trained.
        command: What trained it; None for `torchcaps train` with the settings that differ from the recipe.
        note: What else a user must know.
        images: How many test images ship with the weights.
        result: A file that `torchcaps evaluate` wrote of these very weights; None to measure now.
        only: Names of the controls to measure; None for all that the system has.
        reference: Products of expert capsules: folder of the reference classifier.
    """

    summary: str
    commit: str
    command: str | None = None
    note: str = ""
    images: int = 100
    result: Path | None = None
    only: tuple[str, ...] | None = None
    reference: Path | None = None


def build_model_folder(run_folder: Path, folder: Path, settings: BuildSettings) -> ModelCard:
    """Make the folder of a model: `model.safetensors`, `result.json`, `config.json`, `README.md`.

    Args:
        run_folder: Of a finished run, or weights that carry test images already.
        folder: To write into; its name is the name of the model.
        settings: What the run does not know.

    Returns:
        The card.

    Raises:
        TrainingError: The run is not trained to its end, or the folder cannot be written.
    """
    # The weights, with test images if they bring none
    checkpoint = find_checkpoint(run_folder)
    run = run_of(checkpoint)
    if not run.finished:
        raise TrainingError(f"'{run_folder}' is not trained to its end; go on with: torchcaps train --resume")
    own = {name: value for name, value in run.extra.items() if name.startswith("examples.")}
    names = run.class_names
    if not own:
        test = choose_examples(run.recipe.data.load().test, settings.images)
        names = test.names
        own = {"examples.images": test.images, "examples.labels": test.labels}
        own |= {FACTOR_PREFIX + name: values for name, values in test.factors.items()}
    small = strip_to_weights(checkpoint, half=True, names=names, sums=run.model.training_sums)
    small.tensors.update(own)
    make_folder(folder)
    save(folder / GIVEN_AWAY, small)

    # What is measured is measured with the weights as they were written
    written = load_run(folder / GIVEN_AWAY)
    result = _result(folder, settings)
    card = _card(folder.resolve().name, written, result, settings)
    write_atomically(folder / RESULT, [(json.dumps(asdict(result), indent=2) + "\n").encode()])
    write_atomically(folder / CARD, [encode_card(card)])
    write_atomically(folder / README, [card_text(card, result).encode()])
    return card


def choose_examples(test: Dataset, count: int) -> Dataset:
    """Choose test images to ship with a model.

    Args:
        test: The test set.
        count: How many images; of objects whose viewpoint is known, about as many.

    Returns:
        Images as the model sees them (cropped), evenly spaced over the set. Of smallNORB, the first object of each
        class from every azimuth that fits, at two lightings and one elevation, so that it can be turned.
    """
    rows = torch.linspace(0, len(test) - 1, min(count, len(test))).round().long()
    if {"azimuth", "lighting", "elevation", "instance"} <= test.factors.keys():
        rows = _turntable(test, count)
    return Dataset(
        test.cropped[rows].clone(),
        test.labels[rows].clone(),
        test.classes,
        {name: values[rows].clone() for name, values in test.factors.items()},
        test.names,
    )


def _turntable(test: Dataset, count: int) -> Tensor:
    """Return the rows [n] of one object of each class, seen from all around."""
    factors = test.factors
    lightings = torch.tensor(sorted(set(factors["lighting"].tolist()))[:2])
    elevation = sorted(set(factors["elevation"].tolist()))[2]
    azimuths = torch.tensor(sorted(set(factors["azimuth"].tolist())))
    # As many azimuths as fit, evenly spaced
    wanted = max(1, count // (test.classes * len(lightings)))
    azimuths = azimuths[:: max(1, -(-len(azimuths) // wanted))]
    chosen = (factors["elevation"] == elevation) & torch.isin(factors["azimuth"], azimuths)
    chosen &= torch.isin(factors["lighting"], lightings)
    rows = []
    for label in range(test.classes):
        is_class = test.labels == label
        first = factors["instance"][is_class].min()
        rows.append((chosen & is_class & (factors["instance"] == first)).nonzero().flatten())
    return torch.cat(rows)


def training_command(recipe: Recipe) -> str:
    """Write the command that trains a recipe: its name, its seed, and what differs from the recipe that ships.

    Raises:
        RecipeError: No recipe of that name ships, so that the command must be given.
    """
    if recipe.name not in recipe_names():
        raise RecipeError(f"no recipe '{recipe.name}' ships with torchcaps; say how the run was made with --command")
    known = flatten(to_dict(load_recipe(recipe.name)))
    own = flatten(to_dict(recipe))
    ignored = ("about", "seed", "data.data_dir", "paper.", "start")
    flags = [
        f"--{key} {shlex.quote(json.dumps(value)) if isinstance(value, list | dict | bool) else value}"
        for key, value in own.items()
        if known.get(key) != value and not key.startswith(ignored)
    ]
    return " ".join(["torchcaps train", recipe.name, f"--seed {recipe.seed}", *flags])


def _result(folder: Path, settings: BuildSettings) -> Result:
    """Read the result that was given, or measure the written weights."""
    if settings.result is not None:
        return read_result(settings.result)
    return evaluate_runs([folder], only=settings.only, reference=settings.reference)


def _card(name: str, run: TrainedRun, result: Result, settings: BuildSettings) -> ModelCard:
    data = Choice(DATASETS).name_of(run.recipe.data) or "own"
    examples = stored_examples(run)
    assert examples is not None, "they were written with the weights"
    return ModelCard(
        name=name,
        summary=settings.summary,
        system=system_of(run.recipe).name,
        recipe=run.recipe.name,
        seed=run.recipe.seed,
        data=data,
        data_license={row.name: row.license for row in overview()}.get(data, "not stated"),
        origin=Origin(settings.command or training_command(run.recipe), settings.commit, settings.note),
        parameters=sum(p.numel() for p in run.model.parameters()),
        steps=run.step,
        seconds=round(run.seconds, 1),
        metrics={metric: values[0] for metric, values in result.metrics.items()},
        check_images=len(examples),
        check=spot_check(run),
        picture=_picture(run, examples),
    )


@torch.inference_mode()
def _picture(run: TrainedRun, examples: Dataset) -> Picture:
    """Draw samples of a model that draws without an image, or choose some of its test images."""
    system = system_of(run.recipe)
    pixels = examples.pixels(torch.linspace(0, len(examples) - 1, _PICTURE_IMAGES).long())[:, :1]  # [n 1 h w]
    view = None if system.explorer_view is None else system.explore(run.model, (), None)
    if view is not None and view.domains:
        grid = view.sample_grid(1, view.domains[0], 0)
        pixels = grid.images[0, :_PICTURE_IMAGES, :1]
    data = to_bytes(pixels).contiguous()
    n, c, h, w = data.shape
    return Picture((n, c, h, w), base64.b64encode(data.numpy().tobytes()).decode())
