"""What a model gets of a data set: crops at random or from the center, components alike, standardized or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torchcaps.data import (
    Dataset,
    Preprocess,
    SampleKey,
    Splits,
    batch_position,
    epoch_order,
    hold_out,
    make_batch,
    subset,
)
from torchcaps.data.augment import (
    BRIGHTNESS,
    STANDARD_BRIGHTNESS,
    _stream,
    brightness_contrast,
    crop,
    deform,
    mirror,
)
from torchcaps.data.preprocess import center_crop
from torchcaps.errors import DataError, TorchcapsError
from torchcaps.math.pixels import standardize
from torchcaps.train.loop import _to
from torchcaps.types import Batch
from torchcaps.utils.random import uniform

H, W, SEED = 9, 8, 4


def pairs(n: int = 24) -> Dataset:
    """Noise with two components an image, each another noise."""
    generator = torch.Generator().manual_seed(1)
    images, parts = (torch.randint(0, 256, (n, 2, H, W), generator=generator).byte() for _ in range(2))
    return Dataset(images, torch.randint(0, 5, (n, 2), generator=generator), classes=5, components=parts)


def shaped(data: Dataset, **options: object) -> Dataset:
    """The same images with other settings of their preprocessing and augmentation."""
    preprocess = {name: options.pop(name) for name in ("view", "standardize", "per_channel") if name in options}
    return replace(data, preprocess=replace(data.preprocess, **preprocess), augment=replace(data.augment, **options))


def batch_of(data: Dataset, step: int = 1, *, seed: int = SEED, size: int = 8, **options: float) -> Batch:
    place = batch_position(step, len(data), size)
    return make_batch(data, epoch_order(seed, place.epoch, len(data)), place, size, seed=seed, **options)


def draw(name: str, epoch: int, index: int, choices: tuple[int, int]) -> list[int]:
    """Two whole numbers below the choices, those that (seed, epoch, index) draw for a change."""
    u = uniform(SEED, _stream(name), epoch, torch.tensor(index), count=2)
    return [int(float(u_n) * c) for u_n, c in zip(u, choices, strict=True)]


def transformed(pixels: Tensor, index: int, epoch: int, most: int, side: int) -> Tensor:  # [c side side]
    """Pixel by pixel: of one image [c h w], shifted by up to `most`, the square that is drawn for it."""
    down, right = (d - most for d in draw("shift", epoch, index, (2 * most + 1, 2 * most + 1)))
    top, left = draw("crop", epoch, index, (H - side + 1, W - side + 1))
    out = torch.zeros(len(pixels), side, side)
    for row in range(side):
        for column in range(side):
            y, x = row + top + down, column + left + right
            if 0 <= y < H and 0 <= x < W and row + top < H and column + left < W:
                out[:, row, column] = pixels[:, y, x].float() / 255
    return out


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("step", [1, 5])
def test_images_and_their_components_are_shifted_and_cropped_alike(most, step):
    data, side, epoch = shaped(pairs(), view=6), 6, step // 3
    batch = batch_of(data, step, max_shift=most)
    assert batch.images.shape == batch.components.shape == (8, 2, side, side)
    for n, index in enumerate(batch.indices.tolist()):
        assert torch.equal(batch.images[n], transformed(data.images[index], index, epoch, most, side))
        assert torch.equal(batch.components[n], transformed(data.components[index], index, epoch, most, side))
        assert torch.equal(batch.labels[n], data.labels[index])


def test_every_place_is_cropped_and_another_epoch_has_others():
    compass = torch.arange(H * W).view(1, 1, H, W).expand(120, 1, H, W).byte()
    data = Dataset(compass, torch.zeros(120).long(), classes=1, preprocess=Preprocess(view=6))
    first, second = (batch_of(data, step, size=120).images for step in (0, 1))
    starts = {int((image[0, 0, 0] * 255).round()) for image in first}
    assert starts == {y * W + x for y in range(H - 5) for x in range(W - 5)}
    orders = [epoch_order(SEED, epoch, len(data)) for epoch in (0, 1)]
    assert not torch.equal(first[orders[0].argsort()], second[orders[1].argsort()])  # image by image


def test_shares_of_processes_are_the_whole_batch_in_every_change():
    data = shaped(pairs(), view=6, standardize=True, jitter=True)
    whole = batch_of(data, 4, max_shift=2)
    shares = [batch_of(data, 4, max_shift=2, rows=slice(2 * p, 2 * p + 2)) for p in range(4)]
    for name in ("images", "labels", "indices", "components"):
        assert torch.equal(torch.cat([getattr(s, name) for s in shares]), getattr(whole, name))


def test_a_batch_depends_on_seed_and_place_alone():
    data = shaped(pairs(), view=6, standardize=True, jitter=True)
    once, again, other = batch_of(data, 4), batch_of(data, 4), batch_of(data, 4, seed=SEED + 1)
    assert all(torch.equal(a, b) for a, b in zip(once[:4], again[:4], strict=True))
    assert not torch.equal(once.images, other.images)


def test_brightness_changes_after_images_are_standardized_and_not_that_of_components():
    """The order of the text of Hinton 2018: the other way round, standardizing would take the changes back."""
    plain = shaped(pairs(), view=6)
    standardized = shaped(plain, standardize=True)
    for data, most in ((plain, BRIGHTNESS), (standardized, STANDARD_BRIGHTNESS)):
        before, after = batch_of(data), batch_of(shaped(data, jitter=True))
        wanted = brightness_contrast(before.images, SampleKey(SEED, 0, before.indices), brightness=most)
        assert torch.equal(after.images, wanted)
        assert torch.equal(before.components, after.components)
        assert float((after.images - before.images).abs().max()) > most / 2
    jittered = batch_of(shaped(standardized, jitter=True)).images
    assert float((jittered - standardize(jittered)).abs().max()) > 0.1  # what came last is still there


def test_brightness_may_change_before_images_are_standardized():
    """The order of the authors' code, with its range of contrast; a change of all pixels alike is taken back."""
    plain = shaped(pairs(), view=6)
    before = batch_of(plain)
    after = batch_of(shaped(plain, standardize=True, jitter=True, jitter_before=True)).images
    changed = brightness_contrast(before.images, SampleKey(SEED, 0, before.indices), contrast=(0.2, 1.8))
    assert torch.equal(after, standardize(changed))
    assert not torch.equal(after, batch_of(shaped(plain, standardize=True, jitter=True)).images)


def test_each_channel_may_be_standardized_by_itself():
    data = shaped(pairs(), view=6, standardize=True, per_channel=True)
    for images in (data.model_input(), batch_of(data).images, data.views(slice(2)).flatten(0, 1)):
        assert float(images.mean((2, 3)).abs().max()) < 1e-6
        assert float((images.var((2, 3), unbiased=False) - 1).abs().max()) < 1e-5
    whole = shaped(data, per_channel=False).model_input()
    one = whole[:, :1]
    torch.testing.assert_close(standardize(one), data.model_input()[:, :1], rtol=1e-5, atol=1e-5)


def test_images_and_their_components_are_deformed_alike_before_they_are_cropped_and_standardized():
    plain, bent = shaped(pairs(), view=6), shaped(pairs(), view=6, deform=1.0)
    batch = batch_of(bent)
    for whole, came in ((plain.images, batch.images), (plain.components, batch.components)):
        moved = deform(whole[batch.indices].float() / 255, 1.0, SampleKey(SEED, 0, batch.indices))
        assert torch.equal(came, crop(moved, 6, SampleKey(SEED, 0, batch.indices)))
    standardized = batch_of(shaped(bent, standardize=True)).images
    assert torch.equal(standardized, standardize(batch.images))
    assert torch.equal(bent.model_input(), plain.model_input())  # a test sees what there is


def test_components_are_mirrored_with_their_image_and_keep_their_order():
    plain, turned = pairs(), shaped(pairs(), mirror=(1, 0))
    before, after = batch_of(plain), batch_of(turned)
    assert torch.equal(after.images, mirror(before.images, (1, 0), SampleKey(SEED, 0, before.indices)))
    order = tuple(range(before.components.shape[1]))
    assert torch.equal(after.components, mirror(before.components, order, SampleKey(SEED, 0, before.indices)))
    assert not torch.equal(after.components, before.components)


def test_without_a_view_or_with_one_as_large_as_the_images_a_batch_is_as_ever():
    data = pairs()
    square = replace(data, images=data.images[..., :W, :], components=data.components[..., :W, :])
    batch, same = batch_of(square, max_shift=1), batch_of(shaped(square, view=W), max_shift=1)
    assert torch.equal(batch.images, same.images)
    assert torch.equal(batch.components, same.components)
    assert batch_of(replace(data, components=None)).components is None


def test_a_test_gets_the_center():
    data = shaped(pairs(), view=6)
    assert data.spec == (2, 6, 6, 5)
    assert torch.equal(data.cropped, data.images[:, :, 1:7, 1:7])  # of three rows over, two are cut from below
    for rows in (torch.tensor([3, 1, 3]), slice(2, 5), None):
        wanted = data.images[slice(None) if rows is None else rows][:, :, 1:7, 1:7].float() / 255
        assert torch.equal(data.model_input(rows), wanted)
        assert torch.equal(shaped(data, standardize=True, jitter=True).model_input(rows), standardize(wanted))
    whole = pairs()
    assert whole.spec == (2, H, W, 5)
    assert whole.cropped is whole.images
    assert torch.equal(whole.model_input(slice(3)), whole.images[:3].float() / 255)


def test_thirteen_views_each_standardized_by_itself():
    data = shaped(pairs(), view=6, standardize=True)
    views = data.views(slice(4))
    assert views.shape == (13, 4, 2, 6, 6)
    assert torch.equal(views[0], data.model_input(slice(4)))
    around = [(1, 1), (1, 0), (0, 1), (0, 0), (2, 2), (2, 0), (0, 2), (0, 0)]
    for view, (y, x) in zip(views[1:9], around, strict=True):
        assert torch.equal(view, standardize(data.images[:4, :, y : y + 6, x : x + 6].float() / 255))
    assert torch.equal(data.views(torch.tensor([2]), 5), views[:5, [2]])
    assert data.views(count=1).shape == (1, 24, 2, 6, 6)


def test_a_subset_and_what_is_held_out_are_prepared_alike():
    data = shaped(pairs(), view=6, standardize=True, jitter=True)
    some = subset(data, torch.tensor([5, 2]))
    assert torch.equal(some.components, data.components[[5, 2]])
    assert torch.equal(some.model_input(), data.model_input(torch.tensor([5, 2])))
    splits = hold_out(Splits(data, data), 4)
    assert (splits.validation.preprocess, splits.validation.augment) == (data.preprocess, data.augment)
    assert torch.equal(splits.validation.components, data.components[20:])
    assert torch.equal(splits.train.components, data.components[:20])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"preprocess": Preprocess(view=9)}, "a view of 9 pixels of images of 9x8; 1 to 8 is wanted"),
        ({"preprocess": Preprocess(view=0)}, "1 to 8 is wanted"),
        ({"components": torch.zeros(24, 2, H, W)}, "uint8"),
        ({"components": torch.zeros(23, 2, H, W).byte()}, r"uint8 \[24, 2, 9, 8\]"),
        ({"components": torch.zeros(24, 3, H, W).byte()}, "one for each label"),
        ({"components": torch.zeros(24, H, W).byte()}, "one for each label"),
        ({"components": torch.zeros(24, 2, H, W + 1).byte()}, "one for each label"),
    ],
)
def test_views_and_components_that_cannot_be_are_refused_in_one_line(change, text):
    with pytest.raises(DataError, match=text) as caught:
        replace(pairs(), **change)
    assert "\n" not in str(caught.value)


def test_views_that_are_not_there_are_refused_in_one_line():
    with pytest.raises(DataError, match="give the data set a view") as caught:
        pairs().views()
    assert "\n" not in str(caught.value)
    with pytest.raises(TorchcapsError, match="13 views"):
        shaped(pairs(), view=6).views(count=14)


def test_one_component_an_image_goes_with_one_label():
    data = pairs()
    one = Dataset(data.images, data.labels[:, 0], 5, components=data.components[:, :1], preprocess=Preprocess(view=5))
    batch = batch_of(one)
    assert (batch.labels.shape, batch.components.shape) == ((8,), (8, 1, 5, 5))
    assert torch.equal(center_crop(one.images, 5), one.cropped)


def test_components_go_to_the_device_with_their_images():
    batch = batch_of(shaped(pairs(), view=6))
    moved = _to(batch, torch.device("meta"), channels_last=True)
    assert moved.images.device.type == moved.components.device.type == "meta"
    assert _to(batch._replace(components=None), torch.device("cpu"), channels_last=False).components is None
