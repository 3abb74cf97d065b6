"""Measure what frames, edges, small capsules and a slow competition do to the groups of digits, without drawing.

    python experiments/poe_edges.py [--seeds 0 1 2] [--steps 1000]

W is trained by contrastive divergence on oriented edges alone, as the ranking capsules of poe-quick are, on 12,000
training images of MNIST; groups are compared with the classes of 4,000 other training images. k-means gets the same
numbers. Writes results/lab-poe-edges.json; three minutes a seed on an idle core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.data import MnistConfig
from torchcaps.evaluate.baselines import fit_kmeans
from torchcaps.math.pixels import to_float
from torchcaps.metrics import matched_accuracy, nmi, purity
from torchcaps.models.poe import EnergyConfig
from torchcaps.models.poe.edges import edge_children
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.models.poe.frames import find_frame, into_frame
from torchcaps.utils.random import permutation

TRAINED = 12_000
HELD_OUT = 4_000
DIRECTIONS = 8
SMALL = 4
"""Numbers of a ranking capsule in the package."""
BATCH = 128
GAIN = 24.5
"""Of the reverse pass: half the number of children."""


class Digits(NamedTuple):
    """Images [n c h w] in [0, 1], training images first, and their classes [n]."""

    images: Tensor
    labels: Tensor


def load() -> Digits:
    """Load the first training images of MNIST, to learn from and to choose by."""
    data = MnistConfig(train=TRAINED + HELD_OUT).load().train
    return Digits(to_float(data.images), data.labels)


def framed(images: Tensor) -> Tensor:
    """Bring images into the frames of their moments."""
    return torch.cat([into_frame(chunk, find_frame(chunk)) for chunk in torch.split(images, 1000)])


def edges(images: Tensor) -> Tensor:
    """Compute oriented edges [n i d]."""
    return torch.cat([edge_children(chunk, DIRECTIONS) for chunk in torch.split(images, 1000)])


class Setting(NamedTuple):
    """How capsules are trained.

    Attributes:
        dimension: Numbers of a capsule.
        ramp: Share of the steps after which the competition is sharp.
    """

    dimension: int
    ramp: float


def train_capsules(f: Tensor, capsules: int, steps: int, seed: int, setting: Setting) -> CapsuleEnergy:
    """Train W on features [n i d] as the second stage of poe-quick trains its ranking capsules."""
    torch.manual_seed(seed)
    config = replace(EnergyConfig(), ramp=max(1, round(setting.ramp * steps)), loosen=7 * steps // 10, gain=GAIN)
    energy = CapsuleEnergy(config, f.shape[1], capsules, child_dimension=f.shape[2], dimension=setting.dimension)
    energy.fit_offset(f)
    optimizer = torch.optim.Adam([energy.W], lr=0.03, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / steps))
    an_epoch = len(f) // BATCH
    for step in range(steps):
        rows = permutation(seed, step // an_epoch, len(f))[BATCH * (step % an_epoch) :][:BATCH]
        loss = energy.contrast(energy.visible(f[rows]), step, SampleDraws(seed, rows))["loss"]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return energy


SETTINGS = (Setting(SMALL, 1.0), Setting(SMALL, 0.05), Setting(16, 1.0), Setting(16, 0.05), Setting(1, 1.0))
"""Those of the package first, then what they are compared with."""


def winners(energy: CapsuleEnergy, f: Tensor) -> Tensor:
    """Return the capsule [n] that wins each image."""
    return torch.cat([energy.winners(energy.infer(energy.visible(chunk))) for chunk in torch.split(f, 500)])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(words)
    digits = load()
    upright = framed(digits.images)
    features = {
        "pixels": digits.images.flatten(1).unsqueeze(1),
        "pixels, framed": upright.flatten(1).unsqueeze(1),
        "edges": edges(digits.images),
        "edges, framed": edges(upright),
    }
    labels = digits.labels[TRAINED:]
    rows = [["groups", "features", "J", "NMI", "purity", "accuracy", "used"]]

    def report(name: str, on: str, J: int, group: Callable[[Tensor, int], Tensor]) -> None:
        """Measure the groups of each seed, and add a row with means and deviations."""
        found = [group(features[on], seed) for seed in options.seeds]
        measures = [
            [nmi(w, labels), purity(w, labels), matched_accuracy(w, labels), float(len(torch.unique(w)))] for w in found
        ]
        table = torch.tensor(measures, dtype=torch.float64)
        spread = table.std(0) if len(found) > 1 else torch.zeros(4)
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(table.mean(0).tolist(), spread.tolist(), strict=True)]
        rows.append([name, on, str(J), *cells[:3], f"{table[:, 3].mean():.1f}"])
        print(" | ".join(rows[-1]), flush=True)

    for J in (20, 10):
        for on, f in features.items():

            def kmeans(f: Tensor, seed: int, J: int = J) -> Tensor:
                flat = f.flatten(1)
                return fit_kmeans(flat[:TRAINED], J, 1, seed).winners(flat[TRAINED:])

            report("k-means", on, J, kmeans)
            if f.shape[1] == 1:
                continue
            for setting in SETTINGS if on == "edges, framed" else SETTINGS[:1]:

                def capsules(f: Tensor, seed: int, J: int = J, setting: Setting = setting) -> Tensor:
                    return winners(train_capsules(f[:TRAINED], J, options.steps, seed, setting), f[TRAINED:])

                report(f"capsules of {setting.dimension}, ramp {setting.ramp:.0%}", on, J, capsules)
    write_rows("poe-edges", rows, steps=options.steps, seeds=options.seeds)


if __name__ == "__main__":
    main()
