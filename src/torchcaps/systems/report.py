"""One HTML file that says what was trained, how it did beside its controls, and what the capsules do."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from torchcaps.evaluate.results import Result
from torchcaps.systems.figure_registry import CAPTIONS, figures_of
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.train.run import TrainedRun
from torchcaps.utils.progress import progress

__all__ = ["html_report", "report_of", "rows_of", "text_table"]

PERCENT = (
    "test_error",
    "rising_steps",
    "affnist_accuracy",
    "mnist_accuracy",
    "multimnist_error",
    "digit_error",
    "threshold_error",
    "test_error_13crop",
    "novel_error",
    "familiar_error",
    "mnist_svm",
    "affnist_svm_a",
    "affnist_svm_b",
)
"""Metrics that are shown as such."""

COUNTS = ("classes_covered", "capsules_used", "capsules_in_band")
"""Metrics that count, and need no four decimals."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; } figcaption { color: #555; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } figcaption { color: #aaa; }
th, td { border-color: #444; } }
"""


def rows_of(result: Result, percent: Sequence[str] = PERCENT) -> list[list[str]]:
    """Header, the result, its controls: mean and deviation over seeds; metrics named in `percent` as such."""
    names = list(result.metrics)
    rows = [["", *(f"{n.replace('_', ' ')}{' (%)' if n in percent else ''}" for n in names)]]
    for label, metrics in [(result.recipe, result.metrics), *result.controls.items()]:
        rows.append([label, *(_cell(metrics.get(n, []), n, n in percent) for n in names)])
    if result.paper:
        told = {name: [value] for name, value in result.paper.items()}
        rows.append(["in the paper", *(_cell(told.get(n, []), n, n in percent) for n in names)])
    return rows


def text_table(rows: Sequence[Sequence[str]], width: int = 120) -> str:
    """Aligned columns for a terminal; what is wider than that goes on below, with the first column again."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    blocks = [[0]]
    used = widths[0]
    for n, w in enumerate(widths[1:], 1):
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
    wish: FigureOptions,
    *,
    title: str | None = None,
    text: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """One page of a run in a folder: what was trained, how it did if there are rows, and all pictures of it."""
    galleries = [figures_of(folder, run, wish)]
    if (folder / "journal.jsonl").is_file():
        galleries.append(figures_of(folder, run, wish, "curves"))
    wanted = [(kind, each.draw) for each in galleries for kind in each.kinds]
    figures = [(CAPTIONS[kind], png) for kind, draw in progress(wanted, "drawing") for png in draw(kind).values()]
    return html_report(title or folder.resolve().name, [*text, _facts(run)], rows, figures)


def _facts(run: TrainedRun) -> str:
    count = sum(p.numel() for p in run.model.parameters())
    about = f" ({run.recipe.about})" if run.recipe.about else ""
    return (
        f"Recipe {run.recipe.name}, seed {run.recipe.seed}{about}: {count:,} parameters, {run.step:,} steps in "
        f"{run.seconds:,.0f} s."
    )


def html_report(
    title: str, paragraphs: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[tuple[str, bytes]]
) -> str:
    """A self-contained page: text, table, pictures (caption, PNG) inside it; it loads nothing from anywhere."""
    table = "".join(_row("td" if n else "th", row) for n, row in enumerate(rows))
    text = "".join(f"<p>{html.escape(p)}</p>" for p in paragraphs)
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


def _cell(values: Sequence[float], name: str, percent: bool) -> str:
    if not values:
        return "-"
    scaled = [100 * v if percent else v for v in values]
    digits = 2 if percent else 1 if name in COUNTS else 4
    text = f"{mean(scaled):.{digits}f}"
    return f"{text} ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else text
