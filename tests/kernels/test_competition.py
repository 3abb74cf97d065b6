"""Competition over windows, on stored votes, against a dictionary of who sees whom."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from support.windows import UNREACHED, WINDOWS, places_seen
from torchcaps.kernels.votes import Slots
from torchcaps.kernels.votes.dense import compete_in_slots
from torchcaps.math.grid import Grid, Window


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_share(window: Window, logits: Tensor, types: int, *, across_parents: bool = True) -> Tensor:
    """Logits [(b p) (n i) j] -> log shares of the same shape."""
    slots = Slots.of_window(window, types, logits.device)
    folded = torch.unflatten(logits, 0, (-1, slots.places))
    return compete_in_slots(folded, slots, across_parents=across_parents, background=None).flatten(0, 1)


def slow_log_share(logits: Tensor, window: Window, types: int, across_parents: bool) -> Tensor:
    """A child is (sample, place, type); it competes over every window that holds it, and over parent types or not."""
    seen = places_seen(window)
    b, j = logits.shape[0] // len(seen), logits.shape[-1]
    competing: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for s in range(b):
        for p, places in enumerate(seen):
            for n, (row, column) in enumerate(places):
                for c in range(types):
                    for parent in range(j):
                        child = (s, row, column, c) if across_parents else (s, row, column, c, parent)
                        competing[child].append((s * len(seen) + p, n * types + c, parent))
    share = torch.full_like(logits, math.nan)
    for slots in competing.values():
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
    found = log_share(window, logits, types, across_parents=across_parents)
    wanted = slow_log_share(logits, window, types, across_parents)
    assert bool(wanted.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("across_parents", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_the_shares_of_every_child_that_is_seen_sum_to_1(window: Window, across_parents: bool, scale: float) -> None:
    b, types, j = 2, 2, 3
    share = log_share(window, random_logits(window, b, types, j, scale), types, across_parents=across_parents).exp()
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
    share = log_share(window, torch.zeros(9, 9, 4), 1).exp()  # [p n j]
    assert share[0, 0].tolist() == pytest.approx([1 / 4] * 4)  # place (0, 0), held by one window
    assert share[0, 8].tolist() == pytest.approx([1 / 36] * 4)  # place (2, 2), held by nine
    alone = log_share(window, torch.zeros(9, 9, 4), 1, across_parents=False).exp()
    assert alone[0, 0].tolist() == pytest.approx([1] * 4)
    assert alone[0, 8].tolist() == pytest.approx([1 / 9] * 4)


def test_samples_do_not_compete_with_each_other() -> None:
    window = WINDOWS[1]
    logits = random_logits(window, 3, 2, 2)
    whole = log_share(window, logits, 2)
    p = window.out.places
    for s in range(3):
        alone = log_share(window, logits[s * p : (s + 1) * p], 2)
        torch.testing.assert_close(whole[s * p : (s + 1) * p], alone, rtol=0, atol=0)


def test_a_window_over_everything_is_an_ordinary_softmax() -> None:
    window = Grid(3, 3).window(3, 1)
    logits = random_logits(window, 4, 2, 5)
    torch.testing.assert_close(log_share(window, logits, 2), logits.log_softmax(-1))
    assert not log_share(window, logits, 2, across_parents=False).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
def test_large_logits_in_every_type(dtype: torch.dtype, value: float) -> None:
    logits = torch.full((36, 9, 3), value, dtype=dtype).requires_grad_()
    found = log_share(UNREACHED, logits, 1)
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
    share = log_share(window, torch.full((4, 4, 3), value), 1, across_parents=across_parents).exp()
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
    assert gradcheck(lambda x: log_share(window, x, 1, across_parents=across_parents), (logits,))


def test_a_first_look_without_gradients_does_not_spoil_training() -> None:
    window = Grid(5, 7).window(2, 1)  # a size no other test here uses, so nothing is cached yet
    with torch.inference_mode():
        log_share(window, torch.zeros(24, 4, 2), 1)
    logits = torch.zeros(24, 4, 2, requires_grad=True)
    log_share(window, logits, 1).sum().backward()
    assert logits.grad is not None


def test_a_first_look_at_one_place_does_not_spoil_training() -> None:
    def compete(logits: Tensor) -> Tensor:
        slots = Slots.at_one_place(11, logits.device)  # a size no other test here uses
        return compete_in_slots(logits, slots, across_parents=True, background=0.0)

    with torch.inference_mode():
        compete(torch.zeros(1, 1, 11, 2))
    logits = torch.zeros(1, 1, 11, 2, requires_grad=True)
    compete(logits).sum().backward()
    assert logits.grad is not None
