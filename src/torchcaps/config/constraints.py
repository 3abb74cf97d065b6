"""Constraints that annotations of settings carry: bounds, and a choice of tables; and the common ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

__all__ = [
    "Choice",
    "Count",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Options",
    "Positive",
    "PositiveFloat",
    "Range",
    "Scalar",
    "Share",
    "Table",
]


@dataclass(frozen=True)
class Range:
    """Bound a number: low <= x <= high, or low < x if `open_low`; as in `Annotated[int, Range(1)]`."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def __contains__(self, x: float) -> bool:
        # A NaN compares false with everything, so a bounded range never contains it
        above = self.low is None or (x > self.low if self.open_low else x >= self.low)
        return above and (self.high is None or x <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None and not self.open_low:
            return f"from {self.low} to {self.high}"
        low = "" if self.low is None else f"{'above' if self.open_low else 'at least'} {self.low}"
        high = "" if self.high is None else f"at most {self.high}"
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True, eq=False)
class Choice:
    """Let the `key` of a table pick its dataclass out of a registry: `Annotated[Base, Choice(registry)]`.

    `options` is held, not copied: it may be filled after the annotation is written. A chosen dataclass that
    has a field called `key` itself receives the name in it.
    """

    options: Mapping[str, type]
    key: str = "name"

    def name_of(self, instance: object) -> str | None:
        """Return the name under which the instance's type is registered; its own `key` field decides between two."""
        # A class may be registered under two names
        names = [name for name, cls in self.options.items() if cls is type(instance)]
        own = getattr(instance, self.key, None)
        return own if own in names else next(iter(names), None)


Positive = Range(0, open_low=True)
Count = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveFloat = Annotated[float, Positive]
NonNegativeFloat = Annotated[float, Range(0)]
Scalar = bool | int | float | str
Options = dict[str, Scalar | tuple[Scalar, ...]]  # free keys, e.g. what an optimizer takes
Table = dict[str, Any]
"""Nested plain data, as TOML and JSON hold it."""
