"""Where settings come from, as plain nested dicts: TOML files and flags; and how two such dicts become one."""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchcaps.config.constraints import Table
from torchcaps.config.formatting import Place, key_text, quote, show, toml_value
from torchcaps.errors import RecipeError

__all__ = ["flatten", "merge", "parse_overrides", "read_toml"]

MAX_BYTES = 1_000_000  # of a recipe
MAX_DEPTH = 32  # of tables inside tables

# A dotted key of more than MAX_DEPTH dots: tomllib would take hours over a megabyte of them.
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP = re.compile(rf"(?<![\w-])(?:{_PART}){{{MAX_DEPTH + 1}}}")


def read_toml(path: Path) -> Table:
    """The tables of a TOML file of at most 1 MB; RecipeError if there is none to be had."""
    at = Place(str(path))
    raw = _read(path, at)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise at.error(f"not UTF-8 text (at line {line}); save it as UTF-8") from error
    return _parse_toml(text, at)


def _read(path: Path, at: Place) -> bytes:
    try:
        # One byte more than allowed tells a file that is too large, without reading the rest
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise at.error("no such file; give the path of a .toml recipe") from None
    except (OSError, ValueError) as error:
        raise at.error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise at.error(f"larger than {MAX_BYTES} bytes; a recipe holds settings, not data")
    return raw


def _parse_toml(text: str, at: Place) -> Table:
    # Dots are counted before tomllib reads them (see _DEEP); its own errors become one line
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
    # Depth, level by level: recursion over nested tables could itself run too deep
    level: list[Table] = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [item for table in level for item in table.values() if isinstance(item, dict)]
    if level:
        raise at.error(f"tables are nested more than {MAX_DEPTH} deep; give fewer levels")
    return data


def parse_overrides(args: Sequence[str]) -> Table:
    """`--train.batch 64 --train.save-every=2` -> {"train": {"batch": 64, "save_every": 2}}; the last wins.

    A value is TOML where it parses as a number, true or false, an array or a quoted string, else bare text.
    """
    result: Table = {}
    for flag, text in _pairs(args):
        # Flags are typed with dashes, keys have underscores
        *tables, last = flag[2:].replace("-", "_").split(".")
        node = result
        for part in tables:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise _both(flag, part)
        # --train 3 after --train.batch 64 would throw the first away
        if isinstance(node.get(last), dict):
            raise _both(flag, last)
        node[last] = toml_value(text)
    return result


def _both(flag: str, part: str) -> RecipeError:
    return RecipeError(f"{flag}: {quote(part)} is given both a value and settings inside it")


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, text of its value); a value may start with one dash (`-1`), with two only after `=`."""
    words = deque(args)
    while words:
        word = words.popleft()
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise RecipeError(f"{show(word)} stands alone; settings are given as --key value")
        # The name
        parts = flag[2:].split(".")
        if not all(re.fullmatch(r"[\w-]+", part) for part in parts) or len(parts) > MAX_DEPTH:
            raise RecipeError(f"{show(flag)} names no setting; settings are given as --table.key value")
        # The value: after `=`, or else the next word
        if not equals:
            if not words or words[0].startswith("--"):
                raise RecipeError(f"{flag} has no value; write {flag} VALUE")
            text = words.popleft()
        yield flag, text


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> Table:
    """Deep merge into new dicts, where `over` wins: tables key by key, lists and values as a whole.

    Rule of the name: if both have a table, both tables have a `name` and the two differ, then the table of
    `over` replaces the other whole, since the settings of one Choice mean nothing to another.
    """
    # Copied to the bottom, so that changes of the result never reach `base`
    result = {key: merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        if isinstance(value, Mapping):
            old = result.get(key)
            value = merge(old if isinstance(old, dict) and not _renamed(old, value) else {}, value)
        result[key] = value
    return result


def _renamed(old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    return "name" in old and "name" in new and old["name"] != new["name"]


def flatten(data: Mapping[str, object]) -> Table:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty table stays, a key with a dot is quoted as in TOML."""
    flat: Table = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key_text(key)}.{name}": item for name, item in flatten(value).items()}
        else:
            flat[key_text(key)] = value
    return flat
