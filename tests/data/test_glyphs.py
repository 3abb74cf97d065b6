"""The built-in digits: the same bytes in any batch, drawn as their factors say, and never cut off."""

from __future__ import annotations

import colorsys
import hashlib
import math

import pytest
import torch
from torch import Tensor

from torchcaps.data import glyphs as module
from torchcaps.data.builtin import GlyphsConfig
from torchcaps.data.glyphs import RANGES, SEGMENTS, Factors, draw_factors, draw_hue, draw_jitter, glyphs, paint, render
from torchcaps.errors import DataError

LABELS = [3, 4, 8, 0, 5, 0, 2, 7, 8, 8, 6, 5, 7, 9, 5, 5, 8, 4, 8, 5]
SHA256 = "909f64474ecc5c22506ccd76f62a0a2e92925d0cbffd9af074e7f41948f71234"


def factors_of(label: int = 0, **given: float | list[float]) -> Factors:
    """Upright factors in the middle of the image, but for those given; lists make the batch."""
    upright = {"x": 0.0, "y": 0.0, "rotation": 0.0, "scale": 0.6, "shear": 0.0, "thickness": 0.08}
    columns = torch.broadcast_tensors(*(torch.tensor(v).reshape(-1) for v in (upright | given).values()))
    return Factors(torch.full(columns[0].shape, label), *(c.clone() for c in columns))


def moments(image: Tensor) -> tuple[float, float, float]:
    """Center of the ink (x, y), in sides of the image from its middle, and the slant of its long axis."""
    size = image.shape[-1]
    grid = (torch.arange(size, dtype=torch.float64) + 0.5) / size - 0.5
    ink = image[0].double() / image.double().sum()
    x, y = float((ink.sum(0) * grid).sum()), float((ink.sum(1) * grid).sum())
    xx, yy = float((ink.sum(0) * (grid - x) ** 2).sum()), float((ink.sum(1) * (grid - y) ** 2).sum())
    xy = float((ink * (grid - x) * (grid - y)[:, None]).sum())
    return x, y, math.atan2(2 * xy, yy - xx) / 2


def slow_bend(p: tuple[float, float], j: list[list[float]]) -> tuple[float, float]:
    X, Y, size = p[0] / 0.32, p[1] / 0.5, 0.13
    X_bent = X + size * (1 - X**2) * (j[0][0] + j[0][1] * Y + j[0][2] * (2 * Y**2 - 1))
    Y_bent = Y + size * (1 - Y**2) * (j[1][0] + j[1][1] * X + j[1][2] * (2 * X**2 - 1))
    return 0.32 * X_bent, 0.5 * Y_bent


def slow_ink(f: dict[str, float], jitter: list[list[float]], size: int, row: int, column: int) -> float:
    """The definition, one pixel and one segment at a time."""
    cos, sin = math.cos(f["rotation"]), math.sin(f["rotation"])
    nearest = math.inf
    for segment in SEGMENTS[int(f["label"])].tolist():
        ends = []
        for point in segment:
            px, py = slow_bend(point, jitter)
            px -= f["shear"] * py
            qx = f["x"] + f["scale"] * (cos * px + sin * py)
            qy = f["y"] + f["scale"] * (cos * py - sin * px)
            ends.append(((qx + 0.5) * size, (qy + 0.5) * size))
        (ax, ay), (bx, by) = ends
        dx, dy = bx - ax, by - ay
        t = ((column + 0.5 - ax) * dx + (row + 0.5 - ay) * dy) / (dx**2 + dy**2)
        t = min(max(t, 0.0), 1.0)
        nearest = min(nearest, math.hypot(column + 0.5 - ax - t * dx, row + 0.5 - ay - t * dy))
    return min(max(f["thickness"] * size / 2 - nearest + 0.5, 0.0), 1.0)


@pytest.mark.parametrize("size", [12, 28])
def test_render_equals_the_definition_pixel_by_pixel(size: int) -> None:
    index = torch.arange(12)
    f, j = draw_factors(1, index), draw_jitter(1, index)
    images = render(f, size, j)
    for b in range(12):
        values = {name: float(column[b]) for name, column in f._asdict().items()}
        for row, column in [(n * 5 % size, n * 7 % size) for n in range(20)] + [(size // 2, size // 2)]:
            slow = slow_ink(values, j[b].tolist(), size, row, column)
            assert float(images[b, 0, row, column]) == pytest.approx(slow, abs=2e-5)


def test_no_jitter_is_jitter_zero() -> None:
    f = draw_factors(2, torch.arange(50))
    torch.testing.assert_close(render(f), render(f, jitter=torch.zeros(50, 2, 3)), atol=1e-5, rtol=0)
    moved = (render(f) - render(f, jitter=draw_jitter(2, torch.arange(50)))).abs().amax((1, 2, 3))  # [b]
    assert moved.min() > 0.1 and moved.mean() > 0.5


@pytest.mark.parametrize("size", [13, 28, 40])
def test_image_does_not_depend_on_its_batch(size: int) -> None:
    index = torch.arange(100, 1101)
    images, f = glyphs(3, index, size)
    assert images.shape == (1001, 1, size, size) and images.dtype == torch.uint8
    again, _ = glyphs(3, index, size)
    assert torch.equal(images, again)
    for part in (slice(0, 1), slice(500, 501), slice(1000, 1001), slice(17, 60), slice(3, 1000, 7)):
        images_part, f_part = glyphs(3, index[part], size)
        assert torch.equal(images_part, images[part])
        assert all(torch.equal(a, b[part]) for a, b in zip(f_part, f, strict=True))
    flipped, _ = glyphs(3, index.flip(0), size)
    assert torch.equal(flipped.flip(0), images)


def test_image_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    images = []
    for n in (1, 2):
        torch.set_num_threads(n)
        images.append(glyphs(3, torch.arange(400))[0])
    torch.set_num_threads(threads)
    assert torch.equal(images[0], images[1])


def test_seed_and_index_give_other_images() -> None:
    images = torch.cat([glyphs(seed, torch.arange(200))[0] for seed in (0, 1)])
    assert images.flatten(1).unique(dim=0).shape[0] == 400


def test_the_set_of_seed_zero_is_what_it_has_always_been() -> None:
    images, f = glyphs(0, torch.arange(100))
    assert f.label[:20].tolist() == LABELS
    assert hashlib.sha256(images.numpy().tobytes()).hexdigest() == SHA256


def test_factors_fill_their_ranges_evenly() -> None:
    f = draw_factors(5, torch.arange(20_000))
    assert f.label.dtype == torch.int64 and f.label.shape == (20_000,)
    for name, (low, high) in RANGES.items():
        values = getattr(f, name)
        assert values.dtype == torch.float32 and low <= values.min() and values.max() <= high
        counts = torch.histc(values, bins=20, min=low, max=high)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 60  # 19 degrees of freedom
    j = draw_jitter(5, torch.arange(20_000))
    assert j.shape == (20_000, 2, 3) and -1 <= j.min() < -0.99 and 0.99 < j.max() < 1


def test_classes_are_balanced() -> None:
    counts = torch.bincount(draw_factors(5, torch.arange(50_000)).label, minlength=10)
    assert counts.shape == (10,)
    assert ((counts - 5000).abs() < 5 * math.sqrt(5000 * 0.9)).all()


def test_factors_are_not_correlated() -> None:
    f = draw_factors(6, torch.arange(20_000))
    columns = [*f, *draw_jitter(6, torch.arange(20_000)).flatten(1).unbind(1)]
    r = torch.corrcoef(torch.stack([c.double() for c in columns]))
    assert (r - torch.eye(13)).abs().max() < 0.035  # five deviations of 1 / sqrt(20,000)


@pytest.mark.parametrize("size", [28, 40])
def test_border_is_black_in_5000_draws(size: int) -> None:
    images, _ = glyphs(7, torch.arange(5000), size)
    assert images[..., 1:-1, 1:-1].flatten(1).amax(1).min() > 200
    border = (images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1])
    assert all(int(edge.max()) == 0 for edge in border)


def test_border_is_black_even_for_the_outermost_factors() -> None:
    """q is linear in the jitter, so its bound is |q| without it plus the sum of what each coefficient adds."""
    p = SEGMENTS.flatten(0, 2).T[..., None].double()  # [2 point 1]
    units = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    added = torch.stack([module._bend(p, unit[None]) - p for unit in units])  # [6 2 point 1]
    reach = torch.zeros(2, dtype=torch.float64)
    for r in torch.linspace(*RANGES["rotation"], 41).tolist():
        for k in RANGES["shear"]:
            c, s = math.cos(r), math.sin(r)
            RK = torch.tensor([[c, s - c * k], [-s, c + s * k]], dtype=torch.float64)
            q = (RK @ p[..., 0]).abs() + (RK @ added[..., 0]).abs().sum(0)  # [2 point]
            reach = torch.maximum(reach, q.amax(1))
    shift = torch.tensor([RANGES["x"][1], RANGES["y"][1]], dtype=torch.float64)
    outermost = shift + RANGES["scale"][1] * reach + RANGES["thickness"][1] / 2
    assert (outermost + 0.5 / 28 <= 0.5 - 0.5 / 28).all()  # half the softness; center of a border pixel


@pytest.mark.parametrize("label", range(10))
def test_thicker_and_larger_digits_have_more_ink(label: int) -> None:
    thick = render(factors_of(label, thickness=[0.04, 0.06, 0.08, 0.1, 0.12])).sum((1, 2, 3))
    large = render(factors_of(label, scale=[0.4, 0.5, 0.6, 0.7])).sum((1, 2, 3))
    assert (thick.diff() > 0).all() and (large.diff() > 0).all()


@pytest.mark.parametrize("size", [28, 56])
def test_moments_recover_place_and_rotation(size: int) -> None:
    """A zero is even about its center, which its long axis crosses."""
    angles = [-0.3, -0.1, 0.0, 0.1, 0.3]
    for image, rotation in zip(render(factors_of(0, rotation=angles), size), angles, strict=True):
        assert moments(image)[2] == pytest.approx(rotation, abs=0.015)
    image = render(factors_of(0, x=0.07, y=-0.04), size)[0]
    assert moments(image)[:2] == pytest.approx((0.07, -0.04), abs=0.002)


def test_positive_shear_leans_the_top_to_the_right() -> None:
    upright, sheared = render(factors_of(0, shear=[0.0, 0.25]))
    top, bottom = torch.ones(1, 28, 28), torch.ones(1, 28, 28)
    top[:, 14:], bottom[:, :14] = 0, 0
    assert moments(sheared * top)[0] > moments(upright * top)[0] + 0.02
    assert moments(sheared * bottom)[0] < moments(upright * bottom)[0] - 0.02


@pytest.mark.parametrize("label", range(10))
def test_scale_is_the_height_of_the_digit(label: int) -> None:
    """Rows with ink: the height and the pen, with edges that fade over a pixel."""
    image = render(factors_of(label, scale=0.6, thickness=0.08), 100)[0, 0]
    assert abs(int((image.amax(1) > 0.5).sum()) - 68) <= 4


@pytest.mark.parametrize("label", range(10))
def test_strokes_of_a_curve_join(label: int) -> None:
    curves = SEGMENTS[label].unflatten(0, (4, -1))  # [curve segment end 2]
    assert torch.equal(curves[:, 1:, 0], curves[:, :-1, 1])
    assert ((curves[:, :, 1] - curves[:, :, 0]).norm(dim=-1) > 0.01).all()
    assert (SEGMENTS[label].abs() <= torch.tensor([0.32, 0.5]) + 1e-6).all()


def test_digits_have_the_loops_of_their_figures() -> None:
    """Black areas closed in by ink: none in 1 2 3 5 7 and the open 4, one in 0 6 9, two in 8."""
    images = torch.cat([render(factors_of(label, scale=0.7), 56) for label in range(10)])
    assert [count_loops(image[0] > 0.3) for image in images] == [1, 0, 0, 0, 0, 0, 1, 0, 2, 1]


def count_loops(ink: Tensor) -> int:
    """Connected areas without ink, by four neighbors, less the one around the digit."""
    free = {(int(r), int(c)) for r, c in (~ink).nonzero()}
    areas = 0
    while free:
        areas, stack = areas + 1, [free.pop()]
        while stack:
            r, c = stack.pop()
            near = {(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)} & free
            free -= near
            stack.extend(near)
    return areas - 1


def test_labels_can_be_told_from_images_but_not_trivially() -> None:
    """The nearest class mean is right far more often than chance, and far from always."""
    train, f = glyphs(8, torch.arange(3000))
    test, g = glyphs(9, torch.arange(1000))
    means = torch.stack([train[f.label == k].float().mean(0).flatten() for k in range(10)])
    guess = torch.cdist(test.flatten(1).float(), means).argmin(1)
    assert 0.5 < float((guess == g.label).float().mean()) < 0.97


def test_float_and_uint8_agree_and_an_empty_batch_is_empty() -> None:
    index = torch.arange(64)
    images, f = glyphs(4, index)
    ink = render(f, jitter=draw_jitter(4, index))
    assert ink.dtype == torch.float32 and ink.min() == 0 and ink.max() == 1
    assert torch.equal((ink * 255 + 0.5).floor().to(torch.uint8), images)  # half a gray level rounds up
    assert glyphs(4, index[:0], 16)[0].shape == (0, 1, 16, 16)


def test_paint_is_the_color_of_the_hue_times_the_ink() -> None:
    """Against the standard library, a pixel at a time; hues outside of one turn, too."""
    images = glyphs(5, torch.arange(6), 12)[0]
    hue = torch.tensor([0.0, 1.0, 2.5, -3.0, 7.0, 4 * math.pi / 3])
    painted = paint(images, hue)
    assert painted.shape == (6, 3, 12, 12) and painted.dtype == torch.uint8
    for b in range(6):
        color = colorsys.hsv_to_rgb(float(hue[b]) / (2 * math.pi) % 1, 1, 1)
        for row in range(12):
            for column in range(12):
                ink = int(images[b, 0, row, column])
                for c in range(3):
                    assert int(painted[b, c, row, column]) == pytest.approx(ink * color[c], abs=0.51)
    torch.testing.assert_close(painted.amax(1, keepdim=True), images, atol=1, rtol=0)


def test_hues_are_even_and_tell_nothing_of_the_digit() -> None:
    index = torch.arange(4000)
    hue = draw_hue(2, index)
    counts = torch.histc(hue, 8, -math.pi, math.pi)
    assert (counts > 420).all() and (counts < 580).all() and float(counts.sum()) == 4000
    factors = torch.stack([f.float() for f in draw_factors(2, index)])
    assert float(torch.corrcoef(torch.cat([factors, hue[None]]))[-1, :-1].abs().max()) < 0.05
    assert torch.equal(draw_hue(2, index[5:9]), hue[5:9])


def test_the_colored_set_has_the_digits_of_the_gray_one_and_their_hues() -> None:
    gray = GlyphsConfig(train=20, test=5, size=12).load()
    colored = GlyphsConfig(train=20, test=5, size=12, color=True).load()
    assert colored.train.images.shape == (20, 3, 12, 12)
    torch.testing.assert_close(colored.test.images.amax(1, keepdim=True), gray.test.images, atol=1, rtol=0)
    assert torch.equal(colored.train.labels, gray.train.labels)
    assert set(colored.train.factors) == {*gray.train.factors, "hue"}


def test_wrong_input_is_refused_in_one_line() -> None:
    index = torch.arange(3)
    with pytest.raises(DataError, match=r"^glyphs of size 11: .*12 pixels.*raise the size$"):
        glyphs(0, index, size=11)
    with pytest.raises(DataError, match=r"^index -2: .*no negative index$"):
        glyphs(0, index - 2)
    with pytest.raises(DataError, match=r"^index of shape \[3, 1\]: .*reshape\(-1\)$"):
        draw_jitter(0, index[:, None])
    with pytest.raises(DataError, match=r"^label 8 to 10: .*0 to 9$"):
        render(draw_factors(0, index)._replace(label=index + 8))
