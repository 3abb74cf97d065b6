"""Every entry of DATASETS: a recipe's table that loads, or one line that says what is missing and what to do."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch

from torchcaps.config import from_dict
from torchcaps.data import DATASETS, BatchPosition, Dataset, epoch_order, make_batch
from torchcaps.data.status import BUILT_IN, USER_DATA, is_here
from torchcaps.errors import DataError
from torchcaps.train import Recipe

EVERY = pytest.mark.parametrize("name", DATASETS)


@EVERY
def test_it_is_a_frozen_table_of_a_recipe_with_a_line_about_it(name):
    config = DATASETS[name]
    assert is_dataclass(config) and config.__dataclass_params__.frozen
    assert (config.__doc__ or "").splitlines()[0].endswith((".", "]."))
    keys = {field.name for field in fields(config)}
    assert "path" in keys or "data_dir" in keys or name in (*BUILT_IN, "given")
    assert type(from_dict(Recipe, {"data": {"name": name}}).data) is config


@EVERY
def test_without_files_one_line_says_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    if name in BUILT_IN:
        assert is_here(name)
        return
    assert not is_here(name)
    with pytest.raises(DataError) as caught:
        DATASETS[name]().load()
    text = str(caught.value)
    assert "\n" not in text and ("--data.path" if name in USER_DATA else "torchcaps data fetch") in text


@EVERY
def test_it_loads_where_its_files_are(name):
    if not is_here(name):
        pytest.skip(f"{name} is not on this machine: set TORCHCAPS_DATA, or run torchcaps data fetch {name}")
    fewer = {"train": 40, "test": 20} if "train" in {field.name for field in fields(DATASETS[name])} else {}
    splits = DATASETS[name](**fewer).load()
    for split in (splits.train, splits.test):
        assert isinstance(split, Dataset) and split.spec == splits.train.spec
        pixels = split.model_input(slice(8))
        assert pixels.shape == (8, *split.spec[:3]) and pixels.dtype == torch.float32
    order = epoch_order(0, 0, len(splits.train))
    batch = make_batch(splits.train, order, BatchPosition(0, 0), 8, seed=0)
    assert batch.images.shape == (8, *splits.train.spec[:3]) and torch.equal(batch.indices, order[:8])
