"""The command line of a module that measures one table: its options, a warning, and where the table goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import busy
from torchcaps.systems.report import text_table
from torchcaps.utils.files import write_atomically

__all__ = ["table_parser", "warn_if_busy", "write_table"]


def table_parser(about: str | None, seconds: float, each: str) -> argparse.ArgumentParser:
    """Make a parser with the options that all tables share.

    Args:
        about: The module's docstring.
        seconds: Default of --seconds.
        each: What so many seconds are spent on, such as "for each case".

    Returns:
        The parser; a module may add options of its own.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help=each)
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


def warn_if_busy() -> None:
    """Say on standard error if other programs keep the processor busy."""
    warning = busy()
    if warning:
        print(f"benchmarks: {warning}", file=sys.stderr)


def write_table(table: Sequence[Sequence[str]], file: Path | None) -> None:
    """Print a table, its head first, and write it as JSON if there is a file."""
    rows = [list(row) for row in table]
    print(text_table(rows))
    if file is not None:
        write_atomically(file, [(json.dumps(rows, indent=1) + "\n").encode()])
