"""Grids and windows against torch's convolutions, explicit receptive fields and a dictionary of who sees whom."""

from __future__ import annotations

import math
import re
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.math.grid import Grid, Window

Place = tuple[int, int]

UNREACHED = Grid(14, 14).window(3, 2)
"""Its last window ends at place 12: row 13 and column 13 belong to none."""

WINDOWS = [
    Grid(3, 3).window(3, 1), Grid(4, 5).window(2, 1), Grid(5, 4).window(3, 2), Grid(6, 6).window(3, 3),
    Grid(7, 5).window(2, 3), Grid(6, 7).window(1, 2), UNREACHED,
]  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positions(window: Window) -> list[Place]:
    """The top left place of every window position, in row order: as long as the window fits, step by step."""
    grid, found = window.grid, []
    for top in range(0, grid.height, window.stride):
        for left in range(0, grid.width, window.stride):
            if top + window.kernel <= grid.height and left + window.kernel <= grid.width:
                found.append((top, left))
    return found


def places_seen(window: Window) -> list[list[Place]]:
    """For each window position the n places that it sees, in row order."""
    inside = range(window.kernel)
    return [[(top + y, left + x) for y in inside for x in inside] for top, left in positions(window)]


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


# --- Competition --------------------------------------------------------------------------------------------


def slow_log_share(logits: Tensor, window: Window, types: int, across_parents: bool) -> Tensor:
    """A child is (sample, place, type); it competes over every window that holds it, and over parent types or not."""
    seen = places_seen(window)
    b, j = logits.shape[0] // len(seen), logits.shape[-1]
    rivals: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for s in range(b):
        for p, places in enumerate(seen):
            for n, (row, column) in enumerate(places):
                for c in range(types):
                    for parent in range(j):
                        child = (s, row, column, c) if across_parents else (s, row, column, c, parent)
                        rivals[child].append((s * len(seen) + p, n * types + c, parent))
    share = torch.full_like(logits, math.nan)
    for slots in rivals.values():
        values = [float(logits[slot]) for slot in slots]
        top = max(values)
        total = top + math.log(math.fsum(math.exp(v - top) for v in values))
        for slot, value in zip(slots, values, strict=True):
            share[slot] = value - total
    return share


def random_logits(window: Window, b: int, types: int, j: int, scale: float = 2.0) -> Tensor:
    return scale * random(b * window.out.places, window.kernel**2 * types, j)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("across_parents", [True, False])
@pytest.mark.parametrize(("b", "types", "j"), [(1, 1, 1), (2, 2, 3)])
def test_shares_against_a_dictionary(window: Window, across_parents: bool, b: int, types: int, j: int) -> None:
    logits = random_logits(window, b, types, j)
    found = window.log_share(logits, types, across_parents=across_parents)
    wanted = slow_log_share(logits, window, types, across_parents)
    assert bool(wanted.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("across_parents", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_the_shares_of_every_child_that_is_seen_sum_to_1(window: Window, across_parents: bool, scale: float) -> None:
    b, types, j = 2, 2, 3
    share = window.log_share(random_logits(window, b, types, j, scale), types, across_parents=across_parents).exp()
    share = share.view(b, window.out.places, window.kernel**2, types, j)
    total = torch.zeros(b, window.grid.height, window.grid.width, types, j, dtype=torch.float64)
    for p, places in enumerate(places_seen(window)):
        for n, (row, column) in enumerate(places):
            total[:, row, column] += share[:, p, n]
    total = total.sum(-1) if across_parents else total
    reached = {place for places in places_seen(window) for place in places}
    for row in range(window.grid.height):
        for column in range(window.grid.width):
            wanted = 1.0 if (row, column) in reached else 0.0
            here = total[:, row, column]
            torch.testing.assert_close(here, torch.full_like(here, wanted), rtol=0, atol=1e-9)


def test_equal_logits_share_equally_and_corners_have_one_window() -> None:
    """Section 4: with kernel K an inner child has K x K windows, a corner child one."""
    window = Grid(5, 5).window(3, 1)
    share = window.log_share(torch.zeros(9, 9, 4), 1).exp()  # [p n j]
    assert share[0, 0].tolist() == pytest.approx([1 / 4] * 4)  # place (0, 0), held by one window
    assert share[0, 8].tolist() == pytest.approx([1 / 36] * 4)  # place (2, 2), held by nine
    alone = window.log_share(torch.zeros(9, 9, 4), 1, across_parents=False).exp()
    assert alone[0, 0].tolist() == pytest.approx([1] * 4)
    assert alone[0, 8].tolist() == pytest.approx([1 / 9] * 4)


def test_samples_do_not_compete_with_each_other() -> None:
    window = WINDOWS[1]
    logits = random_logits(window, 3, 2, 2)
    whole = window.log_share(logits, 2)
    p = window.out.places
    for s in range(3):
        alone = window.log_share(logits[s * p : (s + 1) * p], 2)
        torch.testing.assert_close(whole[s * p : (s + 1) * p], alone, rtol=0, atol=0)


def test_a_window_over_everything_is_an_ordinary_softmax() -> None:
    window = Grid(3, 3).window(3, 1)
    logits = random_logits(window, 4, 2, 5)
    torch.testing.assert_close(window.log_share(logits, 2), logits.log_softmax(-1))
    assert not window.log_share(logits, 2, across_parents=False).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
def test_large_logits_in_every_type(dtype: torch.dtype, value: float) -> None:
    logits = torch.full((36, 9, 3), value, dtype=dtype).requires_grad_()
    found = UNREACHED.log_share(logits, 1)
    found.sum().backward()
    assert logits.grad is not None
    assert found.dtype == dtype
    assert bool(found.isfinite().all() and logits.grad.isfinite().all())
    assert float(found.detach()[0, 0, 0]) == pytest.approx(-math.log(3), rel=0.02)


@pytest.mark.parametrize("value", [-1e3, -1e6, -1e12, -1e30, 1e6])
@pytest.mark.parametrize("across_parents", [True, False])
def test_rounding_does_not_spoil_the_sums_of_large_logits(value: float, across_parents: bool) -> None:
    """Log densities of votes that fit nowhere are of the order -1e6 and less, in float32."""
    window = Grid(3, 3).window(2, 1)
    share = window.log_share(torch.full((4, 4, 3), value), 1, across_parents=across_parents).exp()
    total = share.new_zeros(3, 3, 3)
    for p, places in enumerate(places_seen(window)):
        for n, (row, column) in enumerate(places):
            total[row, column] += share[p, n]
    total = total.sum(-1) if across_parents else total
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("across_parents", [True, False])
@pytest.mark.parametrize("window", [Grid(4, 4).window(3, 2), Grid(3, 4).window(2, 1)])
def test_shares_have_a_gradient(window: Window, across_parents: bool) -> None:
    logits = random_logits(window, 1, 1, 2).requires_grad_()
    assert gradcheck(lambda x: window.log_share(x, 1, across_parents=across_parents), (logits,))


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
        window.log_share(torch.zeros(24, 4, 2), 1)
    x = torch.zeros(1, 5, 7, 1, 1, requires_grad=True)
    window.gather(x).sum().backward()
    logits = torch.zeros(24, 4, 2, requires_grad=True)
    window.log_share(logits, 1).sum().backward()
    assert x.grad is not None and logits.grad is not None


def test_an_absurd_stride_is_refused() -> None:
    with pytest.raises(ShapeError, match="stride of 100000"):
        Grid(12, 12).window(3, 100_000)
