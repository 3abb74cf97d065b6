"""Dataclass -> plain data: a nested dict to write down, or rows of text to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from typing import get_args, get_origin

from torchcaps.config.constraints import Choice, Table
from torchcaps.config.convert import check
from torchcaps.config.formatting import key_text, type_text, value_text
from torchcaps.config.schema import choice_in, default_of, hints_of, split_marks

__all__ = ["describe", "to_dict"]

Row = tuple[str, str, str]  # dotted key, type in words, value


def to_dict(instance: object) -> Table:
    """Return a nested dict that JSON and TOML can hold: None is "none", a tuple a list, a Choice has its name first.

    Raises:
        RecipeError: The instance holds what could not be read back.
    """
    # Checked first, so that whatever is written down can be read back
    check(instance)
    return _table(instance)


def _table(instance: object) -> Table:
    hints = hints_of(type(instance))
    return {name: _plain(getattr(instance, name), choice_in(hint)) for name, hint in hints.items()}


def _plain(value: object, choice: Choice | None) -> object:
    # TOML has no null
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return [_plain(item, choice) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, choice) for key, item in value.items()}
    # `is_dataclass` is true of the class itself, too
    if not is_dataclass(value) or isinstance(value, type):
        return value
    if choice and (name := choice.name_of(value)) is not None:
        return {choice.key: name, **_table(value)}
    return _table(value)


def describe(target: object) -> list[Row]:
    """List every setting (dotted key, type in words, value): a class's defaults or an instance's values.

    The keys of an instance are those of `flatten(to_dict(instance))`.
    """
    if isinstance(target, type):
        return list(_rows(target, None, ""))
    check(target)
    return list(_rows(type(target), target, ""))


def _rows(cls: type, instance: object, prefix: str) -> Iterator[Row]:
    for name, hint in hints_of(cls).items():
        yield from _field_rows(hint, default_of(cls, name, instance), prefix + name)


def _field_rows(hint: object, value: object, path: str) -> Iterator[Row]:
    base = split_marks(hint)[0]
    choice = choice_in(hint)
    # A table: the name that chose it, unless the dataclass has it as a field, then its settings
    if is_dataclass(value) and not isinstance(value, type):
        if choice and choice.key not in hints_of(type(value)):
            yield f"{path}.{choice.key}", " | ".join(choice.options), choice.name_of(value) or ""
        yield from _rows(type(value), value, f"{path}.")
    # Free keys, each of which may be a table; a dict may stand inside `| None`
    elif isinstance(value, dict) and value:
        inner = next(get_args(kind)[1] for kind in (base, *get_args(base)) if get_origin(kind) is dict)
        for key, item in value.items():
            yield from _field_rows(inner, item, f"{path}.{key_text(key)}")
    # A plain value
    elif value is not MISSING:
        yield path, type_text(hint), value_text(_plain(value, choice))
    # No default: a required table has keys of its own, of which some may have defaults
    elif isinstance(base, type) and is_dataclass(base) and choice is None:
        yield from _rows(base, None, f"{path}.")
    else:
        yield path, type_text(hint), "required"
