"""torchcaps export"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Export"]

MOST = 1000
"""More test images of a class are a data set."""


@dataclass(frozen=True)
class Export:
    """Write the trained model of a run as a file to give away: ONNX, compared with torch first, or its weights alone.

    Example: torchcaps export runs/capsnet-glyphs-0 model.onnx

    Example: torchcaps export runs/capsnet-glyphs-0 model.safetensors --half --examples 10

    Weights load as a run does: torchcaps predict model.safetensors digit.png. They name no folder of this machine.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or the name of a shipped model (`torchcaps zoo`)."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """File to write: model.onnx, or model.safetensors for the weights."""
    force: bool = False
    """Replace the file if it is there."""
    half: bool = False
    """Weights in half precision: half of the bytes."""
    examples: int = 0
    """Add so many test images of each class to the weights, so that the explorer can show some without the data."""

    def run(self) -> int:
        from torchcaps.errors import RecipeError
        from torchcaps.systems.prediction import class_names
        from torchcaps.systems.run_folders import load_and_report
        from torchcaps.train.export import TOLERANCE, WEIGHTS, check_target, export_onnx, export_weights

        if not 0 <= self.examples <= MOST:
            raise RecipeError(f"--examples {self.examples} is asked for; 0 to {MOST} is wanted")
        # Check the file before the run is loaded
        check_target(self.file, force=self.force)
        run = load_and_report(self.folder)
        names = class_names(run.recipe.data, run.model.spec.classes) if run.model.is_classifier else ()
        # Weights alone
        if self.file.suffix == WEIGHTS:
            moved = export_weights(
                self.folder, self.file, half=self.half, examples=self.examples, names=names, force=self.force
            )
            size = self.file.stat().st_size
            print(f"{self.file}: {size:,} bytes, outputs differ from the run's by {moved:.2g} at most")
            suggest_next("explore", self.file)
            return 0
        # ONNX
        if self.half or self.examples:
            raise RecipeError(f"--half and --examples go with weights: name the file model{WEIGHTS}")
        worst = export_onnx(run.model, self.file, names=names, force=self.force)
        print(f"{self.file}: differs from torch by {worst:.2g} at most ({TOLERANCE:g} is allowed)")
        suggest_next("export", self.folder, self.file.with_suffix(WEIGHTS))
        return 0
