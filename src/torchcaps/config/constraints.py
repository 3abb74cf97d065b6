"""What an annotation may say beyond its type: bounds, inf and nan, a choice of tables; and the common ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

__all__ = [
    "Choice",
    "Count",
    "NonFinite",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Options",
    "Positive",
    "PositiveFloat",
    "Range",
    "Scalar",
    "Share",
]


@dataclass(frozen=True)
class Range:
    """low <= x <= high (low < x if `open_low`); stands directly on a number: `Annotated[int, Range(1)]`."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def __contains__(self, x: float) -> bool:
        above = self.low is None or (x > self.low if self.open_low else x >= self.low)
        return above and (self.high is None or x <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None and not self.open_low:
            return f"from {self.low} to {self.high}"
        low = "" if self.low is None else f"{'above' if self.open_low else 'at least'} {self.low}"
        high = "" if self.high is None else f"at most {self.high}"
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class NonFinite:
    """The float it stands on may be inf or nan, refused elsewhere: `Annotated[float, NonFinite()]`."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A table whose `key` picks its dataclass: `Annotated[Base, Choice(registry)]`.

    `options` is held, not copied: it may be filled after the annotation is written. A chosen dataclass that
    has a field called `key` itself receives the name in it.
    """

    options: Mapping[str, type]
    key: str = "name"

    def name_of(self, instance: object) -> str | None:
        """The name under which the instance's type stands; its own `key` field decides between two."""
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
