"""Configuration is data: TOML tables and flags in, frozen dataclasses out, and every slip named in one line.

The field's annotation is the whole schema, so that a setting is declared once:

    @dataclass(frozen=True)
    class Train:
        batch: Count = 128                                   # whole number, at least 1
        decay: Share | None = None                           # number from 0 to 1, or "none"
        loss: Literal["margin", "spread"] = "margin"
        optimiser: Annotated[object, Choice(OPTIMISERS)] = Adam()   # a table picked by its key `name`

Laws: `from_dict(cls, to_dict(x)) == x`; whatever the data, only `RecipeError` comes out; a key that is left
out keeps the value `describe` shows. An annotation outside the list in `_convert` is a `TypeError`.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchcaps.errors import RecipeError, nearest

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
    "check",
    "describe",
    "flatten",
    "from_dict",
    "merge",
    "parse_overrides",
    "read_toml",
    "to_dict",
]

T = TypeVar("T")

MAX_BYTES = 1_000_000  # of a recipe
MAX_DEPTH = 32  # of tables inside tables


# --- What an annotation may say -----------------------------------------------------------------------------


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
Options = dict[str, Scalar]  # free keys, e.g. what an optimiser takes


@functools.cache
def _schema(cls: Any) -> tuple[dict[str, Any], dict[str, Field[Any]]]:
    """Name -> annotation and name -> field, of the fields that the constructor takes."""
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise TypeError(f"{cls!r} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    taken = {field.name: field for field in fields(cls) if field.init}
    return {name: hints[name] for name in taken}, taken


def _hints(cls: Any) -> dict[str, Any]:
    return _schema(cls)[0]


def _default(cls: Any, name: str, start: object) -> Any:
    """The value of a field that is left out: that of `start`, else the class's default, else MISSING."""
    if start is not None:
        return getattr(start, name)
    field = _schema(cls)[1][name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Annotated[base, *marks] -> (base, marks)."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _choice(hint: Any) -> Choice | None:
    """The Choice of an annotation, also inside `| None`, tuples and dicts."""
    base, marks = _split(hint)
    inner = (_choice(arg) for arg in get_args(base) if get_origin(base) is not Literal)
    return next((mark for mark in (*marks, *inner) if isinstance(mark, Choice)), None)


# --- One line of text ---------------------------------------------------------------------------------------


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _show(value: object) -> str:
    """repr on one line, short; a number of 5000 digits or a list 1000 deep has no repr."""
    try:
        return _short(" ".join(repr(value).splitlines()))
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"


def _quote(text: str) -> str:
    """A TOML basic string."""
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text) + '"'


def _part(key: object) -> str:
    """A key as TOML writes it: bare where it can be, else in quotes."""
    text = key if isinstance(key, str) else _show(key)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quote(text)


def _text(value: Any, *, bare: bool = True) -> str:
    """A plain value as a person types it after a flag: `_toml_value(_text(x)) == x`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        keep = bare and value.isprintable() and not value.startswith("--") and _toml_value(value) == value
        return value if keep and value else _quote(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_part(k)} = {_text(v, bare=False)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_text(v, bare=False) for v in value) + "]"
    return _show(value)


_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def _type_text(hint: Any, *, plural: str = "") -> str:
    """The annotation in words: `whole number, at least 1`, `list of 2: number, number`."""
    base, marks = _split(hint)
    origin, args = get_origin(base), get_args(base)
    if choice := next((mark for mark in marks if isinstance(mark, Choice)), None):
        return f"table by {choice.key} ({' | '.join(choice.options)})"
    if origin is Literal:
        return " | ".join(map(_text, args))
    if origin in (Union, types.UnionType):
        kinds = [_type_text(arg) for arg in args if arg is not types.NoneType]
        return " or ".join(kinds + ["none"] * (types.NoneType in args))
    if origin is tuple and args[-1:] == (...,):
        return f"list of {_type_text(args[0], plural='s')}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(map(_type_text, args))}"
    if origin is dict:
        return f"table of free keys, each {_type_text(args[1])}"
    if base not in _NAMES:
        return f"table of {', '.join(_hints(base))}"
    name = _NAMES[base] + ("" if base is bool else plural)
    return ", ".join([name, *(str(mark) for mark in marks if isinstance(mark, Range))])


@dataclass(frozen=True)
class _Place:
    """Where in a recipe we are, for the error line; `built` if the values are Python objects, not TOML."""

    where: str = ""
    path: str = ""
    built: bool = False
    also: str = ""  # " or none"

    def key(self, name: object) -> _Place:
        part = _short(_part(name))
        return replace(self, path=f"{self.path}.{part}" if self.path else part, also="")

    def item(self, index: int) -> _Place:
        return replace(self, path=f"{self.path}[{index}]", also="")

    def error(self, text: str) -> RecipeError:
        return RecipeError(f"recipe {self.where!r}: {text}" if self.where else text)

    def wrong(self, value: object, wanted: str) -> RecipeError:
        subject = f"{self.path} = {_show(value)}" if self.path else _show(value)
        return self.error(f"{subject} is not {wanted}{self.also}")


# --- Plain data -> dataclass --------------------------------------------------------------------------------


def from_dict(cls: type[T], data: Mapping[str, Any], *, where: str = "") -> T:
    """The dataclass that a plain nested mapping describes; `where` names the recipe in errors."""
    at = _Place(where)
    try:
        result: T = _build(cls, data, at)
    except RecursionError:
        raise at.error("tables are nested too deeply; give fewer levels") from None
    return result


def check(instance: object, *, where: str = "") -> None:
    """The same checks for a dataclass built in Python: there tuples, None and dataclasses are themselves.

    Builds nothing, so that a `__post_init__` may call it.
    """
    at = _Place(where, built=True)
    for name, hint in _hints(type(instance)).items():
        _convert(hint, getattr(instance, name), at.key(name))


def _build(cls: Any, data: Any, at: _Place, start: object = None, tag: str = "") -> Any:
    """One table -> `cls`; `start` gives the keys left out, `tag` is the Choice key, which is not a field."""
    if not isinstance(data, Mapping):
        raise at.wrong(data, "a table")
    hints = _hints(cls)
    known = {*hints, tag} - {""}
    for key in data:
        if key not in known:
            text = _short(key if isinstance(key, str) else _show(key))
            raise at.error(f"unknown key '{at.key(key).path}'{nearest(text, known)}")
    values = {name: _field(cls, name, data, at.key(name), start) for name in hints}
    try:
        return cls(**values)
    except ValueError as error:  # from a __post_init__
        prefix = f"{at.path}: " if at.path else ""
        raise at.error(prefix + " ".join(str(error).split())) from error


def _field(cls: Any, name: str, data: Mapping[str, Any], at: _Place, start: object) -> Any:
    hint, default = _hints(cls)[name], _default(cls, name, start)
    if name in data:
        inner = default if is_dataclass(default) else None
        return _convert(hint, data[name], at, inner)
    if default is MISSING:
        raise at.error(f"missing key '{at.path}'; wanted: {_type_text(hint)}")
    return default


def _convert(hint: Any, value: Any, at: _Place, start: object = None) -> Any:
    """The value that the annotation asks for, or RecipeError."""
    base, marks = _split(hint)
    if choice := next((mark for mark in marks if isinstance(mark, Choice)), None):
        return _choose(choice, value, at, start)
    origin, args = get_origin(base), get_args(base)
    if base in _NAMES:
        return _scalar(base, value, at, marks)
    if any(isinstance(mark, (Range, NonFinite)) for mark in marks):
        raise TypeError(f"{at.path}: {marks!r} must stand directly on a number, not on {base!r}")
    if origin is Literal:
        return _literal(args, value, at)
    if origin in (Union, types.UnionType):
        return _union(args, value, at, start)
    if origin is tuple:
        return _tuple(args, value, at)
    if origin is dict and args[0] is str:
        return _dict(args[1], value, at)
    if is_dataclass(base):
        return _nested(base, value, at, start)
    raise TypeError(f"{at.path}: a setting cannot have the type {hint!r}")


def _scalar(base: type, value: Any, at: _Place, marks: tuple[Any, ...]) -> Any:
    """bool, int, float or str: an int may stand for a float, a bool never for a number."""
    accepted: Any = (int, float) if base is float else base
    if not isinstance(value, accepted) or (isinstance(value, bool) and base is not bool):
        raise at.wrong(value, {bool: "true or false", str: "text in quotes"}.get(base, f"a {_NAMES[base]}"))
    if base is float:
        value = _finite(value, at, marks)
    for mark in marks:
        if isinstance(mark, Range) and value not in mark:
            raise at.error(f"{at.path} = {_show(value)} must be {mark}{at.also}")
    return value


def _finite(value: float, at: _Place, marks: tuple[Any, ...]) -> float:
    try:
        result = float(value)
    except OverflowError:
        raise at.wrong(value, "a number that a float can hold") from None
    if not math.isfinite(result) and not any(isinstance(mark, NonFinite) for mark in marks):
        raise at.wrong(value, "a finite number")
    return result


def _literal(allowed: tuple[Any, ...], value: Any, at: _Place) -> Any:
    for option in allowed:
        if type(option) is type(value) and option == value:
            return option
    close = nearest(_short(value), [str(a) for a in allowed]) if isinstance(value, str) else ""
    close = close if close.startswith("; did") else ""  # the known ones are listed already
    raise at.error(f"{at.path} = {_show(value)} is not one of {', '.join(map(_text, allowed))}{at.also}{close}")


def _union(args: tuple[Any, ...], value: Any, at: _Place, start: object) -> Any:
    """X | None also reads "none", since TOML has no null; of several X that of the value's own type wins."""
    members = [arg for arg in args if arg is not types.NoneType]
    if len(members) < len(args):
        at = replace(at, also=" or none")
        written = isinstance(value, str) and value == "none"
        if written and at.built:
            raise at.error(f"{at.path} = 'none' would be read back as no value; use None")
        if written or value is None:
            return None
    if len(members) == 1:
        return _convert(members[0], value, at, start)
    for member in sorted(members, key=lambda member: _split(member)[0] is not type(value)):
        try:
            return _convert(member, value, at)
        except RecipeError:
            continue
    raise at.wrong(value, " or ".join(map(_type_text, members)))


def _tuple(args: tuple[Any, ...], value: Any, at: _Place) -> tuple[Any, ...]:
    if not isinstance(value, tuple if at.built else (list, tuple)):
        raise at.wrong(value, "a tuple" if at.built else "a list in [ ]")
    hints = (args[0],) * len(value) if args[-1:] == (...,) else args
    if len(value) != len(hints):
        raise at.wrong(value, f"a list of {len(hints)}")
    return tuple(_convert(h, v, at.item(n)) for n, (h, v) in enumerate(zip(hints, value, strict=True)))


def _dict(hint: Any, value: Any, at: _Place) -> dict[str, Any]:
    if not isinstance(value, dict if at.built else Mapping):
        raise at.wrong(value, "a table")
    for key in value:
        if not isinstance(key, str):
            raise at.error(f"{at.path} has the key {_show(key)}; wanted: text")
    return {key: _convert(hint, item, at.key(key)) for key, item in value.items()}


def _nested(cls: Any, value: Any, at: _Place, start: object) -> Any:
    if not at.built:
        return _build(cls, value, at, start)
    if type(value) is not cls:
        raise at.wrong(value, f"a {cls.__name__}")
    for name, hint in _hints(cls).items():
        _convert(hint, getattr(value, name), at.key(name))
    return value


def _choose(choice: Choice, value: Any, at: _Place, start: object) -> Any:
    """The table's name picks the class; without one, or with the same, `start` gives what is left out."""
    if at.built:
        return _chosen(choice, value, at)
    if not isinstance(value, Mapping):
        raise at.wrong(value, f"a table with the key '{choice.key}'")
    key = at.key(choice.key)
    name = value.get(choice.key, choice.name_of(start))
    if name is None:
        raise key.error(f"missing key '{key.path}'; known: {', '.join(sorted(choice.options))}")
    if not isinstance(name, str) or name not in choice.options:
        text = _short(name) if isinstance(name, str) else ""
        raise key.error(f"{key.path} = {_show(name)} is unknown{nearest(text, choice.options)}")
    cls = choice.options[name]
    return _build(cls, value, at, start if type(start) is cls else None, choice.key)


def _chosen(choice: Choice, value: Any, at: _Place) -> Any:
    """The same for an instance: its type must have a name, and its own `key` field, if any, must hold it."""
    name = choice.name_of(value)
    if name is None:
        raise at.wrong(value, f"of a kind with a {choice.key}; known: {', '.join(sorted(choice.options))}")
    if choice.key in _hints(type(value)) and getattr(value, choice.key) != name:
        raise at.key(choice.key).wrong(getattr(value, choice.key), _text(name))
    return _nested(type(value), value, at, None)


# --- Dataclass -> plain data --------------------------------------------------------------------------------


def to_dict(instance: object) -> dict[str, Any]:
    """A nested dict that JSON and TOML can hold: None is "none", a tuple a list, a Choice has its name first.

    The instance is checked first: what could not be read back is refused.
    """
    check(instance)
    return _table(instance)


def _table(instance: object) -> dict[str, Any]:
    hints = _hints(type(instance))
    return {name: _plain(getattr(instance, name), _choice(hint)) for name, hint in hints.items()}


def _plain(value: Any, choice: Choice | None) -> Any:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return [_plain(item, choice) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, choice) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    name = choice.name_of(value) if choice else None
    return {choice.key: name, **_table(value)} if choice and name is not None else _table(value)


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty table stays, a key with a dot is quoted as in TOML."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{_part(key)}.{name}": item for name, item in flatten(value).items()}
        else:
            flat[_part(key)] = value
    return flat


def describe(target: object) -> list[tuple[str, str, str]]:
    """(dotted key, type in words, value) of every setting: a class's defaults or an instance's values.

    The keys of an instance are those of `flatten(to_dict(instance))`.
    """
    if isinstance(target, type):
        return list(_rows(target, None, ""))
    check(target)
    return list(_rows(type(target), target, ""))


def _rows(cls: Any, instance: object, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, hint in _hints(cls).items():
        yield from _field_rows(hint, _default(cls, name, instance), prefix + name)


def _field_rows(hint: Any, value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    base, choice = _split(hint)[0], _choice(hint)
    if is_dataclass(value):
        if choice and choice.key not in _hints(type(value)):
            yield f"{path}.{choice.key}", " | ".join(choice.options), choice.name_of(value) or ""
        yield from _rows(type(value), value, f"{path}.")
    elif isinstance(value, dict) and value:
        inner = next(get_args(kind)[1] for kind in (base, *get_args(base)) if get_origin(kind) is dict)
        for key, item in value.items():
            yield from _field_rows(inner, item, f"{path}.{_part(key)}")
    elif value is not MISSING:
        yield path, _type_text(hint), _text(_plain(value, choice))
    elif is_dataclass(base) and choice is None:
        yield from _rows(base, None, f"{path}.")
    else:
        yield path, _type_text(hint), "required"


# --- Files, flags and their union ---------------------------------------------------------------------------


# A dotted key of more than MAX_DEPTH dots: tomllib would take hours over a megabyte of them.
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP = re.compile(rf"(?<![\w-])(?:{_PART}){{{MAX_DEPTH + 1}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file of at most 1 MB; RecipeError if there is none to be had."""
    at = _Place(str(path))
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise at.error("no such file; give the path of a .toml recipe") from None
    except (OSError, ValueError) as error:
        raise at.error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise at.error(f"larger than {MAX_BYTES} bytes; a recipe holds settings, not data")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise at.error(f"not UTF-8 text (at line {line}); save it as UTF-8") from error
    return _parse_toml(text, at)


def _parse_toml(text: str, at: _Place) -> dict[str, Any]:
    if _DEEP.search(text):
        raise at.error(f"a name has more than {MAX_DEPTH} dots; give fewer levels")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise at.error("not TOML that can be read: values are nested too deeply") from None
    except ValueError as error:
        end = f"at line {max(1, len(text.splitlines()))}, the end of the file"
        reason = " ".join(str(error).replace("at end of document", end).split())
        raise at.error(f"not TOML: {reason}") from error
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [item for table in level for item in table.values() if isinstance(item, dict)]
    if level:
        raise at.error(f"tables are nested more than {MAX_DEPTH} deep; give fewer levels")
    return data


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`--train.batch 64 --train.save-every=2` -> {"train": {"batch": 64, "save_every": 2}}; the last wins.

    A value is TOML where it parses as a number, true or false, an array or a quoted string, else bare text.
    """
    result: dict[str, Any] = {}
    for flag, text in _pairs(args):
        *tables, last = flag[2:].replace("-", "_").split(".")
        node = result
        for part in tables:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise RecipeError(f"{flag}: {_quote(part)} is given both a value and settings inside it")
        if isinstance(node.get(last), dict):
            raise RecipeError(f"{flag}: {_quote(last)} is given both a value and settings inside it")
        node[last] = _toml_value(text)
    return result


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, text of its value); a value may start with one dash (`-1`), with two only after `=`."""
    words = deque(args)
    while words:
        word = words.popleft()
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise RecipeError(f"{_show(word)} stands alone; settings are given as --key value")
        parts = flag[2:].split(".")
        if not all(re.fullmatch(r"[\w-]+", part) for part in parts) or len(parts) > MAX_DEPTH:
            raise RecipeError(f"{_show(flag)} names no setting; settings are given as --table.key value")
        if not equals:
            if not words or words[0].startswith("--"):
                raise RecipeError(f"{flag} has no value; write {flag} VALUE")
            text = words.popleft()
        yield flag, text


def _toml_value(text: str) -> Any:
    """The TOML value that the whole text is, else the text; an inline table ends comments and line breaks."""
    try:
        data = tomllib.loads("v = {v = " + text + "}")
    except (ValueError, RecursionError):
        return text
    if data.keys() != {"v"} or data["v"].keys() != {"v"}:
        return text
    value = data["v"]["v"]
    return value if isinstance(value, (bool, int, float, str, list)) else text


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge into new dicts, where `over` wins: tables key by key, lists and values as a whole.

    Rule of the name: if both have a table, both tables have a `name` and the two differ, then the table of
    `over` replaces the other whole, since the settings of one Choice mean nothing to another.
    """
    result = {key: merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        if not isinstance(value, Mapping):
            result[key] = value
            continue
        old = result.get(key)
        renamed = isinstance(old, dict) and "name" in old and old["name"] != value.get("name", old["name"])
        result[key] = merge({} if renamed or not isinstance(old, dict) else old, value)
    return result
