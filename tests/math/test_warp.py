"""The warp: exact where it can be, the definition one pixel at a time elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.errors import DataError, ShapeError
from torchcaps.math.warp import linear_map, warp


def noise(b: int, c: int, h: int, w: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(b + 10 * h), dtype=torch.float64).to(dtype)


def slow_pixel(image: list[list[float]], row: int, column: int) -> float:
    inside = 0 <= row < len(image) and 0 <= column < len(image[0])
    return image[row][column] if inside else 0.0


def slow_warp(image: Tensor, A: Tensor, t: Tensor, size: tuple[int, int]) -> Tensor:
    """One channel [h w], one pixel of the result at a time: solve A x = y - t, then read between four pixels."""
    pixels, (H, W), (h, w) = image.tolist(), size, image.shape
    (a, b), (c, d) = A.tolist()
    tx, ty = t.tolist()
    result = torch.zeros(H, W, dtype=torch.float64)
    for row in range(H):
        for column in range(W):
            X, Y = column - (W - 1) / 2 - tx, row - (H - 1) / 2 - ty
            x = (d * X - b * Y) / (a * d - b * c) + (w - 1) / 2
            y = (a * Y - c * X) / (a * d - b * c) + (h - 1) / 2
            for r in (math.floor(y), math.floor(y) + 1):
                for k in (math.floor(x), math.floor(x) + 1):
                    weight = (1 - abs(y - r)) * (1 - abs(x - k))
                    result[row, column] += weight * slow_pixel(pixels, r, k)
    return result


def ink_moments(image: Tensor) -> tuple[float, float, float]:
    """Sum of an image [h w], and the center of its ink (x, y) from its middle."""
    h, w = image.shape
    mass = float(image.sum())
    x = float((image.sum(0) * (torch.arange(w) - (w - 1) / 2)).sum()) / mass
    y = float((image.sum(1) * (torch.arange(h) - (h - 1) / 2)).sum()) / mass
    return mass, x, y


def blob(size: int, sigma: float) -> Tensor:
    grid = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    return torch.exp(-(grid[:, None] ** 2 + grid**2) / (2 * sigma**2))


@pytest.mark.parametrize(("H", "W"), [(28, 28), (40, 36), (20, 18)])
def test_the_identity_is_exact_on_a_larger_or_smaller_canvas(H, W):
    images = noise(3, 2, 28, 28)
    done = warp(images, torch.eye(2).expand(3, 2, 2), torch.zeros(3, 2), (H, W))
    pad = ((W - 28) // 2, (W - 28) // 2, (H - 28) // 2, (H - 28) // 2)
    assert torch.equal(done, torch.nn.functional.pad(images, pad))


def test_between_two_rows_is_their_mean():
    images = noise(3, 2, 28, 28)
    done = warp(images, torch.eye(2).expand(3, 2, 2), torch.zeros(3, 2), (29, 28))
    padded = torch.nn.functional.pad(images, (0, 0, 1, 1))
    assert torch.allclose(done, (padded[:, :, :-1] + padded[:, :, 1:]) / 2)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("side", [7, 28])
def test_quarter_turns_and_whole_shifts_are_exact(turns, side):
    images = noise(2, 1, side, side)
    quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])  # counter-clockwise as seen, y being down
    A = torch.linalg.matrix_power(quarter, turns).expand(2, 2, 2)
    assert torch.equal(warp(images, A, torch.zeros(2, 2), (side, side)), torch.rot90(images, turns, (2, 3)))
    moved = warp(images, A, torch.tensor([[3.0, 0.0], [0.0, -2.0]]), (side, side))
    turned = torch.rot90(images, turns, (2, 3))
    assert torch.equal(moved[0, :, :, 3:], turned[0, :, :, :-3])
    assert not moved[0, :, :, :3].any()
    assert torch.equal(moved[1, :, :-2], turned[1, :, 2:])
    assert not moved[1, :, -2:].any()


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(*[st.floats(-1.5, 1.5) for _ in range(4)]).filter(lambda m: abs(m[0] * m[3] - m[1] * m[2]) > 0.2),
    st.tuples(st.floats(-6, 6), st.floats(-6, 6)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_every_pixel_is_the_bilinear_reading_of_its_origin(matrix, shift, source, size):
    images = noise(2, 2, *source, dtype=torch.float64)
    A = torch.tensor(matrix, dtype=torch.float64).view(1, 2, 2).repeat(2, 1, 1)
    A[1] *= 1.25  # the two of a batch differ
    t = torch.tensor(shift, dtype=torch.float64).repeat(2, 1)
    t[1] += 0.5
    done = warp(images, A, t, size)
    for b in range(2):
        for c in range(2):
            torch.testing.assert_close(done[b, c], slow_warp(images[b, c], A[b], t[b], size), rtol=0, atol=1e-9)


def test_it_agrees_with_grid_sample():
    images, size = noise(8, 3, 17, 12, dtype=torch.float64), (15, 20)
    g = torch.Generator().manual_seed(4)
    A = torch.eye(2) + 0.4 * torch.randn(8, 2, 2, generator=g, dtype=torch.float64)
    t = 3 * torch.randn(8, 2, generator=g, dtype=torch.float64)
    half_in, half_out = torch.tensor([12, 17]) / 2, torch.tensor([20, 15]) / 2
    inverse = torch.linalg.inv(A)
    linear = inverse * half_out / half_in[:, None]
    theta = torch.cat((linear, -(inverse @ t[..., None]) / half_in[:, None]), dim=-1)
    grid = torch.nn.functional.affine_grid(theta, [8, 3, *size], align_corners=False)
    wanted = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    torch.testing.assert_close(warp(images, A, t, size), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("factors", [(0.3, 0.1, 0.9, 1.2), (-0.2, -0.2, 1.2, 0.8), (1.0, 0.0, 1.1, 1.1)])
def test_a_smooth_shape_keeps_its_ink_and_its_center(factors):
    """Mass grows with |det A|, and the center of the ink at c goes to A c + t."""
    image = torch.nn.functional.pad(blob(24, 2.5), (6, 0, 0, 4))[None, None]
    A = linear_map(*torch.tensor(factors, dtype=torch.float64)[:, None])
    t = torch.tensor([[1.3, -2.4]], dtype=torch.float64)
    mass, x, y = ink_moments(image[0, 0])
    new_mass, new_x, new_y = ink_moments(warp(image, A, t, (48, 48))[0, 0])
    assert new_mass == pytest.approx(mass * float(torch.det(A[0])), rel=1e-3)
    wanted = A[0] @ torch.tensor([x, y], dtype=torch.float64) + t[0]
    assert [new_x, new_y] == pytest.approx(wanted.tolist(), abs=2e-2)


def test_the_factors_of_a_linear_map_point_where_they_say():
    def apply(x: float, y: float, **given: float) -> list[float]:
        upright = {"rotation": 0.0, "shear": 0.0, "scale_x": 1.0, "scale_y": 1.0}
        A = linear_map(*(torch.tensor([float(v)]) for v in (upright | given).values()))
        return (A[0] @ torch.tensor([float(x), float(y)])).tolist()

    assert apply(1, 0, rotation=math.pi / 2) == pytest.approx([0, -1], abs=1e-6)  # from the right to the top
    assert apply(0, -1, shear=0.5) == pytest.approx([0.5, -1])  # the top to the right
    assert apply(1, 2, scale_x=3, scale_y=5) == pytest.approx([3, 10])
    both = apply(0, -1, rotation=math.pi / 2, shear=0.5, scale_y=2)  # (0, -1) -> (0, -2) -> (1, -2) -> (-2, -1)
    assert both == pytest.approx([-2, -1], abs=1e-6)


def test_an_image_is_the_same_in_any_batch_and_gradients_are_those_of_the_readings():
    images, g = noise(9, 1, 12, 12), torch.Generator().manual_seed(0)
    A, t = torch.eye(2) + 0.2 * torch.randn(9, 2, 2, generator=g), torch.randn(9, 2, generator=g)
    whole = warp(images, A, t, (16, 16))
    assert torch.equal(torch.cat([warp(images[[n]], A[[n]], t[[n]], (16, 16)) for n in range(9)]), whole)
    small = images[:1, :, :4, :4].double().requires_grad_()
    inputs = (small, A[:1].double().requires_grad_(), t[:1].double().requires_grad_())
    assert torch.autograd.gradcheck(lambda i, m, s: warp(i, m, s, (3, 3)), inputs)


def test_what_is_far_outside_is_zero():
    far = torch.tensor([[1e6, 0.0], [0.0, -1e30]])
    assert not warp(torch.ones(2, 1, 5, 5), torch.eye(2).expand(2, 2, 2), far, (9, 9)).any()
    assert warp(torch.ones(0, 1, 5, 5), torch.zeros(0, 2, 2), torch.zeros(0, 2), (9, 9)).shape == (0, 1, 9, 9)


@pytest.mark.parametrize(
    ("images", "matrices", "shifts", "size", "error", "text"),
    [
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2, 2, 2), torch.zeros(2, 2), (3, 3), ShapeError, "floats"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 2, 2), torch.zeros(2, 2), (3, 3), ShapeError, "b c h w"),
        (torch.zeros(2, 1, 3, 3), torch.zeros(1, 2, 2), torch.zeros(2, 2), (3, 3), ShapeError, r"\[2, 2, 2\]"),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, 2, 2), torch.zeros(2, 3), (3, 3), ShapeError, r"\[2, 2\]"),
        (torch.zeros(1, 1, 3, 3), torch.eye(2)[None], torch.zeros(1, 2), (0, 3), ShapeError, "1x1"),
        (torch.zeros(1, 1, 3, 3), torch.zeros(1, 2, 2), torch.zeros(1, 2), (3, 3), DataError, "no inverse"),
        (torch.zeros(1, 1, 3, 3), torch.full((1, 2, 2), math.nan), torch.zeros(1, 2), (3, 3), DataError, "no inverse"),
        (torch.zeros(1, 1, 3, 3), torch.eye(2)[None], torch.full((1, 2), math.nan), (3, 3), DataError, "finite"),
    ],
)
def test_what_cannot_be_warped_is_refused_in_one_line(images, matrices, shifts, size, error, text):
    with pytest.raises(error, match=text) as caught:
        warp(images, matrices, shifts, size)
    assert "\n" not in str(caught.value)
