"""Draw figure 2 of Hauser 2019, (a) to (d), for several models, with the reference classifier's numbers.

python experiments/poe_figure2.py runs/poe-mnist-0 runs/poe-mnist-slab-0
python experiments/poe_figure2.py runs/poe-fashion-0 runs/poe-fashion-slab-0

The first folder is an evaluated run: the printed algorithm and "offset only" are among its controls, which
`torchcaps evaluate` trains, and the reference classifier is beside it. Then it and every further run are drawn. There
is one picture a domain, docs/pictures/poe-figure2-DATA-DOMAIN.png, with a block of four rows a model and a column a
capsule, all 80 samples drawn at once; and one table, results/lab-poe-figure2-DATA.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from lab_result import write_rows
from torchcaps.errors import RecipeError
from torchcaps.evaluate.figures import image_grid, pixels
from torchcaps.evaluate.reference_classifier import reference_probabilities, train_reference_classifier
from torchcaps.evaluate.sample_metrics import sample_confidence
from torchcaps.models import CNN, PoE
from torchcaps.systems import system_of
from torchcaps.systems.poe.generation import Domain, capsule_samples
from torchcaps.systems.poe.system import reference_folder
from torchcaps.train import load_run
from torchcaps.utils.files import write_atomically

DOMAINS: tuple[Domain, ...] = ("complete", "restricted", "gaussian", "empirical")
PICTURED: tuple[Domain, ...] = ("complete", "restricted")
"""Panels (a, c) and (b, d) of the paper."""
SHOWN = 4
CLASSIFIED = 50
"""Samples of a capsule that are drawn, as in the paper, and that the reference classifier sees."""
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


class Subject(NamedTuple):
    """A model of the figure and its title."""

    title: str
    model: PoE


def collect(folders: Sequence[Path]) -> list[Subject]:
    """Load the controls of the first run, and all runs.

    Args:
        folders: Of runs; the first has been evaluated.

    Raises:
        RecipeError: If a run is of another system, or the first one has no trained controls.
    """
    controls = folders[0] / "controls"
    named = [("as printed", controls / "paper"), ("offset only", controls / "offset")]
    subjects = []
    for title, folder in [*named, *((folder.name, folder) for folder in folders)]:
        if not folder.is_dir():
            raise RecipeError(f"there is no run in '{folder}'; train and evaluate it first: torchcaps evaluate")
        run = load_run(folder)
        if system_of(run.recipe).name != "poe":
            raise RecipeError(f"'{folder}' holds no products of expert capsules; name the folder of a run that does")
        subjects.append(Subject(title, cast(PoE, run.model.eval())))
    return subjects


@torch.no_grad()
def measure_samples(model: PoE, reference: CNN, domain: Domain) -> dict[str, float]:
    """Summarize what the reference classifier says of samples of every capsule from a domain."""
    samples = capsule_samples(model, CLASSIFIED, domain).transpose(0, 1)  # [j n c h w]
    verdicts = reference_probabilities(reference, samples.flatten(0, 1)).view(*samples.shape[:2], -1)
    return sample_confidence(verdicts)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="an evaluated run, then others on the same data")
    folders = parser.parse_args(words).runs
    subjects = collect(folders)
    recipe = load_run(folders[0]).recipe
    reference = train_reference_classifier(recipe.data, reference_folder(recipe, folders[0]))
    data = recipe.name.removeprefix("poe-")
    # One table for all domains
    rows = [["model", "domain", "confident fraction", "classes covered", "consistency"]]
    for subject in subjects:
        for domain in DOMAINS:
            found = measure_samples(subject.model, reference, domain)
            numbers = (found["confident_fraction"], found["classes_covered"], found["consistency"])
            rows.append([subject.title, domain, f"{numbers[0]:.3f}", f"{numbers[1]:.0f}", f"{numbers[2]:.3f}"])
    write_rows(f"poe-figure2-{data}", rows)
    # One picture for each of the paper's domains
    for domain in PICTURED:
        grid = []
        for subject in subjects:
            samples = capsule_samples(subject.model, SHOWN, domain)  # [n j c h w]
            grid += [(subject.title if n == 0 else "", pixels(row)) for n, row in enumerate(samples)]
        path = PICTURES / f"poe-figure2-{data}-{domain}.png"
        write_atomically(path, [image_grid(grid)])
        print(path)


if __name__ == "__main__":
    main()
