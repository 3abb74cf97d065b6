"""What products of expert capsules have learned, measured beside what does with less.

Every row of the table is a `Subject` on the features f [n i d] of one and the same autoencoder, so that a difference
between rows is a difference between capsules. Metrics, where j counts capsules and K numbers make a pose:

    confident_fraction, classes_covered, consistency   of 50 samples of each single capsule, as a judge sees them
                     ("empirical" poses; all J capsules count, unused ones too); see `generative.judge_samples`
    argmax_nmi, purity   of the capsule that wins an image, against the image's class
    cka              mean over pairs of capsules, of poses without the gate: each one's own view of every image
    bottleneck_mse   of the pixels, from the J K numbers alone
    tied_mse         through W transposed with each image's own coupling, which leaks; rivals have no such path
    autoencoder_mse  of the features themselves: the floor for both
    knn, linear_probe   accuracy of the classes read from codes of training images
    frechet          between all samples and as many test images (fewer of both if there are not as many)
    capsules_used    capsules that win a tenth of an even share or more

Rivals and the random W are fitted to at most 5,000 training images, and the probes read as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from torchcaps.data import Dataset, Splits, epoch_order, subset
from torchcaps.errors import RecipeError, TrainingError, suggestion
from torchcaps.evaluate.baselines import BASELINES, Baseline, LocalPCA
from torchcaps.evaluate.probes import knn, linear_probe
from torchcaps.evaluate.reference_classifier import reference_features, reference_probabilities
from torchcaps.evaluate.sample_metrics import capsules_used, cross_capsule_cka, frechet, sample_confidence
from torchcaps.math.squash import squash
from torchcaps.metrics import nmi, purity
from torchcaps.models import CNN
from torchcaps.models.poe import DecoderConfig, PoE, PoEConfig
from torchcaps.models.poe.encoder import CapsuleState
from torchcaps.models.poe.stages import DecoderStage
from torchcaps.routing import Dynamic
from torchcaps.train import Recipe, train
from torchcaps.train.recipe import OptimizerConfig, StageConfig, stage_of
from torchcaps.train.train_state import build_model, load_stage
from torchcaps.types import Batch
from torchcaps.utils.progress import progress

__all__ = [
    "CONTROLS",
    "Encoder",
    "EvaluationData",
    "PoEEncoder",
    "build_evaluation_data",
    "measure",
    "run_and_controls",
    "select_controls",
]

IMAGES = 2000
"""Test images measured, unless told otherwise."""
FITTED = 5000
SAMPLES = 50
VIEWED = 1000
CHUNK = 250
SHARE = 0.25
DECODED = 166
"""Of the run's own steps of W, and at most so many of U, that a trained control takes: it has settled long before."""

CONTROLS = ("paper", "offset only", "random W", *BASELINES)
NEED_SKLEARN = frozenset(BASELINES) - {"PCA"}


class Encoder(Protocol):
    """What is asked of anything that makes J groups of numbers of the features of an image."""

    def codes(self, f: Tensor) -> Tensor:
        """[n ...] the numbers that stand for each image."""

    def views(self, f: Tensor) -> Tensor:
        """[n j k] what each group makes of every image, whether or not it wins."""

    def winners(self, f: Tensor) -> Tensor:
        """[n] the group that each image belongs to."""

    def rebuild(self, f: Tensor) -> Tensor:
        """[n i d] features from the codes alone."""

    def rebuild_tied(self, f: Tensor) -> Tensor | None:
        """[n i d] features through W transposed, where there is such a way."""

    def samples(self, n: int, seed: int) -> Tensor:
        """[j n c h w] images of each group alone."""


@dataclass(frozen=True)
class PoEEncoder:
    """A product of expert capsules as a subject."""

    model: PoE

    def codes(self, f: Tensor) -> Tensor:
        return _in_chunks(lambda x: self._look(x).hidden, f)  # [n j k]

    def views(self, f: Tensor) -> Tensor:
        return _in_chunks(lambda x: squash(self._look(x).z), f)

    def winners(self, f: Tensor) -> Tensor:
        return _in_chunks(lambda x: self.model.energy.winners(self._look(x)), f)

    def rebuild(self, f: Tensor) -> Tensor:
        return _in_chunks(lambda x: self.model.decoder(self._look(x).hidden), f)

    def rebuild_tied(self, f: Tensor) -> Tensor:
        return _in_chunks(self._tied, f)

    def samples(self, n: int, seed: int) -> Tensor:
        return torch.stack([self.model.sample(j, n, "empirical", seed) for j in range(self.model.capsules)])

    def _look(self, f: Tensor) -> CapsuleState:
        return self.model.energy.infer(self.model.energy.visible(f))

    def _tied(self, f: Tensor) -> Tensor:
        seen = self._look(f)
        return self.model.energy.reconstruct_children(seen.hidden, seen.coupling) + self.model.energy.offset


@dataclass(frozen=True)
class _BaselineEncoder:
    """A rival on the flattened features of a model, whose autoencoder draws for it."""

    rival: Baseline
    model: PoE

    def codes(self, f: Tensor) -> Tensor:
        return self.rival.codes(f.flatten(1))

    def views(self, f: Tensor) -> Tensor:
        """The codes; those of local PCA before all groups but the winner are put to 0."""
        if isinstance(self.rival, LocalPCA):
            means = self.rival.means
            axes = self.rival.axes
            return torch.einsum("np,jkp->njk", f.flatten(1), axes) - torch.einsum("jp,jkp->jk", means, axes)
        codes = self.codes(f)
        return codes if codes.ndim == 3 else codes.unsqueeze(-1)

    def winners(self, f: Tensor) -> Tensor:
        return self.rival.winners(f.flatten(1))

    def rebuild(self, f: Tensor) -> Tensor:
        return self.rival.rebuild(f.flatten(1)).view_as(f)

    def rebuild_tied(self, f: Tensor) -> None:
        return None

    def samples(self, n: int, seed: int) -> Tensor:
        features = self.rival.samples(n, seed)  # [j n p]
        d = self.model.config.child_dimension
        return torch.stack([self.model.draw_images(part.view(n, -1, d)) for part in features])


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """The images that all rows of a run share, what its autoencoder makes of them, and the judge."""

    model: PoE
    judge: CNN
    fitted: Tensor  # [n i d] of training images
    fitted_labels: Tensor  # [n]
    features: Tensor  # [m i d] of test images
    labels: Tensor  # [m]
    images: Tensor  # [m c h w]
    real: Tensor  # [r p] the judge's features of test images
    autoencoder_mse: float
    trained_on: int  # images


@torch.no_grad()
def build_evaluation_data(model: PoE, splits: Splits, judge: CNN, images: int = IMAGES) -> EvaluationData:
    """Draw the images, in an order that does not depend on the seed of a run, and compute their features once."""
    model.eval()
    train = _some(splits.train, FITTED)
    test = _some(splits.test, images)
    real = _some(splits.test, model.capsules * SAMPLES).model_input()
    pixels = test.model_input()
    features = _features(model, test)
    return EvaluationData(
        model,
        judge,
        _features(model, train),
        train.labels,
        features,
        test.labels,
        pixels,
        reference_features(judge, real),
        _pixel_error(model, features, pixels),
        len(splits.train),
    )


@torch.no_grad()
def measure(subject: Encoder, material: EvaluationData) -> dict[str, float]:
    """One row: the metrics of the module's docstring."""
    m = material
    winners = subject.winners(m.features)
    samples = subject.samples(SAMPLES, seed=0)  # [j n c h w]
    drawn = samples.flatten(0, 1)
    probes = (subject.codes(m.fitted), m.fitted_labels, subject.codes(m.features), m.labels)
    tied = subject.rebuild_tied(m.features)
    row = {
        **sample_confidence(reference_probabilities(m.judge, drawn).view(*samples.shape[:2], -1)),
        "argmax_nmi": nmi(winners, m.labels),
        "purity": purity(winners, m.labels),
        "cka": cross_capsule_cka(subject.views(m.features[:VIEWED])),
        "bottleneck_mse": _pixel_error(m.model, subject.rebuild(m.features), m.images),
        "tied_mse": None if tied is None else _pixel_error(m.model, tied, m.images),
        "autoencoder_mse": m.autoencoder_mse,
        "knn": knn(*probes, k=min(5, len(m.fitted))),
        "linear_probe": linear_probe(*probes),
        "frechet": frechet(reference_features(m.judge, _spread(drawn, len(m.real))), m.real),
        "capsules_used": float(capsules_used(winners, len(samples))),
    }
    return {name: value for name, value in row.items() if value is not None}


def select_controls(only: Sequence[str] | None) -> tuple[str, ...]:
    """The names of controls to measure, in the order of the table: None is all of them; refused before any work."""
    for name in only or ():
        if name not in CONTROLS:
            raise RecipeError(f"unknown control '{name}'{suggestion(name, CONTROLS)}")
    names = CONTROLS if only is None else tuple(name for name in CONTROLS if name in only)
    if NEED_SKLEARN & set(names) and find_spec("sklearn") is None:
        raise RecipeError(
            "k-means and RBM need scikit-learn: pip install 'torchcaps[sklearn]', or choose others with --only"
        )
    return names


def run_and_controls(
    recipe: Recipe, folder: Path, material: EvaluationData, names: Sequence[str] = CONTROLS
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The row of the run in `folder`, and those of its controls; one that would be the run again is left out.

    The controls that are trained, for a quarter of the run's own steps, are kept in FOLDER/controls.
    """
    subjects: dict[str, Callable[[], Encoder]] = {"": partial(PoEEncoder, material.model)}
    for name in names:
        if name in BASELINES:
            subjects[name] = partial(_fit_baseline, name, material, recipe.seed)
        elif name == "random W":
            subjects[name] = partial(_random, recipe, material)
        elif (variant := _variant(recipe, name, material.trained_on)).model != recipe.model:
            subjects[name] = partial(
                PoEEncoder, _trained(variant, folder / "controls" / name.split()[0], material.model)
            )
    bar = progress(list(subjects.items()), "measuring the run and its controls")
    rows = {name: measure(make(), material) for name, make in bar}
    return rows.pop(""), rows


def _variant(recipe: Recipe, name: str, images: int) -> Recipe:
    """The run's recipe with another energy: "offset only" is centerd and no more, "paper" Algorithm 1 as printed.

    "paper" has the paper's own optimizer. All J capsules are soon the same there and answer together, so that a step
    counts J times: with the rate that suits capsules in competition, 2, the first dozen steps overshoot. It gets 1 / J.
    """
    model = cast(PoEConfig, recipe.model)
    capsules = stage_of(recipe, "capsules")
    decoder = stage_of(recipe, "decoder")
    stages = {
        "capsules": _shortened(capsules, SHARE * capsules.train.epochs),
        "decoder": _shortened(decoder, DECODED * decoder.train.batch / images),
    }
    if name == "offset only":
        energy = replace(model.energy, mode="offset")
        return replace(recipe, name=f"{recipe.name}-offset", model=replace(model, energy=energy), stages=stages)
    energy = replace(model.energy, mode="paper", routing=Dynamic(iterations=3, agreement="cosine", over="children"))
    stage = stages["capsules"]
    slow = replace(stage, optimizer=OptimizerConfig("SGD", 2 / model.capsules, {"momentum": 0.9}))
    return replace(
        recipe,
        name=f"{recipe.name}-paper",
        model=replace(model, energy=energy),
        stages={**stages, "capsules": slow},
    )


def _shortened(stage: StageConfig, epochs: float) -> StageConfig:
    """A stage of at most so many epochs."""
    return replace(stage, train=replace(stage.train, epochs=min(stage.train.epochs, epochs)))


def _trained(recipe: Recipe, folder: Path, model: PoE) -> PoE:
    """The control in `folder`, trained there if it was not before, on top of the autoencoder of the run."""
    try:
        outcome = train(recipe, folder, resume="auto", given={"autoencoder": model.autoencoder})
    except TrainingError as error:
        raise TrainingError(f"{error}; for this control: delete '{folder}', or leave it out with --only") from None
    if not outcome.finished:
        raise TrainingError(f"the control in '{folder}' is not trained to its end; run the command again to go on")
    found = cast(PoE, outcome.model.eval())
    own = model.autoencoder.state_dict()
    other = found.autoencoder.state_dict()
    if not all(torch.equal(own[key], other[key]) for key in own):
        raise TrainingError(f"the control in '{folder}' has another autoencoder than the run; delete it and try again")
    return found


@torch.no_grad()
def _random(recipe: Recipe, material: EvaluationData) -> PoEEncoder:
    """W as it is before training, on centerd children, without competition; U by least squares.

    W is divided by one number, so that |z_j|^2 is 1 on average: a capsule is then on for about half of the images.
    """
    config = cast(PoEConfig, recipe.model)
    plain = replace(config, energy=replace(config.energy, mode="offset"), decoder=DecoderConfig())
    model = cast(PoE, build_model(replace(recipe, model=plain), material.model.spec)).eval()
    load_stage(model.stages(), {"autoencoder": material.model.autoencoder})
    f = material.fitted
    energy = model.energy
    energy.fit_offset(f)
    power = torch.cat([energy.infer(energy.visible(x)).z.square().sum(-1) for x in torch.split(f, CHUNK)]).mean()
    energy.W.div_(power.sqrt().clamp_min(torch.finfo(power.dtype).tiny))
    stage = DecoderStage(model.decoder, energy, lambda features: features, model.draw_images)
    stage.store_features(torch.split(f, CHUNK))
    stage.objective(Batch(f, material.fitted_labels, torch.arange(len(f))), 0)
    stage.finish()
    return PoEEncoder(model)


def _fit_baseline(name: str, material: EvaluationData, seed: int) -> _BaselineEncoder:
    model = material.model
    return _BaselineEncoder(BASELINES[name](material.fitted.flatten(1), model.capsules, model.dimension, seed), model)


def _some(data: Dataset, count: int) -> Dataset:
    """At most so many images, the same ones at any time."""
    return subset(data, epoch_order(0, 0, len(data))[:count])


def _spread(x: Tensor, count: int) -> Tensor:
    """`count` rows of x, evenly over it, or all if there are no more."""
    return x[torch.linspace(0, len(x) - 1, min(count, len(x))).long()]


def _in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in torch.split(x, CHUNK)])


def _features(model: PoE, data: Dataset) -> Tensor:
    """[n i d] of all images as a model is shown them."""
    parts = progress(torch.split(torch.arange(len(data)), CHUNK), "computing features")
    return torch.cat([model.features(data.model_input(rows)) for rows in parts])


def _pixel_error(model: PoE, features: Tensor, images: Tensor) -> float:
    """Mean squared error of the images that the autoencoder draws from features [n i d]."""
    parts = zip(torch.split(features, CHUNK), torch.split(images, CHUNK), strict=True)
    return sum(float((model.draw_images(f) - x).double().square().sum()) for f, x in parts) / images.numel()
