"""The dataclass as a schema: which settings it takes, what stands in their annotations, what they are if left out."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

from torchcaps.config.constraints import Choice

__all__ = ["choice_in", "default_of", "first_mark", "hints_of", "split_marks"]

M = TypeVar("M")


def hints_of(cls: type) -> dict[str, object]:
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
    """Return the value of a field that is left out: that of `start`, else the class's default, else MISSING."""
    if start is not None:
        return getattr(start, name)
    # Looked up in `fields`, since a default_factory leaves no attribute on the class
    field = next(field for field in fields(cls) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def split_marks(hint: object) -> tuple[object, tuple[object, ...]]:
    """Split Annotated[base, *marks] into (base, marks); other annotations have no marks."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    base, *marks = get_args(hint)
    return base, tuple(marks)


def first_mark(kind: type[M], marks: Iterable[object]) -> M | None:
    """Return the first mark of this kind, None without one."""
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def choice_in(hint: object) -> Choice | None:
    """Find the Choice of an annotation, also inside `| None`, tuples and dicts."""
    base, marks = split_marks(hint)
    return first_mark(Choice, (*marks, *map(choice_in, get_args(base))))
