"""Data sets. `DATASETS` maps the name in a recipe's [data] table to the configuration that loads one."""

from __future__ import annotations

from torchcaps.data.base import DataConfig, Dataset, Place, Splits, check_splits, epoch_order, place_of, take
from torchcaps.data.builtin import GlyphsConfig

__all__ = [
    "DATASETS",
    "DataConfig",
    "Dataset",
    "GlyphsConfig",
    "Place",
    "Splits",
    "check_splits",
    "epoch_order",
    "place_of",
    "take",
]

DATASETS: dict[str, type] = {
    "glyphs": GlyphsConfig,
}
