"""What settings are worth early: from the journals of short runs, a table of how much each had learned when.

    python experiments/lab.py NAME runs/usual runs/other ...

The first run is the one that the others are told by: each row says in which settings a run differs from it, the mean
accuracy on the training images of the last fifty steps before some steps, and the error of runs that came to their end:
on the toys that were set aside (data.aside), as it should to choose by, or else on test images. Written to
results/lab-NAME.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from torchcaps.config import flatten
from torchcaps.evaluate.classification import classification
from torchcaps.evaluate.results import versions
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.journal import read_journal
from torchcaps.train.run import checkpoint_path, load_run

ROOT = Path(__file__).parents[1]
AT = (200, 400, 800, 1600)
WINDOW = 50
IDLE = {"about", "name", "data.data_dir", "train.save_every", "train.log_every", "optimizer.lr"}
"""Settings that change nothing, or that a schedule overrides."""


def settings_of(folder: Path) -> dict[str, Any]:
    """Every setting of a run by its dotted key."""
    found = flatten(json.loads((folder / "recipe.json").read_text()))
    return {key: value for key, value in found.items() if key not in IDLE}


def change(settings: dict[str, Any], usual: dict[str, Any]) -> str:
    """In which settings a run differs from the usual one."""
    keys = sorted(key for key in settings.keys() | usual.keys() if settings.get(key) != usual.get(key))
    return ", ".join(f"{key} = {settings.get(key)}" for key in keys)


def learned(folder: Path, step: int) -> str:
    """Percent right in the window before a step; nothing if the run did not come so far."""
    entries = read_journal(folder / "journal.jsonl")
    window = [entry["accuracy"] for entry in entries if step - WINDOW < entry["step"] <= step]
    return f"{100 * mean(window):.0f}" if entries and entries[-1]["step"] >= step and window else "-"


def missed(folder: Path, judged: str) -> str:
    """Percent of the images of a split that are wrong at the end; nothing if the run did not come to it."""
    path = checkpoint_path(folder)
    if not path.exists() or not read_checkpoint(path).meta.get("finished"):
        return "-"
    run = load_run(folder)
    images = getattr(run.recipe.data.load(), judged)
    return f"{100 * classification(run.model, images)['test_error']:.1f}"


def store(name: str, rows: list[list[str]], **more: Any) -> int:
    """Write the table and print it; the exit code."""
    path = ROOT / "results" / f"lab-{name}.json"
    path.write_text(json.dumps({"rows": rows, **more, "versions": versions()}, indent=2) + "\n")
    print(path.relative_to(ROOT), *(" | ".join(row) for row in rows), sep="\n")
    return 0


def main(arguments: list[str]) -> int:
    name, *folders = arguments
    runs = [Path(folder) for folder in folders]
    usual = settings_of(runs[0])
    if len({settings_of(run).get("data.aside") for run in runs}) > 1:
        raise SystemExit("the runs set other toys aside; judge those apart that did")
    judged = "validation" if usual.get("data.aside", "none") != "none" else "test"
    at = [step for step in AT if any(learned(run, step) != "-" for run in runs)]
    rows = [["setting", *(f"right (%) at step {step}" for step in at), f"{judged} error (%)"]]
    for run in runs:
        told = change(settings_of(run), usual) or "as the first"
        rows.append([told, *(learned(run, step) for step in at), missed(run, judged)])
    return store(name, rows, usual=usual)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
