"""Which toys of smallNORB's test set a run does not know: the error of each, and what it is most often taken for.

    python experiments/toys.py NAME runs/one

Written to results/lab-NAME.json: a row a class, a column a toy of it, by its number.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lab import store

from torchcaps.errors import RecipeError
from torchcaps.evaluate.classification import class_scores, load_classifier


def main(arguments: list[str]) -> int:
    name, folder = arguments
    run = load_classifier(Path(folder))
    test = run.recipe.data.load().test
    if "instance" not in test.factors:
        raise RecipeError(f"'{folder}' was not trained on smallNORB; its images show no toys with numbers")
    chosen = class_scores(run.model, test).argmax(-1)
    toys = test.factors["instance"]
    numbers = sorted(set(toys.tolist()))
    rows = [["wrong (%) of toy", *(str(number) for number in numbers)]]
    for label in range(test.classes):
        cells = []
        for number in numbers:
            here = chosen[(test.labels == label) & (toys == number)]
            wrong = here[here != label]
            taken = f", {test.name_of(int(wrong.mode().values))}" if len(wrong) else ""
            cells.append(f"{100 * len(wrong) / len(here):.1f}{taken}")
        rows.append([test.name_of(label), *cells])
    return store(name, rows, run=run.recipe.name, steps=run.step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
