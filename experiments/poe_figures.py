"""Draw the figures of docs/poe.md from trained runs.

python experiments/poe_figures.py runs/poe-mnist-0 runs/poe-fashion-0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torchcaps.errors import RecipeError
from torchcaps.models.poe import PoE
from torchcaps.systems import system_of
from torchcaps.systems.poe.figures import FigureOptions, picture
from torchcaps.train import load_run
from torchcaps.utils.files import write_atomically

SWEPT = 14
"""The capsule of poe-mnist whose axes are shown: one that draws sevens."""
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of poe-mnist and poe-fashion")
    for folder in parser.parse_args(words).runs:
        run = load_run(folder)
        if system_of(run.recipe).name != "poe":
            raise RecipeError(f"'{folder}' holds no products of expert capsules; name the folder of a run that does")
        model = cast(PoE, run.model)
        name = run.recipe.name
        _write(f"{name}-samples", picture("samples", model, FigureOptions(count=4)), "samples-empirical")
        if name == "poe-mnist":
            test = run.recipe.data.load().test.model_input(slice(10))
            _write(f"{name}-completion", picture("completion", model, FigureOptions(), test), "completion")
            sweeps = picture("sweeps", model, FigureOptions(capsules=(SWEPT,)))
            _write(f"{name}-sweeps", sweeps, next(key for key in sweeps if key.endswith("-axes")))


def _write(name: str, drawn: dict[str, bytes], which: str) -> None:
    write_atomically(PICTURES / f"{name}.png", [drawn[which]])
    print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
