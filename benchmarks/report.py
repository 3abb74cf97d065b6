"""Rows as a table for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row

__all__ = ["cells_of", "print_table", "table_of"]

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda r: r.name,
    "kind": lambda r: r.kind,
    "batch": lambda r: str(r.batch),
    "threads": lambda r: str(r.threads),
    "ms a sample": lambda r: f"{r.ms_per_sample:.3g}",
    "x faster than plain": lambda r: f"{r.plain_ratio:.2f}" + ("" if r.plain_batch == r.batch else "*"),
    "x less memory": lambda r: _number(r.memory_ratio, ".2f"),
    "peak MB": lambda r: _number(r.peak_mb, ".0f"),
    "% of sgemm": lambda r: f"{100 * r.sgemm_fraction:.1f}",
    "x trunk": lambda r: _number(r.trunk_ratio, ".2f"),
}
_COMPARED: dict[str, Callable[[Row], str]] = {"x faster than then": lambda r: _number(r.then_ratio, ".2f")}
_WIDTH = 120
"""Where there is no terminal to ask."""


def cells_of(rows: Sequence[Row]) -> list[list[str]]:
    """The head and a list of cells for each row."""
    return [list(_COLUMNS), *([cell(row) for cell in _COLUMNS.values()] for row in rows)]


def table_of(rows: Sequence[Row]) -> Table:
    """A line a row; a rule between cases; a column for an earlier run if there is one."""
    then = any(row.then_ratio is not None for row in rows)
    columns = _COLUMNS | (_COMPARED if then else {})
    table = Table(caption=_caption(rows), caption_justify="left")
    for n, title in enumerate(columns):
        table.add_column(title, justify="left" if n < 2 else "right", no_wrap=n < 2)
    for n, row in enumerate(rows):
        last = n + 1 == len(rows) or rows[n + 1].name != row.name
        table.add_row(*(cell(row) for cell in columns.values()), end_section=last)
    return table


def print_table(rows: Sequence[Row]) -> None:
    """Print it, as wide as the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table_of(rows))


def _caption(rows: Sequence[Row]) -> str:
    speeds = {row.threads: max(r.sgemm_gflops for r in rows if r.threads == row.threads) for row in rows}
    parts = ", ".join(f"{speed:.0f} with {count} thread{'s' * (count > 1)}" for count, speed in speeds.items())
    smaller = sorted({row.plain_batch for row in rows if row.plain_batch < row.batch})
    note = (
        f"\n* plain measured at batch {' or '.join(map(str, smaller))}, and at half of it: along that line"
        if smaller
        else ""
    )
    return f"sgemm, best: GFLOP/s {parts}{note}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
