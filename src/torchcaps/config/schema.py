"""The dataclass as a schema: what annotations of settings may carry, and how they and the defaults are read."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints


@dataclass(frozen=True)
class Range:
    """Bound a number: low <= x <= high, or low < x if `open_low`; as in `Annotated[int, Range(1)]`.

    Attributes:
        low: The lower bound.
        high: The upper bound; None for none.
        open_low: If True, the lower bound itself is refused.
        limit: An upper bound that no sensible setting reaches: it keeps mistyped and hostile numbers away from memory
            and loops, and is not part of the description of the setting.
    """

    low: float
    high: float | None = None
    open_low: bool = False
    limit: float | None = None

    def __contains__(self, x: float) -> bool:
        # A NaN compares false with everything, so no range contains it
        above = x > self.low if self.open_low else x >= self.low
        return above and (self.high is None or x <= self.high)

    def __str__(self) -> str:
        if self.high is not None and not self.open_low:
            return f"from {self.low} to {self.high}"
        low = f"{'above' if self.open_low else 'at least'} {self.low}"
        return low if self.high is None else f"{low} and at most {self.high}"


@dataclass(frozen=True, eq=False)
class Choice:
    """Let the key `name` of a table pick its dataclass out of a registry: `Annotated[Base, Choice(registry)]`.

    Attributes:
        options: Name -> dataclass. It is held, not copied: it may be filled after the annotation is written.
    """

    options: Mapping[str, type]

    def name_of(self, instance: object) -> str | None:
        """Return the first name under which the instance's type is registered, None if it is not."""
        return next((name for name, cls in self.options.items() if cls is type(instance)), None)


@dataclass(frozen=True)
class Length:
    """Bound how many values a list may hold: `Annotated[tuple[Size, ...], Length(64)]`.

    Attributes:
        high: The most values.
    """

    high: int


Count = Annotated[int, Range(1, limit=10**9)]
"""Images, steps and other things that are counted."""
NonNegativeInt = Annotated[int, Range(0, limit=2**63 - 1)]
Seed = Annotated[int, Range(0, limit=2**64 - 1)]
"""Random numbers depend on a seed modulo 2^64 (`utils.random`), so larger ones would repeat smaller ones."""
Size = Annotated[int, Range(1, limit=2**16)]
"""One axis of a layer: channels, units, capsules, pixels."""
Padding = Annotated[int, Range(0, limit=2**10)]
"""Pixels added on each side of an image."""
Sizes = Annotated[tuple[Size, ...], Length(64)]
"""The units of consecutive layers."""
Iterations = Annotated[int, Range(1, limit=100)]
"""Repetitions inside of one forward pass."""
Share = Annotated[float, Range(0, 1)]
PositiveFloat = Annotated[float, Range(0, open_low=True, limit=1e30)]
NonNegativeFloat = Annotated[float, Range(0, limit=1e30)]
SignedFloat = Annotated[float, Range(-1e30, 1e30)]
"""Numbers that become weights or factors: single precision holds them."""
Scalar = bool | int | float | str
Options = dict[str, Scalar | tuple[Scalar, ...]]  # free keys, e.g. what an optimizer takes
Table = dict[str, Any]
"""Nested plain data, as TOML and JSON hold it."""


def hints_of(cls: object) -> dict[str, object]:
    """Return name -> annotation of the fields that the constructor takes.

    Raises:
        TypeError: `cls` is not a dataclass.
    """
    return _read_hints(cls)


@functools.cache  # `get_type_hints` evaluates every annotation anew
def _read_hints(cls: Hashable) -> dict[str, object]:
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise TypeError(f"{cls!r} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def default_of(cls: type, name: str, start: object) -> object:
    """Return the value of a field that is left out.

    Args:
        cls: The dataclass.
        name: The field.
        start: An instance of `cls`, whose value is taken; anything else is ignored.

    Returns:
        The value of `start`, else the default of the class, else MISSING.
    """
    if type(start) is cls:
        return getattr(start, name)
    # Looked up in `fields`, since a default_factory leaves no attribute on the class
    field = next(field for field in fields(cls) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def split_marks(hint: object) -> tuple[object, tuple[object, ...]]:
    """Split Annotated[base, *marks] into (base, marks); other annotations have no marks."""
    marks = getattr(hint, "__metadata__", ())
    return get_args(hint)[0] if marks else hint, marks


def choice_in(hint: object) -> Choice | None:
    """Find the Choice of an annotation, also inside `| None`, tuples and dicts."""
    base, marks = split_marks(hint)
    return next((mark for mark in (*marks, *map(choice_in, get_args(base))) if isinstance(mark, Choice)), None)
