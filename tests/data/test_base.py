from __future__ import annotations

import pytest
import torch

from torchcaps.data import Dataset, GlyphsConfig, Splits, batch_position, check_splits, epoch_order, make_batch
from torchcaps.data.augment import SampleKey, shift
from torchcaps.errors import DataError


def some(n: int = 20) -> Dataset:
    images = torch.arange(n * 1 * 6 * 5, dtype=torch.int64).remainder(251).to(torch.uint8).view(n, 1, 6, 5)
    return Dataset(images, torch.arange(n) % 3, classes=3, factors={"angle": torch.linspace(0, 1, n)})


def test_an_epoch_shows_every_image_at_most_once_and_another_epoch_in_another_order():
    data, seen = some(), []
    for step in range(5):
        place = batch_position(step, len(data), 4)
        assert place == (0, step)
        seen += make_batch(data, epoch_order(7, 0, 20), place, 4, seed=7).indices.tolist()
    assert sorted(seen) == list(range(20))
    assert batch_position(5, 20, 4) == (1, 0)
    assert epoch_order(7, 1, 20).tolist() != epoch_order(7, 0, 20).tolist()


def test_what_is_left_over_waits_for_another_epoch():
    assert [batch_position(step, 10, 4) for step in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_parts_of_a_batch_are_the_batch():
    data, order = some(), epoch_order(1, 2, 20)
    place = batch_position(3, 20, 8)
    whole = make_batch(data, order, place, 8, seed=1, max_shift=2)
    parts = [make_batch(data, order, place, 8, seed=1, max_shift=2, rows=slice(2 * p, 2 * p + 2)) for p in range(4)]
    for name in ("images", "labels", "indices"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


def test_a_batch_without_pixels_is_of_the_same_images():
    where = (some(), epoch_order(1, 2, 20), batch_position(3, 20, 8), 8)
    batch, bare = make_batch(*where, seed=1), make_batch(*where, seed=1, pixels=False)
    assert bare.images.numel() == 0
    assert torch.equal(bare.indices, batch.indices) and torch.equal(bare.labels, batch.labels)


def test_a_batch_is_bytes_over_255_with_its_own_labels():
    data = some()
    batch = make_batch(data, torch.arange(20), batch_position(1, 20, 4), 4, seed=0)
    assert torch.equal(batch.images, data.images[4:8].float() / 255)
    assert torch.equal(batch.labels, data.labels[4:8])


def test_shift_moves_by_whole_pixels_and_fills_with_black():
    images = torch.zeros(300, 1, 7, 9)
    images[:, 0, 3, 4] = 1
    index = torch.arange(300)
    moved = shift(images, 2, SampleKey(5, 1, index))
    places = moved[:, 0].nonzero()[:, 1:] - torch.tensor([3, 4])
    assert len(places) == 300
    assert {tuple(p) for p in places.tolist()} == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}
    assert torch.equal(moved[10:20], shift(images[10:20], 2, SampleKey(5, 1, index[10:20])))
    assert not torch.equal(moved, shift(images, 2, SampleKey(5, 2, index)))
    corner = torch.ones(50, 1, 4, 4)
    assert (shift(corner, 3, SampleKey(0, 0, torch.arange(50))).sum((1, 2, 3)) < 16).any()
    assert shift(images, 0, SampleKey(5, 1, index)) is images


@pytest.mark.parametrize(
    ("images", "labels", "classes", "text"),
    [
        (torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), 2, "uint8"),
        (torch.zeros(2, 3, 3).byte(), torch.zeros(2).long(), 2, "n c h w"),
        (torch.zeros(0, 1, 3, 3).byte(), torch.zeros(0).long(), 2, "no images"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(3).long(), 2, "labels"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.tensor([0, 2]), 2, "0 to 1"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.tensor([-1, 1]), 2, "0 to 1"),
    ],
)
def test_wrong_sets_are_refused_in_one_line(images, labels, classes, text):
    with pytest.raises(DataError, match=text) as caught:
        Dataset(images, labels, classes)
    assert "\n" not in str(caught.value)


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(DataError, match="make it smaller"):
        batch_position(0, 10, 11)


def test_check_splits_finds_a_test_image_in_training():
    splits = GlyphsConfig(train=300, test=50, size=16).load()
    assert "no image in two splits" in check_splits(splits)
    leaky = Splits(splits.train, Dataset(splits.train.images[:5], splits.train.labels[:5], 10))
    with pytest.raises(DataError, match="5 images of the test set are also in the train set"):
        check_splits(leaky)


def test_glyphs_load_with_their_factors():
    train, test, _ = GlyphsConfig(train=30, test=20, size=20).load()
    assert (len(train), len(test)) == (30, 20)
    assert train.spec == (1, 20, 20, 10)
    assert set(train.factors) == {"x", "y", "rotation", "scale", "shear", "thickness"}
