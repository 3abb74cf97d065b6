"""Tables of results as text, and a report of a run as one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from torchcaps.evaluate.results import UNFINISHED, UNFINISHED_LABEL, Result
from torchcaps.systems.base import Metric, Table
from torchcaps.systems.figure_context import FigureOptions
from torchcaps.systems.figure_registry import CURVES, figures_of
from torchcaps.systems.registry import SYSTEMS
from torchcaps.train.run import TrainedRun
from torchcaps.utils.progress import progress

__all__ = ["html_report", "metric_of", "report_of", "rows_of", "text_table"]

DIGITS = {"percent": 2, "count": 1, "number": 4}
"""Form of a metric -> decimals in tables."""

STUDY_METRICS = (Metric("rising_steps", "lower", "percent"),)
"""Metrics of results that are of no run, as that of `experiments/em_free_energy.py`."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; } figcaption { color: #555; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } figcaption { color: #aaa; }
th, td { border-color: #444; } }
"""


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
    titles = [name.replace("_", " ") for name in result.metrics]
    header = [f"{title} (%)" if one.form == "percent" else title for title, one in zip(titles, metrics, strict=True)]
    # The rows: the runs, all controls, and the paper last.
    label = f"{result.recipe} ({UNFINISHED_LABEL})" if result.budget.get(UNFINISHED) else result.recipe
    named = [(label, result.metrics), *result.controls.items()]
    if result.paper:
        named.append(("in the paper", {name: [value] for name, value in result.paper.items()}))
    rows = [["", *header]]
    for row_label, values in named:
        cells = [_cell(values.get(name, []), one) for name, one in zip(result.metrics, metrics, strict=True)]
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
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """Write one page about a run: what was trained, how it did, and the figures that its system draws by default.

    Args:
        folder: The run's folder.
        run: The run in it.
        options: What the figures shall show.
        title: Heading; the folder's name if not given.
        text: Paragraphs to begin with.
        rows: A table of results, see `rows_of`; empty for none.

    Returns:
        HTML that loads nothing from anywhere.
    """
    planned = figures_of(folder, run, options)
    # Exported weights have no journal to draw curves from.
    if (folder / "journal.jsonl").is_file():
        planned += figures_of(folder, run, options, CURVES)
    # A figure is planned first and drawn here; one kind may give several files.
    drawn = [(one.caption, png) for one in progress(planned, "drawing") for png in one.draw().values()]
    return html_report(title or folder.resolve().name, [*text, _facts(run)], rows, drawn)


def _facts(run: TrainedRun) -> str:
    """One sentence about what was trained, and for how long."""
    count = sum(p.numel() for p in run.model.parameters())
    about = f" ({run.recipe.about})" if run.recipe.about else ""
    return (
        f"Recipe {run.recipe.name}, seed {run.recipe.seed}{about}: {count:,} parameters, {run.step:,} steps in "
        f"{run.seconds:,.0f} s."
    )


def html_report(
    title: str, paragraphs: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[tuple[str, bytes]]
) -> str:
    """Write a self-contained page.

    Args:
        title: Heading.
        paragraphs: Text, not HTML.
        rows: A table; the first row is its header.
        figures: Caption and PNG of each.

    Returns:
        HTML with the figures inside; it loads nothing from anywhere.
    """
    # All text is escaped: names and captions may hold anything.
    table = "".join(_row("td" if n else "th", row) for n, row in enumerate(rows))
    text = "".join(f"<p>{html.escape(p)}</p>" for p in paragraphs)
    # Pictures are inside the page, so that it can be sent as one file.
    pictures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, png in figures
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"{text}{table and f'<table>{table}</table>'}{pictures}</html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cell(values: Sequence[float], metric: Metric) -> str:
    """Format mean and standard deviation over seeds; "-" without values."""
    if not values:
        return "-"
    scaled = [100 * value if metric.form == "percent" else value for value in values]
    digits = DIGITS[metric.form]
    text = f"{mean(scaled):.{digits}f}"
    # A single seed has no deviation.
    return f"{text} ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else text
