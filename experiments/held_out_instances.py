"""Tabulate the error of a smallNORB classifier for each object instance of the test set, and the commonest confusion.

    python experiments/held_out_instances.py NAME runs/one

Written to results/lab-NAME.json: a row for each class, a column for each of its object instances, by its number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lab_result import write_rows
from torchcaps.errors import RecipeError
from torchcaps.evaluate.classification import class_scores, load_classifier


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("run", type=Path, help="folder of a classifier that was trained on smallNORB")
    arguments = parser.parse_args(words)

    run = load_classifier(arguments.run)
    test = run.recipe.data.load().test
    if "instance" not in test.factors:
        raise RecipeError(f"'{arguments.run}' was not trained on smallNORB; its images have no object instances")
    # One row a class: of each instance the error, and the class it is most often taken for.
    predicted = class_scores(run.model, test).argmax(-1)  # [n]
    instances = test.factors["instance"]  # [n]
    numbers = sorted(set(instances.tolist()))
    rows = [["wrong (%) of toy", *(str(number) for number in numbers)]]
    for label in range(test.classes):
        cells = []
        for number in numbers:
            answers = predicted[(test.labels == label) & (instances == number)]
            wrong = answers[answers != label]
            confusion = f", {test.name_of(int(wrong.mode().values))}" if len(wrong) else ""
            cells.append(f"{100 * len(wrong) / len(answers):.1f}{confusion}")
        rows.append([test.name_of(label), *cells])
    write_rows(arguments.name, rows, run=run.recipe.name, steps=run.step)


if __name__ == "__main__":
    main()
