"""What sparse capsules have learned without labels, measured beside what does with less (Rawlinson 2018, section 3).

A row of the table is a Look: codes and groups of images. Metrics, where SET is the name of the data set:

    SET_svm           accuracy of the read-out, trained on codes of training images, on codes of test images
    affNIST           mnist_svm, of digits placed in the middle of the canvas as they are
                      affnist_svm_a, of moved digits, training digits under transforms of their own
                      affnist_svm_b, trained on placed digits and tested on moved ones
    knn, linear_probe accuracy of simpler readers; on affNIST by protocol (a)
    argmax_nmi, purity   of the capsule of rank 0 against the class, over test images
    argmax_nmi_place  of the capsule of rank 0 against where the image was put, a quarter of the rows and of the columns
    capsules_in_band  capsules whose share of ranks 0 is in the mask's band, over training images as training shows them

The read-out learns from at most so many images, 10,000 unless told otherwise, and is tested on all. Controls: the same
capsules before the mask, which the authors' code reads; the network untrained; pixels; as many principal components as
a code has numbers; k-means with as many centers as there are capsules. The two last are fitted to training images as
training shows them. Read-outs of trained networks with dynamic routing, whose capsules are below 1 in length, have the
authors' kernel; the kernel of all others fits the size of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import RecipeError, suggestion
from torchcaps.evaluate.baselines import fit_kmeans, fit_pca
from torchcaps.evaluate.probes import knn, linear_probe
from torchcaps.evaluate.results import Metrics, gather
from torchcaps.evaluate.svm_probe import GAMMA, ProbeData, fit_svm
from torchcaps.metrics import nmi, purity
from torchcaps.models import Model, SparseConfig
from torchcaps.models.sparse import SparseModel, SparseOutput
from torchcaps.train.run import TrainedRun
from torchcaps.train.train_state import build_model
from torchcaps.utils.progress import progress

__all__ = [
    "CONTROLS",
    "Look",
    "Seen",
    "capsules",
    "chosen",
    "encode_dataset",
    "gamma_of",
    "in_band",
    "measure",
    "rows_of_runs",
    "see_all",
]

BEFORE = "before the mask"
CONTROLS = (BEFORE, "untrained", "pixels", "PCA", "k-means")
CHUNK = 250


class Seen(NamedTuple):
    """What is made of n images: codes [n ...] and groups [n], where there are such, and codes before a mask."""

    codes: Tensor | None
    groups: Tensor | None
    unmasked: Tensor | None = None

    def before(self) -> Seen:
        """The codes before the mask, of which there are no groups."""
        return Seen(self.unmasked, None)


Look = Callable[[Tensor], Seen]
"""Images [n c h w] as floats -> what is made of them."""
Row = dict[str, float]


@torch.no_grad()
def see_all(look: Look, material: ProbeData) -> dict[str, Seen]:
    """What is made of the images of each set."""
    return {name: encode_dataset(look, data) for name, data in material.sets.items()}


@torch.no_grad()
def measure(seen: Mapping[str, Seen], material: ProbeData, gamma: float | None = None) -> Row:
    """One row: the metrics of the module's docstring, as far as they can be asked of what was seen of each set."""
    m = material
    train, test = m.protocols[m.main]
    row: Row = {}
    codes = {name: found.codes for name, found in seen.items() if found.codes is not None}
    if codes:
        row |= _read(codes, m, gamma)
        probes = (codes[train], m.sets[train].labels, codes[test], m.sets[test].labels)
        row |= {"knn": knn(*probes, k=min(5, m.read)), "linear_probe": linear_probe(*probes)}
    groups = seen[test].groups
    if groups is not None:
        row |= {name: f(groups, m.sets[test].labels) for name, f in (("argmax_nmi", nmi), ("purity", purity))}
        row |= _placed(groups, m.sets[test].factors)
    return row


def _placed(groups: Tensor, factors: Mapping[str, Tensor]) -> dict[str, float]:
    """How much the groups say of where images were put, if that is known: in which row and column of
    4x4 fields, all rows with as many images and all columns, too."""
    if not {"x", "y"} <= factors.keys():
        return {}
    row, column = (4 * factors[name].argsort().argsort() // len(groups) for name in ("y", "x"))
    return {"argmax_nmi_place": nmi(groups, 4 * row + column)}


def _read(codes: Mapping[str, Tensor], m: ProbeData, gamma: float | None) -> dict[str, float]:
    """The accuracy by each protocol; one machine for each set that is learned from."""
    machines = {
        name: fit_svm(codes[name], m.sets[name].labels, gamma=gamma)
        for name in dict.fromkeys(train for train, _ in m.protocols.values())
    }
    return {
        metric: machines[train].accuracy(codes[test], m.sets[test].labels)
        for metric, (train, test) in m.protocols.items()
    }


def encode_dataset(look: Look, data: Dataset) -> Seen:
    """All images of a set, a bounded number at a time."""
    parts = [look(data.model_input(rows)) for rows in torch.split(torch.arange(len(data)), CHUNK)]
    return Seen(*(None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)))


def capsules(model: SparseModel) -> Look:
    """The masked capsules v' [n j k] of a network, the capsule of rank 0, and v before there were ranks."""

    def look(images: Tensor) -> Seen:
        out: SparseOutput = model(images)
        return Seen(out.masked.pose, out.ranks.argmin(-1), out.unmasked.pose)

    return look


@torch.no_grad()
def in_band(model: SparseModel, images: Tensor) -> int:
    """How many capsules come first in a share of images [n c h w] that is inside the mask's band."""
    look = capsules(model)
    first = torch.cat([cast(Tensor, look(part).groups) for part in torch.split(images, CHUNK)])
    share = torch.bincount(first, minlength=model.config.capsules) / len(first)  # [j]
    return int(model.mask.count_in_band(share))


def chosen(only: Sequence[str] | None) -> tuple[str, ...]:
    """The names of controls to measure, in the order of the table: None is all of them; refused before any work."""
    for name in only or ():
        if name not in CONTROLS:
            raise RecipeError(f"unknown control '{name}'{suggestion(name, CONTROLS)}")
    return CONTROLS if only is None else tuple(name for name in CONTROLS if name in only)


def rows_of_runs(
    runs: Sequence[TrainedRun], others: Sequence[TrainedRun], material: ProbeData, names: Sequence[str] = CONTROLS
) -> tuple[Metrics, dict[str, Metrics]]:
    """The metrics of the runs, and the rows of other runs, by the names of their recipes, and of the controls."""
    own: list[Row] = []
    bare: list[Row] = []
    named: dict[str, list[Row]] = {}
    for run in progress(runs, "measuring the runs"):
        seen = _seen(run.model, material)
        own.append(_row(run.model, seen, material, gamma_of(run)))
        if BEFORE in names:
            bare.append(measure({name: found.before() for name, found in seen.items()}, material, gamma_of(run)))
    for run in progress(others, "measuring other runs"):
        row = _row(run.model, _seen(run.model, material), material, gamma_of(run))
        named.setdefault(run.recipe.name, []).append(row)
    rows = {name: gather(found) for name, found in named.items()}
    for name in progress(names, "measuring the controls"):
        rows[name] = gather(bare) if name == BEFORE else _control(name, runs, material)
    return gather(own), rows


def _seen(model: Model, material: ProbeData) -> dict[str, Seen]:
    return see_all(capsules(cast(SparseModel, model.eval())), material)


def _row(model: Model, seen: Mapping[str, Seen], material: ProbeData, gamma: float | None) -> Row:
    inside = in_band(cast(SparseModel, model), material.shown)
    return measure(seen, material, gamma) | {"capsules_in_band": float(inside)}


def gamma_of(run: TrainedRun) -> float | None:
    """The gamma of a trained run's read-out: the authors', or one that fits the size of the codes."""
    return GAMMA if isinstance(run.recipe.model, SparseConfig) else None


def _control(name: str, runs: Sequence[TrainedRun], material: ProbeData) -> Metrics:
    """One row; what has no seed is measured once."""
    if name != "untrained":
        return gather([measure(see_all(_without_network(name, runs[0], material.shown), material), material)])
    networks = (_untrained(run, material.shown) for run in runs)
    return gather(_row(network, _seen(network, material), material, None) for network in networks)


@torch.no_grad()
def _untrained(run: TrainedRun, shown: Tensor) -> SparseModel:
    """The run's network before its first step, which knows what support is usual, if it is ranked by that."""
    network = cast(SparseModel, build_model(run.recipe, run.model.spec).eval())
    if network.mask.relative:
        found = [cast(SparseOutput, network(part)).support for part in torch.split(shown, CHUNK)]
        network.mask.observe_support(torch.cat(found).mean(0))
    return network


@torch.no_grad()
def _without_network(name: str, run: TrainedRun, shown: Tensor) -> Look:
    """Pixels, or what is fitted to those of `shown`, as many groups and numbers as the run has."""
    if name == "pixels":
        return lambda images: Seen(images, None)
    out: SparseOutput = run.model(shown[:1])
    f = shown.flatten(1)
    (j, k) = out.masked.pose.shape[1:]
    if name == "PCA":
        axes = fit_pca(f, j, k)
        return lambda images: Seen(axes.codes(images.flatten(1)), None)
    means = fit_kmeans(f, j, k, run.recipe.seed)
    return lambda images: Seen(None, means.winners(images.flatten(1)))
