"""Draw the figures of docs/systems/poe.md from trained runs.

python experiments/poe_figures.py runs/poe-mnist-0 runs/poe-fashion-0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from torchcaps.data import subset
from torchcaps.errors import RecipeError
from torchcaps.systems import System, system_of
from torchcaps.systems.figure_context import FigureOptions, draw_figure
from torchcaps.train import TrainedRun, load_run
from torchcaps.utils.files import write_atomically

SWEPT = 5
"""The capsule of poe-mnist whose axes are shown: one that draws sevens."""
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of poe-mnist and poe-fashion")
    for folder in parser.parse_args(words).runs:
        run = load_run(folder)
        system = system_of(run.recipe)
        if system.name != "poe":
            raise RecipeError(f"'{folder}' holds no products of expert capsules; name the folder of a run that does")
        name = run.recipe.name
        _write(f"{name}-samples", _draw(system, run, "samples", FigureOptions(count=4)), "samples-empirical")
        if name == "poe-mnist":
            _write(f"{name}-completion", _draw(system, run, "completion", FigureOptions(count=10)), "completion")
            sweeps = _draw(system, run, "sweeps", FigureOptions(capsules=(SWEPT,)))
            _write(f"{name}-sweeps", sweeps, next(key for key in sweeps if key.endswith("-axes")))


def _draw(system: System, run: TrainedRun, kind: str, options: FigureOptions) -> dict[str, bytes]:
    """Draw a figure from the model, and from the first test images if it needs any."""
    context = system.figure_context(
        run.model, options, lambda: subset(run.recipe.data.load().test, torch.arange(options.count))
    )
    return draw_figure(system.figures, kind, context)


def _write(name: str, drawn: dict[str, bytes], which: str) -> None:
    write_atomically(PICTURES / f"{name}.png", [drawn[which]])
    print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
