"""Write the rows of a small study to results/lab-NAME.json, from which `table.py` makes a table of the docs."""

from __future__ import annotations

import json
from pathlib import Path

from torchcaps.evaluate.results import versions

ROOT = Path(__file__).parents[1]


def result_path(name: str) -> Path:
    """Return the path of a study's file."""
    return ROOT / "results" / f"lab-{name}.json"


def write_rows(name: str, rows: list[list[str]], **more: object) -> Path:
    """Write and print a table.

    Args:
        name: of the study; the file is results/lab-NAME.json.
        rows: cells as text, the header first.
        **more: what else the file shall record, as JSON can hold it.

    Returns:
        The path of the file.
    """
    path = result_path(name)
    path.write_text(json.dumps({"rows": rows, **more, "versions": versions()}, indent=2) + "\n")
    print(path.relative_to(ROOT), *(" | ".join(row) for row in rows), sep="\n")
    return path
