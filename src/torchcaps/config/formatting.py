"""Values, keys, types and errors, each on one short line of text."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Union, get_args, get_origin

from torchcaps.config.constraints import Choice, Range, Scalar
from torchcaps.config.schema import first_mark, hints_of, split_marks
from torchcaps.errors import RecipeError

__all__ = ["SCALARS", "Place", "key_text", "quote", "short", "show", "toml_value", "type_text", "value_text"]

SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def short(text: str, limit: int = 60) -> str:
    """The text, or its start and three dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show(value: object) -> str:
    """repr on one line, short; a number of 5000 digits or a list 1000 deep has no repr."""
    try:
        return short(" ".join(repr(value).splitlines()))
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"


def quote(text: str) -> str:
    """A TOML basic string."""
    # Backslashes first, or those of the escaped quotes would be doubled
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text) + '"'


def key_text(key: object) -> str:
    """A key as TOML writes it: bare where it can be, else in quotes."""
    text = key if isinstance(key, str) else show(key)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else quote(text)


def value_text(value: object, *, bare: bool = True) -> str:
    """A plain value as a person types it after a flag: `toml_value(value_text(x)) == x`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # Bare only if it reads back as the same text: "3" and "true" need quotes
        keep = bare and value.isprintable() and not value.startswith("--") and toml_value(value) == value
        return value if keep and value else quote(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key_text(k)} = {value_text(v, bare=False)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(value_text(v, bare=False) for v in value) + "]"
    return show(value)


def toml_value(text: str) -> Scalar | list[object]:
    """The TOML value that the whole text is, else the text; an inline table ends comments and line breaks."""
    try:
        data = tomllib.loads("v = {v = " + text + "}")
    except (ValueError, RecursionError):
        return text
    # Text such as `1}\nx = {y = 2` closes our table and opens another: that is no single value
    if data.keys() != {"v"} or data["v"].keys() != {"v"}:
        return text
    # Dates and tables are TOML values, too, but no setting has such a type
    value = data["v"]["v"]
    return value if isinstance(value, (bool, int, float, str, list)) else text


def type_text(hint: object, *, plural: str = "") -> str:
    """The annotation in words: `whole number, at least 1`, `list of 2: number, number`."""
    base, marks = split_marks(hint)
    origin = get_origin(base)
    args = get_args(base)
    # Choices and literals list what may be written
    if choice := first_mark(Choice, marks):
        return f"table by {choice.key} ({' | '.join(choice.options)})"
    if origin is Literal:
        return " | ".join(map(value_text, args))
    if origin in (Union, types.UnionType):
        kinds = [type_text(arg) for arg in args if arg is not types.NoneType]
        return " or ".join(kinds + ["none"] * (types.NoneType in args))
    # Containers
    if origin is tuple and args[-1:] == (...,):
        return f"list of {type_text(args[0], plural='s')}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(map(type_text, args))}"
    if origin is dict:
        return f"table of free keys, each {type_text(args[1])}"
    # Dataclasses and scalars
    if not isinstance(base, type):
        raise TypeError(f"a setting cannot have the type {hint!r}")
    if base not in SCALARS:
        return f"table of {', '.join(hints_of(base))}"
    name = SCALARS[base] + ("" if base is bool else plural)
    return ", ".join([name, *(str(mark) for mark in marks if isinstance(mark, Range))])


@dataclass(frozen=True)
class Place:
    """Where in a recipe we are, for the error line; `built` if the values are Python objects, not TOML."""

    where: str = ""
    path: str = ""
    built: bool = False
    also: str = ""  # " or none"

    def key(self, name: object) -> Place:
        """The place of a table's key."""
        part = short(key_text(name))
        return replace(self, path=f"{self.path}.{part}" if self.path else part, also="")

    def item(self, index: int) -> Place:
        """The place of a list's item."""
        return replace(self, path=f"{self.path}[{index}]", also="")

    def error(self, text: str) -> RecipeError:
        """The error line, which starts with the recipe's name if it has one."""
        return RecipeError(f"recipe {self.where!r}: {text}" if self.where else text)

    def wrong(self, value: object, wanted: str) -> RecipeError:
        """`train.batch = 'many' is not a whole number`."""
        subject = f"{self.path} = {show(value)}" if self.path else show(value)
        return self.error(f"{subject} is not {wanted}{self.also}")
