"""Plain data -> dataclass, and the same checks for a dataclass that was built in Python."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass, replace
from typing import Literal, TypeVar, Union, cast, get_args, get_origin

from torchcaps.config.constraints import Choice, Range
from torchcaps.config.formatting import SCALARS, Place, short, show, type_text, value_text
from torchcaps.config.schema import default_of, first_mark, hints_of, split_marks
from torchcaps.errors import RecipeError, suggestion

__all__ = ["RENAMED", "check", "from_dict"]

RENAMED = {"optimiser": "optimizer", "check_every": "validate_every"}
"""Keys of earlier versions and what they are called now: an old one is refused with the new one's name."""

T = TypeVar("T")

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}


def from_dict(cls: type[T], data: Mapping[str, object], *, where: str = "") -> T:
    """Build the dataclass that a plain nested mapping describes.

    Args:
        cls: A dataclass whose annotations are the schema.
        data: Nested plain data, as TOML and JSON hold it.
        where: The name of the recipe, for errors.

    Raises:
        RecipeError: A key is unknown or missing, or a value is not what its annotation asks for.
    """
    at = Place(where)
    try:
        return cast(T, _build(cls, data, at))
    except RecursionError:
        raise at.error("tables are nested too deeply; give fewer levels") from None


def check(instance: object, *, where: str = "") -> None:
    """Check a dataclass that was built in Python, where tuples, None and dataclasses are themselves.

    Builds nothing, so that a `__post_init__` may call it.

    Raises:
        RecipeError: A value is not what its annotation asks for.
    """
    _check_fields(instance, Place(where, built=True))


def _check_fields(instance: object, at: Place) -> None:
    for name, hint in hints_of(type(instance)).items():
        _convert(hint, getattr(instance, name), at.key(name))


def _build(cls: type, data: object, at: Place, start: object = None, tags: tuple[str, ...] = ()) -> object:
    """Build `cls` from one table; `start` gives the keys left out, `tags` are keys that need not be fields."""
    if not isinstance(data, Mapping):
        raise at.wrong(data, "a table")
    # Refuse unknown keys first: a misspelled one would otherwise be reported as missing
    hints = hints_of(cls)
    known = {*hints, *tags}
    for key in data:
        if key not in known:
            if RENAMED.get(key) in known:
                raise at.error(f"the key '{at.key(key).path}' is now called '{RENAMED[key]}'; rename it")
            text = short(key if isinstance(key, str) else show(key))
            raise at.error(f"unknown key '{at.key(key).path}'{suggestion(text, known)}")
    # Convert every field, given or not, then let the dataclass check what concerns several at once
    values = {name: _field(cls, name, data, at.key(name), start) for name in hints}
    try:
        return cls(**values)
    except ValueError as error:  # from a __post_init__
        prefix = f"{at.path}: " if at.path else ""
        raise at.error(prefix + " ".join(str(error).split())) from error


def _field(cls: type, name: str, data: Mapping[str, object], at: Place, start: object) -> object:
    # A table that is given is merged over the default's, so that it may name only what differs
    hint = hints_of(cls)[name]
    default = default_of(cls, name, start)
    if name in data:
        return _convert(hint, data[name], at, default if is_dataclass(default) else None)
    if default is MISSING:
        raise at.error(f"missing key '{at.path}'; wanted: {type_text(hint)}")
    return default


def _convert(hint: object, value: object, at: Place, start: object = None) -> object:
    """Return the value that the annotation asks for.

    Args:
        hint: The annotation of a field.
        value: What stands there.
        at: The place, for errors.
        start: The dataclass that keys are taken from which a table leaves out.
    """
    base, marks = split_marks(hint)
    origin = get_origin(base)
    args = get_args(base)
    # A choice comes first: its base is a class, too, but the table's name picks another
    if choice := first_mark(Choice, marks):
        return _chosen(choice, value, at) if at.built else _choose(choice, value, at, start)
    if isinstance(base, type) and base in SCALARS:
        return _scalar(base, value, at, marks)
    # A bound on anything but a number would be ignored in silence; that is the programmer's error, hence TypeError
    if any(isinstance(mark, Range) for mark in marks):
        raise TypeError(f"{at.path}: {marks!r} must stand directly on a number, not on {base!r}")
    # By the form of the annotation
    if origin is Literal:
        return _literal(args, value, at)
    if origin in (Union, types.UnionType):
        return _union(args, value, at, start)
    if origin is tuple:
        return _tuple(args, value, at)
    if origin is dict and args[0] is str:
        return _dict(args[1], value, at)
    if isinstance(base, type) and is_dataclass(base):
        return _nested(base, value, at) if at.built else _build(base, value, at, start)
    raise TypeError(f"{at.path}: a setting cannot have the type {hint!r}")


def _scalar(base: type, value: object, at: Place, marks: tuple[object, ...]) -> object:
    """Return a bool, int, float or str: an int may stand for a float, a bool never for a number."""
    # Type: isinstance(True, int) holds in Python, so bools are excluded by hand
    accepted = (int, float) if base is float else (base,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and base is not bool):
        raise at.wrong(value, _WANTED[base])
    # Value: whole numbers become floats before they are compared with bounds
    if isinstance(value, int | float) and base is float:
        value = _finite(value, at)
    for mark in marks:
        if isinstance(mark, Range) and isinstance(value, int | float) and value not in mark:
            raise at.error(f"{at.path} = {show(value)} must be {mark}{at.also}")
    return value


def _finite(value: float, at: Place) -> float:
    try:
        result = float(value)
    except OverflowError:
        raise at.wrong(value, "a number that a float can hold") from None
    if not math.isfinite(result):
        raise at.wrong(value, "a finite number")
    return result


def _literal(allowed: tuple[object, ...], value: object, at: Place) -> object:
    for option in allowed:
        # Types are compared, too, since 1 == True == 1.0
        if type(option) is type(value) and option == value:
            return option
    close = suggestion(short(value), map(str, allowed)) if isinstance(value, str) else ""
    close = close if close.startswith("; did") else ""  # the known ones are listed already
    raise at.error(f"{at.path} = {show(value)} is not one of {', '.join(map(value_text, allowed))}{at.also}{close}")


def _union(args: tuple[object, ...], value: object, at: Place, start: object) -> object:
    """Return the first member that takes the value; `X | None` also reads "none", since TOML has no null."""
    # None comes first: text would otherwise take "none" for a value
    members = [arg for arg in args if arg is not types.NoneType]
    if len(members) < len(args):
        at = replace(at, also=" or none")
        written = isinstance(value, str) and value == "none"
        if written and at.built:
            raise at.error(f"{at.path} = 'none' would be read back as no value; use None")
        if written or value is None:
            return None
    # One member left: its own error says more than "none of several"
    if len(members) == 1:
        return _convert(members[0], value, at, start)
    # A value's own type comes first, so that 1 of `float | int` stays a whole number.
    for member in sorted(members, key=lambda member: split_marks(member)[0] is not type(value)):
        try:
            return _convert(member, value, at)
        except RecipeError:
            continue
    raise at.wrong(value, " or ".join(map(type_text, members)))


def _tuple(args: tuple[object, ...], value: object, at: Place) -> tuple[object, ...]:
    if not isinstance(value, tuple if at.built else (list, tuple)):
        raise at.wrong(value, "a tuple" if at.built else "a list in [ ]")
    # tuple[X, ...] takes any number of X
    hints = (args[0],) * len(value) if args[-1:] == (...,) else args
    if len(value) != len(hints):
        raise at.wrong(value, f"a list of {len(hints)}")
    return tuple(_convert(h, v, at.item(n)) for n, (h, v) in enumerate(zip(hints, value, strict=True)))


def _dict(hint: object, value: object, at: Place) -> dict[str, object]:
    if not isinstance(value, dict if at.built else Mapping):
        raise at.wrong(value, "a table")
    for key in value:
        if not isinstance(key, str):
            raise at.error(f"{at.path} has the key {show(key)}; wanted: text")
    return {key: _convert(hint, item, at.key(key)) for key, item in value.items()}


def _nested(cls: type, value: object, at: Place) -> object:
    """Check a dataclass inside one that was built in Python."""
    if type(value) is not cls:
        raise at.wrong(value, f"a {cls.__name__}")
    _check_fields(value, at)
    return value


def _choose(choice: Choice, value: object, at: Place, start: object) -> object:
    """Build the class that the table's name picks; without one, or with the same, `start` gives what is left out."""
    if not isinstance(value, Mapping):
        raise at.wrong(value, f"a table with the key '{choice.key}'")
    # The name: the table's own, or else that of the default
    key = at.key(choice.key)
    name = value.get(choice.key, choice.name_of(start))
    if name is None:
        raise key.error(f"missing key '{key.path}'; known: {', '.join(sorted(choice.options))}")
    if not isinstance(name, str) or name not in choice.options:
        text = short(name) if isinstance(name, str) else ""
        raise key.error(f"{key.path} = {show(name)} is unknown{suggestion(text, choice.options)}")
    # Settings of the default's class mean nothing to another one
    cls = choice.options[name]
    return _build(cls, value, at, start if type(start) is cls else None, (choice.key,))


def _chosen(choice: Choice, value: object, at: Place) -> object:
    """Check an instance: its type must have a name, and its own `key` field, if any, must hold it."""
    name = choice.name_of(value)
    if name is None:
        raise at.wrong(value, f"of a kind with a {choice.key}; known: {', '.join(sorted(choice.options))}")
    if choice.key in hints_of(type(value)) and getattr(value, choice.key) != name:
        raise at.key(choice.key).wrong(getattr(value, choice.key), value_text(name))
    _check_fields(value, at)
    return value
