"""torchcaps export"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["Export"]


@dataclass(frozen=True)
class Export:
    """Write the trained model of a run as an ONNX file, compared with torch before it is kept.

    Example: torchcaps export runs/capsnet-glyphs-0 model.onnx
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """File to write, as in model.onnx."""
    force: bool = False
    """Replace the file if it is there."""

    def run(self) -> int:
        from torchcaps.evaluate.export import TOLERANCE, check_target, export_onnx
        from torchcaps.train import load_run

        check_target(self.file, force=self.force)
        run = load_run(self.folder)
        worst = export_onnx(run.model, self.file, force=self.force)
        print(f"{self.file}: differs from torch by {worst:.2g} at most ({TOLERANCE:g} is allowed)")
        return 0
