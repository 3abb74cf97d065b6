"""torchcaps average"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Average"]


@dataclass(frozen=True)
class Average:
    """Write the mean of the weights of several runs as a run of its own; it often errs less than each of them.

    Example: torchcaps average runs/first runs/second runs/third --out runs/mean

    The runs are those of one network, each started from another's weights (--start): the ends of several cycles of the
    learning rate.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of one network; settings of the last one are kept."""
    out: Path
    """Folder for the new run."""
    name: str | None = None
    """Its name in results tables (the last run's, and -mean)."""

    def run(self) -> int:
        from torchcaps.train.average import average

        recipe = average(self.runs, self.out, name=self.name)
        print(f"{self.out}: '{recipe.name}', the mean of {len(self.runs)} runs")
        suggest_next("evaluate", self.out)
        return 0
