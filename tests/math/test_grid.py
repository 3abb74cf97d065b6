"""Grids and windows against torch's convolutions, explicit receptive fields and a dictionary of who sees whom."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.windows import UNREACHED, WINDOWS, Place, places_seen
from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.math.grid import Grid, Window


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Sizes --------------------------------------------------------------------------------------------------


@given(
    height=st.integers(1, 40), width=st.integers(1, 40), kernel=st.integers(1, 12), stride=st.integers(1, 6)
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_sizes_are_those_of_a_convolution(height: int, width: int, kernel: int, stride: int) -> None:
    if kernel > min(height, width):
        with pytest.raises(ShapeError):
            Grid.of_image(height, width).window(kernel, stride)
        return
    out = Grid.of_image(height, width).window(kernel, stride).out
    image, filters = torch.zeros(1, 1, height, width), torch.zeros(1, 1, kernel, kernel)
    made = torch.nn.functional.conv2d(image, filters, stride=stride)
    assert (out.height, out.width) == tuple(made.shape[2:])
    assert out.places == made[0, 0].numel()


def test_the_grid_of_capsnet() -> None:
    grid = Grid.of_image(28, 28).window(9, 1).out
    assert (grid.height, grid.width) == (20, 20)
    grid = grid.window(9, 2).out
    assert (grid.height, grid.width, grid.places) == (6, 6, 36)


def test_padding_adds_places_outside_of_the_image() -> None:
    """As many as torch's convolution has; and the image's own pixels keep their coordinates."""
    plain = Grid.of_image(9, 11)
    padded = Grid.of_image(9, 11, padding=2)
    made = torch.nn.functional.conv2d(torch.zeros(1, 1, 9, 11), torch.zeros(1, 1, 3, 3), stride=2, padding=2)
    out = padded.window(3, 2).out
    assert (out.height, out.width) == tuple(made.shape[2:])
    inside = padded.centers().view(13, 15, 2)[2:-2, 2:-2]
    torch.testing.assert_close(inside, plain.centers().view(9, 11, 2))
    with pytest.raises(ShapeError, match="images of at least 16x16 pixels"):
        padded.window(20, 1)


# --- Centers ------------------------------------------------------------------------------------------------


def explicit_centers(height: int, width: int, windows: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """The mean of the pixel centers in each place's receptive field, grown place by place."""
    fields: dict[Place, set[Place]] = {(y, x): {(y, x)} for y in range(height) for x in range(width)}
    for kernel, stride in windows:
        above: dict[Place, set[Place]] = {}
        rows, columns = max(y for y, _ in fields) + 1, max(x for _, x in fields) + 1
        for row, top in enumerate(range(0, rows - kernel + 1, stride)):
            for column, left in enumerate(range(0, columns - kernel + 1, stride)):
                seen = [fields[top + y, left + x] for y in range(kernel) for x in range(kernel)]
                above[row, column] = set().union(*seen)
        fields = above
    center = []
    for place in sorted(fields):
        pixels = fields[place]
        center.append(tuple(sum(p[axis] + 0.5 for p in pixels) / len(pixels) for axis in (0, 1)))
    return center


@pytest.mark.parametrize(
    ("height", "width", "windows"),
    [
        (3, 4, []),
        (5, 6, [(3, 1)]),
        (9, 7, [(2, 2), (2, 1)]),
        (14, 11, [(5, 2), (3, 1)]),
        (16, 13, [(4, 3), (2, 1), (2, 2)]),
        (18, 18, [(5, 2), (1, 1), (3, 2)]),
    ],
)
def test_centers_are_the_means_of_receptive_fields(height: int, width: int, windows: list[tuple[int, int]]) -> None:
    grid = Grid.of_image(height, width)
    for kernel, stride in windows:
        grid = grid.window(kernel, stride).out
    wanted = torch.tensor(explicit_centers(height, width, windows))
    torch.testing.assert_close(grid.centers(), wanted)
    torch.testing.assert_close(grid.centers(0.01), wanted / 100)


def test_one_place_alone_has_a_center_too() -> None:
    assert Grid.of_image(1, 1).centers().tolist() == [[0.5, 0.5]]
    assert Grid.of_image(5, 5).window(5, 1).out.centers().tolist() == [[2.5, 2.5]]


# --- Gathering ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("b", "i", "d"), [(1, 1, 1), (2, 3, 4)])
def test_gather_against_loops(window: Window, b: int, i: int, d: int) -> None:
    x = random(b, window.grid.height, window.grid.width, i, d)
    found = window.gather(x)
    assert found.shape == (b, window.out.places, window.kernel**2 * i, d)
    for p, places in enumerate(places_seen(window)):
        children = [x[:, row, column, c] for row, column in places for c in range(i)]
        torch.testing.assert_close(found[:, p], torch.stack(children, 1), rtol=0, atol=0)


def test_gather_sends_back_to_each_place_what_its_windows_received() -> None:
    x = random(1, 14, 14, 1, 1).requires_grad_()
    UNREACHED.gather(x).sum().backward()
    count = torch.zeros(14, 14, dtype=torch.float64)
    for places in places_seen(UNREACHED):
        for row, column in places:
            count[row, column] += 1
    assert x.grad is not None
    torch.testing.assert_close(x.grad.view(14, 14), count)
    assert not count[13].any()
    assert not count[:, 13].any()


def test_gather_does_not_mind_strides() -> None:
    window, x = WINDOWS[2], random(3, 2, 4, 5, 2).permute(4, 3, 2, 1, 0)
    torch.testing.assert_close(window.gather(x), window.gather(x.contiguous()), rtol=0, atol=0)


# --- Errors -------------------------------------------------------------------------------------------------


def failure(height: int, width: int, windows: list[tuple[int, int]]) -> str | None:
    """What the construction of the windows over an image says; None if they fit."""
    grid = Grid.of_image(height, width)
    try:
        for kernel, stride in windows:
            grid = grid.window(kernel, stride).out
    except TorchcapsError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("height", "width", "windows"),
    [
        (4, 9, [(5, 1)]),
        (8, 8, [(9, 1)]),
        (12, 30, [(9, 1), (9, 2)]),
        (10, 10, [(5, 2), (1, 1), (5, 1)]),
        (13, 40, [(3, 2), (3, 2), (3, 1)]),
    ],
)
def test_the_error_names_the_smallest_image_that_fits(height: int, width: int, windows: list[tuple[int, int]]) -> None:
    text = failure(height, width, windows)
    assert text is not None
    assert "\n" not in text
    smallest = next(size for size in range(1, 99) if failure(size, size, windows) is None)
    assert f"{smallest}x{smallest}" in re.findall(r"\d+x\d+", text)


@pytest.mark.parametrize(("kernel", "stride"), [(0, 1), (1, 0), (-3, 1), (3, -1)])
def test_a_window_without_size_or_step_is_refused(kernel: int, stride: int) -> None:
    with pytest.raises(ShapeError, match=f"{kernel} and {stride}") as caught:
        Grid.of_image(8, 8).window(kernel, stride)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 3)])
def test_a_grid_without_places_is_refused(height: int, width: int) -> None:
    with pytest.raises(ShapeError, match=f"{height}x{width}"):
        Grid.of_image(height, width)


def test_a_first_look_without_gradients_does_not_spoil_training() -> None:
    window = Grid(5, 7).window(2, 1)  # a size no other test uses, so nothing is remembered yet
    with torch.inference_mode():
        window.gather(torch.zeros(1, 5, 7, 1, 1))
    x = torch.zeros(1, 5, 7, 1, 1, requires_grad=True)
    window.gather(x).sum().backward()
    assert x.grad is not None


def test_an_absurd_stride_is_refused() -> None:
    with pytest.raises(ShapeError, match="stride of 100000"):
        Grid(12, 12).window(3, 100_000)
