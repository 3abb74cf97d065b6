"""Data sets. `DATASETS` maps the name in a recipe's [data] table to the configuration that loads one."""

from __future__ import annotations

from torchcaps.data.base import (
    DataConfig,
    Dataset,
    Place,
    Splits,
    check_splits,
    epoch_order,
    hold_out,
    place_of,
    subset,
    take,
)
from torchcaps.data.builtin import GlyphsConfig
from torchcaps.data.sets import AffnistConfig, Cifar10Config, FashionMnistConfig, MnistConfig, MultiMnistConfig
from torchcaps.data.smallnorb import SmallNorbConfig
from torchcaps.data.user_data import FolderConfig, NpzConfig

__all__ = [
    "DATASETS",
    "AffnistConfig",
    "Cifar10Config",
    "DataConfig",
    "Dataset",
    "FashionMnistConfig",
    "FolderConfig",
    "GlyphsConfig",
    "MnistConfig",
    "MultiMnistConfig",
    "NpzConfig",
    "Place",
    "SmallNorbConfig",
    "Splits",
    "check_splits",
    "epoch_order",
    "hold_out",
    "place_of",
    "subset",
    "take",
]

DATASETS: dict[str, type] = {
    "glyphs": GlyphsConfig,
    "mnist": MnistConfig,
    "fashion-mnist": FashionMnistConfig,
    "smallnorb": SmallNorbConfig,
    "affnist": AffnistConfig,
    "multimnist": MultiMnistConfig,
    "cifar10": Cifar10Config,
    "folder": FolderConfig,
    "npz": NpzConfig,
}
