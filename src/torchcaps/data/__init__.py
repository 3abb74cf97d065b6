"""Data sets. `DATASETS` maps the name in a recipe's [data] table to the configuration that loads one."""

from __future__ import annotations

from torchcaps.data.augment import Augment, SampleKey
from torchcaps.data.base import (
    BatchPosition,
    DataConfig,
    Dataset,
    RawBatch,
    Splits,
    batch_position,
    check_splits,
    epoch_order,
    hold_out,
    make_batch,
    subset,
)
from torchcaps.data.builtin import GlyphsConfig
from torchcaps.data.preprocess import Preprocess
from torchcaps.data.sets import AffnistConfig, Cifar10Config, FashionMnistConfig, MnistConfig, MultiMnistConfig
from torchcaps.data.smallnorb import SmallNorbConfig
from torchcaps.data.user_data import FolderConfig, GivenConfig, NpzConfig

__all__ = [
    "DATASETS",
    "AffnistConfig",
    "Augment",
    "BatchPosition",
    "Cifar10Config",
    "DataConfig",
    "Dataset",
    "FashionMnistConfig",
    "FolderConfig",
    "GivenConfig",
    "GlyphsConfig",
    "MnistConfig",
    "MultiMnistConfig",
    "NpzConfig",
    "Preprocess",
    "RawBatch",
    "SampleKey",
    "SmallNorbConfig",
    "Splits",
    "batch_position",
    "check_splits",
    "epoch_order",
    "hold_out",
    "make_batch",
    "subset",
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
    "given": GivenConfig,
}
