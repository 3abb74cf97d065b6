"""The dataclass as a schema: which settings it takes, what stands in their annotations, what they are if left out."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from torchcaps.config.constraints import Choice

__all__ = ["choice_in", "default_of", "first_mark", "hints_of", "split_marks"]

M = TypeVar("M")


def hints_of(cls: Any) -> dict[str, Any]:
    """Name -> annotation of the fields that the constructor takes; read once for each class."""
    return _read(cls)


@functools.cache
def _read(cls: Any) -> dict[str, Any]:
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise TypeError(f"{cls!r} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def default_of(cls: Any, name: str, start: object) -> Any:
    """The value of a field that is left out: that of `start`, else the class's default, else MISSING."""
    if start is not None:
        return getattr(start, name)
    field = cls.__dataclass_fields__[name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def split_marks(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Annotated[base, *marks] -> (base, marks)."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def first_mark(kind: type[M], marks: Iterable[object]) -> M | None:
    """The first of the marks that is of this kind."""
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def choice_in(hint: Any) -> Choice | None:
    """The Choice of an annotation, also inside `| None`, tuples and dicts."""
    base, marks = split_marks(hint)
    return first_mark(Choice, (*marks, *map(choice_in, get_args(base))))
