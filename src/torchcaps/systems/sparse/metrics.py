"""Metrics of sparse capsules, which learn without labels, and their controls (Rawlinson 2018, section 3).

A row of the table is an `ImageEncoder`: codes and groups of images. Metrics, where SET is the name of the data set:

    SET_svm           accuracy of an SVM, trained on codes of training images, on codes of test images
    affNIST           mnist_svm, of digits placed in the middle of the canvas as they are
                      affnist_svm_a, of moved digits, training digits under transforms of their own
                      affnist_svm_b, trained on placed digits and tested on moved ones
    knn, linear_probe accuracy of simpler probes; on affNIST by protocol (a)
    argmax_nmi, purity   of the capsule of rank 0 against the class, over test images
    accuracy         with as many capsules as classes: capsules matched to classes one to one
    argmax_nmi_place  of the capsule of rank 0 against where the image was put, a quarter of the rows and of the columns
    capsules_in_band  capsules whose share of ranks 0 is in the mask's band, over augmented training images

The SVM learns from 10,000 images at most, unless told otherwise, and is tested on all. Controls: the same capsules
before the mask, which the authors' code reads; the network untrained; pixels; as many principal components as a code
has numbers; k-means with as many centers as there are capsules. The two last are fitted to augmented training images.
A table may also be of codes before the mask. Codes behind it then have a row of their own.
SVMs of trained networks with dynamic routing, whose capsules are below 1 in length, have the authors' kernel; the
kernel of all others fits the size of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.evaluate.baselines import fit_kmeans, fit_pca
from torchcaps.evaluate.probes import knn, linear_probe
from torchcaps.evaluate.results import Metrics, gather
from torchcaps.evaluate.svm_probe import GAMMA, ProbeData, fit_svm
from torchcaps.metrics import matched_accuracy, nmi, purity
from torchcaps.models import Model
from torchcaps.models.sparse import SparseModel, SparseOutput
from torchcaps.systems.base import model_name
from torchcaps.train.run import TrainedRun
from torchcaps.train.train_state import build_model
from torchcaps.utils.progress import progress

__all__ = [
    "BEFORE_MASK",
    "BEHIND_MASK",
    "CONTROLS",
    "ImageCodes",
    "ImageEncoder",
    "TableRows",
    "capsule_encoder",
    "count_in_band",
    "encode_dataset",
    "encode_sets",
    "gamma_of",
    "measure",
    "rows_of_runs",
]

BEFORE_MASK = "before the mask"
BEHIND_MASK = "behind the mask"
CONTROLS = (BEFORE_MASK, BEHIND_MASK, "untrained", "pixels", "PCA", "k-means")
CHUNK = 250
"""Images that are encoded at once."""


class ImageCodes(NamedTuple):
    """How an encoder describes n images.

    Attributes:
        codes: [n ...] numbers, None if there are only groups.
        groups: [n] the group that each image belongs to, None if there are only codes.
        unmasked: [n ...] codes before a mask, where there is one.
    """

    codes: Tensor | None
    groups: Tensor | None
    unmasked: Tensor | None = None

    def before_mask(self) -> ImageCodes:
        """Return the codes before the mask, without groups."""
        return ImageCodes(self.unmasked, None)

    def behind_mask(self) -> ImageCodes:
        """Return the codes behind the mask, without groups."""
        return ImageCodes(self.codes, None)


ImageEncoder = Callable[[Tensor], ImageCodes]
"""Images [n c h w] in the model's input format -> their codes."""
Row = dict[str, float]
"""Metric name -> value."""


class TableRows(NamedTuple):
    """The metrics of the runs over their seeds, and those of all rows beside them by name."""

    runs: Metrics
    controls: dict[str, Metrics]


@torch.no_grad()
def encode_sets(encoder: ImageEncoder, data: ProbeData) -> dict[str, ImageCodes]:
    """Encode the images of each set, by the set's name."""
    return {name: encode_dataset(encoder, images) for name, images in data.sets.items()}


@torch.no_grad()
def measure(encoded: Mapping[str, ImageCodes], data: ProbeData, gamma: float | None = None) -> Row:
    """Compute one row of the table.

    Args:
        encoded: The codes of each set in `data`, by its name.
        data: The sets of images, and which of them to train and test on.
        gamma: Of the SVM's kernel; None for one that fits the size of the codes.

    Returns:
        The metrics of the module's docstring, as far as the codes allow.
    """
    train, test = data.protocols[data.main]
    row: Row = {}
    # How much codes say of the class.
    codes = {name: found.codes for name, found in encoded.items() if found.codes is not None}
    if codes:
        row |= _svm_accuracies(codes, data, gamma)
        probes = (codes[train], data.sets[train].labels, codes[test], data.sets[test].labels)
        row |= {"knn": knn(*probes, k=min(5, data.train_count)), "linear_probe": linear_probe(*probes)}
    # How much the capsule of rank 0 says of the class, and of the place.
    groups = encoded[test].groups
    if groups is not None:
        labels = data.sets[test].labels
        row |= {"argmax_nmi": nmi(groups, labels), "purity": purity(groups, labels)}
        if _count_groups(encoded[test]) == int(labels.max()) + 1:
            row["accuracy"] = matched_accuracy(groups, labels)
        row |= _place_information(groups, data.sets[test].factors)
    return row


def _count_groups(found: ImageCodes) -> int:
    """How many groups there are: capsules, or where there are only groups, those that have images."""
    if found.codes is not None and found.codes.ndim == 3:
        return found.codes.shape[1]
    return 0 if found.groups is None else int(found.groups.max()) + 1


def _place_information(groups: Tensor, factors: Mapping[str, Tensor]) -> dict[str, float]:
    """How much the groups [n] say of where images were put, if that is known: in which row and column of 4x4 fields.

    The fields are cut so that all rows have as many images, and all columns, too.
    """
    if not {"x", "y"} <= factors.keys():
        return {}
    # By order, not by coordinate, so that each quarter has as many images.
    row, column = (4 * factors[name].argsort().argsort() // len(groups) for name in ("y", "x"))
    return {"argmax_nmi_place": nmi(groups, 4 * row + column)}


def _svm_accuracies(codes: Mapping[str, Tensor], data: ProbeData, gamma: float | None) -> dict[str, float]:
    """The accuracy by each protocol; one SVM for each set that is trained on."""
    # Protocols may share a training set, so SVMs are fitted by set.
    svms = {
        name: fit_svm(codes[name], data.sets[name].labels, gamma=gamma)
        for name in dict.fromkeys(train for train, _ in data.protocols.values())
    }
    return {
        metric: svms[train].accuracy(codes[test], data.sets[test].labels)
        for metric, (train, test) in data.protocols.items()
    }


def encode_dataset(encoder: ImageEncoder, data: Dataset) -> ImageCodes:
    """Encode all images of a data set, a bounded number at a time."""
    chunks = [encoder(data.model_input(rows)) for rows in torch.split(torch.arange(len(data)), CHUNK)]
    # A field that is None is so in every chunk.
    return ImageCodes(*(None if field[0] is None else torch.cat(field) for field in zip(*chunks, strict=True)))


def capsule_encoder(model: SparseModel) -> ImageEncoder:
    """Return an encoder of images as masked capsules v' [n j k], the capsule of rank 0, and v before the mask."""

    def encode(images: Tensor) -> ImageCodes:
        out: SparseOutput = model(images)
        return ImageCodes(out.masked.pose, out.ranks.argmin(-1), out.unmasked.pose)

    return encode


@torch.no_grad()
def count_in_band(model: SparseModel, images: Tensor) -> int:
    """Count the capsules that come first in a share of images [n c h w] that is inside the mask's band."""
    encoder = capsule_encoder(model)
    first = torch.cat([cast(Tensor, encoder(chunk).groups) for chunk in torch.split(images, CHUNK)])
    share = torch.bincount(first, minlength=model.config.capsules) / len(first)  # [j]
    return int(model.mask.count_in_band(share))


def rows_of_runs(
    runs: Sequence[TrainedRun],
    others: Sequence[TrainedRun],
    data: ProbeData,
    names: Sequence[str] = CONTROLS,
    *,
    unmasked: bool = False,
) -> TableRows:
    """Measure runs of one recipe, other runs, and controls.

    Args:
        runs: Of one recipe, one a seed.
        others: Of other recipes; they make one row a recipe.
        data: The images to measure on.
        names: Which controls. The codes that the rows are of anyway are no control.
        unmasked: Rows are of codes before the mask. Those behind it are a control, also of other runs.

    Returns:
        All rows.
    """
    counterpart = BEHIND_MASK if unmasked else BEFORE_MASK
    wanted = counterpart in names
    # The runs; what they encode serves the other side of the mask, too.
    rows: list[Row] = []
    named: dict[str, list[Row]] = {}
    for run in progress(runs, "measuring the runs"):
        encoded = _encode(run.model, data)
        rows.append(_measure_network(run.model, encoded, data, gamma_of(run), unmasked=unmasked))
        if wanted and _has_mask(run):
            named.setdefault(counterpart, []).append(_measure_counterpart(encoded, data, gamma_of(run), unmasked))
    # Other runs, a row a recipe.
    for run in progress(others, "measuring other runs"):
        encoded = _encode(run.model, data)
        row = _measure_network(run.model, encoded, data, gamma_of(run), unmasked=unmasked)
        named.setdefault(run.recipe.name, []).append(row)
        if wanted and unmasked and _has_mask(run):
            row = _measure_counterpart(encoded, data, gamma_of(run), unmasked)
            named.setdefault(f"{run.recipe.name}, {BEHIND_MASK}", []).append(row)
    # Controls.
    controls = {name: gather(found) for name, found in named.items()}
    for name in progress([name for name in names if name not in (BEFORE_MASK, BEHIND_MASK)], "measuring the controls"):
        controls[name] = _measure_control(name, runs, data, unmasked=unmasked)
    return TableRows(gather(rows), controls)


def _has_mask(run: TrainedRun) -> bool:
    """Return whether the run's capsules compete at all: its dense control has no mask."""
    return cast(SparseModel, run.model).config.sparse


def _measure_counterpart(
    encoded: Mapping[str, ImageCodes], data: ProbeData, gamma: float | None, unmasked: bool
) -> Row:
    """Measure the codes on the side of the mask that is not the table's."""
    sides = {n: found.behind_mask() if unmasked else found.before_mask() for n, found in encoded.items()}
    return measure(sides, data, gamma)


def _encode(model: Model, data: ProbeData) -> dict[str, ImageCodes]:
    return encode_sets(capsule_encoder(cast(SparseModel, model.eval())), data)


def _measure_network(
    model: Model, encoded: Mapping[str, ImageCodes], data: ProbeData, gamma: float | None, *, unmasked: bool
) -> Row:
    inside = count_in_band(cast(SparseModel, model), data.augmented)
    if unmasked:
        encoded = {name: found._replace(codes=found.unmasked) for name, found in encoded.items()}
    return measure(encoded, data, gamma) | {"capsules_in_band": float(inside)}


def gamma_of(run: TrainedRun) -> float | None:
    """Return the gamma of a trained run's SVM: the authors', or None for one that fits the size of the codes.

    The poses of EM routing are not bounded by 1, which the authors' gamma relies on.
    """
    return None if model_name(run.recipe.model) == "sparse-matrix" else GAMMA


def _measure_control(name: str, runs: Sequence[TrainedRun], data: ProbeData, *, unmasked: bool) -> Metrics:
    """One row; what has no seed is measured once."""
    # Pixels, and what is fitted to them, are measured once, with the seed of the first run.
    if name != "untrained":
        return gather([measure(encode_sets(_fit_control(name, runs[0], data.augmented), data), data)])
    networks = (_untrained(run, data.augmented) for run in runs)
    return gather(_measure_network(one, _encode(one, data), data, None, unmasked=unmasked) for one in networks)


@torch.no_grad()
def _untrained(run: TrainedRun, images: Tensor) -> SparseModel:
    """The run's network before its first step, with the usual support [j] on images [n c h w], if it ranks by that."""
    network = cast(SparseModel, build_model(run.recipe, run.model.spec).eval())
    # A relative mask ranks by the support over its running mean, which training would have collected.
    if network.mask.relative:
        found = [cast(SparseOutput, network(chunk)).support for chunk in torch.split(images, CHUNK)]
        network.mask.observe_support(torch.cat(found).mean(0))
    return network


@torch.no_grad()
def _fit_control(name: str, run: TrainedRun, images: Tensor) -> ImageEncoder:
    """Return an encoder without a network, fitted to images [n c h w], with as many groups and numbers as the run."""
    if name == "pixels":
        return lambda images: ImageCodes(images, None)
    # The size of a code, from a single image.
    out: SparseOutput = run.model(images[:1])
    f = images.flatten(1)
    (j, k) = out.masked.pose.shape[1:]
    if name == "PCA":
        pca = fit_pca(f, j, k)
        return lambda images: ImageCodes(pca.codes(images.flatten(1)), None)
    means = fit_kmeans(f, j, k, run.recipe.seed)
    return lambda images: ImageCodes(None, means.winners(images.flatten(1)))
