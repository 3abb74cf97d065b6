"""Write the results tables of README and docs from results/*.json, so that no number is typed by hand.

    python experiments/table.py            rewrite every table
    python experiments/table.py --check    exit 1 if one is stale, and change nothing

A table stands between `<!-- KIND: NAME -->` and `<!-- /KIND -->`. The kinds, and the files that they are made from:

    results    results/NAME.json, by `torchcaps evaluate --results`
    attacks    results/NAME-attacks.json, by `torchcaps attack --results`
    lab        results/lab-NAME.json, by a study in experiments/
    bench      benchmarks/NAME.json, by `python -m benchmarks --json`
    cells      benchmarks/NAME.json, by another module of benchmarks/: a table as it was written
    load       benchmarks/NAME.json, by `python -m benchmarks.explore`
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchcaps.evaluate.results import read_result
from torchcaps.systems.attack_runs import attack_rows, curves_of, verdicts
from torchcaps.systems.report import rows_of

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for `benchmarks`, which is no part of the installed package
PLACE = re.compile(r"(<!-- (results|bench|cells|attacks|lab|load): ([\w-]+) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)


def results_table(name: str) -> str:
    """Format a result as Markdown: the recipe's row, its controls, and one line on seeds and budget."""
    result = read_result(ROOT / "results" / f"{name}.json")
    lines = _lines(rows_of(result))
    budget = result.budget
    made = result.versions
    seeds = f"{len(result.seeds)} seed{'s' if len(result.seeds) != 1 else ''}"
    read = f"; the SVM probe learned from {budget['read_images']:,.0f} images" if "read_images" in budget else ""
    lines += [
        "",
        f"{seeds}, {budget['steps']:.0f} steps, {budget['seconds']:.0f} s each on {budget['threads']:.0f} threads, "
        f"{budget['parameters']:,.0f} parameters{read}; torch {made['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def speed_table(name: str) -> str:
    """Format every row of a measurement of speed and memory."""
    from benchmarks.report import cells_of
    from benchmarks.rows import read_rows

    return "\n".join(_lines(cells_of(read_rows(ROOT / "benchmarks" / f"{name}.json")))) + "\n"


def cell_table(name: str) -> str:
    """Format a table whose cells are stored as text."""
    return "\n".join(_lines(json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()))) + "\n"


def attack_table(name: str) -> str:
    """Format accuracies by epsilon, and whether the curves show gradient masking."""
    found = json.loads((ROOT / "results" / f"{name}-attacks.json").read_text())
    curves = curves_of(found)
    images = next(iter(curves.values())).images
    verdict = f"{images} images. {'; '.join(verdicts(curves))}."
    return "\n".join([*_lines(attack_rows(curves)), "", verdict]) + "\n"


def lab_table(name: str) -> str:
    """Format the rows of a study."""
    return "\n".join(_lines(json.loads((ROOT / "results" / f"lab-{name}.json").read_text())["rows"])) + "\n"


def load_table(name: str) -> str:
    """Format how long clients of the explorer wait, alone and together."""
    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    keys = ("moves", "p50_ms", "p95_ms", "max_ms", "moves_per_second", "turned_away", "lost")
    rows = [["clients", *(key.replace("_", " ") for key in keys)]]
    rows += [[str(one["clients"]), *(f"{one[key]:.4g}" for key in keys)] for one in (found["alone"], found["load"])]
    where = found["machine"]
    return "\n".join([*_lines(rows), "", f"{found['run']}; {where['cpus']} cores; torch {where['torch']}."]) + "\n"


def _lines(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    return [_line(head), _line(["---"] + ["--:"] * (len(head) - 1)), *(_line(row) for row in body)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def pages() -> Iterator[Path]:
    """Yield every page that may hold a table."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


TABLES = {
    "results": results_table,
    "attacks": attack_table,
    "lab": lab_table,
    "bench": speed_table,
    "cells": cell_table,
    "load": load_table,
}


def regenerate(text: str) -> str:
    """Return the text of a page with each of its tables made from the stored results."""
    return PLACE.sub(lambda m: m[1] + TABLES[m[2]](m[3]) + m[5], text)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    arguments = parser.parse_args(words)
    stale = [page for page in pages() if regenerate(page.read_text()) != page.read_text()]
    if arguments.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is stale: run python experiments/table.py", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(regenerate(page.read_text()))
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
