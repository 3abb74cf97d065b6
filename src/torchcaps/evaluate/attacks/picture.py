"""A picture of attacks: a panel each, a line a model."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from torchcaps.evaluate.attacks.curves import GRADIENT, AttackCurves, Curve, find_masking
from torchcaps.evaluate.figures import require_matplotlib

__all__ = ["curve_plot"]

_COLUMNS = 3
_TITLES = {"targeted": "targeted FGSM", "square": "square (no gradient)", "transfer": "transfer (no gradient)"}


def curve_plot(rows: Mapping[str, AttackCurves]) -> bytes:
    """PNG of accuracy against epsilon, of several models by their names; of a targeted attack, its success.

    A ring marks a number of a gradient attack that an attack without gradients beats: the gradient is masked there.
    """
    require_matplotlib()
    import matplotlib.pyplot as plt

    # Attacks in the order in which they come; models may differ in them.
    names = list(dict.fromkeys(name for one in rows.values() for name in (*one.attack_accuracy, *one.attack_success)))
    columns = min(_COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=(3.1 * columns, 2.6 * lines), sharex=True)
    # Panels beyond the last attack stay blank.
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes.flat, names, strict=False):
        _panel(ax, name, rows)
    # All panels have the same lines: one legend will do.
    axes.flat[0].legend(frameon=False, fontsize=7)
    if any(find_masking(one.attack_accuracy) for one in rows.values()):
        figure.supxlabel("ring: the gradient is masked, an attack without it does better", fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def _panel(ax: Any, name: str, rows: Mapping[str, AttackCurves]) -> None:
    for label, one in rows.items():
        curve: Curve = (one.attack_accuracy | one.attack_success).get(name, {})
        (line,) = ax.plot([float(e) for e in curve], list(curve.values()), ".-", label=label, linewidth=1)
        # Rings where the gradient is masked; attacks without gradients have none.
        flagged = [e for e in find_masking(one.attack_accuracy) if e in curve] if name in GRADIENT else []
        ax.plot([float(e) for e in flagged], [curve[e] for e in flagged], "o", mfc="none", color=line.get_color())
    ax.set(xlabel="epsilon", ylabel="success" if name == "targeted" else "accuracy", ylim=(-0.02, 1.02))
    ax.set_title(_TITLES.get(name, name.upper()), fontsize=9)
