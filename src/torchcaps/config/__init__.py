"""Configuration is data: TOML tables and flags in, frozen dataclasses out, and every slip named in one line.

The field's annotation is the whole schema, so that a setting is declared once:

    @dataclass(frozen=True)
    class Train:
        batch: Count = 128                                   # whole number, at least 1
        decay: Share | None = None                           # number from 0 to 1, or "none"
        loss: Literal["margin", "spread"] = "margin"
        optimizer: Annotated[object, Choice(OPTIMIZERS)] = Adam()   # a table picked by its key `name`

Laws: `from_dict(cls, to_dict(x)) == x`; whatever the data, only `RecipeError` comes out; a key that is left
out keeps the value `describe` shows. An annotation outside the list in `convert.py` is a `TypeError`.

Imports inside go one way: schema < formatting < convert, and formatting < loading.
"""

from __future__ import annotations

from torchcaps.config.convert import check, describe, from_dict, to_dict
from torchcaps.config.loading import flatten, merge, parse_overrides, read_toml
from torchcaps.config.schema import (
    Choice,
    Count,
    Iterations,
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    Padding,
    PositiveFloat,
    Range,
    Seed,
    Share,
    SignedFloat,
    Size,
    Sizes,
    Table,
)

__all__ = [
    "Choice",
    "Count",
    "Iterations",
    "Length",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Options",
    "Padding",
    "PositiveFloat",
    "Range",
    "Seed",
    "Share",
    "SignedFloat",
    "Size",
    "Sizes",
    "Table",
    "check",
    "describe",
    "flatten",
    "from_dict",
    "merge",
    "parse_overrides",
    "read_toml",
    "to_dict",
]
