"""Compare decoders and densities of poses on the images that runs of poe-mnist hold out, beside local PCA.

    torchcaps train poe-mnist --seed 0 --data.validation 10000 --out runs/poe-held-0        and seeds 1, 2
    python experiments/poe_decoders.py runs/poe-held-0 runs/poe-held-1 runs/poe-held-2
    python experiments/poe_decoders.py --coverage runs/poe-held-0 runs/poe-held-1 runs/poe-held-2

Capsules stay as they are; U, Q and the stored poses are fitted again for every row. Local PCA groups the images by
the same edges, its clusters from one seed; its rows have the axes of its clusters and, where `curvature` is not 0,
products of them, too. With --coverage, rows differ in the share of the images that poses are stored of
(`decoder.coverage`), for any data. Numbers are means over the runs. Writes results/lab-poe-decoders.json, or
results/lab-poe-coverage-DATA.json; four minutes a run on an idle core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.data import Dataset, epoch_order, subset
from torchcaps.errors import RecipeError
from torchcaps.evaluate.baselines import LocalPCA, fit_local_pca
from torchcaps.evaluate.reference_classifier import (
    reference_features,
    reference_probabilities,
    train_reference_classifier,
)
from torchcaps.evaluate.sample_metrics import frechet, sample_confidence
from torchcaps.models import CNN, PoE
from torchcaps.models.poe import PoEConfig
from torchcaps.models.poe.decoder import axis_products
from torchcaps.models.poe.frames import Frame, find_frame
from torchcaps.models.poe.stages import DecoderStage
from torchcaps.systems.poe.generation import Domain
from torchcaps.systems.poe.system import reference_folder
from torchcaps.train import load_run
from torchcaps.types import Batch
from torchcaps.utils.random import resample_near

CURVATURES = (0, 4, 8, 16)
EXAMPLES = (256, 1024)
COVERAGES = (1.0, 0.9, 0.8, 0.7)
FITTED = (5000, 20_000)
DOMAINS: tuple[Domain, ...] = ("empirical", "mixture", "gaussian")
SAMPLES = 50
"""Images drawn of each capsule."""
MEASURED = 4000
"""Held-out images that are reconstructed."""
BATCH = 500
RIDGE = 0.01
"""Of local PCA's quadratic decoder, relative to each number's variance."""


class Row(NamedTuple):
    """A row of the table: what was fitted, and its numbers by their names."""

    name: str
    numbers: dict[str, float]


@dataclass(frozen=True)
class HeldOut:
    """What all rows of one run share.

    Attributes:
        model: The run's model.
        train: The images that it learned from.
        images: [n c h w] images that it held out.
        reference: The reference classifier, which learned from the images of `train`.
        real: [m p] its features of held-out images, as many as there are samples.
    """

    model: PoE
    train: Dataset
    images: Tensor
    reference: CNN
    real: Tensor

    @classmethod
    def of_run(cls, folder: Path) -> HeldOut:
        """Load a run and the images that it held out.

        Raises:
            RecipeError: If it held out none.
        """
        run = load_run(folder)
        splits = run.recipe.data.load()
        if splits.validation is None:
            raise RecipeError(f"'{folder}' holds out no images; train it with --data.validation 10000")
        model = cast(PoE, run.model.eval())
        reference = train_reference_classifier(run.recipe.data, reference_folder(run.recipe, folder))
        images = splits.validation.model_input(torch.arange(min(MEASURED, len(splits.validation))))
        real = reference_features(reference, images[: model.capsules * SAMPLES])
        return cls(model, splits.train, images, reference, real)

    def measure_samples(self, samples: Tensor) -> dict[str, float]:
        """Return what the reference classifier says of samples [j n c h w]."""
        drawn = samples.flatten(0, 1)
        verdicts = reference_probabilities(self.reference, drawn).view(*samples.shape[:2], -1)
        found = sample_confidence(verdicts)
        distance = frechet(reference_features(self.reference, drawn), self.real)
        return {"confident": found["confident_fraction"], "consistency": found["consistency"], "frechet": distance}


@torch.no_grad()
def with_decoder(data: HeldOut, curvature: int, examples: int, coverage: float = 1.0) -> PoE:
    """Build the run's model with another decoder, fitted to the images that it learned from."""
    old = data.model
    decoder = replace(old.config.decoder, curvature=curvature, examples=examples, coverage=coverage)
    model = PoE(replace(cast(PoEConfig, old.config), decoder=decoder), old.spec).eval()
    kept = {name: value for name, value in old.state_dict().items() if not name.startswith("decoder.")}
    model.load_state_dict(kept, strict=False)
    stage = cast(DecoderStage, model.stages()["decoder"])
    stage.prepare(data.train.images)
    for step, rows in enumerate(torch.split(torch.arange(len(data.train)), BATCH)):
        stage.objective(Batch(data.train.model_input(rows), data.train.labels[rows], rows), step)
    stage.finish()
    return model


@torch.no_grad()
def measure_capsules(data: HeldOut, curvature: int, examples: int, coverage: float = 1.0) -> Row:
    """Measure capsules with a decoder: their reconstructions, and their samples from all domains."""
    model = with_decoder(data, curvature, examples, coverage)
    numbers = {"mse": float((model.reconstruct(data.images) - data.images).square().mean())}
    for domain in DOMAINS:
        samples = torch.stack([model.sample(j, SAMPLES, domain) for j in range(model.capsules)])
        found = data.measure_samples(samples)
        prefix = "" if domain == "empirical" else f"{domain} "
        numbers |= {f"{prefix}{name}": value for name, value in found.items()}
    return Row(f"capsules, curvature {curvature}, {examples} stored poses{_covered(coverage)}", numbers)


def _covered(coverage: float) -> str:
    """Return what the name of a row says of its coverage."""
    return "" if coverage == 1 else f", coverage {coverage}"


def _quadratic(scores: Tensor, drawn: Tensor, curvature: int) -> Callable[[Tensor], Tensor]:
    """Fit features [n p] by scores [n k] of a cluster and products of the first of them."""
    axes = torch.eye(scores.shape[1])[:, :curvature].unsqueeze(0)

    def code(s: Tensor) -> Tensor:
        return torch.cat([s, axis_products(s.unsqueeze(1), axes).squeeze(1)], 1)

    x = code(scores)
    center = x.mean(0)
    deviation = x.std(0).clamp_min(1e-9)
    unit = (x - center) / deviation
    gram = unit.T @ unit / len(unit) + RIDGE * torch.eye(unit.shape[1])
    weights = torch.linalg.solve(gram, unit.T @ (drawn - drawn.mean(0)) / len(unit))
    return lambda s: (code(s) - center) / deviation @ weights + drawn.mean(0)


@torch.no_grad()
def measure_local_pca(data: HeldOut, curvature: int, fitted: int, coverage: float = 1.0) -> Row:
    """Measure local PCA on so many training images, with a linear decoder or one like that of the capsules."""
    model = data.model
    d = model.config.child_dimension
    seen = model.energy.ranking * d
    some = subset(data.train, epoch_order(0, 0, len(data.train))[:fitted])
    chunks = [some.model_input(rows) for rows in torch.split(torch.arange(len(some)), BATCH)]
    f = torch.cat([model.features(chunk) for chunk in chunks]).flatten(1)
    frames = torch.cat([find_frame(chunk).numbers for chunk in chunks])
    pca = cast(LocalPCA, fit_local_pca(f, model.capsules, model.dimension, seen=seen, coverage=coverage))
    winners = pca.winners(f).masked_fill(~pca.covered, -1)
    wide = f.shape[1] - seen
    # Held-out images, each by the cluster that it falls into
    held = torch.cat([model.features(chunk) for chunk in torch.split(data.images, BATCH)]).flatten(1)
    held_winners = pca.winners(held)
    held_frames = find_frame(data.images).numbers
    error = 0.0
    samples = []
    for j in range(model.capsules):
        decode = _quadratic(pca.scores[j], f[winners == j, :wide], curvature)
        own = held_winners == j
        if bool(own.any()):
            scores = (held[own] - pca.means[j]) @ pca.axes[j].T
            frame = Frame.of_numbers(held_frames[own]) if model.framed else None
            drawn = model.draw_images(decode(scores).view(len(scores), -1, d), frame)
            error += float((drawn - data.images[own]).square().sum())
        which = torch.arange(SAMPLES)
        numbers = resample_near(frames[winners == j], 0, j, which)
        features = decode(resample_near(pca.scores[j], 0, j, which)).view(SAMPLES, -1, d)
        samples.append(model.draw_images(features, Frame.of_numbers(numbers) if model.framed else None))
    numbers = {"mse": error / data.images.numel(), **data.measure_samples(torch.stack(samples))}
    return Row(f"local PCA, curvature {curvature}, {fitted} images{_covered(coverage)}", numbers)


def table(rows: Sequence[Sequence[Row]]) -> list[list[str]]:
    """Return the table of the mean over runs of the rows of each."""
    names = list(max((row.numbers for row in rows[0]), key=len))
    cells = [["row", *names]]
    for same in zip(*rows, strict=True):
        values = [[row.numbers[name] for row in same] for name in names if name in same[0].numbers]
        digits = [_digits(name) for name in names]
        texts = [f"{mean(found):.{places}f}" for found, places in zip(values, digits, strict=False)]
        cells.append([same[0].name, *texts, *["-"] * (len(names) - len(texts))])
    return cells


def _digits(name: str) -> int:
    """Return how many digits of a number the table shows."""
    if name == "mse":
        return 5
    return 1 if name.endswith("frechet") else 3


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="runs of poe-mnist that hold out training images")
    parser.add_argument("--coverage", action="store_true", help="compare coverages instead of decoders")
    given = parser.parse_args(words)
    rows = []
    for folder in given.runs:
        data = HeldOut.of_run(folder)
        if given.coverage:
            own = [measure_capsules(data, CURVATURES[2], EXAMPLES[-1], coverage) for coverage in COVERAGES]
            rows.append(own + [measure_local_pca(data, 0, FITTED[-1], coverage) for coverage in COVERAGES])
            continue
        own = [measure_capsules(data, 0, EXAMPLES[0])]
        own += [measure_capsules(data, curvature, EXAMPLES[-1]) for curvature in CURVATURES]
        own += [measure_local_pca(data, curvature, fitted) for fitted in FITTED for curvature in (0, 8)]
        rows.append(own)
    name = load_run(given.runs[0]).recipe.name.replace("poe-", "poe-coverage-") if given.coverage else "poe-decoders"
    write_rows(name, table(rows), runs=len(rows))


if __name__ == "__main__":
    main()
