"""Every attack by its name: what it makes of a batch at each epsilon, and what is counted on the way."""

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
    along,
    bim,
    cross_entropy,
    gradient,
    logits_of,
    own_loss,
    pgd,
    random_start,
)
from torchcaps.evaluate.attacks.square import square
from torchcaps.models import Model

__all__ = ["ATTACKS", "AttackBatch", "Counts", "Target", "build_target"]


class Target(NamedTuple):
    """A model as attacks see it, from pixels in [0, 1] on."""

    logits: Logits
    loss: Loss
    scores: Logits

    @torch.no_grad()
    def classes(self, pixels: Tensor) -> Tensor:  # [b]
        """The class with the highest score, of equals the first; -1 where a score is not a number."""
        scores = self.scores(pixels)
        return scores.argmax(1).masked_fill(scores.isnan().any(1), -1)


def build_target(model: Model, data: Dataset, *, own: bool = False) -> Target:
    """A model behind what its data set does to pixels; attacked along cross-entropy, or along its `own` loss."""
    logits = logits_of(model)
    trained_by = own_loss(model)

    show = data.preprocess.to_input

    def answer(pixels: Tensor) -> Tensor:
        return logits(show(pixels))

    def loss(pixels: Tensor, labels: Tensor) -> Tensor:
        return trained_by(show(pixels), labels)

    return Target(answer, loss if own else cross_entropy(answer), lambda pixels: model.scores(show(pixels)))


@dataclass(frozen=True)
class Counts:
    """Sums over batches: images told right and, of those of `others`, taken for a class; gradients by attack."""

    right: Counter[tuple[str, float]] = field(default_factory=Counter)
    taken: Counter[tuple[int, float]] = field(default_factory=Counter)
    others: Counter[int] = field(default_factory=Counter)
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
    """Who is attacked, with pixels [b c h w] made on which source, their labels and rows [b], at rising epsilons."""

    victim: Target
    source: Target | None
    pixels: Tensor
    labels: Tensor
    rows: Tensor
    levels: Sequence[float]
    seed: int
    queries: int
    counts: Counts

    def record(self, name: str, made: Iterator[Tensor]) -> None:
        """Count what the victim still tells right of the images made at each epsilon."""
        for e, x in zip(self.levels, made, strict=True):
            self.counts.right[name, e] += int((self.victim.classes(x) == self.labels).sum())


def _fgsm(s: AttackBatch) -> None:
    g = s.counts.count_gradients("fgsm", gradient(s.victim.loss, s.pixels, s.labels))
    s.record("fgsm", (along(s.pixels, g, e) for e in s.levels))


def _bim(s: AttackBatch) -> None:
    s.counts.count_gradients("bim", gradient(s.victim.loss, s.pixels, s.labels))
    s.record("bim", (bim(s.victim.loss, s.pixels, s.labels, e) for e in s.levels))


def _pgd(s: AttackBatch) -> None:
    for e in s.levels:
        s.counts.count_gradients("pgd", gradient(s.victim.loss, random_start(s.pixels, e, s.seed, s.rows), s.labels))
    s.record("pgd", (pgd(s.victim.loss, s.pixels, s.labels, e, seed=s.seed, rows=s.rows) for e in s.levels))


def _square(s: AttackBatch) -> None:
    """What is fooled stays so, in a larger ball; only the rest is searched for again."""

    def made() -> Iterator[Tensor]:
        x = s.pixels.clone()
        live = torch.arange(len(s.pixels))
        for e in s.levels:
            if len(live):
                here = s.pixels[live]
                told = s.labels[live]
                x[live] = square(s.victim.logits, here, told, e, queries=s.queries, seed=s.seed, rows=s.rows[live])
                live = live[s.victim.classes(x[live]) == told]
            yield x

    s.record("square", made())


def _transfer(s: AttackBatch) -> None:
    assert s.source is not None, "nothing is transferred without a source"
    g = gradient(s.source.loss, s.pixels, s.labels)
    s.record("transfer", (along(s.pixels, g, e) for e in s.levels))


def _targeted(s: AttackBatch) -> None:
    with torch.no_grad():
        classes = s.victim.scores(s.pixels[:1]).shape[1]
    for j in range(classes):
        x = s.pixels[s.labels != j]
        if not len(x):
            continue
        t = torch.full((len(x),), j)
        g = s.counts.count_gradients("targeted", gradient(s.victim.loss, x, t))
        s.counts.others[j] += len(x)
        for e in s.levels:
            s.counts.taken[j, e] += int((s.victim.classes(along(x, g, e, targeted=True)) == j).sum())


ATTACKS: dict[str, Callable[[AttackBatch], None]] = {
    "fgsm": _fgsm,
    "bim": _bim,
    "pgd": _pgd,
    "square": _square,
    "transfer": _transfer,
    "targeted": _targeted,
}
"""The attacks by name; each counts into its scene."""
