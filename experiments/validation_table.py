"""Tabulate the validation errors of runs that hold out different object instances, to choose without test images.

    python experiments/validation_table.py NAME runs/one-0 runs/one-1 runs/other-0 ...

A row for each setting, named after what it changes in the first one; a column for each held-out instance
(`data.aside`) with the mean error of its seeds, and the mean of all. Runs with averaged weights have a second row, of
the weights of the last step. Unfinished runs are left out. Written to results/lab-NAME.json; what that file knows of
other runs with the same reference settings stays, since folders of runs may be gone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from early_training_table import difference, settings_of
from lab_result import result_path, write_rows
from torchcaps.data import Dataset
from torchcaps.evaluate.classification import classification
from torchcaps.models import Model
from torchcaps.train.checkpoint import Checkpoint
from torchcaps.train.run import checkpoint_path, find_checkpoint, run_of


class Judged(NamedTuple):
    """The validation error (%) of one run, under the settings that are compared."""

    setting: str
    instance: str
    seed: int
    error: float


def last_weights(checkpoint: Checkpoint) -> Model | None:
    """Build the model with the weights of the last step; None where these are what a run loads."""
    state = checkpoint.state
    if not isinstance(state, dict) or "average" not in state:
        return None
    plain = {name: part for name, part in state.items() if name != "average"}
    return run_of(Checkpoint(checkpoint.tensors, checkpoint.meta, plain)).model


def judge(folder: Path, setting: str, data: dict[object, Dataset]) -> list[Judged]:
    """Measure the errors of a finished run on its validation images; none of an unfinished one."""
    if not checkpoint_path(folder).exists():
        return []
    checkpoint = find_checkpoint(folder)
    run = run_of(checkpoint)
    if not run.finished:
        return []
    # Images of one setting of the data serve all runs that share it.
    if run.recipe.data not in data:
        held_out = run.recipe.data.load().validation
        if held_out is None:
            raise SystemExit(f"'{folder}' holds out no images; set data.aside or data.validation")
        data[run.recipe.data] = held_out
    images = data[run.recipe.data]
    instance = str(getattr(run.recipe.data, "aside", "-"))

    def judged(model: Model, name: str) -> Judged:
        return Judged(name, instance, run.recipe.seed, 100 * classification(model, images)["test_error"])

    found = [judged(run.model, setting)]
    last = last_weights(checkpoint)
    return found if last is None else [*found, judged(last, f"{setting}; weights of the last step")]


def stored(name: str, reference: dict[str, object]) -> list[Judged]:
    """Return the errors in the file of a table; none if it has another reference."""
    path = result_path(name)
    if not path.exists():
        return []
    file = json.loads(path.read_text())
    if file.get("usual") != json.loads(json.dumps(reference)):
        return []
    return [Judged(**error) for error in file["errors"]]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; the first is the reference")
    arguments = parser.parse_args(words)

    # Settings without what tells the runs of one setting apart.
    def compared(folder: Path) -> dict[str, object]:
        return {k: v for k, v in settings_of(folder).items() if k not in ("seed", "data.aside") and k[:6] != "paper."}

    folders = [folder for folder in arguments.runs if (folder / "recipe.json").exists()]
    if not folders:
        raise SystemExit("none of these runs has been started")
    reference = compared(folders[0])
    data: dict[object, Dataset] = {}
    found = [
        one
        for folder in folders
        for one in judge(folder, difference(compared(folder), reference) or "as the first", data)
    ]
    measured = {(one.setting, one.instance, one.seed) for one in found}
    earlier = stored(arguments.name, reference)
    found += [one for one in earlier if (one.setting, one.instance, one.seed) not in measured]
    # One row a setting, the reference first, then in the order of the runs; a cell is the mean over seeds.
    instances = sorted({one.instance for one in found})
    rows = [["setting", *(f"instance {instance}" for instance in instances), "validation error (%)", "runs"]]
    for setting in sorted(dict.fromkeys(one.setting for one in found), key=lambda setting: setting != "as the first"):
        errors = {i: [one.error for one in found if (one.setting, one.instance) == (setting, i)] for i in instances}
        cells = [f"{mean(values):.2f}" if values else "-" for values in errors.values()]
        # The mean of the instances' means, and only where all of them are there: one instance may be harder.
        overall = f"{mean(map(mean, errors.values())):.2f}" if all(errors.values()) else "-"
        rows.append([setting, *cells, overall, str(sum(map(len, errors.values())))])
    write_rows(arguments.name, rows, usual=reference, errors=[one._asdict() for one in found])


if __name__ == "__main__":
    main()
