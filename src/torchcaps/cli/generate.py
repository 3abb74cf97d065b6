"""torchcaps generate"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from torchcaps.cli.next_steps import suggest_next

if TYPE_CHECKING:
    from torchcaps.systems.figure_registry import PlannedFigure

__all__ = ["Generate"]

MAX_COUNT = 64
"""The most images in a row of a figure."""


@dataclass(frozen=True)
class Generate:
    """Draw figures of a trained run as PNG files: what its capsules stand for and how routing finds them.

    Example: torchcaps generate runs/poe-quick-0 --what samples --domain restricted --count 4

    Example: torchcaps generate runs/capsnet-mnist-0 --what perturbations --capsule 4 9

    Example: torchcaps generate runs/sparse-affnist-small-0 --beside runs/capsnet-affnist-small-0
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or the name of a shipped model (`torchcaps zoo`)."""
    out: Path | None = None
    """Folder to draw into; RUN/pictures if not given, of a file of weights beside it."""
    what: Annotated[str, tyro.conf.arg(metavar="KIND")] = "all"
    """all: every kind that the run's model has, but pairs.
    Of any run - curves: how training went.
    Of products of experts - samples: each capsule alone, a column each; pairs: two together;
    sweeps: each number of a capsule's pose moved;
    wins: the mean of the test images that a capsule wins, beside its samples;
    reconstructions, interpolation, completion, routing: of test images.
    Of a CapsNet - reconstructions: of test images, also the worst and those with a wrong answer;
    perturbations: each dimension of a class's capsule moved; routing: coupling by iteration;
    calibration: how often it is right when it is how sure; multimnist: two digits redrawn in two colors.
    Of matrix capsules - votes: how far the votes for each class capsule are from its pose, by iteration;
    routing; calibration.
    Of sparse capsules - parts: a test image redrawn from each capsule alone, and from all but each;
    ranked: the support of an image's capsules from the largest down;
    frequencies: how often each capsule has each rank;
    equivariances: each number of the first capsule's pose from -1 to 1;
    winners: images in which each capsule is first."""
    domain: Literal["empirical", "mixture", "gaussian", "complete", "restricted"] | None = None
    """Where samples of experts come from: the poses seen in training (empirical, if not given),
    a mixture of Gaussians fitted to them (mixture), one Gaussian with their mean and covariance (gaussian),
    N(0, 1) (complete), or its half that training visited (restricted)."""
    capsule: tuple[int, ...] = ()
    """Only these capsules, counted from 0; all, or the most used ones, if not given."""
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 8
    """How many samples of a capsule, and how many test images."""
    seed: int = 0
    """Other samples and other test images."""
    beside: tuple[Path, ...] = ()
    """Folders of other runs, of sparse capsules or of a CapsNet: ranked has a curve of each, on its own test images."""

    def run(self) -> int:
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.systems.figure_context import FigureOptions
        from torchcaps.systems.figure_registry import figures_of
        from torchcaps.systems.run_folders import find_run, load_and_report, output_folder

        # Check the flags, load the run, and plan every figure before the first is drawn
        require_matplotlib()
        self._check()
        folder = find_run(self.folder)
        options = FigureOptions(self.capsule, self.count, self.domain, self.seed)
        figures = figures_of(folder, load_and_report(folder), options, self.what, self.beside)
        self._draw(figures, self.out or output_folder(folder) / "pictures")
        suggest_next("explore", folder)
        return 0

    def _check(self) -> None:
        from torchcaps.errors import RecipeError

        if not 1 <= self.count <= MAX_COUNT:
            raise RecipeError(f"--count {self.count} is asked for; 1 to {MAX_COUNT} is wanted")
        if len(set(self.capsule)) < len(self.capsule):
            raise RecipeError(f"--capsule {' '.join(map(str, self.capsule))} names one twice; name each once")

    def _draw(self, figures: list[PlannedFigure], folder: Path) -> None:
        """Write every figure as soon as it is drawn; print the paths when the progress bar is gone."""
        from torchcaps.utils.files import make_folder, write_atomically
        from torchcaps.utils.progress import progress

        make_folder(folder)
        paths = []
        for figure in progress(figures, "drawing"):
            for name, png in figure.draw().items():
                paths.append(folder / f"{name}.png")
                write_atomically(paths[-1], [png])
        print(*paths, sep="\n")
