"""Where settings come from, as plain nested dicts: TOML files and flags; and how two such dicts become one."""

from __future__ import annotations

import errno
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchcaps.config.formatting import Place, key_text, parse_value, quote, show
from torchcaps.config.schema import Table
from torchcaps.errors import RecipeError
from torchcaps.utils.files import read_regular

__all__ = ["flatten", "merge", "parse_overrides", "read_toml"]

MAX_BYTES = 1_000_000  # of a recipe
MAX_DEPTH = 32  # of tables inside tables

# A dotted key of more than MAX_DEPTH dots: tomllib would take hours over a megabyte of them.
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP = re.compile(rf"(?<![\w-])(?:{_PART}){{{MAX_DEPTH + 1}}}")


def read_toml(path: Path) -> Table:
    """Read the tables of a TOML file of at most 1 MB.

    Args:
        path: The file, in UTF-8.

    Returns:
        Its tables, at most 32 inside each other.

    Raises:
        RecipeError: There is no such file, it is too large or nested too deeply, or it is not TOML.
    """
    at = Place(str(path))
    try:
        raw = read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        raise at.error("no such file; give the path of a .toml recipe") from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EFBIG:
            raise at.error(f"larger than {MAX_BYTES} bytes; a recipe holds settings, not data") from None
        raise at.error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise at.error(f"not UTF-8 text (at line {line}); save it as UTF-8") from error
    return _parse_toml(text, at)


def _parse_toml(text: str, at: Place) -> Table:
    # Dots are counted before tomllib reads them (see _DEEP); its own errors become one line
    if _DEEP.search(text):
        raise at.error(f"a name has more than {MAX_DEPTH} dots; give fewer levels")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise at.error("not TOML that can be read: values are nested too deeply") from None
    except ValueError as error:
        raise at.error(f"not TOML: {' '.join(str(error).split())}") from error
    # A header such as [a.b], the dotted key below it and the inline table that it holds add up.
    if _depth(data) > MAX_DEPTH + 1:
        raise at.error(f"tables are nested more than {MAX_DEPTH} deep; give fewer levels")
    return data


def _depth(value: object) -> int:
    return 1 + max(map(_depth, value.values()), default=0) if isinstance(value, dict) else 0


def parse_overrides(args: Sequence[str]) -> Table:
    """Parse flags: `--train.batch 64 --train.save-every=2` -> {"train": {"batch": 64, "save_every": 2}}.

    A value is a number as TOML or Python writes it, true or false, an array or a quoted string, else bare text.

    Args:
        args: Words of the command line.

    Returns:
        Nested tables; of a flag that is given twice, the last value.

    Raises:
        RecipeError: A word is not a flag, a flag has no value, or one names both a value and a table.
    """
    result: Table = {}
    for flag, text in _pairs(args):
        # Flags are typed with dashes, keys have underscores
        *tables, last = flag[2:].replace("-", "_").split(".")
        node = result
        for name in tables:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise RecipeError(f"{flag}: {quote(name)} is given both a value and settings inside it")
        # --train 3 after --train.batch 64 would throw the first away
        if isinstance(node.get(last), dict):
            raise RecipeError(f"{flag}: {quote(last)} is given both a value and settings inside it")
        node[last] = parse_value(text)
    return result


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, text of its value); a value may start with one dash (`-1`), with two only after `=`."""
    words = iter(args)
    for word in words:
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise RecipeError(f"{show(word)} stands alone; settings are given as --key value")
        if not re.fullmatch(rf"--[\w-]+(\.[\w-]+){{0,{MAX_DEPTH - 1}}}", flag):
            raise RecipeError(f"{show(flag)} names no setting; settings are given as --table.key value")
        # The value: after `=`, or else the next word
        text = text if equals else next(words, "--")
        if not equals and text.startswith("--"):
            raise RecipeError(f"{flag} has no value; write {flag} VALUE")
        yield flag, text


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> Table:
    """Merge two nested tables into new dicts: tables key by key, lists and values as a whole.

    Rule of the name: if both have a table, both tables have a `name` and the two differ, then the table of
    `over` replaces the other whole, since the settings of one Choice mean nothing to another.

    Args:
        base: Tables.
        over: Tables that win over those of `base`.

    Returns:
        New dicts; neither argument is changed.
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
    """Name every value by its dotted key: {"a": {"b": 1}} -> {"a.b": 1}.

    Args:
        data: Nested tables.

    Returns:
        One table; an empty table in it stays, a key with a dot is quoted as in TOML.
    """
    flat: Table = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key_text(key)}.{name}": item for name, item in flatten(value).items()}
        else:
            flat[key_text(key)] = value
    return flat
