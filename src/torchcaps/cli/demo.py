"""torchcaps demo"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from torchcaps.evaluate import Result
    from torchcaps.train import Recipe

__all__ = ["Demo", "next_commands"]

_RECIPES = {"mnist": "poe-quick", "glyphs": "poe-glyphs"}

_TEXT = (
    "A capsule is a small group of numbers that stands for one thing: how long the vector is says whether the thing "
    "is there, where it points says how it looks. Nobody told the {capsules} capsules you just trained what a digit "
    "is: they saw {images:,} pictures without labels, each brought upright into a frame of its own, competed for "
    "each, and every capsule learned from those it won. "
    "Below, each column is one capsule drawing on its own. Most draw one form of one digit in varying shapes; a few "
    "may be undecided.",
    "Pictures alone prove little, so a reference classifier, a network that did learn the labels, looks at {samples} "
    "drawings of each capsule. {confident:.0%} of them it recognizes with certainty (confident fraction), and those "
    "of one capsule agree on the digit {consistent:.0%} of the time (consistency). Beside it stand controls on the "
    "same features: the paper's algorithm as printed, which collapses to the mean picture; no competition; random "
    "weights; and PCA, k-means and a restricted Boltzmann machine. Smaller is better for the errors (mse) and for "
    "frechet, the distance between drawings and real images; cka says how alike the capsules are; larger is better "
    "for the others.",
)


@dataclass(frozen=True)
class Demo:
    """Train products of expert capsules without labels, measure them beside controls, and write a report.

    Example: torchcaps demo --out runs/demo --data glyphs

    On MNIST digits if they are here or can be fetched, else on digits drawn by code. Takes a few minutes on two cores;
    run again, it goes on where it was cut off.
    """

    out: Path = Path("runs/demo")
    """Folder for the runs and report.html."""
    data: Literal["auto", "mnist", "glyphs"] = "auto"
    """Which images; auto is MNIST, and glyphs where that cannot be had."""
    data_dir: Path | None = None
    """Folder to look for MNIST in."""
    epochs: float | None = None
    """Train every stage for this long instead of what the recipe says."""
    quiet: bool = False
    """No progress bars."""

    def run(self) -> int:
        from torchcaps.evaluate import write_result
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.systems import evaluate_runs, system_of
        from torchcaps.systems.report import rows_of, text_table
        from torchcaps.train import train

        # Refuse now what would fail at the end: training takes minutes
        require_matplotlib()
        recipe = self._recipe()
        system_of(recipe).select_controls(None)  # asks for scikit-learn before anything is trained
        # Train, or go on where an earlier demo was cut off
        folder = self.out / recipe.name
        if not train(recipe, folder, resume="auto", quiet=self.quiet).finished:
            print("stopped; torchcaps demo goes on from here")
            return 1
        # Measure beside the controls
        result = evaluate_runs([folder])
        write_result(self.out, result)
        print(text_table(rows_of(result)))
        # Report, and what to do next
        report = self._report(recipe, folder, result)
        print(f"\nreport: {report}\n\nnext, copy any of these lines:\n")
        print(*next_commands(report, folder), sep="\n")
        return 0

    def _recipe(self) -> Recipe:
        from torchcaps.train import load_recipe
        from torchcaps.train.recipe import stage_names

        # Loaded twice: the names of the stages must be known before their epochs can be overridden
        name = self._data()
        recipe = load_recipe(_RECIPES[name])
        over: dict[str, Any] = {}
        if self.epochs is not None:
            over["stages"] = {stage: {"train": {"epochs": self.epochs}} for stage in stage_names(recipe.model)}
        if name == "mnist" and self.data_dir:
            over["data"] = {"data_dir": str(self.data_dir)}
        return load_recipe(_RECIPES[name], over)

    def _data(self) -> Literal["mnist", "glyphs"]:
        """The data set to use: MNIST must be here, or be fetched, before it is chosen."""
        from torchcaps.data.cache import fetch_set, locate
        from torchcaps.errors import DataError

        if self.data == "glyphs":
            return "glyphs"
        # Find MNIST on this machine, or else download it
        try:
            try:
                locate("mnist", self.data_dir)
            except DataError:
                # A folder that was named is not to be replaced by a download in silence
                if self.data_dir:
                    raise
                print("MNIST is not on this machine; fetching it", file=sys.stderr)
                fetch_set("mnist", progress=not self.quiet)
        except DataError as error:
            # Only "auto" may fall back to other images
            if self.data == "mnist":
                raise
            print(f"MNIST cannot be had ({error}); using digits drawn by code instead", file=sys.stderr)
            return "glyphs"
        return "mnist"

    def _report(self, recipe: Recipe, folder: Path, result: Result) -> Path:
        from torchcaps.models import PoE
        from torchcaps.systems.figure_context import FigureOptions
        from torchcaps.systems.poe.metrics import SAMPLES
        from torchcaps.systems.report import report_of
        from torchcaps.train import load_run
        from torchcaps.utils.files import write_atomically

        # The numbers that the text quotes
        run = load_run(folder)
        facts = {
            "capsules": cast(PoE, run.model).capsules,
            "images": len(recipe.data.load().train),
            "samples": SAMPLES,
            "confident": result.metrics["confident_fraction"][0],
            "consistent": result.metrics["consistency"][0],
        }
        text = [paragraph.format(**facts) for paragraph in _TEXT]
        # One page: the text, the table of results, and every figure of the run
        path = self.out / "report.html"
        page = report_of(folder, run, FigureOptions(), title="torchcaps demo", text=text, result=result)
        write_atomically(path, [page.encode()])
        return path


def next_commands(report: Path, folder: Path) -> list[str]:
    """Return what to run after the demo, each a line for a shell of this folder that works as it is.

    Args:
        report: The report that the demo wrote.
        folder: Of the demo's run.
    """
    torchcaps = _this_command()
    run = shlex.quote(str(folder))
    lines = {
        f"{_shown(sys.executable)} -m webbrowser {report.resolve().as_uri()}": "open the report",
        f"{torchcaps} explore {run}": "look inside the capsules in the browser",
        f"{torchcaps} evaluate {run}": "the table above, again",
    }
    width = max(map(len, lines))
    return [f"    {command:{width}}  # {purpose}" for command, purpose in lines.items()]


def _this_command() -> str:
    """How this program was started: by name if the shell finds it there, else by its path or as a module."""
    started = Path(sys.argv[0])
    if started.stem != "torchcaps":
        return f"{_shown(sys.executable)} -m torchcaps"
    found = shutil.which("torchcaps")
    if found and started.exists() and Path(found).resolve() == started.resolve():
        return "torchcaps"
    return _shown(sys.argv[0])


def _shown(program: str) -> str:
    """The path of a program, relative to this folder if it lies below, quoted for a shell."""
    path = os.path.abspath(program)  # noqa: PTH100 (resolve would leave a virtual environment by its symbolic links)
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)
