"""affNIST: its factors as published, seen again in the images, and no digit cut off."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchcaps.data.affnist import RANGES, Transforms, affnist
from torchcaps.data.glyphs import glyphs
from torchcaps.errors import TorchcapsError
from torchcaps.math.warp import linear_map, warp

SHA256 = "683afdb544bab499d496a748494b7fbc7c03f717e75179ca76cef61c9861ece8"
SHARED = Path(__file__).parents[3] / "shared" / "data"
BLOBS = ((0.0, -6.0), (5.2, 3.0), (-5.2, 3.0))  # (x, y) from the center: a triangle, its middle in the origin


def glyph_digits(count: int) -> Tensor:
    return glyphs(3, torch.arange(count), 28)[0]


def mnist_digits(count: int) -> Tensor:
    path = Path(os.environ.get("TORCHCAPS_DATA", SHARED)) / "mnist" / "train-images-idx3-ubyte.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} in TORCHCAPS_DATA")
    with gzip.open(path) as file:
        pixels = bytearray(file.read(16 + count * 784)[16:])
    return torch.frombuffer(pixels, dtype=torch.uint8).view(count, 1, 28, 28)


def three_blobs(sigma: float = 1.7) -> Tensor:
    grid = torch.arange(28, dtype=torch.float64) - 13.5
    ink = sum(torch.exp(-((grid - x) ** 2 + (grid[:, None] - y) ** 2) / (2 * sigma**2)) for x, y in BLOBS)
    return (ink * 250 + 0.5).to(torch.uint8).view(1, 1, 28, 28)


def places(size: int) -> Tensor:  # [h*w 2]
    grid = torch.arange(size, dtype=torch.float32) - (size - 1) / 2
    return torch.cartesian_prod(grid, grid).flip(-1)


def centers(ink: Tensor) -> Tensor:  # [... 2]
    """Mean place of the ink [... h*w], in pixels from the middle."""
    return ink @ places(math.isqrt(ink.shape[-1])) / ink.sum(-1, keepdim=True)


def covariances(ink: Tensor) -> Tensor:  # [b 2 2]
    away = places(math.isqrt(ink.shape[-1])) - centers(ink)[:, None]  # [b hw 2]
    return torch.einsum("bn,bnx,bny->bxy", ink, away, away) / ink.sum(-1)[:, None, None]


def matrices(t: Transforms) -> Tensor:
    return linear_map(t.rotation, t.shear, t.scale_x, t.scale_y)


def shifts(t: Transforms) -> Tensor:
    return torch.stack((t.x, t.y), dim=-1)


def find_blobs(images: Tensor) -> Tensor:  # [b 3 2]
    """The centers of the three blobs, by k-means that starts from where they would be, were nothing but moved."""
    ink = images.flatten(1).float()  # [b hw]
    means = centers(ink)[:, None] + torch.tensor(BLOBS)  # [b 3 2]
    for _ in range(3):
        nearest = torch.cdist(places(40).expand(len(ink), -1, -1), means).argmin(-1)  # [b hw]
        means = torch.stack([centers(ink * (nearest == n)) for n in range(3)], dim=1)
    return means


def recover(images: Tensor) -> tuple[Tensor, ...]:
    """The six factors, each [b], from the images alone: q_n = A p_n + t for three points, then A = R K S."""
    p = torch.cat((torch.tensor(BLOBS), torch.ones(3, 1)), dim=1)  # [3 3]
    solved = torch.linalg.solve(p.expand(len(images), 3, 3), find_blobs(images)).mT  # [b 2 3], (A | t)
    (a, b), (c, d) = solved[:, 0, :2].unbind(-1), solved[:, 1, :2].unbind(-1)
    scale_x = (a * a + c * c).sqrt()
    cos, sin = a / scale_x, -c / scale_x
    scale_y = cos * d + sin * b
    return torch.atan2(sin, cos), (sin * d - cos * b) / scale_y, scale_x, scale_y, solved[:, 0, 2], solved[:, 1, 2]


def test_rotation_shear_scale_and_place_of_10_000_images_are_recovered_from_their_pixels():
    seen = []
    for part in torch.arange(10_000).split(500):
        images, drawn = affnist(three_blobs(), 11, part)
        seen.append(torch.stack([torch.stack((r, d)) for r, d in zip(recover(images), drawn, strict=False)]))
    recovered, drawn = torch.cat(seen, dim=-1).unbind(1)  # [6 10000] each
    off = (recovered - drawn).abs().amax(-1)
    assert float(off[0]) < math.radians(0.6)
    assert float(off[1:4].max()) < 0.012
    assert float(off[4:].max()) < 0.04
    for found, (low, high) in zip(recovered, RANGES.values(), strict=False):
        assert low - 0.01 < float(found.min()) < low + 0.02
        assert high - 0.02 < float(found.max()) < high + 0.01


@pytest.mark.parametrize("digits", [glyph_digits, mnist_digits], ids=["glyphs", "mnist"])
def test_the_ink_of_digits_moves_and_spreads_as_the_factors_say(digits):
    """Center c -> A c + t, covariance Σ -> A Σ Aᵀ and mass times |A|, for 2,000 digits, each under its own map."""
    sources = digits(2000)
    images, t = affnist(sources, 5, torch.arange(2000, 4000))
    A, ink, new = matrices(t), sources.flatten(1).float(), images.flatten(1).float()
    off = centers(new) - torch.einsum("bxy,by->bx", A, centers(ink)) - shifts(t)
    assert float(off.abs().max()) < 0.25
    assert float(off.square().mean().sqrt()) < 0.03
    before, after = A @ covariances(ink) @ A.mT, covariances(new)
    spread = ((after - before) / before.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]).abs()
    assert float(spread.max()) < 0.05
    assert float(spread.mean()) < 0.006
    mass = new.sum(-1) / (ink.sum(-1) * A.det())
    assert 0.96 < float(mass.min()) < float(mass.max()) < 1.04


@pytest.mark.parametrize(("digits", "count"), [(glyph_digits, 10_000), (mnist_digits, 3_000)], ids=["glyphs", "mnist"])
def test_no_digit_is_cut_off(digits, count):
    """On a canvas with 6 pixels more on every side the ink is the same, and all on the inner 40x40."""
    sources, touched = digits(2500), torch.zeros(4)
    for part in torch.arange(count).split(250):
        images, t = affnist(sources, 1, part)
        assert torch.equal(t.source, part % 2500)
        large = warp(sources[t.source].float(), matrices(t), shifts(t), (52, 52)).add(0.5).to(torch.uint8)
        assert torch.equal(large, torch.nn.functional.pad(images, (6, 6, 6, 6)))
        edges = (images[:, 0, 0], images[:, 0, -1], images[:, 0, :, 0], images[:, 0, :, -1])
        touched += torch.stack([edge.any(-1).float().sum() for edge in edges])
    assert (touched > count / 200).all()  # but it may reach the very edge


def room(digit: Tensor, A: Tensor, size: int = 40) -> tuple[Tensor, Tensor]:  # [b 2] each
    """Least and greatest shifts under A [b 2 2], from all four corners of the tents of all ink of a digit [28 28]."""
    ink = digit.nonzero().flip(-1).float() - 13.5  # [n 2], (x, y)
    corners = torch.cat([ink + torch.tensor(c) for c in ((-1, -1), (-1, 1), (1, -1), (1, 1))])
    ends = torch.einsum("bxy,ny->bnx", A, corners)
    edge = size / 2 + 0.5
    return -edge - ends.amin(1), edge - ends.amax(1)


def test_factors_are_uniform_in_their_ranges_and_independent():
    _, t = affnist(three_blobs(), 2, torch.arange(10_000))
    low, high = room(three_blobs()[0, 0], matrices(t))
    factors = [(v - low) / (high - low) for v, (low, high) in zip(t, RANGES.values(), strict=False)]
    u = torch.stack((*factors, *((shifts(t) - low) / (high - low)).unbind(-1)))  # [6 n], in [0, 1]
    assert -1e-5 < float(u.min()) < 0.001
    assert 0.999 < float(u.max()) < 1 + 1e-5
    for column in u:
        counts = torch.histc(column, 20, 0, 1)
        assert float(((counts - 500) ** 2 / 500).sum()) < 50  # χ² with 19 degrees of freedom: 1 in 8,000
    assert float((torch.corrcoef(u) - torch.eye(6)).abs().max()) < 0.04
    assert [round(math.degrees(b)) for b in RANGES["rotation"]] == [-20, 20]


def test_every_digit_has_its_own_room():
    digits = glyph_digits(200)
    _, t = affnist(digits, 9, torch.arange(200))
    shares = []
    for n in range(200):
        low, high = room(digits[n, 0], matrices(t)[[n]])
        shares.append((shifts(t)[n] - low) / (high - low))
    u = torch.cat(shares)
    assert -1e-5 < float(u.min()) < 0.05
    assert 0.95 < float(u.max()) < 1 + 1e-5
    assert float(u.mean()) == pytest.approx(0.5, abs=0.06)


def test_an_image_depends_on_seed_and_index_alone():
    digits, index = glyph_digits(50), torch.tensor([7, 3, 57, 1 << 40, 0, 107])
    images, t = affnist(digits, 4, index)
    for n in range(6):
        alone, own = affnist(digits, 4, index[[n]])
        assert torch.equal(alone[0], images[n])
        assert all(torch.equal(a[0], b[n]) for a, b in zip(own, t, strict=True))
    assert t.source.tolist() == [7, 3, 7, (1 << 40) % 50, 0, 7]
    variants = images[[0, 2, 5]]  # of one digit
    assert len({bytes(v) for v in variants.numpy()}) == 3
    assert not torch.equal(affnist(digits, 5, index)[0], images)
    many = torch.arange(300)
    assert torch.equal(affnist(digits, 4, many.flip(0))[0].flip(0), affnist(digits, 4, many)[0])


def test_the_bytes_stay_what_they_are():
    images, _ = affnist(glyph_digits(64), 0, torch.arange(64))
    assert images.shape == (64, 1, 40, 40)
    assert hashlib.sha256(images.numpy().tobytes()).hexdigest() == SHA256


def test_any_canvas_that_is_large_enough_will_do():
    images, t = affnist(glyph_digits(20), 0, torch.arange(20), size=61)
    assert images.shape == (20, 1, 61, 61)
    assert float(shifts(t).abs().max()) > 15
    nothing, none = affnist(glyph_digits(3), 0, torch.arange(0))
    assert nothing.shape == (0, 1, 40, 40)
    assert all(len(column) == 0 for column in none)


FULL, BLANK = torch.full((2, 1, 28, 28), 9, dtype=torch.uint8), torch.zeros(2, 1, 28, 28, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "index", "size", "text"),
    [
        (FULL, torch.tensor([1]), 20, "source image 1 does not fit on 20x20"),
        (BLANK, torch.tensor([3]), 40, "source image 1 has no ink"),
        (FULL.float(), torch.tensor([0]), 40, "uint8"),
        (FULL[:, 0], torch.tensor([0]), 40, "n 1 h w"),
        (FULL[:0], torch.tensor([0]), 40, "n > 0"),
        (FULL.expand(-1, 3, -1, -1), torch.tensor([0]), 40, "n 1 h w"),
        (FULL, torch.tensor([[0]]), 40, "shape"),
        (FULL, torch.tensor([0, -2]), 40, "-2"),
        (FULL, torch.tensor([0.5]), 40, "whole numbers"),
        (FULL, torch.tensor([0]), 0, "40x40"),
    ],
)
def test_what_affnist_cannot_be_made_of_is_refused_in_one_line(images, index, size, text):
    with pytest.raises(TorchcapsError, match=text) as caught:
        affnist(images, 0, index, size)
    assert "\n" not in str(caught.value)
