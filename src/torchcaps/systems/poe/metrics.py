"""Metrics of products of expert capsules and of the controls that they are compared with.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.data import Dataset, Splits, epoch_order, subset
from torchcaps.evaluate.probes import knn, linear_probe
from torchcaps.evaluate.reference_classifier import reference_features, reference_probabilities
from torchcaps.evaluate.sample_metrics import capsules_used, cross_capsule_cka, frechet, sample_confidence
from torchcaps.metrics import matched_accuracy, nmi, purity
from torchcaps.models import CNN
from torchcaps.models.poe import PoE
from torchcaps.models.poe.frames import Frame, find_frame
from torchcaps.systems.poe.encoders import CHUNK, Encoder, PoEEncoder
from torchcaps.utils.progress import progress

__all__ = ["EvaluationData", "build_evaluation_data", "measure"]

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
