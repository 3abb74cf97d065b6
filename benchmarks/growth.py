"""How the cost of a routing layer grows with batch, children, parents and iterations: a table and a log-log plot.

python -m benchmarks.growth [--base dynamic-1152x8-10x16 | em-144x16] [--batch 32] [--threads 1] [--memory]
                            [--out FILE.png] [--json FILE]

One number grows at a time, the others stay at the base. Time is that of forward and backward, best of several, ours
and plain in turn; memory is the peak over import, each in a process of its own. The exponent p is the slope of the line
through the points on logarithmic axes: cost grows like (what grows)^p.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import case_of
from benchmarks.memory import peaks
from benchmarks.timing import best_times, busy, threads
from torchcaps.errors import RecipeError, TorchcapsError
from torchcaps.systems.report import text_table
from torchcaps.train.train_state import flushed_denormals
from torchcaps.utils.files import write_atomically
from torchcaps.utils.progress import progress

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
ITERATIONS = (1, 2, 3, 4, 6, 8)
GROWS = ("batch", "children", "parents", "iterations")


@dataclass(frozen=True)
class Base:
    """A layer: dynamic routing of I children of d numbers to J parents of k, or EM routing, whose poses are 4x4."""

    router: str = "dynamic"
    children: int = 1152
    parents: int = 10
    d: int = 8
    k: int = 16
    iterations: int = 3
    batch: int = 32

    def name(self, **changed: int) -> str:
        """Return the name of the case with some of the sizes changed."""
        n = {**vars(self), **changed}
        if self.router == "em":
            return "em-{children}x{parents}-t{iterations}".format(**n)
        return "dynamic-{children}x{d}-{parents}x{k}-t{iterations}".format(**n)


class Point(NamedTuple):
    """Cost at one size, where `what` grows: milliseconds and MB, ours and plain."""

    what: str
    size: int
    ours: float
    plain: float
    ours_mb: float | None = None
    plain_mb: float | None = None


def sizes(base: Base, what: str) -> list[int]:
    """What is measured where `what` grows: around the base by powers of two, or the numbers of iterations."""
    if what == "iterations":
        return list(ITERATIONS)
    return sorted({max(1, round(vars(base)[what] * factor)) for factor in FACTORS})


def measure(base: Base, what: str, size: int, seconds: float, memory: bool) -> Point:
    """One point of a curve."""
    batch = size if what == "batch" else base.batch
    name = base.name() if what == "batch" else base.name(**{what: size})
    case = case_of(name)
    tasks = {"ours": case.ours(batch).step, "plain": case.plain(batch).step}
    tasks["ours"]()  # compiles, which may take longer than all the rest
    best = best_times(tasks, seconds)
    point = Point(what, size, 1000 * best["ours"], 1000 * best["plain"])
    if not memory:
        return point
    ours = peaks(name, batch, "fast")
    plain = peaks(name, batch, "plain")
    return point._replace(ours_mb=ours and ours.step, plain_mb=plain and plain.step)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log cost over log size by least squares, over the larger half, where fixed costs count least.

    >>> exponent([(1, 3), (2, 12), (4, 48), (8, 192)])
    2.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points)[len(points) // 2 :]]
    if len(logs) < 2:
        return math.nan
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    over = sum((x - mean_x) ** 2 for x, _ in logs)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / over
    return round(slope, 9)


def curves(points: Sequence[Point], key: str) -> dict[str, list[tuple[float, float]]]:
    """What grows -> (size, cost) pairs, for one of the costs of a point."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        cost = getattr(point, key)
        if cost is not None:
            found.setdefault(point.what, []).append((point.size, cost))
    return found


def rows_of(points: Sequence[Point]) -> list[list[str]]:
    """A line a point, and the exponents of each curve below it."""
    memory = any(point.ours_mb is not None for point in points)
    keys = ("ours", "plain", *(("ours_mb", "plain_mb") if memory else ()))
    units = {"ours": "ours ms", "plain": "plain ms", "ours_mb": "ours MB", "plain_mb": "plain MB"}
    rows = [["grows", "to", *(units[key] for key in keys), "plain / ours"]]
    for what in dict.fromkeys(point.what for point in points):
        mine = [point for point in points if point.what == what]
        for point in mine:
            cells = [_number(getattr(point, key)) for key in keys]
            rows.append([what, str(point.size), *cells, f"{point.plain / point.ours:.1f}"])
        slopes = [exponent(curves(mine, key).get(what, [])) for key in keys]
        rows.append(["", "exponent", *("-" if math.isnan(p) else f"{p:.2f}" for p in slopes), ""])
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def plot(points: Sequence[Point], title: str) -> bytes:
    """Log-log: a panel for each thing that grows, a row for time and, where measured, one for memory."""
    import io

    from torchcaps.evaluate.figures import require_matplotlib

    require_matplotlib()
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    kinds = [("ours", "plain", "ms, forward + backward"), ("ours_mb", "plain_mb", "peak MB over import")]
    kinds = [kind for kind in kinds if curves(points, kind[0])]
    names = list(dict.fromkeys(point.what for point in points))
    size = (3.2 * len(names), 2.8 * len(kinds) + 0.4)
    figure, axes = plt.subplots(len(kinds), len(names), squeeze=False, figsize=size, sharey="row")
    for line, (mine, plain, label) in zip(axes, kinds, strict=True):
        for ax, what in zip(line, names, strict=True):
            for key, style in ((plain, "s--"), (mine, "o-")):
                pairs = curves(points, key).get(what, [])
                text = f"{key.split('_')[0]}, p = {exponent(pairs):.2f}"
                ax.loglog([x for x, _ in pairs], [y for _, y in pairs], style, label=text, markersize=4)
            ax.set_xlabel(what)
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.legend(frameon=False, fontsize=8)
        line[0].set_ylabel(label)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def _base(text: str, batch: int) -> Base:
    match = re.fullmatch(r"dynamic-(\d+)x(\d+)-(\d+)x(\d+)|em-(\d+)x(\d+)", text)
    if not match or batch < 1:
        raise RecipeError(
            f"--base {text} --batch {batch}; such as dynamic-1152x8-10x16 or em-144x16, and 32, is wanted"
        )
    case_of(text)  # refuses sizes of 0
    numbers = [int(n) for n in match.groups() if n]
    if len(numbers) == 2:
        return Base("em", children=numbers[0], parents=numbers[1], batch=batch)
    i, d, j, k = numbers
    return Base("dynamic", children=i, parents=j, d=d, k=k, batch=batch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="PNG file to draw into")
    parser.add_argument("--json", type=Path, help="file to write the table into")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too (two processes a point)")
    parser.add_argument(
        "--base", default="dynamic-1152x8-10x16", help="the layer that the others differ from by one size"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each of ours and plain at a point")
    parser.add_argument("--grows", nargs="+", choices=GROWS, default=GROWS)
    given = parser.parse_args(arguments)
    try:
        base = _base(given.base, given.batch)
        todo = [(what, size) for what in given.grows for size in sizes(base, what)]
        if busy():
            print(f"growth: {busy()}", file=sys.stderr)
        with flushed_denormals(), threads(given.threads):
            points = [measure(base, *pair, given.seconds, given.memory) for pair in progress(todo, "measuring")]
        rows = rows_of(points)
        print(text_table(rows))
        if given.json:
            write_atomically(given.json, [(json.dumps(rows, indent=1) + "\n").encode()])
        if given.out:
            given.out.write_bytes(plot(points, f"{base.name()}, batch {base.batch}, {given.threads} threads"))
            print(f"\nwritten to {given.out}")
    except (TorchcapsError, OSError) as error:
        print(f"growth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
