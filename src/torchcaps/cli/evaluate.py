"""torchcaps evaluate"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Evaluate"]

KEYWORDS: dict[tuple[str, ...], tuple[str, ...] | None] = {("all",): None, ("none",): ()}
"""What --only may say instead of names."""


@dataclass(frozen=True)
class Evaluate:
    """Measure runs of one recipe (one a seed) beside controls, and store the result.

    Example: torchcaps evaluate runs/capsnet-glyphs-0 --control runs/cnn-glyphs-0 --results results

    Products of expert capsules: torchcaps evaluate runs/poe-quick --only paper "local PCA"

    Sparse capsules: torchcaps evaluate runs/sparse-affnist-small-0 --control runs/dense-affnist-small-0 --unmasked

    Two processes that share the images; both read the runs: torchrun --nproc-per-node 2 -m torchcaps evaluate RUN
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of the same recipe, one a seed, or the name of a shipped model (`torchcaps zoo`).
    A run that is not trained to its end is marked."""
    control: tuple[Path, ...] = ()
    """Folders of runs of other recipes, to compare with."""
    results: Path | None = None
    """Folder to write RECIPE.json into."""
    images: int | None = None
    """Products of expert capsules: how many test images to measure (2000).
    Sparse capsules: how many training images the SVM learns from (10,000)."""
    only: tuple[str, ...] = ("all",)
    """Products of expert capsules, sparse capsules: controls to measure, by the names in the table, or none."""
    reference: Path | None = None
    """Products of expert capsules: folder of the reference classifier, a CNN with labels that classifies samples,
    beside the run if not given; it is trained there if there is none."""
    views: Annotated[int, tyro.conf.arg(metavar="1-13")] = 13
    """Classifiers of images that are larger than what they see: how many views of each to average, too."""
    unmasked: bool = False
    """Sparse capsules: measure codes before the mask, as the authors' code does;
    those behind it are rows of their own."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        import json

        from torchcaps.errors import RecipeError
        from torchcaps.evaluate import write_result
        from torchcaps.systems import evaluate_runs
        from torchcaps.systems.papers import paper_notes, paper_tables
        from torchcaps.systems.report import rows_of, text_table
        from torchcaps.systems.run_folders import find_run
        from torchcaps.utils.distributed import process_group, sharing_rows
        from torchcaps.utils.files import make_folder

        if not self.runs:
            raise RecipeError(
                "no run to evaluate; name the folder of one, as in: torchcaps evaluate runs/capsnet-glyphs-0"
            )
        with process_group() as group, sharing_rows():
            # Made now: measuring takes minutes, too long to fail at the end
            if self.results and group.is_main:
                make_folder(self.results, "--results")
            result = evaluate_runs(
                self.runs,
                self.control,
                images=self.images,
                only=KEYWORDS.get(self.only, self.only),
                reference=self.reference,
                views=self.views,
                unmasked=self.unmasked,
            )
        # Every process has the whole result; process 0 says it
        if not group.is_main:
            return 0
        # Write the file before printing: a closed pipe must not lose what took minutes to measure
        if self.results:
            path = write_result(self.results, result)
        print(json.dumps(asdict(result), indent=2) if self.json else text_table(rows_of(result)))
        # Beside the table: what the papers report, where a recipe follows one
        if not self.json:
            for rows in paper_tables(result):
                print(f"\n{text_table(rows)}")
            for line in paper_notes(result):
                print(f"\n{line}")
        if self.results and not self.json:
            print(f"\nwritten to {path}")
        suggest_next("report", find_run(self.runs[0]), *(("--result", path) if self.results else ()))
        return 0
