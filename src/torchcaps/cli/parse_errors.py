"""Turn what tyro prints about a wrong command line, boxes of many lines, into an error of one line."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Literal, get_args, get_origin, get_type_hints

from torchcaps.config.formatting import type_text
from torchcaps.errors import RecipeError, suggestion

__all__ = ["one_line_errors"]

_REFUSED = 2
"""What tyro exits with if it refuses; after --help it is 0."""

_COLOR = re.compile(r"\x1b\[[\d;]*m")
"""Terminals get boxes in color."""

_ROW = re.compile(r"[│ ] (.*?)[│ ]*")
"""A line of a box, whose text is the group; where output is not UTF-8, the frame consists of spaces."""

_RULE = re.compile(r"[│ ] [─-]{5}")
"""How the line begins that parts the message from the help."""

_MISSING = re.compile(r" {4}(\S.*)")
"""A row of the box of what is missing: names are indented by four spaces, their help by eight."""

_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(\S+)'")
_VALUE = re.compile(r"Error parsing (\S+):|Missing value for argument '(\S+)'")
"""How tyro names the argument that it refuses; names of one flag, the longest last, have slashes between them."""


@contextlib.contextmanager
def one_line_errors(command: type, name: str, words: Sequence[str]) -> Iterator[None]:
    """Raise an error of one line where tyro, called inside, prints a box and exits.

    Args:
        command: Class of the command that is parsed.
        name: Its name on the command line.
        words: What was typed after it.

    Raises:
        RecipeError: tyro refused the words.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        if stop.code != _REFUSED:
            raise
        raise RecipeError(_explain(printed.getvalue(), command, name, words)) from None


def _explain(box: str, command: type, name: str, words: Sequence[str]) -> str:
    """Say in one line what a box says."""
    # The message comes first; the help below the rule is left out
    lines = takewhile(lambda line: not _RULE.match(line), _COLOR.sub("", box).splitlines())
    rows = [found[1] for line in lines if (found := _ROW.fullmatch(line))]
    text = " ".join(" ".join(rows).split())
    hints = get_type_hints(command)
    # What is required was left out: the first example of the command has it
    missing = [found[1] for row in rows if (found := _MISSING.fullmatch(row))]
    if text.startswith("Missing from") and missing:
        example = re.search(r"Example: (.+)", inspect.getdoc(command) or "")
        return f"no {' and no '.join(missing)} is given" + (f"; write it as in: {example[1]}" if example else "")
    # A value is none of those that are known, is of the wrong type, or was left out
    if found := _CHOICE.search(text):
        return f"{found[2]} {found[1]} is unknown{suggestion(found[1], _choices(hints.get(_field(found[2]))))}"
    if found := _VALUE.search(text):
        flags = (found[1] or found[2]).split("/")
        given = " ".join(_values(flags, words))
        if not given:
            return f"{flags[-1]} has no value; write {flags[-1]} VALUE"
        wanted = type_text(hints[_field(flags[-1])]).removeprefix("list of ").removesuffix(" or none")
        return f"{flags[-1]} {given} came; wanted: {wanted}"
    # Whatever else tyro refuses is said in its own words
    return f"{text or ' '.join(box.split())}; torchcaps {name} --help says what is wanted"


def _field(flag: str) -> str:
    """Return the name of the field behind a flag."""
    return flag.removeprefix("--").replace("-", "_")


def _choices(hint: object) -> list[str]:
    """Return the words that an annotation allows, also inside of `| None` and tuples."""
    inner = get_args(hint)
    return [*map(str, inner)] if get_origin(hint) is Literal else [word for one in inner for word in _choices(one)]


def _values(flags: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return what was typed after a flag, which has one of several names."""
    for n, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return [value] if equals else list(takewhile(lambda one: not one.startswith("--"), words[n + 1 :]))
    return []
