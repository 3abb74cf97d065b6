"""Plain data <-> dataclass; the same checks for a dataclass that was built in Python; and its settings in words."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass, replace
from typing import Literal, TypeVar, Union, cast, get_args, get_origin

from torchcaps.config.formatting import SCALARS, Place, key_text, short, show, type_text, value_text
from torchcaps.config.schema import Choice, Length, Range, Table, choice_in, default_of, hints_of, split_marks
from torchcaps.errors import RecipeError, suggestion

__all__ = ["RENAMED", "check", "describe", "from_dict", "to_dict"]

RENAMED = {"optimiser": "optimizer", "check_every": "validate_every"}
"""Keys of earlier versions and what they are called now: an old one is refused with the new one's name."""

T = TypeVar("T")
Row = tuple[str, str, str]  # dotted key, type in words, value

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}


def from_dict(cls: type[T], data: Mapping[str, object], *, where: str = "") -> T:
    """Build the dataclass that a plain nested mapping describes.

    Args:
        cls: A dataclass whose annotations are the schema.
        data: Nested plain data, as TOML and JSON hold it.
        where: The name of the recipe, for errors.

    Returns:
        The instance; a key that is left out has its default.

    Raises:
        RecipeError: A key is unknown or missing, or a value is not what its annotation asks for.
    """
    return cast(T, _build(cls, data, Place(where)))


def check(instance: object) -> None:
    """Check a dataclass that was built in Python, where tuples, None and dataclasses are themselves.

    Builds nothing, so that a `__post_init__` may call it.

    Args:
        instance: The dataclass.

    Raises:
        RecipeError: A value is not what its annotation asks for.
    """
    _check_fields(instance, Place(built=True))


def _check_fields(instance: object, at: Place) -> object:
    for name, hint in hints_of(type(instance)).items():
        _convert(hint, getattr(instance, name), at.key(name))
    return instance


def _mapping(value: object, at: Place, wanted: str = "a table") -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise at.wrong(value, wanted)
    return value


def _build(cls: type, data: object, at: Place, start: object = None, tags: tuple[str, ...] = ()) -> object:
    """Build `cls` from one table; `start` gives the keys left out, `tags` are keys that need not be fields."""
    table = _mapping(data, at)
    hints = hints_of(cls)
    known = {*hints, *tags}
    # Refuse unknown keys first: a misspelled one would otherwise be reported as missing
    for key in table:
        if key not in known and RENAMED.get(key) in known:
            raise at.error(f"the key '{at.key(key).path}' is now called '{RENAMED[key]}'; rename it")
        if key not in known:
            table_of = _table_with(hints, key)
            close = f"; did you mean '{table_of}.{key}'?" if table_of else suggestion(short(key), known)
            raise at.error(f"unknown key '{at.key(key).path}'{close}")
    # Convert every field that is given, over its default, so that a table may name only what differs
    values: Table = {}
    for name, hint in hints.items():
        values[name] = default_of(cls, name, start)
        if name in table:
            values[name] = _convert(hint, table[name], at.key(name), values[name])
        elif values[name] is MISSING:
            raise at.error(f"missing key '{at.key(name).path}'; wanted: {type_text(hint)}")
    # Let the dataclass check what concerns several fields at once
    try:
        return cls(**values)
    except ValueError as error:  # from a __post_init__
        prefix = f"{at.path}: " if at.path else ""
        raise at.error(prefix + " ".join(str(error).split())) from error


def _table_with(hints: Mapping[str, object], key: str) -> str | None:
    """Return the first table among the fields that has the key, of whatever kind that table is."""
    for name, hint in hints.items():
        choice = choice_in(hint)
        base = split_marks(hint)[0]
        kinds = [base] if choice is None else list(choice.options.values())
        if any(isinstance(kind, type) and is_dataclass(kind) and key in hints_of(kind) for kind in kinds):
            return name
    return None


def _convert(hint: object, value: object, at: Place, start: object = None) -> object:
    """Return the value that the annotation asks for.

    Args:
        hint: The annotation of a field.
        value: What stands there.
        at: The place, for errors.
        start: The value if the key were left out; a dataclass gives the keys that a table leaves out.
    """
    base, marks = split_marks(hint)
    origin = get_origin(base)
    args = get_args(base)
    # A choice comes first: its base is a class, too, but the table's name picks another
    if marks and isinstance(marks[0], Choice):
        return _choose(marks[0], value, at, start)
    if isinstance(base, type) and base in SCALARS:
        return _scalar(base, value, at, marks)
    # A bound on anything but a number would be ignored in silence; that is the programmer's error, hence TypeError
    if any(isinstance(mark, Range) for mark in marks):
        raise TypeError(f"{at.path}: {marks!r} must stand directly on a number, not on {base!r}")
    # By the form of the annotation
    if origin is Literal:
        # Types are compared, too, since 1 == True == 1.0
        if any(type(option) is type(value) and option == value for option in args):
            return value
        close = suggestion(short(value), map(str, args)) if isinstance(value, str) else ""
        close = close if close.startswith("; did") else ""  # the known ones are listed already
        raise at.error(f"{at.path} = {show(value)} is not one of {', '.join(map(value_text, args))}{at.also}{close}")
    if origin in (Union, types.UnionType):
        return _union(args, value, at, start)
    if origin is tuple:
        return _tuple(args, value, at, marks)
    if origin is dict and args[0] is str:
        return {key: _convert(args[1], item, at.key(key)) for key, item in _mapping(value, at).items()}
    # What is left is a dataclass: plain data build one, in Python it is there already
    if not (isinstance(base, type) and is_dataclass(base)):
        raise TypeError(f"{at.path}: a setting cannot have the type {hint!r}")
    if not at.built:
        return _build(base, value, at, start)
    if type(value) is not base:
        raise at.wrong(value, f"a {base.__name__}")
    return _check_fields(value, at)


def _scalar(base: type, value: object, at: Place, marks: tuple[object, ...]) -> object:
    """Return a bool, int, float or str: an int may stand for a float, a bool never for a number."""
    # Type: isinstance(True, int) holds in Python, so bools are excluded by hand
    accepted = (int, float) if base is float else (base,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and base is not bool):
        raise at.wrong(value, _WANTED[base])
    # Value: whole numbers become floats before they are compared with bounds; NaN is below nothing
    if isinstance(value, int | float) and base is float:
        if not abs(value) <= sys.float_info.max:
            raise at.wrong(value, "a finite number")
        value = float(value)
    for mark in marks:
        if isinstance(mark, Range) and isinstance(value, int | float) and value not in mark:
            raise at.error(f"{at.path} = {show(value)} must be {mark}{at.also}")
        if isinstance(mark, Range) and mark.limit is not None and isinstance(value, int | float) and value > mark.limit:
            raise at.error(f"{at.path} = {show(value)} is beyond {mark.limit}, the most that is allowed; lower it")
    return value


def _union(args: tuple[object, ...], value: object, at: Place, start: object) -> object:
    """Return the first member that takes the value; `X | None` also reads "none", since TOML has no null."""
    members = [arg for arg in args if arg is not types.NoneType]
    # None comes first: text would otherwise take "none" for a value
    if len(members) < len(args):
        at = replace(at, also=" or None" if at.built else " or none")
        written = isinstance(value, str) and value == "none"
        if written and at.built:
            raise at.error(f"{at.path} = 'none' would be read back as no value; use None")
        if written or value is None:
            return None
    # One member left: its own error says more than "none of several"
    if len(members) == 1:
        return _convert(members[0], value, at, start)
    for member in members:
        with contextlib.suppress(RecipeError):
            return _convert(member, value, at)
    # The error of the only member of the value's kind, such as a bound that a number breaks, says more than a list
    alike = [member for member in members if _is_alike(member, value)]
    if len(alike) == 1:
        return _convert(alike[0], value, at)
    raise at.wrong(value, " or ".join(map(_wanted, members)))


def _is_alike(hint: object, value: object) -> bool:
    """Tell whether a value has the type of an annotation, whatever its bounds and entries are."""
    base = split_marks(hint)[0]
    return isinstance(value, list | tuple) if get_origin(base) is tuple else type(value) is base


def _wanted(hint: object) -> str:
    """Write in words, with an article, what a member of a union takes."""
    base = split_marks(hint)[0]
    if isinstance(base, type) and base in _WANTED:
        return _WANTED[base]
    return f"a {type_text(hint)}"


def _tuple(args: tuple[object, ...], value: object, at: Place, marks: tuple[object, ...]) -> tuple[object, ...]:
    if not isinstance(value, tuple if at.built else (list, tuple)):
        raise at.wrong(value, "a tuple" if at.built else "a list in [ ]")
    for mark in marks:
        if isinstance(mark, Length) and len(value) > mark.high:
            raise at.error(f"{at.path} holds {len(value)} values; at most {mark.high} are allowed")
    # tuple[X, ...] takes any number of X
    hints = (args[0],) * len(value) if args[-1:] == (...,) else args
    if len(value) != len(hints):
        raise at.wrong(value, f"a list of {len(hints)}")
    places = (replace(at, path=f"{at.path}[{n}]", also="") for n in range(len(hints)))
    return tuple(map(_convert, hints, value, places))


def _choose(choice: Choice, value: object, at: Place, start: object) -> object:
    """Build the class that the table's name picks; without one, or with the same, `start` gives what is left out."""
    if at.built:
        if choice.name_of(value) is None:
            raise at.wrong(value, f"of a kind with a name; known: {', '.join(sorted(choice.options))}")
        return _check_fields(value, at)
    table = _mapping(value, at, "a table with the key 'name'")
    # The name: the table's own, or else that of the default
    name = table.get("name", choice.name_of(start))
    if not isinstance(name, str) or name not in choice.options:
        close = suggestion(short(name) if isinstance(name, str) else "", choice.options)
        raise at.error(f"{at.key('name').path} = {show(name)} is unknown{close}")
    return _build(choice.options[name], table, at, start, tags=("name",))


def to_dict(instance: object) -> Table:
    """Write a dataclass as a nested dict that JSON and TOML can hold.

    Args:
        instance: The dataclass.

    Returns:
        Its fields: None is "none", a tuple a list, and the table of a Choice has its name first.

    Raises:
        RecipeError: The instance holds what could not be read back.
    """
    # Checked first, so that whatever is written down can be read back
    check(instance)
    return cast(Table, _plain(instance, None))


def _plain(value: object, choice: Choice | None) -> object:
    if isinstance(value, tuple):
        return [_plain(item, choice) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, choice) for key, item in value.items()}
    if is_dataclass(value):
        hints = hints_of(type(value))
        table = {name: _plain(getattr(value, name), choice_in(hint)) for name, hint in hints.items()}
        return table if choice is None else {"name": choice.name_of(value), **table}
    # TOML has no null
    return "none" if value is None else value


def describe(instance: object) -> list[Row]:
    """List every setting of a dataclass.

    Args:
        instance: The dataclass.

    Returns:
        (dotted key, type in words, value) of each; the keys are those of `flatten(to_dict(instance))`.

    Raises:
        RecipeError: The instance holds what could not be read back.
    """
    check(instance)
    rows = _rows(type(instance), instance, "")
    return [(path.removeprefix("."), kind, text) for path, kind, text in rows]


def _rows(hint: object, value: object, path: str) -> Iterator[Row]:
    choice = choice_in(hint)
    # A table: the name that chose it, then its settings
    if is_dataclass(value):
        if choice is not None:
            yield f"{path}.name", " | ".join(choice.options), choice.name_of(value) or ""
        for name, inner in hints_of(type(value)).items():
            yield from _rows(inner, getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict) and value:
        # Free keys, each of which may be a table; a dict may stand inside `| None`
        inner = next(get_args(kind)[1] for kind in (hint, *get_args(hint)) if get_origin(kind) is dict)
        for key, item in value.items():
            yield from _rows(inner, item, f"{path}.{key_text(key)}")
    else:
        yield path, type_text(hint), value_text(_plain(value, choice))
