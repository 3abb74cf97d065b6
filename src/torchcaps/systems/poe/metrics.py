"""Metrics of products of expert capsules, and the controls that they are compared with.

Every row of the table is an `Encoder` on the features f [n i d] of one and the same autoencoder, so that a difference
between rows is a difference between capsules. Metrics, where j counts capsules and K numbers make a pose:

    confident_fraction, classes_covered, consistency   of 50 samples of each single capsule, by the reference classifier
                     ("empirical" poses; all J capsules count, unused ones too); see `sample_confidence`
    mixture_confident, mixture_consistency   the same of samples without kept poses, from a mixture of eight Gaussians
                     a capsule; gaussian_confident, gaussian_consistency from one with each capsule's mean and
                     covariance; and restricted_confident, complete_confident from N(0, 1) on the paper's domains
    argmax_nmi, purity   of the capsule that wins an image, against the image's class
    accuracy         with as many capsules as classes: capsules matched to classes one to one
    cka              mean over pairs of capsules, of poses without the gate: each one's own view of every image
    bottleneck_mse   of the pixels, from the J K numbers alone
    tied_mse         through W transposed with each image's own coupling, which leaks; baselines have no such path
    autoencoder_mse  of the features themselves: the floor for both
    knn, linear_probe   accuracy of the classes read from codes of training images
    frechet          between all samples and as many test images (fewer of both if there are not as many)
    capsules_used    capsules that win a tenth of an even share or more

Baselines and the random W are fitted to at most 5,000 training images, and the probes learn from as many. Baselines
that group images are fitted to 20,000, about as many as capsules store poses of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from torchcaps.data import Dataset, Splits, epoch_order, subset
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.baselines import BASELINES, Baseline, LocalPCA, fit_local_pca
from torchcaps.evaluate.probes import knn, linear_probe
from torchcaps.evaluate.reference_classifier import reference_features, reference_probabilities
from torchcaps.evaluate.sample_metrics import capsules_used, cross_capsule_cka, frechet, sample_confidence
from torchcaps.metrics import matched_accuracy, nmi, purity
from torchcaps.models import CNN
from torchcaps.models.poe import DecoderConfig, PoE, PoEConfig
from torchcaps.models.poe.encoder import CapsuleState
from torchcaps.models.poe.energy import hidden
from torchcaps.models.poe.frames import Frame, find_frame
from torchcaps.models.poe.stages import DecoderStage
from torchcaps.routing import Dynamic
from torchcaps.systems.poe.generation import Domain
from torchcaps.systems.run_folders import output_folder
from torchcaps.train import Recipe, train
from torchcaps.train.initial_weights import load_stage
from torchcaps.train.recipe import OptimizerConfig, StageConfig, stage_of
from torchcaps.train.train_state import build_model
from torchcaps.types import Batch
from torchcaps.utils.progress import progress
from torchcaps.utils.random import resample_near

__all__ = [
    "CONTROLS",
    "EncodedFeatures",
    "Encoder",
    "EvaluationData",
    "PoEEncoder",
    "RunRows",
    "build_evaluation_data",
    "measure",
    "require_controls",
    "run_and_controls",
]

IMAGES = 2000
"""Test images measured, unless told otherwise."""
FITTED = 5000
"""Training images that controls and probes are fitted to, at most."""
GROUPED = 20_000
"""Training images that baselines which group images are fitted to, at most."""
SAMPLES = 50
"""Images drawn of each capsule."""
CKA_IMAGES = 1000
"""Test images of which capsules are compared with each other."""
CHUNK = 250
"""Images that are encoded at once."""
CONTROL_SHARE = 0.25
CONTROL_DECODER_STEPS = 166
"""Of the run's own steps of W, and of U at most, that a trained control takes: it has converged long before."""

_RUN = ""
"""Key of the run itself among the names of its controls."""

CONTROLS = ("paper", "offset only", "random W", *BASELINES)
GROUPING = frozenset({"k-means", "k-means centroid", "local PCA"})
"""Baselines that group images, which they do by the children that rank the capsules."""
NEED_SKLEARN = frozenset(BASELINES) - {"PCA"}


class EncodedFeatures(NamedTuple):
    """Codes of n images, as one encoder computes them from their features.

    Attributes:
        codes: [n ...] the numbers that stand for each image.
        poses: [n j k] what each group says of every image, whether or not it wins.
        winners: [n] the group that each image belongs to.
        rebuilt: [n i d] features from the codes alone.
        rebuilt_tied: [n i d] features through W transposed, None where there is no such way.
    """

    codes: Tensor
    poses: Tensor
    winners: Tensor
    rebuilt: Tensor
    rebuilt_tied: Tensor | None


class Encoder(Protocol):
    """Anything that encodes the features of an image as J groups of numbers, and samples from each group."""

    def codes(self, f: Tensor) -> Tensor:
        """Encode features [n i d] as numbers [n ...], and nothing else."""

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode features [n i d]."""

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each group alone."""


@dataclass(frozen=True)
class PoEEncoder:
    """A product of expert capsules as an encoder."""

    model: PoE

    def codes(self, f: Tensor) -> Tensor:
        """[n j k] poses behind the gate."""
        return torch.cat([self._infer(chunk).hidden for chunk in torch.split(f, CHUNK)])

    def encode(self, f: Tensor) -> EncodedFeatures:
        """Encode features [n i d], with one inference for all that is asked of them."""
        energy = self.model.energy
        chunks = []
        for chunk in torch.split(f, CHUNK):
            state = self._infer(chunk)
            # Two ways back to features: through W transposed, and from the codes alone.
            tied = energy.reconstruct_children(state.hidden, state.coupling) + energy.offset
            rebuilt = self.model.decoder(state.hidden)
            ungated = hidden(state.z, slab=state.slab)
            chunks.append((state.hidden, ungated, energy.winners(state), rebuilt, tied))
        return EncodedFeatures(*(torch.cat(field) for field in zip(*chunks, strict=True)))

    def samples(self, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each capsule, in poses as training saw them."""
        return self.samples_from("empirical", n, seed)

    def samples_from(self, domain: Domain, n: int, seed: int) -> Tensor:
        """Draw n images [j n c h w] of each capsule from a domain."""
        return torch.stack([self.model.sample(j, n, domain, seed) for j in range(self.model.capsules)])

    def _infer(self, f: Tensor) -> CapsuleState:
        return self.model.energy.infer(self.model.energy.visible(f))


@dataclass(frozen=True)
class _BaselineEncoder:
    """A baseline on the flattened features of a model, whose autoencoder draws for it.

    Attributes:
        baseline: Fitted to the features, or to those that the autoencoder draws alone.
        model: Whose features these are.
        frames: [n 4] numbers of the frames of the images that it was fitted to, None if the model has none.
        members: [n] the group of each of these images.
    """

    baseline: Baseline
    model: PoE
    frames: Tensor | None = None
    members: Tensor | None = None

    def codes(self, f: Tensor) -> Tensor:
        return self.baseline.codes(f.flatten(1))

    def encode(self, f: Tensor) -> EncodedFeatures:
        flat = f.flatten(1)
        codes = self.baseline.codes(flat)
        rebuilt = self.baseline.rebuild(flat).view_as(f)
        return EncodedFeatures(codes, self.baseline.poses(flat), self.baseline.winners(flat), rebuilt, None)

    def samples(self, n: int, seed: int) -> Tensor:
        # The autoencoder of the run draws, so that rows differ in the codes alone.
        features = self.baseline.samples(n, seed)  # [j n p]
        d = self.model.config.child_dimension
        drawn = [
            self.model.draw_images(group.view(n, -1, d), self._frames(j, n, seed)) for j, group in enumerate(features)
        ]
        return torch.stack(drawn)

    def _frames(self, j: int, n: int, seed: int) -> Frame | None:
        """Sample frames of the images of a group, as capsules do; of all images if the group has none."""
        if self.frames is None or self.members is None:
            return None
        own = self.frames[self.members == j]
        return Frame.of_numbers(resample_near(own if len(own) else self.frames, seed, j, torch.arange(n)))


@dataclass(frozen=True)
class _DrawnOnly:
    """A baseline that knows the drawn columns alone, as an encoder of all columns."""

    encoder: _BaselineEncoder

    def codes(self, f: Tensor) -> Tensor:
        return self.encoder.codes(self._drawn(f))

    def encode(self, f: Tensor) -> EncodedFeatures:
        return self.encoder.encode(self._drawn(f))

    def samples(self, n: int, seed: int) -> Tensor:
        return self.encoder.samples(n, seed)

    def _drawn(self, f: Tensor) -> Tensor:
        return f[:, : self.encoder.model.decoder.U.shape[1]]


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """The images that all rows of a run share, and the features that the run's autoencoder computes from them.

    Attributes:
        model: The run's model.
        reference: The reference classifier, which classifies samples.
        fitted: [n i d] features of training images, which controls and probes are fitted to.
        fitted_labels: [n] their labels.
        grouped: [g i d] features of more training images, which baselines that group images are fitted to.
        features: [m i d] features of test images.
        labels: [m] their labels.
        images: [m c h w] the test images.
        real: [r p] the reference classifier's features of test images.
        autoencoder_mse: Pixel error of the images that are drawn from `features`.
        trained_on: How many images the run was trained on.
        frames: Of the test images, None if the model has none.
        fitted_frames: [n 4] numbers of the frames of the images in `fitted`, None if the model has none.
        grouped_frames: [g 4] those of the images in `grouped`, None if the model has none.
    """

    model: PoE
    reference: CNN
    fitted: Tensor
    fitted_labels: Tensor
    grouped: Tensor
    features: Tensor
    labels: Tensor
    images: Tensor
    real: Tensor
    autoencoder_mse: float
    trained_on: int
    frames: Frame | None = None
    fitted_frames: Tensor | None = None
    grouped_frames: Tensor | None = None


@torch.no_grad()
def build_evaluation_data(model: PoE, splits: Splits, reference: CNN, images: int = IMAGES) -> EvaluationData:
    """Pick the images, in an order that does not depend on the seed of a run, and compute their features once.

    Args:
        model: Whose autoencoder computes the features.
        splits: Its data.
        reference: The reference classifier, which classifies samples.
        images: How many test images to measure on.
    """
    model.eval()
    # Training images to fit to, test images to measure on, and as many real images as samples.
    train = _first_in_fixed_order(splits.train, FITTED)
    grouped = _first_in_fixed_order(splits.train, GROUPED)
    test = _first_in_fixed_order(splits.test, images)
    real = _first_in_fixed_order(splits.test, model.capsules * SAMPLES).model_input()
    pixels = test.model_input()
    features = _features(model, test)
    frames = model.find_frame(pixels)
    return EvaluationData(
        model=model,
        reference=reference,
        fitted=_features(model, train),
        fitted_labels=train.labels,
        grouped=_features(model, grouped),
        features=features,
        labels=test.labels,
        images=pixels,
        real=reference_features(reference, real),
        autoencoder_mse=_pixel_error(model, features, pixels, frames),
        trained_on=len(splits.train),
        frames=frames,
        fitted_frames=_frame_numbers(model, train),
        grouped_frames=_frame_numbers(model, grouped),
    )


@torch.no_grad()
def measure(encoder: Encoder, data: EvaluationData) -> dict[str, float]:
    """Compute every metric of one encoder on the evaluation data.

    Args:
        encoder: The capsules of a run, or a control.
        data: The images that all rows of the table share.

    Returns:
        Metric name -> value, see the module's docstring; without `tied_mse` for encoders that have no such way.
    """
    # Encode the test images once, and draw samples of each capsule.
    encoded = encoder.encode(data.features)
    samples = encoder.samples(SAMPLES, seed=0)  # [j n c h w]
    drawn = samples.flatten(0, 1)
    # What the reference classifier says about the samples.
    verdicts = reference_probabilities(data.reference, drawn).view(*samples.shape[:2], -1)  # [j n classes]
    drawn_features = reference_features(data.reference, _spread(drawn, len(data.real)))
    probes = (encoder.codes(data.fitted), data.fitted_labels, encoded.codes, data.labels)
    # The order of the metrics is that of published tables.
    row = {
        **sample_confidence(verdicts),
        **_other_domains(encoder, data),
        "argmax_nmi": nmi(encoded.winners, data.labels),
        "purity": purity(encoded.winners, data.labels),
        **_matched(encoded.winners, data.labels, len(samples)),
        "cka": cross_capsule_cka(encoded.poses[:CKA_IMAGES]),
        "bottleneck_mse": _pixel_error(data.model, encoded.rebuilt, data.images, data.frames),
    }
    if encoded.rebuilt_tied is not None:
        row["tied_mse"] = _pixel_error(data.model, encoded.rebuilt_tied, data.images, data.frames)
    row |= {
        "autoencoder_mse": data.autoencoder_mse,
        "knn": knn(*probes, k=min(5, len(data.fitted))),
        "linear_probe": linear_probe(*probes),
        "frechet": frechet(drawn_features, data.real),
        "capsules_used": float(capsules_used(encoded.winners, len(samples))),
    }
    return row


def _matched(winners: Tensor, labels: Tensor, capsules: int) -> dict[str, float]:
    """Return `accuracy` where each capsule can stand for a class, else nothing."""
    if capsules != int(labels.max()) + 1:
        return {}
    return {"accuracy": matched_accuracy(winners, labels)}


def _other_domains(encoder: Encoder, data: EvaluationData) -> dict[str, float]:
    """Measure samples of capsules that come from no kept pose; nothing for baselines, which have no such domains."""
    if not isinstance(encoder, PoEEncoder):
        return {}
    found = {}
    for domain in ("mixture", "gaussian", "restricted", "complete"):
        samples = encoder.samples_from(domain, SAMPLES, seed=0)  # [j n c h w]
        verdicts = reference_probabilities(data.reference, samples.flatten(0, 1)).view(*samples.shape[:2], -1)
        found[domain] = sample_confidence(verdicts)
    return {
        "mixture_confident": found["mixture"]["confident_fraction"],
        "mixture_consistency": found["mixture"]["consistency"],
        "gaussian_confident": found["gaussian"]["confident_fraction"],
        "gaussian_consistency": found["gaussian"]["consistency"],
        "restricted_confident": found["restricted"]["confident_fraction"],
        "complete_confident": found["complete"]["confident_fraction"],
    }


def require_controls(names: Sequence[str]) -> None:
    """Refuse controls that need scikit-learn where it is missing, before any work is done.

    Raises:
        RecipeError: If there is one.
    """
    if NEED_SKLEARN & set(names) and find_spec("sklearn") is None:
        raise RecipeError(
            "k-means and RBM need scikit-learn: pip install 'torchcaps[sklearn]', or choose others with --only"
        )


class RunRows(NamedTuple):
    """The metrics of a run, and those of its controls by their names."""

    run: dict[str, float]
    controls: dict[str, dict[str, float]]


def run_and_controls(recipe: Recipe, folder: Path, data: EvaluationData, names: Sequence[str] = CONTROLS) -> RunRows:
    """Measure a run and its controls.

    Args:
        recipe: Of the run.
        folder: Of the run. Controls that are trained, for a quarter of the run's own steps, are stored in
            FOLDER/controls; a file of weights has one beside it.
        data: The run's model, and the images to measure on.
        names: Which controls; one that would be the run again is left out.

    Returns:
        All rows.
    """
    # Baselines are fitted when their turn comes, so that one at a time is in memory; controls that need
    # training are trained here, before the first measurement.
    encoders: dict[str, Callable[[], Encoder]] = {_RUN: partial(PoEEncoder, data.model)}
    for name in names:
        if name in BASELINES:
            encoders[name] = partial(_fit_baseline, name, data, recipe.seed)
        elif name == "random W":
            encoders[name] = partial(_random_encoder, recipe, data)
        elif (variant := _variant(recipe, name, data.trained_on)).model != recipe.model:
            control_folder = output_folder(folder) / "controls" / name.split()[0]
            encoders[name] = partial(PoEEncoder, _train_control(variant, control_folder, data.model))
    bar = progress(list(encoders.items()), "measuring the run and its controls")
    rows = {name: measure(make(), data) for name, make in bar}
    return RunRows(rows.pop(_RUN), rows)


def _variant(recipe: Recipe, name: str, images: int) -> Recipe:
    """Return the run's recipe with another energy: "offset only" is centered, "paper" is Algorithm 1 as printed.

    Both have the paper's capsule, without a slab, and its linear decoder.

    "paper" has the paper's own optimizer. All J capsules are soon the same there and answer together, so that a step
    counts J times: with the rate that suits capsules in competition, 2, the first dozen steps overshoot. It gets 1 / J.
    """
    model = cast(PoEConfig, recipe.model)
    model = replace(model, decoder=replace(model.decoder, curvature=0))
    capsules = stage_of(recipe, "capsules")
    decoder = stage_of(recipe, "decoder")
    # Shorter than the run, since controls converge early.
    stages = {
        "capsules": _shortened(capsules, CONTROL_SHARE * capsules.train.epochs),
        "decoder": _shortened(decoder, CONTROL_DECODER_STEPS * decoder.train.batch / images),
    }
    if name == "offset only":
        energy = replace(model.energy, mode="offset", slab=0)
        return replace(recipe, name=f"{recipe.name}-offset", model=replace(model, energy=energy), stages=stages)
    # Algorithm 1: the energy and the routing as printed, and the smaller rate.
    routing = Dynamic(iterations=3, agreement="cosine", over="children")
    energy = replace(model.energy, mode="paper", slab=0, routing=routing)
    stage = stages["capsules"]
    slow = replace(stage, optimizer=OptimizerConfig("SGD", 2 / model.capsules, {"momentum": 0.9}))
    return replace(
        recipe,
        name=f"{recipe.name}-paper",
        model=replace(model, energy=energy),
        stages={**stages, "capsules": slow},
    )


def _shortened(stage: StageConfig, epochs: float) -> StageConfig:
    """Limit a stage to a number of epochs."""
    return replace(stage, train=replace(stage.train, epochs=min(stage.train.epochs, epochs)))


def _train_control(recipe: Recipe, folder: Path, model: PoE) -> PoE:
    """Load the control in a folder, trained there if it was not before, on top of the autoencoder of a run's model."""
    # Only capsules and decoder are trained: the autoencoder is that of the run.
    try:
        outcome = train(recipe, folder, resume="auto", given={"autoencoder": model.autoencoder})
    except TrainingError as error:
        raise TrainingError(f"{error}; for this control: delete '{folder}', or leave it out with --only") from None
    if not outcome.finished:
        raise TrainingError(f"the control in '{folder}' is not trained to its end; run the command again to go on")
    found = cast(PoE, outcome.model.eval())
    # A folder may hold the control of an earlier run with another autoencoder.
    wanted = model.autoencoder.state_dict()
    loaded = found.autoencoder.state_dict()
    if not all(torch.equal(wanted[key], loaded[key]) for key in wanted):
        raise TrainingError(f"the control in '{folder}' has another autoencoder than the run; delete it and try again")
    return found


@torch.no_grad()
def _random_encoder(recipe: Recipe, data: EvaluationData) -> PoEEncoder:
    """Build capsules with W as before training, on centered children, without competition; U by least squares.

    W is divided by one number, so that |z_j|^2 is 1 on average: a capsule is then on for about half of the images.
    """
    # An untrained model on top of the autoencoder of the run.
    config = cast(PoEConfig, recipe.model)
    plain = replace(config, energy=replace(config.energy, mode="offset", slab=0), decoder=DecoderConfig())
    model = cast(PoE, build_model(replace(recipe, model=plain), data.model.spec)).eval()
    load_stage(model.stages(), {"autoencoder": data.model.autoencoder})
    # Center the children, then scale W.
    f = data.fitted
    energy = model.energy
    energy.fit_offset(f)
    power = torch.cat([energy.infer(energy.visible(x)).z.square().sum(-1) for x in torch.split(f, CHUNK)]).mean()
    energy.W.div_(power.sqrt().clamp_min(torch.finfo(power.dtype).tiny))
    # Fit U as the decoder stage does, to all features as one batch.
    stage = DecoderStage(model.decoder, energy, lambda features: features, model.draw_images)
    stage.store_features(torch.split(f, CHUNK), data.fitted_frames)
    stage.objective(Batch(f, data.fitted_labels, torch.arange(len(f))), 0)
    stage.finish()
    return PoEEncoder(model)


def _fit_baseline(name: str, data: EvaluationData, seed: int) -> Encoder:
    """Fit a baseline to the features of the capsules, grouped by those that rank these, and give it the frames."""
    model = data.model
    fit = BASELINES[name]
    groups = name in GROUPING
    f = data.grouped if groups else data.fitted
    frames = data.grouped_frames if groups else data.fitted_frames
    # Edges group images but are not drawn.
    seen = model.energy.ranking * model.config.child_dimension
    if seen and not groups:
        f = f[:, : model.decoder.U.shape[1]]
    flat = f.flatten(1)
    more: dict[str, float] = {"seen": seen} if seen and groups else {}
    # Local PCA samples as the capsules do: near the rows of a group that it rebuilds best
    if fit is fit_local_pca:
        more["coverage"] = model.decoder.config.coverage
    baseline = fit(flat, model.capsules, model.dimension, seed, **more)
    members = baseline.winners(flat) if model.framed else None
    if members is not None and isinstance(baseline, LocalPCA):
        members = members.masked_fill(~baseline.covered, -1)
    encoder = _BaselineEncoder(baseline, model, frames, members)
    return _DrawnOnly(encoder) if seen and not groups else encoder


def _first_in_fixed_order(data: Dataset, count: int) -> Dataset:
    """At most `count` images, the same ones at any time."""
    return subset(data, epoch_order(0, 0, len(data))[:count])


def _spread(x: Tensor, count: int) -> Tensor:
    """`count` rows of x, evenly over it, or all if there are no more."""
    return x[torch.linspace(0, len(x) - 1, min(count, len(x))).long()]


def _features(model: PoE, data: Dataset) -> Tensor:
    """[n i d] of all images."""
    chunks = progress(torch.split(torch.arange(len(data)), CHUNK), "computing features")
    return torch.cat([model.features(data.model_input(rows)) for rows in chunks])


def _frame_numbers(model: PoE, data: Dataset) -> Tensor | None:
    """[n 4] numbers of the frames of all images, None if the model has no frames."""
    if not model.framed:
        return None
    chunks = torch.split(torch.arange(len(data)), CHUNK)
    return torch.cat([find_frame(data.model_input(rows)).numbers for rows in chunks])


def _pixel_error(model: PoE, features: Tensor, images: Tensor, frames: Frame | None) -> float:
    """Mean squared error of the images that the autoencoder draws from features [n i d], each in its own frame."""
    total = 0.0
    for rows in torch.split(torch.arange(len(images)), CHUNK):
        frame = None if frames is None else Frame(*(part[rows] for part in frames))
        total += float((model.draw_images(features[rows], frame) - images[rows]).double().square().sum())
    return total / images.numel()
