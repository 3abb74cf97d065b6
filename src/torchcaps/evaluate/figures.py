"""Figures of any model, drawn with matplotlib (the `plot` extra), as PNG bytes: image grids, curves, reliability."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.errors import RecipeError
from torchcaps.metrics import expected_calibration_error

__all__ = [
    "Reliability",
    "Rows",
    "image_grid",
    "learning_curve",
    "pixels",
    "png",
    "pyplot",
    "reliability",
    "reliability_diagram",
    "require_matplotlib",
    "running_mean",
]

Rows = Sequence[tuple[str, Tensor]]
"""Rows of images, each (title, [n h w] gray or [n h w 3])."""

_GAP = 0.03
"""White around an image, in sides of it."""

_NOTE = 0.26
"""Height of a line of notes, in sides of an image."""

_CHARACTER = 0.055
_BETWEEN = 0.05
_MAX_NOTE = 2.0
"""Inches: a character of a note, the least room between two notes, and the most to which a note widens an image."""

_SIDE = 32
"""Pixels to which smaller images are enlarged, by whole numbers, so that the white around them looks the same."""


def pixels(images: Tensor) -> Tensor:
    """[n c h w] -> [n h w 3] in color, or else [n h w], the mean of the channels."""
    return images.permute(0, 2, 3, 1) if images.shape[1] == 3 else images.mean(1)


def image_grid(rows: Rows, scale: float = 0.55, notes: Mapping[int, Sequence[str]] | None = None) -> bytes:
    """Draw rows of images as one PNG.

    Args:
        rows: Title and images [n h w] or [n h w 3] in [0, 1], a row each.
        scale: Inches an image; more where a note needs the room.
        notes: Row number -> texts above its images.

    Returns:
        A PNG.
    """
    plt = pyplot()
    # The left margin has room for the longest title.
    notes = notes or {}
    scale = max(scale, _note_width(notes))
    columns = max(len(images) for _, images in rows)
    tops, height = _tops(len(rows), notes)
    margin = 0.3 + 0.07 * max(len(line) for title, _ in rows for line in title.split("\n"))
    size = (scale * columns + margin, scale * height + 0.1)
    # One axes for the whole grid: a subplot for each image would be much slower.
    figure, ax = plt.subplots(figsize=size)
    figure.subplots_adjust(left=margin / size[0], right=1, top=1, bottom=0)
    # A row is one strip of images, its title to the left.
    for (title, images), top in zip(rows, tops, strict=True):
        place = (0, len(images), top + 1, top)
        ax.imshow(_strip(images).cpu().numpy(), cmap="gray", vmin=0, vmax=1, extent=place)
        ax.text(-0.2, top + 0.5, title, ha="right", va="center", fontsize=8)
    # Notes stand in the room that `_tops` left above their row.
    for n, texts in notes.items():
        for column, text in enumerate(texts):
            ax.text(column + 0.5, tops[n], text, ha="center", va="bottom", fontsize=7)
    # The first row is at the top, so the vertical axis is reversed.
    ax.set(xlim=(0, columns), ylim=(height, 0))
    ax.set_axis_off()
    return png(figure)


def _note_width(notes: Mapping[int, Sequence[str]]) -> float:
    """Inches that the widest note takes, within reason."""
    lines = [line for texts in notes.values() for note in texts for line in note.split("\n")]
    return min(_MAX_NOTE, _BETWEEN + _CHARACTER * max(map(len, lines), default=0))


def _tops(rows: int, notes: Mapping[int, Sequence[str]]) -> tuple[list[float], float]:
    """Where each row begins, and the height of all."""
    tops = []
    height = 0.0
    for n in range(rows):
        # Room for the note with the most lines.
        height += _NOTE * max((1 + note.count("\n") for note in notes.get(n, ())), default=0)
        tops.append(height)
        height += 1.0
    return tops, height


def _strip(images: Tensor) -> Tensor:
    """[n h w] or [n h w 3] -> [s (n s)] or [s (n s) 3]: side by side, each in the middle of a white square."""
    # Small images are enlarged by whole numbers, so that their pixels stay sharp.
    more = max(1, round(_SIDE / max(images.shape[1:3])))
    images = images.repeat_interleave(more, 1).repeat_interleave(more, 2)
    # Pad each image to a square, with a gap around it.
    h, w = images.shape[1:3]
    side = max(h, w)
    gap = max(1, round(_GAP * side))
    down = side - h + 2 * gap
    right = side - w + 2 * gap
    edges = (right // 2, right - right // 2, down // 2, down - down // 2)
    squares = pad(images.float(), (0, 0, *edges) if images.ndim == 4 else edges, value=1.0)  # [n s s], or with color
    return torch.cat(list(squares), dim=1)


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Of each value and the `reach` values before and after it, as far as there are any.

    >>> running_mean([1.0, 2.0, 6.0], 1)
    [1.5, 3.0, 4.0]
    """
    windows = [values[max(0, n - reach) : n + reach + 1] for n in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def learning_curve(curves: Sequence[tuple[str, Sequence[dict[str, Any]]]], key: str = "accuracy") -> bytes:
    """Draw journals as lines over the steps, pale, with their running means.

    Args:
        curves: Name and entries of each journal.
        key: Which value of the entries; a loss above 0 has a logarithmic scale.

    Returns:
        A PNG.
    """
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(6, 2.6))
    for name, entries in curves:
        # Not every entry has every value: validation is less frequent.
        kept = [entry for entry in entries if key in entry]
        steps = [entry["step"] for entry in kept]
        values = [float(entry[key]) for entry in kept]
        (line,) = ax.plot(steps, running_mean(values, len(values) // 50), label=name, linewidth=1)
        ax.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.5)
    # A loss may fall by orders of magnitude, but one that reaches 0 has no logarithm.
    if key == "loss" and all(float(entry[key]) > 0 for _, entries in curves for entry in entries if key in entry):
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel(key.replace("_", " ") if key.startswith("validation") else f"training {key}")
    ax.legend(frameon=False)
    figure.tight_layout()
    return png(figure)


class Reliability(NamedTuple):
    """Of each bin of confidence: how many answers, their mean confidence, the share that is right; all [bins]."""

    counts: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(confidence: Tensor, correct: Tensor, bins: int = 15) -> Reliability:
    """Sort answers by their confidence [n] into the bins of `expected_calibration_error`; `correct` is [n]."""
    p = confidence.detach().double()
    hit = correct.detach().double()
    # Inner edges only: 0 falls into the first bin and 1 into the last.
    edges = torch.arange(1, bins, dtype=p.dtype, device=p.device) / bins
    place = torch.bucketize(p, edges)  # [n]
    counts = torch.bincount(place, minlength=bins)
    means = (torch.bincount(place, weights=x, minlength=bins) / counts.clamp_min(1) for x in (p, hit))
    return Reliability(counts, *means)


def reliability_diagram(confidence: Tensor, correct: Tensor, bins: int = 15) -> bytes:
    """Draw the share of right answers by their confidence; on the diagonal a model knows how often it errs.

    Below, the share of the answers in each bin: one with few says little.

    Args:
        confidence: [n] in [0, 1].
        correct: [n] True where the answer is right.
        bins: How many.

    Returns:
        A PNG.
    """
    plt = pyplot()
    error = expected_calibration_error(confidence, correct, bins)
    shown = Reliability(*(x.cpu() for x in reliability(confidence, correct, bins)))
    figure, (ax, below) = plt.subplots(2, sharex=True, figsize=(3.6, 4.4), height_ratios=(3, 1))
    # Above, the share right in each bin as a bar; the dots are at its mean confidence.
    left = torch.arange(bins) / bins
    some = shown.counts > 0
    ax.bar(left, shown.accuracy, 1 / bins, align="edge", color="tab:blue", edgecolor="white")
    ax.plot((0, 1), (0, 1), color="gray", linewidth=1, linestyle="--")
    ax.plot(shown.confidence[some], shown.accuracy[some], "o", color="black", markersize=3)
    # Below, how many answers are in each bin.
    below.bar(left, shown.counts / shown.counts.sum(), 1 / bins, align="edge", color="gray", edgecolor="white")
    ax.set(ylabel="share right", ylim=(0, 1), title=f"calibration error {error:.4f}, {len(confidence)} images")
    ax.title.set_fontsize(9)
    below.set(xlabel="confidence", ylabel="share of images", xlim=(0, 1))
    figure.tight_layout()
    return png(figure)


def require_matplotlib() -> None:
    """Refuse to go on without matplotlib, at once rather than after an hour of training.

    Raises:
        RecipeError: If it is not installed.
    """
    pyplot()


def pyplot() -> Any:
    """Import `matplotlib.pyplot`, set to draw into memory."""
    try:
        import matplotlib
    except ImportError:
        raise RecipeError("pictures need matplotlib: pip install 'torchcaps[plot]'") from None
    # Before pyplot is imported, which would otherwise ask for a display.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def png(figure: Any) -> bytes:
    """Return what is drawn in a figure, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    # matplotlib holds every figure in memory until it is closed.
    pyplot().close(figure)
    return buffer.getvalue()
