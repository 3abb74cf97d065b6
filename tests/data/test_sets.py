"""The sets as recipes name them: from files made by the test, and from the real ones where they are."""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.config import from_dict
from torchcaps.data import (
    AffnistConfig,
    BatchPosition,
    Cifar10Config,
    Dataset,
    FashionMnistConfig,
    GlyphsConfig,
    MnistConfig,
    MultiMnistConfig,
    SmallNorbConfig,
    batch_position,
    check_splits,
    epoch_order,
    make_batch,
    subset,
)
from torchcaps.data.augment import STANDARD_BRIGHTNESS, SampleKey, brightness_contrast, crop, deform, mirror
from torchcaps.data.readers import Cifar10
from torchcaps.data.smallnorb import is_familiar
from torchcaps.errors import DataError, RecipeError
from torchcaps.math.pixels import standardize
from torchcaps.train import Recipe, train


def real(name: str) -> str:
    """The folder of the real files, or a skip that says what is missing."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TORCHCAPS_DATA", beside))
    if not (folder / name).is_dir():
        pytest.skip(f"{name} is not on this machine: set TORCHCAPS_DATA to a folder that holds {name}/")
    return str(folder)


def write_idx(path: Path, array: np.ndarray) -> Path:
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))
    return path


@pytest.fixture
def small_mnist(tmp_path, monkeypatch) -> Dataset:
    """Four files as MNIST has them, with 60 + 30 glyphs inside, found by `require`."""
    train, test = GlyphsConfig(train=60, test=30).load()[:2]
    files = {}
    for prefix, data in {"train": train, "t10k": test}.items():
        for kind, array in {"images-idx3": data.images[:, 0], "labels-idx1": data.labels.byte()}.items():
            name = f"{prefix}-{kind}-ubyte.gz"
            files[name] = write_idx(tmp_path / name, array.numpy())
    monkeypatch.setattr("torchcaps.data.sets.locate", lambda name, folder: files)
    return train


@pytest.mark.parametrize("config", [MnistConfig, FashionMnistConfig])
def test_idx_sets_come_with_labels_and_names(small_mnist, config):
    splits = config(validation=10).load()
    assert [len(s) for s in splits] == [50, 30, 10]
    assert torch.equal(splits.train.images, small_mnist.images[:50])
    assert torch.equal(splits.validation.labels, small_mnist.labels[50:])
    assert splits.train.spec == (1, 28, 28, 10) and len(splits.train.names) == 10
    assert "no image in two splits" in check_splits(splits)


def test_digits_are_deformed_while_training_if_asked(small_mnist):
    plain, bent = MnistConfig().load(), MnistConfig(deform=0.8).load()
    place, order = batch_position(0, len(plain.train), 4), epoch_order(0, 0, len(plain.train))
    bare, seen = (make_batch(s.train, order, place, 4, seed=0).images for s in (plain, bent))
    assert torch.equal(seen, deform(bare, 0.8, SampleKey(0, 0, order[:4]))) and not torch.equal(seen, bare)
    assert torch.equal(bent.test.model_input(), plain.test.model_input())


def test_images_and_labels_of_different_length_are_refused(small_mnist, tmp_path):
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(59, dtype=np.uint8))
    with pytest.raises(DataError, match="do not belong together"):
        MnistConfig().load()


def test_affnist_places_training_digits_and_moves_test_digits(small_mnist):
    splits = AffnistConfig(test=50).load()
    assert splits.train.spec == splits.test.spec == (1, 40, 40, 10)
    assert torch.equal(splits.train.images[:, :, 6:34, 6:34], small_mnist.images)
    assert int(splits.train.images.long().sum()) == int(small_mnist.images.long().sum())
    assert len(splits.test) == 50 and "rotation" in splits.test.factors
    assert torch.equal(splits.test.labels[30:], splits.test.labels[:20])  # the second round of 30 digits
    assert not torch.equal(splits.test.images[30:], splits.test.images[:20])
    moved = AffnistConfig(train_on="affnist", train=120, test=10).load().train
    assert len(moved) == 120 and "shear" in moved.factors


def test_affnist_validation_digits_are_placed_or_shifted_once_and_for_all(small_mnist):
    still = AffnistConfig(test=5, validation=20).load()
    assert [len(s) for s in still] == [40, 5, 20]
    assert torch.equal(still.validation.images[:, :, 6:34, 6:34], small_mnist.images[40:])
    shifted = AffnistConfig(test=5, validation=20, placed_shift=6)
    splits = shifted.load()
    assert torch.equal(splits.train.images, still.train.images)
    assert torch.equal(splits.validation.labels, still.validation.labels)
    places = []
    for digit, moved in zip(small_mnist.images[40:, 0], splits.validation.images[:, 0], strict=True):
        cuts = {(y, x): moved[y : y + 28, x : x + 28] for y in range(13) for x in range(13)}
        held = [at for at, cut in cuts.items() if torch.equal(cut, digit)]
        assert len(held) == 1 and int(moved.sum()) == int(digit.sum())
        places += held
    assert len(set(places)) > 10
    again, other = (replace(shifted, drawn=d).load().validation.images for d in (0, 1))
    assert torch.equal(again, splits.validation.images)
    assert not torch.equal(other, splits.validation.images)
    with pytest.raises(DataError, match="placed_shift") as caught:
        replace(shifted, train_on="affnist").load()
    assert "\n" not in str(caught.value)


def test_affnist_training_and_test_transforms_are_different_draws(small_mnist):
    splits = AffnistConfig(train_on="affnist", train=30, test=30).load()
    assert not torch.equal(splits.train.factors["rotation"], splits.test.factors["rotation"])


def test_multimnist_shows_two_classes(small_mnist):
    splits = MultiMnistConfig(train=40, test=20).load()
    assert splits.train.spec == (1, 36, 36, 10)
    assert splits.train.labels.shape == (40, 2)
    assert bool((splits.train.labels[:, 0] != splits.train.labels[:, 1]).all())
    assert splits.validation is None


def test_multimnist_knows_each_digit_alone(small_mnist):
    splits = MultiMnistConfig(train=70, test=20, validation=25, size=33, most_shift=2).load()
    assert [len(s) for s in splits] == [70, 20, 25]
    for split in splits:
        assert split.spec == (1, 33, 33, 10) and split.components.shape == (len(split), 2, 33, 33)
        assert torch.equal(split.images[:, 0].int(), split.components.int().sum(1).clamp(max=255))
    assert "no image in two splits" in check_splits(splits)


def test_multimnist_draws_other_pairs_each_epoch_and_the_same_ones_again_unless_fresh(small_mnist):
    drawn = MultiMnistConfig(train=30, test=5).load().train
    stored = MultiMnistConfig(train=30, test=5, fresh=False).load().train
    index = torch.tensor([3, 0, 29])
    for epoch in range(3):
        images, labels, parts = drawn.raw_batch(epoch, index)
        again = MultiMnistConfig(train=30 * (epoch + 1), test=5, fresh=False).load().train
        assert torch.equal(images, again.images[30 * epoch + index])
        assert torch.equal(labels, again.labels[30 * epoch + index]) and parts is not None
        assert torch.equal(images[:, 0], parts.sum(1).clamp(max=255).to(torch.uint8))
        for mine, wanted in zip(
            stored.raw_batch(epoch, index), (stored.images, stored.labels, stored.components), strict=True
        ):
            assert mine is not None and wanted is not None and torch.equal(mine, wanted[index])
    assert not torch.equal(drawn.raw_batch(0, index)[0], drawn.raw_batch(1, index)[0])


def test_a_batch_of_fresh_pairs_is_its_epochs_and_a_subset_stays_what_it_is(small_mnist):
    data = MultiMnistConfig(train=30, test=5).load().train
    order = torch.arange(30)
    batch = make_batch(data, order, BatchPosition(2, 1), 10, seed=0)
    images, labels, parts = data.raw_batch(2, order[10:20])
    assert torch.equal(batch.images, images.float() / 255) and torch.equal(batch.labels, labels)
    assert parts is not None and batch.components is not None and torch.equal(batch.components, parts.float() / 255)
    kept = subset(data, torch.tensor([4, 7]))
    assert torch.equal(kept.raw_batch(5, torch.tensor([1]))[0], data.images[[7]])


def test_multimnist_validation_shows_no_digit_that_is_trained_on(small_mnist):
    splits = MultiMnistConfig(train=70, test=20, validation=25, size=28, most_shift=0).load()
    known = {bytes(image.flatten().tolist()): n for n, image in enumerate(small_mnist.images)}
    for split, numbers in ((splits.train, range(35)), (splits.validation, range(35, 60))):
        shown = [known[bytes(part.flatten().tolist())] for part in split.components.flatten(0, 1)]
        assert set(shown) <= set(numbers)
        assert set(shown[::2]) == set(numbers)  # all of them come first once
        assert split.labels.flatten().tolist() == small_mnist.labels[shown].tolist()


@pytest.fixture
def small_cifar(monkeypatch) -> list[np.ndarray]:
    """Images, labels, test images and test labels, 50 + 30, in place of the archive."""
    rng = np.random.default_rng(0)
    arrays = [a for n in (50, 30) for a in (rng.integers(0, 256, (n, 3, 32, 32), np.uint8), np.arange(n) % 10)]
    monkeypatch.setattr("torchcaps.data.sets.locate", lambda name, folder: {"archive": Path("archive")})
    monkeypatch.setattr("torchcaps.data.sets.read_cifar_archive", lambda path: Cifar10(*arrays))
    return arrays


def test_cifar10_takes_the_first_images_and_shows_squares(small_cifar):
    arrays = small_cifar
    whole = Cifar10Config().load()
    assert [len(whole.train), len(whole.test)] == [50, 30] and whole.train.spec == (3, 32, 32, 10)
    assert torch.equal(whole.test.model_input(), torch.from_numpy(arrays[2]).float() / 255)
    some = Cifar10Config(train=20, test=10, view=24, validation=5).load()
    assert [len(s) for s in some] == [15, 10, 5]
    assert all(s.spec == (3, 24, 24, 10) for s in some)
    assert torch.equal(some.test.cropped, torch.from_numpy(arrays[2][:10, :, 4:28, 4:28]))


def test_a_model_is_prepared_and_trained_for_the_side_it_sees(small_cifar, tmp_path, monkeypatch):
    looked: list[torch.Tensor] = []
    monkeypatch.setattr("torchcaps.models.CNN.prepare", lambda self, images: looked.append(images))
    recipe = {
        "data": {"name": "cifar10", "train": 16, "test": 8, "view": 24}, "train": {"epochs": 1.0, "batch": 8},
        "model": {"name": "cnn", "widths": [4], "kernel": 3, "hidden": [8]},
    }  # fmt: skip
    outcome = train(from_dict(Recipe, recipe), tmp_path / "run", quiet=True)
    assert outcome.model.spec == (3, 24, 24, 10) and outcome.step == 2
    assert torch.equal(looked[0], torch.from_numpy(small_cifar[0][:16, :, 4:28, 4:28]))


def test_a_missing_set_is_one_line_that_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    for config in (MnistConfig(), SmallNorbConfig(), Cifar10Config()):
        with pytest.raises(DataError, match="missing") as caught:
            config.load()
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def small_norb(rows: int = 180) -> dict[str, np.ndarray]:
    n = np.arange(rows)
    images = (n[:, None, None, None] + np.arange(2 * 48 * 48).reshape(2, 48, 48)).astype(np.uint8)
    return {
        "images": images, "category": n % 5, "instance": n % 3, "lighting": n % 6,
        "elevation": n % 9, "azimuth": 2 * (n % 18),
    }  # fmt: skip


@pytest.fixture
def norb_files(tmp_path, monkeypatch) -> None:
    """The copy of smallNORB with 180 + 180 images, found by `require`."""
    files = {}
    for part in ("train", "test"):
        files[f"smallnorb48_{part}.npz"] = tmp_path / f"{part}.npz"
        np.savez(tmp_path / f"{part}.npz", **small_norb())
    monkeypatch.setattr("torchcaps.data.smallnorb.locate", lambda name, folder: files)


def test_smallnorb_as_the_paper_shows_it(norb_files):
    plain, seen = SmallNorbConfig().load(), SmallNorbConfig(view=32, standardize=True, jitter=True, validation=9).load()
    assert [s.spec for s in seen] == [(2, 32, 32, 5)] * 3
    middle = plain.test.images[:7, :, 8:40, 8:40].float() / 255
    assert torch.equal(seen.test.model_input(slice(7)), standardize(middle))
    assert seen.test.views(slice(7)).shape == (13, 7, 2, 32, 32)
    place, order = batch_position(0, 171, 16), epoch_order(0, 0, 171)
    batch, bare = (make_batch(s.train, order, place, 16, seed=0).images for s in (seen, plain))
    assert (batch.shape, bare.shape) == ((16, 2, 32, 32), (16, 2, 48, 48))
    wanted = standardize(crop(bare, 32, SampleKey(0, 0, order[:16])))
    assert torch.equal(batch, brightness_contrast(wanted, SampleKey(0, 0, order[:16]), brightness=STANDARD_BRIGHTNESS))


def test_pairs_are_mirrored_with_their_cameras_exchanged_unless_azimuths_are_held_out(norb_files):
    plain, turned = SmallNorbConfig().load(), SmallNorbConfig(mirror=True).load()
    place, order = batch_position(0, 180, 32), epoch_order(0, 0, 180)
    bare, seen = (make_batch(s.train, order, place, 32, seed=0).images for s in (plain, turned))
    assert torch.equal(seen, mirror(bare, (1, 0), SampleKey(0, 0, order[:32]))) and not torch.equal(seen, bare)
    assert torch.equal(turned.test.model_input(), plain.test.model_input())
    assert SmallNorbConfig(novel="elevation", mirror=True).mirror
    with pytest.raises(RecipeError, match="mirror with novel = 'azimuth'"):
        SmallNorbConfig(novel="azimuth", mirror=True)


def test_smallnorb_splits_by_viewpoint(norb_files):
    whole = SmallNorbConfig().load()
    assert whole.train.spec == (2, 48, 48, 5) and len(whole.train) == 180
    by_azimuth = SmallNorbConfig(novel="azimuth").load()
    assert sorted(set(by_azimuth.train.factors["azimuth"].tolist())) == [0, 2, 4, 30, 32, 34]
    assert len(by_azimuth.train) == 60 and len(by_azimuth.test) == 180
    assert torch.equal(by_azimuth.test.factors["familiar"].bool(), is_familiar(by_azimuth.test, "azimuth"))
    by_elevation = SmallNorbConfig(novel="elevation").load()
    assert sorted(set(by_elevation.train.factors["elevation"].tolist())) == [0, 1, 2]
    with pytest.raises(DataError, match="needs that factor"):
        is_familiar(GlyphsConfig(train=10, test=10).load().train, "azimuth")


def test_smallnorb_matched_validates_on_the_familiar_viewpoints_of_the_test_set(norb_files):
    train, test, held = SmallNorbConfig(novel="elevation", matched=True, view=32, standardize=True).load()
    rows = test.factors["familiar"].nonzero().flatten()
    assert len(train) == 60 and len(test) == 180 and len(held) == len(rows) == 60
    assert torch.equal(held.images, test.images[rows]) and torch.equal(held.labels, test.labels[rows])
    assert held.spec == (2, 32, 32, 5) and held.preprocess.standardize
    with pytest.raises(RecipeError, match="set novel, too"):
        SmallNorbConfig(matched=True)


def test_an_object_instance_set_aside_is_validated_on_and_nothing_else_is(norb_files):
    train, test, held = SmallNorbConfig(aside=1, view=32).load()
    assert (len(train), len(test), len(held)) == (120, 180, 60)
    assert set(train.factors["instance"].tolist()) == {0, 2} and set(held.factors["instance"].tolist()) == {1}
    assert held.spec == (2, 32, 32, 5)
    with pytest.raises(DataError, match="aside = 5: the object instances of training have the numbers 0, 1, 2"):
        SmallNorbConfig(aside=5).load()


@pytest.mark.parametrize(
    "ways", [{"matched": True, "novel": "azimuth", "validation": 5}, {"aside": 4, "validation": 5}]
)  # fmt: skip
def test_one_thing_is_validated_on(ways):
    with pytest.raises(RecipeError, match="each say what to validate on"):
        SmallNorbConfig(**ways)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"images": small_norb()["images"][:, :1]}, r"\[180, 1, 48, 48\]; pairs \[n 2 h w\]"),
        ({"images": small_norb()["images"][:, 0]}, r"pairs \[n 2 h w\]"),
        ({"azimuth": None}, "azimuth missing among"),
        ({"elevation": None, "azimuth": None}, "azimuth, elevation missing"),
    ],
)  # fmt: skip
def test_smallnorb_without_both_eyes_or_without_viewpoints_is_refused_in_one_line(tmp_path, monkeypatch, change, says):
    arrays = {name: value for name, value in (small_norb() | change).items() if value is not None}
    np.savez(tmp_path / "part.npz", **arrays)
    files = {f"smallnorb48_{part}.npz": tmp_path / "part.npz" for part in ("train", "test")}
    monkeypatch.setattr("torchcaps.data.smallnorb.locate", lambda name, folder: files)
    with pytest.raises(DataError, match=says) as caught:
        SmallNorbConfig(novel="azimuth").load()
    assert "\n" not in str(caught.value)


def test_smallnorb_from_the_official_files_is_averaged(tmp_path, monkeypatch):
    rows = small_norb(10)
    big = np.arange(10 * 2 * 96 * 96).reshape(10, 2, 96, 96).astype(np.uint8)
    info = np.stack([rows[f] for f in ("instance", "elevation", "azimuth", "lighting")], 1).astype("<i4")
    files = {}
    for part in ("training", "testing"):
        for kind, array in {"dat": big, "cat": rows["category"].astype("<i4"), "info": info}.items():
            path = tmp_path / f"smallnorb-{part}-{kind}.mat"
            magic = 0x1E3D4C55 if array.dtype == np.uint8 else 0x1E3D4C54
            dims = [*array.shape, *[1] * (3 - array.ndim)]
            path.write_bytes(struct.pack(f"<{2 + len(dims)}I", magic, array.ndim, *dims) + array.tobytes())
            files[path.name] = path
    monkeypatch.setattr("torchcaps.data.smallnorb.locate", lambda name, folder: files)
    train = SmallNorbConfig().load().train
    assert train.spec == (2, 48, 48, 5)
    for n, c, y, x in ((0, 0, 0, 0), (3, 1, 20, 47), (9, 0, 47, 5)):
        four = big[n, c, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(int)
        assert int(train.images[n, c, y, x]) == (four.sum() + 2) // 4
    assert train.factors["azimuth"].tolist() == rows["azimuth"].tolist()


def test_setting_all_images_aside_is_refused(small_mnist):
    with pytest.raises(DataError, match="leave none"):
        MnistConfig(validation=60).load()


@pytest.mark.parametrize(("config", "name"), [(MnistConfig, "mnist"), (FashionMnistConfig, "fashion-mnist")])
def test_the_real_idx_sets(config, name):
    splits = config(validation=5000, data_dir=real(name)).load()
    assert [len(s) for s in splits] == [55_000, 10_000, 5_000]
    assert "no image in two splits" in check_splits(splits)


def test_the_real_smallnorb_has_the_paper_s_splits():
    folder = real("smallnorb")
    by_azimuth = SmallNorbConfig(novel="azimuth", data_dir=folder).load()
    assert len(by_azimuth.train) == 8_100
    assert int((by_azimuth.test.factors["familiar"] == 0).sum()) == 16_200
    assert torch.bincount(by_azimuth.test.labels).tolist() == [4860] * 5


def test_the_real_digits_make_pairs_that_can_be_told_apart():
    splits = MultiMnistConfig(train=500, test=300, validation=200, data_dir=real("mnist")).load()
    assert "no image in two splits" in check_splits(splits)
    assert torch.equal(splits.test.images[:, 0].int(), splits.test.components.int().sum(1).clamp(max=255))
