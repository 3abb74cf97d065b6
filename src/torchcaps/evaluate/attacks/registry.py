"""The table of attacks: each changes a batch of images at every epsilon, and counts what the classifier then says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.evaluate.attacks.gradients import (
    Logits,
    Loss,
    bim,
    cross_entropy,
    gradient,
    logits_of,
    pgd,
    random_start,
    step_along,
    training_loss,
)
from torchcaps.evaluate.attacks.square import square
from torchcaps.models import Model

__all__ = ["ATTACKS", "AttackBatch", "Counts", "Target", "build_target"]


class Target(NamedTuple):
    """A classifier of pixels in [0, 1], as attacks use it.

    Attributes:
        logits: Pixels [b c h w] -> [b j], with gradients everywhere.
        loss: Pixels and labels [b] -> [b], what attacks along the gradient climb.
        scores: Pixels -> [b j], the classifier's own scores.
    """

    logits: Logits
    loss: Loss
    scores: Logits

    @torch.no_grad()
    def predict(self, pixels: Tensor) -> Tensor:  # [b]
        """Return the class with the highest score, of equals the first; -1 where a score is not a number."""
        scores = self.scores(pixels)
        return scores.argmax(1).masked_fill(scores.isnan().any(1), -1)


def build_target(model: Model, data: Dataset, *, own: bool = False) -> Target:
    """Put a model behind the preprocessing of its data set, so that pixels can be attacked.

    Args:
        model: A classifier.
        data: Whose preprocessing it is used to.
        own: Attack along the loss that the model was trained by, not along cross-entropy.
    """
    logits = logits_of(model)
    loss_of_input = training_loss(model)
    to_input = data.preprocess.to_input

    # The attacked function includes the preprocessing: epsilon is a change of pixels, not of standardized values.
    def pixel_logits(pixels: Tensor) -> Tensor:
        return logits(to_input(pixels))

    def pixel_loss(pixels: Tensor, labels: Tensor) -> Tensor:
        return loss_of_input(to_input(pixels), labels)

    loss = pixel_loss if own else cross_entropy(pixel_logits)
    return Target(pixel_logits, loss, lambda pixels: model.scores(to_input(pixels)))


@dataclass(frozen=True)
class Counts:
    """Sums over batches.

    Attributes:
        right: (attack, epsilon) -> images that are still classified right.
        targeted_hits: (class, epsilon) -> images that are taken for the class they were moved towards.
        targeted_images: Class -> images that were moved towards it.
        gradients: Attack -> sums over its gradients, see `count_gradients`.
    """

    right: Counter[tuple[str, float]] = field(default_factory=Counter)
    targeted_hits: Counter[tuple[int, float]] = field(default_factory=Counter)
    targeted_images: Counter[int] = field(default_factory=Counter)
    gradients: dict[str, dict[str, float]] = field(default_factory=dict)

    def count_gradients(self, name: str, g: Tensor) -> Tensor:
        """Count the images and the values of gradients g [b c h w] that are exactly zero, and add up their sizes."""
        zero = g == 0
        sums = self.gradients.setdefault(name, defaultdict(float))
        sums["images"] += len(g)
        sums["zero images"] += int(zero.flatten(1).all(1).sum())
        sums["values"] += g.numel()
        sums["zero values"] += int(zero.sum())
        sums["size"] += float(g.abs().sum(dtype=torch.float64))
        return g


@dataclass(frozen=True)
class AttackBatch:
    """A batch of images to attack.

    Attributes:
        target: The classifier that is attacked.
        source: The classifier on which the images of "transfer" are made.
        pixels: [b c h w] in [0, 1].
        labels: [b].
        rows: [b] indices of the images in their set, for random numbers.
        epsilons: Rising.
        seed: Of random numbers.
        queries: How often "square" may ask about an image.
        counts: Where results are added.
    """

    target: Target
    source: Target | None
    pixels: Tensor
    labels: Tensor
    rows: Tensor
    epsilons: Sequence[float]
    seed: int
    queries: int
    counts: Counts

    def record(self, name: str, made: Iterator[Tensor]) -> None:
        """Count the images, made at each epsilon, that the target still classifies right."""
        for e, x in zip(self.epsilons, made, strict=True):
            self.counts.right[name, e] += int((self.target.predict(x) == self.labels).sum())


def _fgsm(s: AttackBatch) -> None:
    # One gradient serves all epsilons.
    g = s.counts.count_gradients("fgsm", gradient(s.target.loss, s.pixels, s.labels))
    s.record("fgsm", (step_along(s.pixels, g, e) for e in s.epsilons))


def _bim(s: AttackBatch) -> None:
    # Only the gradient at the start is counted.
    s.counts.count_gradients("bim", gradient(s.target.loss, s.pixels, s.labels))
    s.record("bim", (bim(s.target.loss, s.pixels, s.labels, e) for e in s.epsilons))


def _pgd(s: AttackBatch) -> None:
    for e in s.epsilons:
        # Each epsilon has a start, and so a first gradient, of its own.
        s.counts.count_gradients("pgd", gradient(s.target.loss, random_start(s.pixels, e, s.seed, s.rows), s.labels))
    s.record("pgd", (pgd(s.target.loss, s.pixels, s.labels, e, seed=s.seed, rows=s.rows) for e in s.epsilons))


def _square(s: AttackBatch) -> None:
    """Search at each epsilon for the images that are not fooled yet: a larger ball holds what a smaller one had."""

    def made() -> Iterator[Tensor]:
        x = s.pixels.clone()
        live = torch.arange(len(s.pixels))
        for e in s.epsilons:
            if len(live):
                here = s.pixels[live]
                told = s.labels[live]
                x[live] = square(s.target.logits, here, told, e, queries=s.queries, seed=s.seed, rows=s.rows[live])
                live = live[s.target.predict(x[live]) == told]
            # Counted before the next epsilon changes it in place.
            yield x

    s.record("square", made())


def _transfer(s: AttackBatch) -> None:
    assert s.source is not None, "nothing is transferred without a source"
    # Made along the gradient of the source, judged by the target.
    g = gradient(s.source.loss, s.pixels, s.labels)
    s.record("transfer", (step_along(s.pixels, g, e) for e in s.epsilons))


def _targeted(s: AttackBatch) -> None:
    with torch.no_grad():
        classes = s.target.scores(s.pixels[:1]).shape[1]
    # Towards each class, the images of all others.
    for j in range(classes):
        x = s.pixels[s.labels != j]
        if not len(x):
            continue
        t = torch.full((len(x),), j)
        g = s.counts.count_gradients("targeted", gradient(s.target.loss, x, t))
        s.counts.targeted_images[j] += len(x)
        for e in s.epsilons:
            s.counts.targeted_hits[j, e] += int((s.target.predict(step_along(x, g, e, targeted=True)) == j).sum())


ATTACKS: dict[str, Callable[[AttackBatch], None]] = {
    "fgsm": _fgsm,
    "bim": _bim,
    "pgd": _pgd,
    "square": _square,
    "transfer": _transfer,
    "targeted": _targeted,
}
"""Name -> attack, which adds to the batch's counts."""
