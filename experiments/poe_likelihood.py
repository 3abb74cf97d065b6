"""Measure whether contrastive divergence raises the likelihood of held-out data, on a model small enough to compute it.

    python experiments/poe_likelihood.py

Four children of two numbers, three capsules of three, uniform coupling held fixed: then the energy of Hauser 2019 is a
density on the product of unit discs, and its partition function is known exactly. Log-likelihoods in nats, by the exact
partition function and by annealed importance sampling. Written to results/poe-likelihood.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from likelihood import ais, log_likelihood, log_partition_exact, log_volume
from torchcaps.evaluate.results import Result, gather, versions, write_result
from torchcaps.models.poe.config import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws

SEEDS = [0, 1, 2]
CHILDREN = 4
CAPSULES = 3
STEPS = 2000
RATE = 0.05


def data(seed: int, count: int) -> Tensor:
    """Draw children [n i d] that rotate together: one hidden angle, noise, lengths near .8."""
    g = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, 1, generator=g) * 2 * torch.pi + torch.arange(CHILDREN) * torch.pi / 2
    x = torch.stack([angle.cos(), angle.sin()], -1) * 0.8 + 0.05 * torch.randn(count, CHILDREN, 2, generator=g)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1) * 0.98


def measure(model: CapsuleEnergy, x: Tensor, seed: int) -> dict[str, float]:
    """Compute the mean log-likelihood of x, exactly and by AIS, and the error of the latter's partition function."""
    W = model.W.detach().double()
    b = model.bias.double()
    c = torch.full((CHILDREN, CAPSULES), model.share, dtype=torch.float64)
    exact = log_partition_exact(W, c, b)
    estimate = ais(W, c, b, chains=200, steps=100, seed=seed)
    mean = float(log_likelihood(x.double(), W, c, b, exact).mean())
    return {
        "log_likelihood": mean,
        "by_ais": mean + exact - estimate.log_partition,
        "ais_error": abs(estimate.log_partition - exact),
        "ais_standard_error": estimate.standard_error,
    }


def train_energy(seed: int, **settings: object) -> CapsuleEnergy:
    """Train a fresh model by contrastive divergence with some settings of `EnergyConfig`."""
    torch.manual_seed(seed)
    model = CapsuleEnergy(EnergyConfig(mode="paper", **settings), CHILDREN, CAPSULES, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    x = data(seed, 1000)
    model.power.fill_(float(x.square().sum((1, 2)).mean()))
    if len(model.particles):
        model.particles.copy_(x[: len(model.particles)])
    for step in range(STEPS):
        index = torch.randint(len(x), (100,))
        loss = model.contrast(x[index], step, SampleDraws(seed, index))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    start = time.monotonic()
    held_out = {seed: data(seed + 100, 500) for seed in SEEDS}
    # Three ways to train, beside the untrained model and the uniform density.
    rows = {}
    for name, settings in {"CD-1": {}, "CD-10": {"steps": 10}, "persistent": {"chain": "persistent"}}.items():
        rows[name] = gather(measure(train_energy(seed, **settings), held_out[seed], seed) for seed in SEEDS)
    torch.manual_seed(0)
    fresh = CapsuleEnergy(EnergyConfig(mode="paper"), CHILDREN, CAPSULES, 2, 3)
    rows["untrained"] = gather(measure(fresh, held_out[seed], seed) for seed in SEEDS)
    rows["uniform"] = gather({"log_likelihood": -log_volume(CHILDREN, 2)} for _ in SEEDS)
    first, *others = rows
    budget = {"steps": STEPS, "seconds": time.monotonic() - start, "threads": torch.get_num_threads()}
    config = {"children": CHILDREN, "capsules": CAPSULES, "rate": RATE, "first row": first}
    result = Result(
        recipe="poe-likelihood",
        config=config,
        seeds=SEEDS,
        metrics=rows[first],
        controls={name: rows[name] for name in others},
        paper={},
        budget={**budget, "parameters": fresh.W.numel()},
        versions=versions(),
    )
    print(write_result(Path(__file__).parents[1] / "results", result).name)
    for name, row in rows.items():
        print(name, {metric: [round(v, 3) for v in values] for metric, values in row.items()})


if __name__ == "__main__":
    main()
