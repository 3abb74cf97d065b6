"""Notice a training that went astray and goes on: its loss is far above that of the first steps."""

from __future__ import annotations

from torchcaps.utils.notices import notice

__all__ = ["LossWatch"]

_FIRST = 5
"""Reports at the start that say how large a loss is usual."""
_FACTOR = 30.0
"""How many times larger a loss is worth a word. Losses that only fluctuate stay far below."""


class LossWatch:
    """Looks at the losses that a stage reports, and speaks at most once.

    Args:
        label: Name of the stage, if there are several.
    """

    def __init__(self, label: str | None = None) -> None:
        self._where = f" of stage '{label}'" if label else ""
        self._seen = 0
        self._usual = 0.0
        self._spoke = False

    def see(self, step: int, loss: float) -> None:
        """Say so if the loss of a step is many times larger than the largest at the start.

        Args:
            step: Counted from 1.
            loss: A finite number. The first ones after a resumption count as the start.
        """
        self._seen += 1
        if self._seen <= _FIRST:
            self._usual = max(self._usual, abs(loss))
        elif loss > _FACTOR * self._usual > 0 and not self._spoke:
            self._spoke = True
            notice(
                f"at step {step}{self._where} the loss is {loss:.4g}, {loss / self._usual:.0f} times that of the first "
                "steps; training goes on, but what it learned may be lost: lower optimizer.lr or set train.clip"
            )
