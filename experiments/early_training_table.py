"""Tabulate how much short runs had learned at some early steps, from their journals, to compare settings.

    python experiments/early_training_table.py NAME runs/reference runs/other ...

Each row names the settings in which a run differs from the first one, the mean accuracy on the training images of the
last fifty steps before some steps, and the error of runs that were trained to their end: on the object instances that
were held out for validation (`data.aside`), or on the test images if none were. Written to results/lab-NAME.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from lab_result import write_rows
from torchcaps.config import flatten
from torchcaps.evaluate.classification import classification
from torchcaps.train.journal import read_journal
from torchcaps.train.run import checkpoint_path, load_run

STEPS = (200, 400, 800, 1600)
WINDOW = 50
IGNORED = {"about", "name", "data.data_dir", "train.save_every", "train.log_every", "optimizer.lr"}
"""Settings that change nothing, or that a schedule overrides."""


def settings_of(folder: Path) -> dict[str, object]:
    """Read every setting of a run, by its dotted key."""
    found = flatten(json.loads((folder / "recipe.json").read_text()))
    return {key: value for key, value in found.items() if key not in IGNORED}


def difference(settings: dict[str, object], reference: dict[str, object]) -> str:
    """Name the settings in which a run differs from the reference."""
    keys = sorted(key for key in settings.keys() | reference.keys() if settings.get(key) != reference.get(key))
    return ", ".join(f"{key} = {settings.get(key)}" for key in keys)


def accuracy_before(folder: Path, step: int) -> str:
    """Return the training accuracy (%) in the window before a step, or a dash if the run ended earlier."""
    entries = read_journal(folder / "journal.jsonl")
    window = [entry["accuracy"] for entry in entries if step - WINDOW < entry["step"] <= step]
    if not entries or entries[-1]["step"] < step or not window:
        return "-"
    return f"{100 * mean(window):.0f}"


def final_error(folder: Path, split: str) -> str:
    """Return the error (%) on a split, or a dash if the run is not finished."""
    if not checkpoint_path(folder).exists():
        return "-"
    run = load_run(folder)
    if not run.finished:
        return "-"
    images = getattr(run.recipe.data.load(), split)
    return f"{100 * classification(run.model, images)['test_error']:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; the first is the reference")
    arguments = parser.parse_args(words)
    runs: list[Path] = arguments.runs

    # All runs are judged on the same images, those held out for validation if there are any.
    reference = settings_of(runs[0])
    if len({settings_of(run).get("data.aside") for run in runs}) > 1:
        raise SystemExit("the runs hold out different object instances; compare those that hold out the same ones")
    split = "validation" if reference.get("data.aside", "none") != "none" else "test"
    steps = [step for step in STEPS if any(accuracy_before(run, step) != "-" for run in runs)]
    # One row a run, named after what it changes.
    rows = [["setting", *(f"right (%) at step {step}" for step in steps), f"{split} error (%)"]]
    for run in runs:
        label = difference(settings_of(run), reference) or "as the first"
        rows.append([label, *(accuracy_before(run, step) for step in steps), final_error(run, split)])
    write_rows(arguments.name, rows, usual=reference)


if __name__ == "__main__":
    main()
