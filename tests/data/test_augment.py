"""Augmentation: what each change does, in loops; the same by (seed, epoch, index), and independent of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcaps.data.augment import (
    SampleKey,
    _stream,
    affine,
    brightness_contrast,
    crop,
    deform,
    mirror,
    shift,
    windows,
)
from torchcaps.data.preprocess import center_crop, crops
from torchcaps.errors import TorchcapsError
from torchcaps.math.pixels import standardize
from torchcaps.math.warp import linear_map, warp
from torchcaps.utils.random import uniform

N = 4000
Change = Callable[[Tensor, int, int, Tensor], Tensor]
CHANGES: dict[str, Change] = {
    "shift": lambda images, *where: shift(images, 3, SampleKey(*where)),
    "crop": lambda images, *where: crop(images, 7, SampleKey(*where)),
    "brightness_contrast": lambda images, *where: brightness_contrast(images, SampleKey(*where)),
    "deform": lambda images, *where: deform(images, 0.7, SampleKey(*where)),
    "mirror": lambda images, *where: mirror(images, tuple(range(images.shape[1])), SampleKey(*where)),
    "affine": lambda images, *where: affine(
        images, SampleKey(*where), rotation=0.4, scale=(0.8, 1.2), shear=0.2, translate=2.0
    ),
}
EVERY = pytest.mark.parametrize("name", CHANGES)


def noise(b: int = 12, c: int = 2, h: int = 12, w: int = 10) -> Tensor:
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(0))


def compass(b: int) -> Tensor:
    """Images [b 1 12 10] whose pixel at (row, column) is 10 row + column: a crop says where it was taken."""
    return torch.arange(120.0).view(1, 1, 12, 10).expand(b, 1, 12, 10)


def brightness_and_contrast(index: Tensor, seed: int = 0, epoch: int = 0, **options: object) -> tuple[Tensor, Tensor]:
    """δ and κ [b] of an augmentation, from an image of 0 and 1: its mean moves by δ, its range grows by κ."""
    images = torch.tensor([0.0, 1.0]).expand(len(index), 1, 1, 2)
    low, high = brightness_contrast(images, SampleKey(seed, epoch, index), **options).flatten(1).unbind(-1)
    return (low + high) / 2 - 0.5, high - low


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    """Within the bounds, near both, and even over twenty bins (χ² with 19 degrees of freedom: 1 in 8,000)."""
    slack = (high - low) / 100
    assert low - 1e-5 <= float(values.min()) < low + slack
    assert high - slack < float(values.max()) <= high + 1e-5
    counts = torch.histc(values, 20, low, high)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 50


@EVERY
def test_the_same_seed_epoch_and_index_give_the_same_in_any_batch(name):
    change, images, index = CHANGES[name], noise(), torch.arange(100, 112)
    whole = change(images, 3, 1, index)
    for n in range(12):
        assert torch.equal(change(images[[n]], 3, 1, index[[n]])[0], whole[n])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(change(images[order], 3, 1, index[order]), whole[order])


@EVERY
def test_another_seed_epoch_or_index_gives_another(name):
    change, images = CHANGES[name], noise(1).expand(12, -1, -1, -1)
    whole = change(images, 3, 1, torch.arange(12))
    others = [change(images, 4, 1, torch.arange(12)), change(images, 3, 2, torch.arange(12))]
    least, kinds = (2, 2) if name == "mirror" else (10, 6)  # a coin has two sides, a crop 24 places
    for other in [*others, change(images, 3, 1, 12 + torch.arange(12))]:
        assert sum(not torch.equal(a, b) for a, b in zip(whole, other, strict=True)) >= least
    assert len({tuple(image.flatten().tolist()) for image in whole}) >= kinds


@EVERY
def test_images_are_left_as_they_were(name):
    images = noise()
    CHANGES[name](images, 0, 0, torch.arange(12))
    assert torch.equal(images, noise())
    assert CHANGES[name](images[:0], 0, 0, torch.arange(0)).shape[:2] == (0, 2)


def test_the_streams_of_the_changes_are_independent():
    index = torch.arange(N)
    key = SampleKey(0, 0, index)
    place = crop(compass(N), 6, key)[:, 0, 0, 0]
    dots = torch.nn.functional.pad(torch.ones(N, 1, 1, 1), (3, 3, 3, 3))
    moved = shift(dots, 3, key).flatten(1).argmax(-1)
    slopes = torch.linspace(-1, 1, 5).expand(N, 1, 5, 5)
    turned = affine(slopes, key, rotation=1.0)[:, 0, 1, 2]  # sin of the angle, in halves
    columns = (place // 10, place % 10, moved // 7, moved % 7, *brightness_and_contrast(index), turned)
    off = torch.corrcoef(torch.stack([c.float() for c in columns])) - torch.eye(7)
    assert float(off.abs().max()) < 0.07


def test_shift_is_the_shift_of_the_loop():
    images = noise()
    moves = (uniform(5, _stream("shift"), 2, torch.arange(12), count=2) * 7).long() - 3
    done = shift(images, 3, SampleKey(5, 2, torch.arange(12)))
    for n, (dy, dx) in enumerate(moves.tolist()):
        for row in range(12):
            for column in range(10):
                y, x = row + dy, column + dx
                wanted = images[n, :, y, x] if 0 <= y < 12 and 0 <= x < 10 else torch.zeros(2)
                assert torch.equal(done[n, :, row, column], wanted)


def test_crop_takes_a_square_from_any_place_alike():
    done = crop(compass(N), 6, SampleKey(1, 0, torch.arange(N)))
    assert done.shape == (N, 1, 6, 6)
    start = done[:, 0, 0, 0]
    counts = torch.bincount(start.long(), minlength=120).view(12, 10)
    assert not counts[7:].any()
    assert not counts[:, 5:].any()
    held = counts[:7, :5].double()
    assert float(((held - held.mean()) ** 2 / held.mean()).sum()) < 34 + 5 * 68**0.5
    wanted = start.view(N, 1, 1) + 10 * torch.arange(6.0)[:, None] + torch.arange(6.0)
    assert torch.equal(done[:, 0], wanted)
    square = noise(3, 1, 6, 6)
    assert torch.equal(crop(square, 6, SampleKey(0, 0, torch.arange(3))), square)


def test_crop_keeps_channels_and_bytes():
    images = (noise(4, 3) * 255).byte()
    done = crop(images, 5, SampleKey(0, 0, torch.arange(4)))
    starts = crop(compass(4), 5, SampleKey(0, 0, torch.arange(4)))[:, 0, 0, 0].long().tolist()
    for n, start in enumerate(starts):
        y, x = divmod(start, 10)
        assert torch.equal(done[n], images[n, :, y : y + 5, x : x + 5])
    assert done.dtype == torch.uint8


def test_center_crop_is_the_middle():
    assert float(center_crop(compass(1), 6)[0, 0, 0, 0]) == 32  # 3 rows above and below, 2 columns left and right
    assert float(center_crop(compass(1), 7)[0, 0, 0, 0]) == 21  # 2 above and 3 below, 1 left and 2 right
    assert torch.equal(center_crop(noise()[..., :10, :], 10), noise()[..., :10, :])


def test_the_thirteen_views_are_where_they_are_said_to_be():
    images = torch.arange(48.0 * 48).view(1, 1, 48, 48).repeat(2, 1, 1, 1)
    views = crops(images, 32)
    assert views.shape == (13, 2, 1, 32, 32)
    starts = [divmod(int(v[1, 0, 0, 0]), 48) for v in views]
    assert starts[0] == (8, 8)
    assert starts[1:5] == [(8, 8), (8, 7), (7, 8), (7, 7)]
    assert starts[5:9] == [(9, 9), (9, 7), (7, 9), (7, 7)]
    assert starts[9:] == [(9, 9), (9, 6), (6, 9), (6, 6)]
    for (y, x), view in zip(starts, views, strict=True):
        assert torch.equal(view, images[:, :, y : y + 32, x : x + 32])
    assert torch.equal(crops(images, 32, count=5), views[:5])
    assert torch.equal(crops(noise(), 7, count=1)[0], center_crop(noise(), 7))
    corner = crops(noise(), 9)[-1]  # of a margin of three rows and one column, two pixels up and left is the corner
    assert torch.equal(corner, noise()[..., :9, :9])


def test_brightness_and_contrast_are_uniform_in_their_ranges():
    delta, kappa = brightness_and_contrast(torch.arange(N))
    assert_uniform(delta, -63 / 255, 63 / 255)
    assert_uniform(kappa, 0.5, 1.5)
    delta, kappa = brightness_and_contrast(torch.arange(N), brightness=0.1, contrast=(0.2, 1.8))
    assert_uniform(delta, -0.1, 0.1)
    assert_uniform(kappa, 0.2, 1.8)


def test_brightness_and_contrast_in_a_loop_each_channel_about_its_own_mean_and_nothing_clipped():
    images, index = noise(), torch.arange(12)
    delta, kappa = brightness_and_contrast(index)
    done = brightness_contrast(images, SampleKey(0, 0, index))
    for n in range(12):
        for c in range(2):
            pixels = [v + float(delta[n]) for v in images[n, c].flatten().tolist()]
            m = sum(pixels) / len(pixels)
            wanted = [(v - m) * float(kappa[n]) + m for v in pixels]
            assert done[n, c].flatten().tolist() == pytest.approx(wanted, abs=1e-5)
    assert float(done.min()) < 0
    assert float(done.max()) > 1
    same = brightness_contrast(images, SampleKey(0, 0, index), brightness=0, contrast=(1, 1))
    torch.testing.assert_close(same, images, rtol=0, atol=1e-6)


def test_to_deform_is_affine_about_the_brightness_of_the_rim():
    images, index = noise(), torch.arange(12)
    assert torch.equal(deform(images, 0.0, SampleKey(0, 0, index)), images)
    done = deform(images, 0.5, SampleKey(3, 1, index))
    for n in range(12):
        for c in range(2):
            image = images[n, c]
            rim = [*image[0].tolist(), *image[-1].tolist(), *image[:, 0].tolist(), *image[:, -1].tolist()]
            ground = sorted(rim)[(len(rim) - 1) // 2]
            one = (image - ground)[None, None]
            turned = affine(one, SampleKey(3, 1, index[n : n + 1]), rotation=0.085, scale=(0.9, 1.1), shear=0.085)
            torch.testing.assert_close(done[n, c], turned[0, 0] + ground)
    even = torch.full((12, 1, 9, 9), 0.8)
    torch.testing.assert_close(deform(even, 1.0, SampleKey(0, 0, index)), even)  # nothing black comes in


def test_a_mirror_turns_left_and_right_and_exchanges_channels_in_half_of_the_images():
    images, index = compass(N).repeat(1, 2, 1, 1) + torch.tensor([0.0, 1000.0]).view(2, 1, 1), torch.arange(N)
    done = mirror(images, (1, 0), SampleKey(3, 1, index))
    turned = done[:, 0, 0, 0] != images[:, 0, 0, 0]
    assert abs(float(turned.float().mean()) - 0.5) < 0.03
    assert torch.equal(done[~turned], images[~turned])
    one = done[turned][0]
    for c in range(2):
        for y in range(12):
            for x in range(10):
                assert float(one[c, y, x]) == 1000 * (1 - c) + 10 * y + (9 - x)
    assert bool((done[turned] == one).all())
    with pytest.raises(TorchcapsError, match="name each once"):
        mirror(images, (0, 0), SampleKey(0, 0, index))


@pytest.mark.parametrize(
    ("options", "name", "bounds"),
    [
        ({"rotation": 0.5}, "rotation", (-0.5, 0.5)),
        ({"shear": 0.3}, "shear", (-0.3, 0.3)),
        ({"scale": (0.8, 1.3)}, "scale_x", (0.8, 1.3)),
        ({"scale": (0.8, 1.3)}, "scale_y", (0.8, 1.3)),
        ({"translate": 2.0}, "x", (-2, 2)),
        ({"translate": 2.0}, "y", (-2, 2)),
    ],
)
def test_the_factors_of_an_affine_change_are_uniform_and_seen_in_ramps(options, name, bounds):
    """Of an image that equals x (or y), a pixel of the result is the x (or y) it came from: A⁻¹ (y - t), exactly."""
    grid = torch.arange(9.0) - 4
    ramps = torch.stack((grid.expand(9, 9), grid[:, None].expand(9, 9))).expand(N, 2, 9, 9)
    done = affine(ramps, SampleKey(7, 3, torch.arange(N)), **options)
    inverse = torch.stack((done[..., 4, 5] - done[..., 4, 4], done[..., 5, 4] - done[..., 4, 4]), dim=-1)  # [b 2 2]
    A = torch.linalg.inv(inverse)
    x, y = (A @ -done[..., 4, 4, None])[..., 0].unbind(-1)
    rotation = torch.atan2(-A[:, 1, 0], A[:, 0, 0])
    scale_x, scale_y = A[:, :, 0].norm(dim=-1), A.det() / A[:, :, 0].norm(dim=-1)
    shear = -(A[:, 0, 0] * A[:, 0, 1] + A[:, 1, 0] * A[:, 1, 1]) / (scale_x * scale_y)
    found = {"rotation": rotation, "shear": shear, "scale_x": scale_x, "scale_y": scale_y, "x": x, "y": y}
    assert_uniform(found[name], *bounds)
    still = {"rotation": 0, "shear": 0, "scale_x": 1, "scale_y": 1, "x": 0, "y": 0}
    for other in still:
        if other[:5] != name[:5] and (len(other), len(name)) != (1, 1):
            assert float((found[other] - still[other]).abs().max()) < 1e-4
    one = linear_map(*(found[k][:5] for k in ("rotation", "shear", "scale_x", "scale_y")))
    again = warp(ramps[:5], one, torch.stack((x, y), dim=-1)[:5], (9, 9))
    torch.testing.assert_close(again[..., 2:7, 2:7], done[:5, ..., 2:7, 2:7], rtol=0, atol=1e-3)


def test_an_affine_change_of_nothing_is_exact_and_what_comes_in_is_black():
    images = noise()
    assert torch.equal(affine(images, SampleKey(0, 0, torch.arange(12))), images)
    moved = affine(torch.ones(50, 1, 8, 8), SampleKey(0, 0, torch.arange(50)), translate=4.0)
    assert float(moved.min()) == 0
    assert float(moved.max()) <= 1 + 1e-6


def test_standardize_in_a_loop():
    images = torch.cat((noise() * 3 + 5, torch.full((1, 2, 12, 10), 0.7), 0.5 + 1e-4 * noise(1)))
    done = standardize(images)
    for n, image in enumerate(images):
        pixels = image.double().flatten().tolist()
        mean = sum(pixels) / 240
        spread = math.sqrt(sum((v - mean) ** 2 for v in pixels) / 240)
        wanted = [(v - mean) / max(spread, 1 / math.sqrt(240)) for v in pixels]
        assert done[n].flatten().tolist() == pytest.approx(wanted, abs=1e-5)
    assert done[:12].mean((1, 2, 3)).tolist() == pytest.approx([0] * 12, abs=1e-6)
    assert done[:12].var((1, 2, 3), unbiased=False).tolist() == pytest.approx([1] * 12, abs=1e-5)
    assert not done[12].any()
    assert torch.equal(standardize(images[[3]])[0], done[3])
    assert standardize(images[:0]).shape == (0, 2, 12, 10)


def test_windows_read_each_image_at_its_own_place():
    images, top, left = noise(3), torch.tensor([0, 4, 9]), torch.tensor([5, 0, 2])
    done = windows(images, top, left, (3, 5))
    for n in range(3):
        assert torch.equal(done[n], images[n, :, top[n] : top[n] + 3, left[n] : left[n] + 5])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, i: crop(x, 11, SampleKey(0, 0, i)), "crop of size 11 from images of 12x10; ask for 1 to 10"),
        (lambda x, i: crop(x, 0, SampleKey(0, 0, i)), "ask for 1 to 10"),
        (lambda x, i: crop(x, 5, SampleKey(0, 0, i[:3])), r"\[12\], one number an image"),
        (lambda x, i: shift(x, 2, SampleKey(0, 0, i[:3])), r"\[12\], one number an image"),
        (lambda x, i: affine(x, SampleKey(0, 0, i[:, None])), "shape"),
        (lambda x, i: affine(x, SampleKey(0, 0, i - 1)), "index -1"),
        (lambda x, i: affine(x, SampleKey(0, 0, i), scale=(0, 0)), "no inverse"),
        (lambda x, i: affine(x.byte(), SampleKey(0, 0, i)), "floats"),
        (lambda x, i: brightness_contrast(x.byte(), SampleKey(0, 0, i)), "floats"),
        (lambda x, i: brightness_contrast(x, SampleKey(0, 0, i[:1])), "one number an image"),
        (lambda x, i: standardize(x[0]), "b c h w"),
        (lambda x, i: center_crop(x, 13), "1 to 10"),
        (lambda x, i: crops(x, 13), "1 to 10"),
        (lambda x, i: crops(x, 5, count=14), "1 to 13"),
        (lambda x, i: crops(x, 5, count=0), "1 to 13"),
    ],
)
def test_what_cannot_be_changed_is_refused_in_one_line(call, text):
    with pytest.raises(TorchcapsError, match=text) as caught:
        call(noise(), torch.arange(12))
    assert "\n" not in str(caught.value)
