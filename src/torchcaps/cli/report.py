"""torchcaps report"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Write everything there is to see of a run into one HTML file: curves, pictures and, if given, its results.

    Example: torchcaps report runs/capsnet-mnist-small-0 --result results/capsnet-mnist-small.json

    The file needs nothing beside it, loads nothing from anywhere, and can be sent by mail.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or the name of a shipped model (`torchcaps zoo`)."""
    out: Path | None = None
    """File to write; RUN/report.html if not given."""
    result: Path | None = None
    """What `torchcaps evaluate` wrote of the recipe: the table with the controls. Shipped models bring their own."""
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 8
    """How many samples of a capsule, and how many test images."""
    seed: int = 0
    """Other samples and other test images."""

    def run(self) -> int:
        from torchcaps.cli.generate import MAX_COUNT
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.evaluate.results import read_result
        from torchcaps.systems.figure_context import FigureOptions
        from torchcaps.systems.report import report_of
        from torchcaps.systems.run_folders import find_run, load_and_report, output_folder
        from torchcaps.train.run import shipped_models, weights_path
        from torchcaps.utils.files import make_folder, write_atomically
        from torchcaps.zoo.card import RESULT

        # Check the flags before the run is loaded
        require_matplotlib()
        if not 1 <= self.count <= MAX_COUNT:
            raise RecipeError(f"--count {self.count} is asked for; 1 to {MAX_COUNT} is wanted")
        folder = find_run(self.folder)
        # Load, draw and write one page
        run = load_and_report(folder)
        # The name of a shipped model, and that of a file of weights, are no folders yet
        path = self.out or make_folder(output_folder(folder)) / "report.html"
        # With a shipped model comes its result
        origin = weights_path(folder).parent
        found = self.result or (origin / RESULT if origin in shipped_models().values() else None)
        result = read_result(found) if found else None
        page = report_of(folder, run, FigureOptions(count=self.count, seed=self.seed), result=result)
        write_atomically(path, [page.encode()])
        print(path)
        suggest_next("explore", folder)
        return 0
