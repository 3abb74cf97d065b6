"""The stateless generator: equal to integer arithmetic, independent of batches, and random enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.errors import DataError
from torchcaps.utils.random import hash_counters, normal, permutation, resample, resample_near, seed_of, uniform

WORD = 2**64
any_int64 = st.integers(-(2**63), 2**63 - 1)


def slow_mix(x: int) -> int:
    """SplitMix64 in Python's integers, as published."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def slow_hash(seed: int, *counters: int) -> int:
    h = slow_mix((seed + 0x9E3779B97F4A7C15) % WORD)
    for c in counters:
        h = slow_mix((h + (c + 1) * 0x9E3779B97F4A7C15) % WORD)
    return h


def set_bits(x: Tensor) -> Tensor:  # [... 64]
    return (x[..., None] >> torch.arange(64)) & 1


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    """The first outputs for seed 1234567, as Rosetta Code lists them."""
    first = [slow_mix((1234567 + n * 0x9E3779B97F4A7C15) % WORD) for n in (1, 2, 3)]
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert int(hash_counters(1234567)) % WORD == first[0]


@given(any_int64, any_int64, any_int64)
@settings(max_examples=50, deadline=None)
def test_hash_equals_integer_arithmetic(seed: int, a: int, b: int) -> None:
    assert int(hash_counters(seed, a, b)) % WORD == slow_hash(seed, a, b)
    assert int(hash_counters(seed, torch.tensor(a), torch.tensor([b]))) % WORD == slow_hash(seed, a, b)


def test_hash_broadcasts_and_heeds_order_and_number_of_counters() -> None:
    a, b = torch.arange(3)[:, None], torch.arange(5, dtype=torch.int32)
    h = hash_counters(4, a, 8, b)
    assert h.shape == (3, 5) and h.dtype == torch.int64
    assert all(int(h[i, j]) % WORD == slow_hash(4, i, 8, j) for i in range(3) for j in range(5))
    assert len({int(hash_counters(*c)) for c in [(0,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (0, 1, 0)]}) == 6
    assert hash_counters(2**64 + 3, -1) == hash_counters(3, 2**64 - 1)


def test_no_two_hashes_of_a_grid_are_equal() -> None:
    a, b, c = torch.arange(50)[:, None, None], torch.arange(50)[:, None], torch.arange(50)
    assert torch.stack([hash_counters(s, a, b, c) for s in range(3)]).unique().numel() == 3 * 50**3


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_element_does_not_depend_on_its_batch(draw: Callable[..., Tensor], dtype: torch.dtype) -> None:
    index = torch.arange(1000, 1101)
    whole = draw(7, 3, index, count=19, dtype=dtype)
    assert whole.shape == (101, 19) and whole.dtype == dtype
    assert torch.equal(whole, draw(7, 3, index, count=19, dtype=dtype))
    for i in (0, 1, 50, 100):
        assert torch.equal(draw(7, 3, int(index[i]), count=19, dtype=dtype), whole[i])
        assert torch.equal(draw(7, 3, index[i : i + 1], count=5, dtype=dtype), whole[i : i + 1, :5])
    assert torch.equal(draw(7, 3, index.flip(0), count=19, dtype=dtype), whole.flip(0))


@pytest.mark.parametrize(
    ("dtype", "p"), [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24), (torch.float64, 53)]
)
def test_uniform_is_a_multiple_of_the_precision_below_one(dtype: torch.dtype, p: int) -> None:
    u = uniform(0, 1, count=100_000, dtype=dtype).double()
    assert u.min() >= 0 and u.max() <= 1 - 2.0**-p
    assert torch.equal(u * 2**p, (u * 2**p).round())


def test_uniform_has_even_bins_for_indices_and_for_positions() -> None:
    """χ² with 99 degrees of freedom: mean 99, deviation 14; 50 is below and 180 above any plausible draw."""
    index = torch.arange(100_000)
    for u in (uniform(0, index, count=1), uniform(1, 5, count=100_000), uniform(2, index * 2**32, count=1)):
        counts = torch.histc(u.flatten(), bins=100, min=0, max=1)
        assert 50 < float(((counts - 1000) ** 2 / 1000).sum()) < 180


def test_pairs_of_neighbors_fill_the_square_evenly() -> None:
    u = uniform(3, torch.arange(100_001), count=1).flatten()
    cell = (u[:-1] * 10).floor() * 10 + (u[1:] * 10).floor()
    counts = torch.bincount(cell.long(), minlength=100).float()
    assert 50 < float(((counts - 1000) ** 2 / 1000).sum()) < 180


def test_neighbors_are_not_correlated() -> None:
    """A correlation of n = 100,000 independent pairs has deviation 0.0032."""
    u = uniform(0, torch.arange(100_001), count=2, dtype=torch.float64) - 0.5
    seeds = torch.stack([uniform(s, 0, count=100_000, dtype=torch.float64) for s in (10, 11)]) - 0.5
    pairs = [(u[:-1, 0], u[1:, 0]), (u[:, 0], u[:, 1]), (u[:-1, 0], u[1:, 1]), (seeds[0], seeds[1])]
    assert all(abs(float((a * b).mean()) * 12) < 0.016 for a, b in pairs)


@pytest.mark.parametrize("place", ["seed", "first", "last"])
def test_avalanche(place: str) -> None:
    """Flipping one input bit flips every output bit in about half of 500 or 1,000 cases (deviation 0.022)."""
    x = torch.arange(1000)
    for bit in (0, 1, 7, 31, 32, 62, 63):
        flip = 1 << bit if bit < 63 else -(2**63)
        if place == "seed":
            before = torch.stack([hash_counters(s, 1) for s in range(500)])
            after = torch.stack([hash_counters(s ^ flip, 1) for s in range(500)])
        elif place == "first":
            before, after = hash_counters(0, x, 9), hash_counters(0, x ^ flip, 9)
        else:
            before, after = hash_counters(0, 9, x), hash_counters(0, 9, x ^ flip)
        changed = set_bits(before ^ after).double().mean(0)  # [64]
        assert changed.min() > 0.39 and changed.max() < 0.61
        assert abs(float(changed.mean()) - 0.5) < 0.01


def test_normal_has_the_moments_and_quantiles_of_a_gaussian() -> None:
    z = normal(5, torch.arange(1000), count=200, dtype=torch.float64).flatten()
    moments = [float((z**n).mean()) for n in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.06)
    for q in (-2.0, -1.0, 0.0, 0.5, 3.0):
        Phi = (1 + math.erf(q / math.sqrt(2))) / 2
        assert abs(float((z < q).double().mean()) - Phi) < 0.006


@pytest.mark.parametrize("word", [0, -1, 2**63 - 1, -(2**63)])
def test_normal_is_finite_for_the_outermost_hashes(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr("torchcaps.utils.random._positions", lambda *a: torch.tensor([word]))
    z, u = normal(0, count=1), uniform(0, count=1)
    assert z.isfinite().all() and z.abs().max() < 8.3
    assert 0 <= float(u) < 1


def test_functions_do_not_share_their_numbers() -> None:
    u, z = uniform(0, 1, count=1000, dtype=torch.float64), normal(0, 1, count=1000, dtype=torch.float64)
    assert not torch.equal(u.argsort(), z.argsort())
    assert not torch.equal(u.argsort(), permutation(0, 1, 1000))


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_holds_each_index_once(n: int) -> None:
    order = permutation(3, 0, n)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, permutation(3, 0, n))


def test_permutation_changes_with_epoch_and_seed_and_is_fair() -> None:
    orders = [permutation(3, 0, 1000), permutation(3, 1, 1000), permutation(4, 0, 1000)]
    assert all((orders[i] == orders[j]).sum() < 10 for i in range(3) for j in range(i))
    counts = Counter(tuple(permutation(0, epoch, 3).tolist()) for epoch in range(1200))
    assert len(counts) == 6
    assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 25  # 5 degrees of freedom


def test_seed_of_is_a_seed() -> None:
    seeds = [seed_of(s, c) for s in range(-20, 20) for c in range(20)]
    assert len(set(seeds)) == 800 and all(0 <= s < 2**63 for s in seeds)
    assert max(seeds) > 2**62 > min(seeds)
    torch.Generator().manual_seed(max(seeds))
    assert seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)


def test_wrong_input_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match=r"^counter of dtype torch.float32.*int64 tensor$"):
        uniform(0, torch.tensor([0.5]), count=1)
    with pytest.raises(DataError, match=r"^permutation of n=-1 .*data set$"):
        permutation(0, 0, -1)


POINTS = torch.tensor([[0.0, 0.0], [2.0, 1.0], [4.0, -1.0], [2.0, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("breadth", [0.0, 0.5, 1.0])
def test_resampled_points_keep_mean_and_covariance(breadth: float) -> None:
    drawn = resample(POINTS, 3, 1, torch.arange(20_000), breadth=breadth)
    torch.testing.assert_close(drawn.mean(0), POINTS.mean(0), rtol=0, atol=0.04)
    torch.testing.assert_close(drawn.T.cov(), POINTS.T.cov(correction=0), rtol=0.03, atol=0.02)


def test_resampling_without_breadth_draws_the_points_evenly_and_with_it_something_new() -> None:
    drawn = resample(POINTS, 3, torch.arange(4000), breadth=0.0)
    found = torch.cdist(drawn, POINTS).argmin(1)
    torch.testing.assert_close(drawn, POINTS[found])
    assert all(abs(int((found == n).sum()) - 1000) < 120 for n in range(4))
    assert float(torch.cdist(resample(POINTS, 3, torch.arange(50)), POINTS).min()) > 1e-3


def test_resampling_is_a_function_of_seed_and_counters() -> None:
    whole = resample(POINTS.float(), 0, 5, torch.arange(9))
    assert whole.dtype == torch.float32 and torch.equal(resample(POINTS.float(), 0, 5, torch.arange(4)), whole[:4])
    assert not torch.equal(resample(POINTS.float(), 0, 6, torch.arange(9)), whole)
    assert torch.equal(resample(POINTS[:1], 0, torch.arange(3)), POINTS[:1].expand(3, 2))


def test_points_near_others_have_the_moments_of_the_neighbors() -> None:
    # Two clouds of three points: neighbors of a point are those of its cloud
    clouds = torch.tensor([[0, 0], [1, 0], [0, 2], [50, 9], [51, 9], [50, 7]], dtype=torch.float64)
    drawn = resample_near(clouds, 3, 1, torch.arange(20_000), neighbors=3)
    left = drawn[drawn[:, 0] < 25]
    assert abs(len(left) - 10_000) < 400
    torch.testing.assert_close(left.mean(0), clouds[:3].mean(0), rtol=0, atol=0.03)
    torch.testing.assert_close(left.T.cov(), clouds[:3].T.cov(correction=0), rtol=0.05, atol=0.02)
    # With all points as neighbors it is a Gaussian with their moments, as `resample` draws with breadth 1
    wide = resample_near(POINTS, 3, 1, torch.arange(20_000))
    torch.testing.assert_close(wide.mean(0), POINTS.mean(0), rtol=0, atol=0.04)
    torch.testing.assert_close(wide.T.cov(), POINTS.T.cov(correction=0), rtol=0.03, atol=0.02)


def test_points_near_others_follow_a_bent_cloud() -> None:
    angle = torch.linspace(0, 2 * torch.pi, 257, dtype=torch.float64)[:-1]
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    away = (resample_near(circle, 0, torch.arange(2000)).norm(dim=1) - 1).abs()
    smoothed = (resample(circle, 0, torch.arange(2000)).norm(dim=1) - 1).abs()
    assert float(away.mean()) < 0.02 and float(smoothed.mean()) > 0.2


def test_drawing_near_points_is_a_function_of_seed_and_counters_and_one_point_is_itself() -> None:
    whole = resample_near(POINTS.float(), 0, 5, torch.arange(9))
    assert whole.dtype == torch.float32 and torch.equal(resample_near(POINTS.float(), 0, 5, torch.arange(4)), whole[:4])
    assert not torch.equal(resample_near(POINTS.float(), 0, 6, torch.arange(9)), whole)
    assert torch.equal(resample_near(POINTS[:1], 0, torch.arange(3)), POINTS[:1].expand(3, 2))
