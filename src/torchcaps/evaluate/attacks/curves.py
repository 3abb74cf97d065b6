"""Accuracy against epsilon, attack by attack, and where the gradient cannot tell how robust a model is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal, NamedTuple

import torch

from torchcaps.data import Dataset
from torchcaps.errors import DataError, RecipeError, suggestion
from torchcaps.evaluate.attacks.registry import ATTACKS, AttackBatch, Counts, build_target
from torchcaps.models import Model
from torchcaps.utils.progress import progress
from torchcaps.utils.random import permutation

__all__ = [
    "EPSILONS",
    "FREE",
    "GRADIENT",
    "AttackCurves",
    "Curve",
    "GradientMasking",
    "attack_curves",
    "find_masking",
    "select_attacks",
    "sorted_epsilons",
]

GRADIENT = ("fgsm", "bim", "pgd")
FREE = ("square", "transfer")
"""Attacks along the gradient of the model itself, and those that never ask for it."""
EPSILONS = (0.0, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3)

_BATCH = 100
"""Images that are attacked together."""

Curve = dict[str, float]
"""Epsilon, as text -> a share of images."""


@dataclass(frozen=True)
class AttackCurves:
    """What attacks did to a model; dictionaries are by the attack's name.

    Attributes:
        images: How many were attacked.
        seconds: How long that took.
        attack_accuracy: Epsilon -> share of the attacked images that are still classified right.
        attack_success: Epsilon -> share of images that are taken for a given other class, the mean over the classes.
        zero_gradients: Share of images whose gradient is exactly zero where the attack starts: it never moves them.
        zero_values: Share of the values of those gradients that are exactly zero.
        gradient_size: Mean size of those values.
    """

    images: int
    seconds: float = field(compare=False)
    attack_accuracy: dict[str, Curve]
    attack_success: dict[str, Curve]
    zero_gradients: dict[str, float]
    zero_values: dict[str, float]
    gradient_size: dict[str, float]


def attack_curves(
    model: Model,
    data: Dataset,
    attacks: Sequence[str] | None = None,
    epsilons: Sequence[float] = EPSILONS,
    *,
    images: int = 500,
    seed: int = 0,
    source: Model | None = None,
    queries: int = 300,
    loss: Literal["cross-entropy", "own"] = "cross-entropy",
) -> AttackCurves:
    """Attack a classifier at every epsilon.

    Args:
        model: The classifier.
        data: Test images; where they are standardized, the attacked image is.
        attacks: Names in `ATTACKS`; by default all, "transfer" only where there is a source. "targeted" is FGSM
            towards each class in turn, of the images of all others (Hinton 2018, section 6).
        epsilons: Largest changes of a pixel of [0, 1].
        images: How many images to attack, picked by the seed; all if there are fewer.
        seed: Picks images and random numbers.
        source: The model on which FGSM makes the images of "transfer".
        queries: Of "square", an image; one that it has fooled stays so at larger epsilons, whose balls hold it too.
        loss: What gradient attacks climb; "own" is what the model is trained by, see `gradients`.

    Returns:
        The curves of all attacks.
    """
    began = time.perf_counter()
    # Refuse what cannot be attacked before anything is computed.
    names = select_attacks(attacks, source is not None)
    levels = sorted_epsilons(epsilons)
    _check(model, data, images, queries, source)
    # Which images, and both models behind the preprocessing.
    rows = permutation(seed, 0, len(data))[:images]
    counts = Counts()
    victim = build_target(model, data, own=loss == "own")
    helper = None if source is None else build_target(source, data)
    # All attacks on one batch, then the next batch; the counts add up.
    with _evaluating(model, source):
        work = [(chunk, name) for chunk in torch.split(rows, _BATCH) for name in names]
        for chunk, name in progress(work, "attacking"):
            pixels = data.pixels(chunk)
            labels = data.labels[chunk].long()
            ATTACKS[name](AttackBatch(victim, helper, pixels, labels, chunk, levels, seed, queries, counts))
    return _attacked(counts, len(rows), time.perf_counter() - began, levels)


class GradientMasking(NamedTuple):
    """The attack without gradients that leaves the least accuracy, and the best one along them with what it leaves."""

    free: str
    accuracy: float
    gradient: str
    gradient_accuracy: float


def find_masking(accuracy: Mapping[str, Mapping[str, float]]) -> dict[str, GradientMasking]:
    """Epsilon -> where the gradient is masked: an attack without it leaves less accuracy than every one along it.

    `accuracy` is `AttackCurves.attack_accuracy`. The gradient attacks are given their best at this epsilon or a smaller
    one, since an attack may change less than it is allowed to.
    """
    # (accuracy, epsilon, attack) of both kinds of attacks.
    along = [(value, float(e), name) for name in GRADIENT for e, value in accuracy.get(name, {}).items()]
    free = [(value, e, name) for name in FREE for e, value in accuracy.get(name, {}).items()]
    found: dict[str, GradientMasking] = {}
    # By epsilon, and within one the strongest first, which is the one that counts.
    for least, e, name in sorted(free, key=lambda one: (float(one[1]), one[0])):
        best = min((one for one in along if one[1] <= float(e)), default=None)
        if e not in found and best is not None and least < best[0]:
            found[e] = GradientMasking(name, least, best[2], best[0])
    return found


def _attacked(counts: Counts, images: int, seconds: float, levels: Sequence[float]) -> AttackCurves:
    # Epsilons become text, since they are keys in JSON.
    names = dict.fromkeys(name for name, _ in counts.right)
    sums = counts.gradients
    return AttackCurves(
        images,
        round(seconds, 1),
        {name: {f"{e:g}": counts.right[name, e] / images for e in levels} for name in names},
        {"targeted": {f"{e:g}": _success(counts, e) for e in levels}} if counts.targeted_images else {},
        {name: s["zero images"] / s["images"] for name, s in sums.items()},
        {name: s["zero values"] / s["values"] for name, s in sums.items()},
        {name: s["size"] / s["values"] for name, s in sums.items()},
    )


def _success(counts: Counts, epsilon: float) -> float:
    return mean(counts.targeted_hits[j, epsilon] / count for j, count in counts.targeted_images.items())


def select_attacks(attacks: Sequence[str] | None, has_source: bool) -> list[str]:
    """The names of the attacks, checked; None are all that can be made."""
    names = [name for name in ATTACKS if has_source or name != "transfer"] if attacks is None else list(attacks)
    for name in names:
        if name not in ATTACKS:
            raise RecipeError(f"unknown attack '{name}'{suggestion(name, ATTACKS)}")
    if not names or len(set(names)) < len(names):
        raise RecipeError(f"the attacks are {names}; at least one is wanted, and each once")
    if "transfer" in names and not has_source:
        raise RecipeError("'transfer' attacks with images made on another model; give that as the source")
    return names


def sorted_epsilons(epsilons: Sequence[float]) -> list[float]:
    """The epsilons in their order, checked; each has a text of its own."""
    levels = sorted(float(e) for e in epsilons)
    for e in levels:
        if not 0 <= e <= 1:
            raise RecipeError(f"epsilon = {e:g}; 0 to 1 is wanted, as pixels are in [0, 1]")
    # Epsilons that print alike would share a key.
    if not levels or len({f"{e:g}" for e in levels}) < len(levels):
        raise RecipeError(f"the epsilons are {levels}; at least one is wanted, and each once")
    return levels


def _check(model: Model, data: Dataset, images: int, queries: int, source: Model | None) -> None:
    for one in (model, source):
        if one is not None and not one.is_classifier:
            raise RecipeError(f"{type(one).__name__} is not a classifier; attacks need one")
        if one is not None and one.spec != data.spec:
            raise RecipeError(f"the model is made for {one.spec}, the images are {data.spec}; take those it knows")
    if data.labels.ndim != 1:
        raise DataError(
            f"labels of shape {list(data.labels.shape)}; attacks need one label an image: choose other data"
        )
    if images < 1 or queries < 1:
        raise RecipeError(f"{images} images and {queries} queries are asked for; at least 1 is wanted of each")


@contextmanager
def _evaluating(*models: Model | None) -> Iterator[None]:
    """The models in evaluation mode, and afterwards as they were."""
    before = [(model, model.training) for model in models if model is not None]
    try:
        for model, _ in before:
            model.eval()
        yield
    finally:
        for model, was in before:
            model.train(was)
