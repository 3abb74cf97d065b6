"""Measure speed and memory as ratios to the plain path, to the convolutions alone and to a matrix product.

Example: python -m benchmarks capsnet-28 --batch 32 --json now.json --against then.json

Without names: dynamic-1152x8-10x16, dynamic-4608x8-16x16, cd-576x8-20x16, em-64-8-16-16, em-32-32-32-32, capsnet-28,
sparse-40; other sizes are named likewise. All of it takes about a quarter of an hour, --quick two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import timing
from benchmarks.cases import case_of
from benchmarks.machine import describe_machine, this_machine
from benchmarks.report import print_table
from benchmarks.rows import Row, as_json, compare, read_measurement, read_rows, update, write_rows
from benchmarks.runner import FULL, QUICK, Plan, measure
from torchcaps.errors import RecipeError, TorchcapsError, suggestion
from torchcaps.utils.progress import progress

__all__ = ["main"]

STDOUT = Path("-")
"""The file name that stands for standard output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; exit code 2 and one line if it asks for something impossible.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code.
    """
    try:
        return _run(arguments)
    except (TorchcapsError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str] | None) -> int:
    # Refuse what cannot be done before anything is measured.
    given = _parse(arguments)
    plan = _plan(given)
    earlier = read_rows(given.against) if given.against else None
    _check_comparable(plan, earlier, given.against)
    _check_writable(given.json)
    kept = _rows_to_update(given) if given.update else []

    # Measure.
    warning = timing.busy()
    if warning:
        print(f"benchmarks: {warning}", file=sys.stderr)
    rows = measure(plan, lambda pairs: progress(pairs, "measuring"))
    if earlier:
        rows = compare(rows, earlier)

    # Report, to a terminal or as JSON.
    machine = this_machine()
    if given.json == STDOUT:
        print(as_json(rows, machine), end="")
        return 0
    print_table(rows)
    print(describe_machine(machine))
    if given.json:
        write_rows(given.json, update(rows, kept), machine)
        print(f"written to {given.json}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words of the command line; `names` and `json` come out as case names and a path."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all if none is named")
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="batch sizes (1 32 128; with --quick 32)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[], help="numbers of threads, 0 = all (0 1; with --quick 0)"
    )
    parser.add_argument("--quick", action="store_true", help="one batch size, shorter runs: rougher figures")
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave peak memory out: each figure is a process"
    )
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, type=Path, metavar="FILE", help="write the rows as JSON, or print them"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="rows of an earlier run (--json): how many times as fast each is"
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="replace rows of the file of --json, which was measured here; keep others",
    )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise RecipeError(f"'python -m benchmarks' does not know '{unknown[0]}'{suggestion(unknown[0], flags)}")
    # The word behind --json may be the first case instead of a file.
    if given.json and _is_case(str(given.json)):
        given.names.append(str(given.json))
        given.json = STDOUT
    return given


def _is_case(word: str) -> bool:
    try:
        case_of(word)
    except RecipeError:
        return False
    return True


def _plan(given: argparse.Namespace) -> Plan:
    """Return the plan that the options describe; unknown cases and sizes below 1 are refused."""
    names = tuple(dict.fromkeys(given.names))
    for name in names:
        case_of(name)
    plan = QUICK if given.quick else FULL
    return replace(
        plan,
        names=names or plan.names,
        batches=tuple(dict.fromkeys(given.batch)) or plan.batches,
        threads=tuple(given.threads) or plan.threads,
        memory=given.memory,
    )


def _check_comparable(plan: Plan, earlier: list[Row] | None, path: Path | None) -> None:
    """Refuse an earlier run that shares no row with the plan."""
    if earlier is None:
        return
    if not any(r.name in plan.names and r.batch in plan.batches and r.threads in plan.counts for r in earlier):
        has = sorted({f"{r.name} at batch {r.batch} with {r.threads} threads" for r in earlier})
        more = f" and {len(has) - 3} others" if len(has) > 3 else ""
        raise RecipeError(f"'{path}' has none of the rows asked for; it has {', '.join(has[:3])}{more}")


def _rows_to_update(given: argparse.Namespace) -> list[Row]:
    """Read the rows of the file that --update adds to; rows of another machine are refused."""
    if given.json is None or given.json == STDOUT:
        raise RecipeError("--update is asked for without a file; --json FILE says which rows are replaced")
    found = read_measurement(given.json)
    if found.machine != this_machine():
        raise RecipeError(f"'{given.json}' was measured on another machine; write a new file, without --update")
    return found.rows


def _check_writable(file: Path | None) -> None:
    """Refuse a file that cannot be written."""
    if file and file != STDOUT and (file.is_dir() or not file.parent.is_dir()):
        raise RecipeError(f"cannot write '{file}': give --json a file in a folder that exists")


if __name__ == "__main__":
    sys.exit(main())
