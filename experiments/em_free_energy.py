"""Count the steps of EM routing that raise its free energy, which the paper says each step lowers.

    python experiments/em_free_energy.py

Random votes with one cluster, lambda held fixed, eight iterations; the assignment of procedure 1 as printed, beside
the one that minimizes eq. (4) (`EM(assignment="descent")`). Written to results/em-free-energy.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchcaps.evaluate.results import Result, gather, versions, write_result
from torchcaps.kernels.votes import DenseVotes
from torchcaps.routing import EM
from torchcaps.routing.em import Problem, free_energy, init, step

SEEDS = [0, 1, 2]
PROBLEMS = 500
ITERATIONS = 8


def rising_share(settings: EM, seed: int) -> float:
    """Return the share of steps after which the free energy is higher than before."""
    torch.manual_seed(seed)
    votes = torch.randn(PROBLEMS, 12, 4, 6, dtype=torch.float64)  # [b i j k]
    votes[:, :6, 0] = torch.randn(PROBLEMS, 1, 6, dtype=torch.float64) + 0.05 * votes[:, :6, 0]
    activation = torch.rand(PROBLEMS, 12, dtype=torch.float64)
    # Uniform start, then one step at a time, with the free energy after each.
    beta_a = votes.new_full((4,), 1.0)
    beta_u = votes.new_full((4,), 1.5)
    problem = Problem(DenseVotes.at_one_place(votes, activation), beta_a, beta_u, settings)
    state = init(problem)
    energies = [free_energy(problem, state, settings.final_inverse_temperature)]
    for t in range(1, ITERATIONS):
        state = step(problem, state, t)
        energies.append(free_energy(problem, state, settings.final_inverse_temperature))
    change = torch.stack(energies).diff(dim=0)  # [t b]
    return float((change > 1e-9).double().mean())


def measure(lam: float, assignment: str) -> dict[str, list[float]]:
    """Measure every seed; decay = 0 keeps lambda fixed."""
    settings = EM(final_inverse_temperature=lam, decay=0.0, assignment=assignment)
    return gather({"rising_steps": rising_share(settings, seed)} for seed in SEEDS)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    start = time.monotonic()
    rows = {f"{kind}, lambda {lam}": measure(lam, kind) for kind in ("paper", "descent") for lam in (0.01, 1.0)}
    first, *others = rows
    config = {"problems": PROBLEMS, "iterations": ITERATIONS, "first row": first}
    budget = {
        "steps": ITERATIONS,
        "seconds": time.monotonic() - start,
        "threads": torch.get_num_threads(),
        "parameters": 0,
    }
    controls = {name: rows[name] for name in others}
    result = Result("em-free-energy", config, SEEDS, rows[first], controls, {}, budget, versions())
    print(write_result(Path(__file__).parents[1] / "results", result).name, rows)


if __name__ == "__main__":
    main()
