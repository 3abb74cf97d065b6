"""Tables of results as text, and a report of a run as one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from torchcaps.evaluate.results import UNFINISHED, UNFINISHED_LABEL, Metrics, Result
from torchcaps.systems.base import Metric, Table
from torchcaps.systems.figure_context import FigureOptions
from torchcaps.systems.figure_registry import CURVES, PlannedFigure, figures_of
from torchcaps.systems.registry import SYSTEMS
from torchcaps.train.run import TrainedRun
from torchcaps.utils.progress import progress

__all__ = ["ReportTable", "html_report", "metric_of", "report_of", "report_tables", "rows_of", "text_table"]

DIGITS = {"percent": 2, "count": 1, "number": 4}
"""Form of a metric -> decimals in tables."""

STUDY_METRICS = (Metric("rising_steps", "lower", "percent"),)
"""Metrics of results that are of no run, as that of `experiments/em_free_energy.py`."""

_REPORT_DIGITS = {"percent": 2, "count": 0, "number": 3}
"""The same in reports, which people read and no program."""

_MAX_SMALL = 10.0
"""From this size on, a number of a report has one decimal."""

_REPORT_COLUMNS = 6
"""Metrics beside each other in a report: more would not fit on a page."""

_REPORT_FIGURES = 2
"""Pictures of one kind in a report; `torchcaps generate` draws all."""

_UNRANKED = ("real images", "in the paper")
"""Rows that are no method of ours, and so never the best."""

# The colors of the explorer's page. Figures have a white ground: they look the same by day, by night and on paper.
_STYLE = """
:root { --paper: #f6f3ec; --card: #fffdf9; --ink: #23262b; --soft: #666a70; --line: #e3dfd5; --accent: #14707f; }
@media (prefers-color-scheme: dark) { :root { --paper: #131518; --card: #1b1e22; --ink: #ece9e2; --soft: #a0a4a9;
  --line: #30343a; --accent: #5fc1cf; color-scheme: dark; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.9rem; letter-spacing: -.02em; line-height: 1.2; margin: 0 0 1rem; }
p { max-width: 44rem; }
.table { overflow-x: auto; margin: 1.2rem 0; }
.table, figure { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
th { color: var(--soft); font-weight: 600; line-height: 1.3; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } td b { color: var(--accent); }
figure { margin: 1.6rem 0; padding: 1rem; }
img { display: block; max-width: 100%; margin: 0 auto; background: #fff; border-radius: 8px; }
figcaption { color: var(--soft); margin-top: .7rem; font-size: .95rem; }
@media print { :root { --paper: #fff; --card: #fff; --ink: #000; --soft: #333; --line: #bbb; --accent: #000; }
  main { max-width: none; padding: 0; } figure, .table { break-inside: avoid; border-radius: 0; }
  .table { overflow: visible; } }
"""


class ReportTable(NamedTuple):
    """A table of a report.

    Attributes:
        rows: Cells; the first row is the header.
        best: (row, column) of the cells that no other row surpasses.
    """

    rows: Table
    best: frozenset[tuple[int, int]]


def report_tables(result: Result) -> list[ReportTable]:
    """Lay out a result as tables that fit on a page: some metrics in each, every row in all of them.

    Args:
        result: Of runs of any system.

    Returns:
        Tables whose rows are the result, its controls and the paper; the best of each column is known.
    """
    named = _named_rows(result)
    names = list(result.metrics)
    blocks = [names[n : n + _REPORT_COLUMNS] for n in range(0, len(names), _REPORT_COLUMNS)]
    return [_report_table(named, block) for block in blocks]


def _report_table(named: Sequence[tuple[str, Metrics]], names: Sequence[str]) -> ReportTable:
    # Rows that know nothing of these metrics are left out
    shown = [(label, values) for label, values in named if any(values.get(name) for name in names)]
    metrics = [metric_of(name) for name in names]
    rows = [["", *map(_title, names, metrics)]]
    rows += [
        [label, *(_cell(values.get(n, []), one, _REPORT_DIGITS) for n, one in zip(names, metrics, strict=True))]
        for label, values in shown
    ]
    best: set[tuple[int, int]] = set()
    for column, (name, metric) in enumerate(zip(names, metrics, strict=True), 1):
        means = {
            n: mean(values[name])
            for n, (label, values) in enumerate(shown, 1)
            if values.get(name) and label not in _UNRANKED
        }
        # One row alone is not the best of anything
        if metric.better != "neither" and len(means) > 1:
            top = min(means.values()) if metric.better == "lower" else max(means.values())
            best |= {(n, column) for n, value in means.items() if value == top}
    return ReportTable(rows, frozenset(best))


def _title(name: str, metric: Metric) -> str:
    """Write the name of a metric as the head of a column."""
    words = name.replace("_", " ")
    return f"{words} (%)" if metric.form == "percent" else words


def _named_rows(result: Result) -> list[tuple[str, Metrics]]:
    """List the rows of a result: the runs, all controls, and the paper last."""
    label = f"{result.recipe} ({UNFINISHED_LABEL})" if result.budget.get(UNFINISHED) else result.recipe
    named = [(label, result.metrics), *result.controls.items()]
    if result.paper:
        named.append(("in the paper", {name: [value] for name, value in result.paper.items()}))
    return named


def rows_of(result: Result) -> Table:
    """Lay out a result as a table.

    Args:
        result: Of runs of any system.

    Returns:
        A header, the result, its controls, and the paper's numbers if it has any: mean and standard deviation over
        seeds, each in the form that its metric is declared with.
    """
    # How each column is printed is declared with its metric.
    metrics = [metric_of(name) for name in result.metrics]
    rows = [["", *map(_title, result.metrics, metrics)]]
    for row_label, values in _named_rows(result):
        cells = [_cell(values.get(name, []), one, DIGITS) for name, one in zip(result.metrics, metrics, strict=True)]
        rows.append([row_label, *cells])
    return rows


def metric_of(name: str) -> Metric:
    """Find the declaration of a metric among those of all systems; a plain number if there is none."""
    declared = [metric for system in SYSTEMS.values() for metric in system.metrics]
    fitting = [metric for metric in (*declared, *STUDY_METRICS) if metric.covers(name)]
    # A name of its own comes before a pattern that happens to fit.
    exact = [metric for metric in fitting if metric.name == name]
    return next(iter([*exact, *fitting]), Metric(name, "neither"))


def text_table(rows: Sequence[Sequence[str]], width: int = 120) -> str:
    """Align columns for a terminal; what is wider than `width` continues below, with the first column again."""
    # Fill blocks with as many columns as fit beside the first.
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    blocks = [[0]]
    used = widths[0]
    for n, w in enumerate(widths[1:], 1):
        # A block has at least one column beside the first, however wide that is.
        if used + 2 + w > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(n)
        used += 2 + w
    return "\n\n".join(_block([[row[n] for n in block] for row in rows]) for block in blocks)


def _block(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def report_of(
    folder: Path,
    run: TrainedRun,
    options: FigureOptions,
    *,
    title: str | None = None,
    text: Sequence[str] = (),
    result: Result | None = None,
) -> str:
    """Write one page about a run: what was trained, how it did, and the figures that its system draws by default.

    Args:
        folder: The run's folder.
        run: The run in it.
        options: What the figures shall show.
        title: Heading; the folder's name if not given.
        text: Paragraphs to begin with.
        result: What `torchcaps evaluate` measured, for tables beside the controls; None for none.

    Returns:
        HTML that loads nothing from anywhere.
    """
    planned = figures_of(folder, run, options)
    # Exported weights have no journal to draw curves from.
    if (folder / "journal.jsonl").is_file():
        planned += figures_of(folder, run, options, CURVES)
    # A figure is planned first and drawn here; one kind may give several files.
    drawn = [picture for one in progress(planned, "drawing") for picture in _pictures(one, folder)]
    tables = report_tables(result) if result else []
    name = title or folder.resolve().name
    return html_report(name, [*text, _facts(run)], tables, drawn, seeds=len(result.seeds) if result else 0)


def _pictures(figure: PlannedFigure, folder: Path) -> list[tuple[str, bytes]]:
    """Draw a kind of figure: its first pictures with their captions, and where to find the others."""
    pictures = list(figure.draw().values())
    # Curves are one for each value, and few
    shown = pictures if figure.kind == CURVES else pictures[:_REPORT_FIGURES]
    captions = [figure.caption] * len(shown)
    if len(shown) < len(pictures):
        captions[-1] += f" All {len(pictures)} pictures: torchcaps generate {folder} --what {figure.kind}"
    return list(zip(captions, shown, strict=True))


def _facts(run: TrainedRun) -> str:
    """One sentence about what was trained, and for how long."""
    count = sum(p.numel() for p in run.model.parameters())
    about = f" {run.recipe.about.rstrip('.')}." if run.recipe.about else ""
    return (
        f"Recipe {run.recipe.name}, seed {run.recipe.seed}: {count:,} parameters, {run.step:,} steps in "
        f"{run.seconds:,.0f} s.{about}"
    )


def html_report(
    title: str,
    paragraphs: Sequence[str],
    tables: Sequence[ReportTable],
    figures: Sequence[tuple[str, bytes]],
    *,
    seeds: int = 1,
) -> str:
    """Write a self-contained page.

    Args:
        title: Heading.
        paragraphs: Text, not HTML.
        tables: Tables of results.
        figures: Caption and PNG of each.
        seeds: Runs that the tables are about.

    Returns:
        HTML with the figures inside; it loads nothing from anywhere.
    """
    # All text is escaped: names and captions may hold anything.
    text = "".join(f"<p>{html.escape(p)}</p>" for p in paragraphs)
    results = "".join(f'<div class="table"><table>{_html_rows(table)}</table></div>' for table in tables)
    notes = ["Bold: the best of a column."] if any(one.best for one in tables) else []
    if tables:
        notes.append(f"Means over {seeds} seeds." if seeds > 1 else "One seed: other seeds give other numbers.")
    note = f"<p>{' '.join(notes)}</p>" if notes else ""
    # Pictures are inside the page, so that it can be sent as one file.
    pictures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in figures
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><main><h1>{html.escape(title)}</h1>"
        f"{text}{results}{note}{pictures}</main></html>\n"
    )


def _html_rows(table: ReportTable) -> str:
    """Write the rows of a table as HTML, the best cells in bold."""
    lines = []
    for n, row in enumerate(table.rows):
        tag = "td" if n else "th"
        cells = [
            f"<b>{html.escape(cell)}</b>" if (n, m) in table.best else html.escape(cell) for m, cell in enumerate(row)
        ]
        lines.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>")
    return "".join(lines)


def _cell(values: Sequence[float], metric: Metric, decimals: Mapping[str, int]) -> str:
    """Format mean and standard deviation over seeds; "-" without values."""
    if not values:
        return "-"
    scaled = [100 * value if metric.form == "percent" else value for value in values]
    digits = decimals[metric.form]
    if decimals is _REPORT_DIGITS and metric.form == "number" and abs(mean(scaled)) >= _MAX_SMALL:
        digits = 1
    text = f"{mean(scaled):.{digits}f}"
    # A single seed has no deviation.
    return f"{text} ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else text
