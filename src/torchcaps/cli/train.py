"""torchcaps train"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchcaps.config import parse_overrides

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a recipe into a folder, or go on with one.

    Any key of the recipe can be set: `torchcaps list RECIPE` shows them. A model trained in several
    stages also takes settings for one of them: --stages.NAME.train.epochs 2. Under torchrun the batch is shared by
    the processes: torchrun --nproc-per-node 2 -m torchcaps train RECIPE.

    Example: torchcaps train capsnet-glyphs --out runs/first --train.epochs 2 --model.routing.iterations 1
    """

    recipe: tyro.conf.Positional[str]
    """Name of a recipe (`torchcaps list`) or path of a .toml file."""
    out: Path | None = None
    """Folder of the run; runs/RECIPE-SEED if not given."""
    resume: bool = False
    """Go on from the folder's last checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard events into the folder."""
    quiet: bool = False
    """No progress bar."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        from torchcaps.train import load_recipe, train

        recipe = load_recipe(self.recipe, parse_overrides(self.overrides))
        folder = self.out or Path("runs") / f"{recipe.name}-{recipe.seed}"
        outcome = train(recipe, folder, resume=self.resume, quiet=self.quiet, tensorboard=self.tensorboard)
        if os.environ.get("RANK", "0") != "0":
            return 0 if outcome.finished else 1
        if not outcome.finished:
            words = [self.recipe, *self.overrides, "--out", str(folder), "--resume"]
            print(f"stopped at step {outcome.step}; go on with: torchcaps train {' '.join(words)}", file=sys.stderr)
            return 1
        print(f"{folder}: {outcome.step} steps in {outcome.seconds:.0f} s")
        return 0
