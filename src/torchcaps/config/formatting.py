"""Values, keys, types and errors, each on one short line of text; and the value that a text is."""

from __future__ import annotations

import re
import tomllib
import types
from dataclasses import dataclass, replace
from typing import Literal, Union, get_args, get_origin

from torchcaps.config.schema import Choice, Range, Scalar, hints_of, split_marks
from torchcaps.errors import RecipeError

SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}

# Python reads these numbers, TOML does not: .5, -.5, 5., 5.e3
_OPEN_FLOAT = re.compile(r"[+-]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*\.)(?:[eE][+-]?[0-9]+)?")


def short(text: str, limit: int = 60) -> str:
    """Return the text, or its start and three dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show(value: object) -> str:
    """Return a short repr on one line; a number of 5000 digits or a list 1000 deep has no repr."""
    try:
        return short(" ".join(repr(value).splitlines()))
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"


def quote(text: str) -> str:
    """Write a TOML basic string."""
    # Backslashes first, or those of the escaped quotes would be doubled
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text) + '"'


def key_text(key: str) -> str:
    """Write a key as TOML does: bare where it can be, else in quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else quote(key)


def value_text(value: object, *, bare: bool = True) -> str:
    """Write a plain value as a person types it after a flag: `parse_value(value_text(x)) == x`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # Bare only if it reads back as the same text: "3" and "true" need quotes
        keep = bare and value.isprintable() and not value.startswith("--") and parse_value(value) == value
        return value if keep and value else quote(value)
    if isinstance(value, list):
        return "[" + ", ".join(value_text(v, bare=False) for v in value) + "]"
    return show(value)


def parse_value(text: str) -> Scalar | list[object]:
    """Return the TOML value or the Python number that the whole text is, else the text itself.

    >>> [parse_value(text) for text in ("1_000", "-.5", "5.", "true", "[1, 2]", "margin")]
    [1000, -0.5, 5.0, True, [1, 2], 'margin']
    """
    try:
        if _OPEN_FLOAT.fullmatch(text):
            return float(text)
        data = tomllib.loads("v = {v = " + text + "}")  # an inline table ends comments and line breaks
    except (ValueError, RecursionError):
        return text
    value = data["v"]["v"]
    # Text such as `1}\nx = {y = 2` is no single value; dates and tables are, but no setting has such a type
    whole = data == {"v": {"v": value}} and isinstance(value, bool | int | float | str | list)
    return value if whole else text


def type_text(hint: object, *, plural: str = "") -> str:
    """Write an annotation in words: `whole number, at least 1`, `list of 2: number, number`."""
    base, marks = split_marks(hint)
    origin = get_origin(base)
    args = get_args(base)
    # Choices and literals list what may be written
    for mark in marks:
        if isinstance(mark, Choice):
            return f"table by name ({' | '.join(mark.options)})"
    if origin is Literal:
        return " | ".join(map(value_text, args))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if arg is types.NoneType else type_text(arg) for arg in args)
    # Containers
    if origin is tuple and args[-1:] == (...,):
        return f"list of {type_text(args[0], plural='s')}"
    if origin is tuple and len(set(args)) == 1:
        return f"list of {len(args)} {type_text(args[0], plural='s')}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(map(type_text, args))}"
    if origin is dict:
        return f"table of free keys, each {type_text(args[1])}"
    # Dataclasses and scalars
    if not isinstance(base, type) or base not in SCALARS:
        return f"table of {', '.join(hints_of(base))}"
    name = SCALARS[base] + ("" if base is bool else plural)
    return ", ".join([name, *(str(mark) for mark in marks if isinstance(mark, Range))])


@dataclass(frozen=True)
class Place:
    """Where in a recipe a value stands, for the error line.

    Attributes:
        where: Name of the recipe.
        path: Dotted key.
        built: True if the values are Python objects, not TOML.
        also: ` or none` where None is allowed too, ` or None` in Python.
    """

    where: str = ""
    path: str = ""
    built: bool = False
    also: str = ""

    def key(self, name: str) -> Place:
        """Return the place of a table's key."""
        last = short(key_text(name))
        return replace(self, path=f"{self.path}.{last}" if self.path else last, also="")

    def error(self, text: str) -> RecipeError:
        """Return the error whose line starts with the recipe's name, if it has one."""
        return RecipeError(f"recipe {self.where!r}: {text}" if self.where else text)

    def wrong(self, value: object, wanted: str) -> RecipeError:
        """Return the error `train.batch = 'many' is not a whole number`."""
        subject = f"{self.path} = {show(value)}" if self.path else show(value)
        return self.error(f"{subject} is not {wanted}{self.also}")
