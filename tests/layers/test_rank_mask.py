"""The sparse mask against a loop-only reading of Rawlinson 2018, eqs. (1)-(7) and algorithm 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError, TorchcapsError
from torchcaps.layers import SparseMask
from torchcaps.layers.rank_mask import rank, rank_mask, update_boost, update_frequency


def slow_rank(row: list[float]) -> list[int]:
    """Eq. (2): how many come before; among equals the lower index does."""
    return [
        sum(other > z or (other == z and k < j) for k, other in enumerate(row)) for j, z in enumerate(row)
    ]  # fmt: skip


@dataclass
class Slow:
    """The paper's per-image and per-batch equations for L capsules, with lists."""

    L: int
    gamma: float
    alpha: float
    d: float
    N: int
    low: float
    high: float
    n: int = 0
    mu: list[float] = field(default_factory=list)
    g: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mu, self.g = [1 / self.L] * self.L, [1.0] * self.L

    def image(self, psi: list[float]) -> tuple[list[float], list[int]]:
        z = [psi[j] * self.g[j] for j in range(self.L)]  # eq. (1)
        r = slow_rank(z)  # eq. (2)
        m = [math.exp(-self.gamma * r[j] / (self.L - 1)) for j in range(self.L)]  # eq. (3)
        return [0.0 if value < 0.01 else value for value in m], r

    def batch(self, ranks: list[list[int]]) -> None:
        K = len(ranks)
        for j in range(self.L):
            phi = sum(1 if r[j] == 0 else 0 for r in ranks) / K  # eq. (5)
            self.mu[j] = self.alpha * self.mu[j] + (1 - self.alpha) * phi  # eqs. (6), (7)
        self.n += 1
        if self.n % self.N != 0:
            return
        for j in range(self.L):
            if self.mu[j] < self.low:
                self.g[j] = self.g[j] + self.d
            if self.mu[j] > self.high:
                self.g[j] = max(1.0, self.g[j] - self.d)


def supports(batches: int, K: int, L: int, seed: int = 0) -> Tensor:
    """[batches K L] supports that favor a few capsules at first and others in the second half."""
    make = torch.Generator().manual_seed(seed)
    favor = torch.linspace(2.0, 1.0, L, dtype=torch.float64)
    psi = torch.rand(batches, K, L, generator=make, dtype=torch.float64) + 1
    return torch.cat([psi[: batches // 2] * favor, psi[batches // 2 :] * favor.flip(0)])


@pytest.mark.parametrize(
    ("L", "gamma", "every"), [(16, 12.0, 50), (16, 12.0, 1), (5, 3.0, 3), (2, 1.0, 7), (20, 60.0, 2)]
)
@pytest.mark.parametrize("alpha", [0.9, 0.99])
def test_the_equations_line_by_line_over_many_batches(L: int, gamma: float, every: int, alpha: float) -> None:
    layer = SparseMask(L, gamma=gamma, every=every, alpha=alpha).double()
    slow = Slow(L, gamma, alpha, 0.1, every, 0.64 / L, 1.6 / L)
    boosts = [slow.g[:]]
    for psi in supports(160, 8, L):
        mask, ranks = layer(psi)
        each = [slow.image(row) for row in psi.tolist()]
        assert ranks.tolist() == [r for _, r in each]
        torch.testing.assert_close(mask, torch.tensor([m for m, _ in each], dtype=torch.float64), rtol=1e-5, atol=0)
        layer.observe(ranks)
        slow.batch([r for _, r in each])
        assert layer.frequency.tolist() == pytest.approx(slow.mu, abs=1e-7)
        assert layer.boost.tolist() == pytest.approx(slow.g, abs=1e-12)
        boosts.append(slow.g[:])
    assert int(layer.batches) == 160
    steps = [b - a for old, new in pairwise(boosts) for a, b in zip(old, new, strict=True)]
    assert max(steps) == pytest.approx(0.1)  # the simulation did raise a boost
    if every < 50 and alpha < 0.99:
        assert min(steps) == pytest.approx(-0.1)  # and lowered one
    assert min(min(g) for g in boosts) == 1.0


def test_boosts_change_only_every_so_many_batches() -> None:
    layer = SparseMask(4, every=5, alpha=0.5)
    ranks = torch.tensor([[0, 1, 2, 3]])
    changed = []
    for n in range(1, 21):
        before = layer.boost.clone()
        layer.observe(ranks)
        if not torch.equal(before, layer.boost):
            changed.append(n)
    assert changed == [5, 10, 15, 20]
    assert layer.boost.tolist() == pytest.approx([1, 1.4, 1.4, 1.4])


def test_relative_support_is_told_by_what_is_usual_for_a_capsule() -> None:
    """By loops: psi_j g_j over the moving average of psi_j, which starts at the first batch's mean."""
    layer = SparseMask(5, every=3, alpha=0.8, relative=True).double()
    usual: list[float] = []
    for psi in supports(30, 6, 5):
        means = [sum(column) / len(column) for column in zip(*psi.tolist(), strict=True)]
        _, ranks = layer(psi)
        if usual:
            for row, found in zip(psi.tolist(), ranks.tolist(), strict=True):
                z = [p * g / u for p, g, u in zip(row, layer.boost.tolist(), usual, strict=True)]
                assert found == [sorted(z, reverse=True).index(value) for value in z]
        layer.observe_support(psi.mean(0))
        layer.observe(ranks)
        usual = [0.8 * u + 0.2 * m for u, m in zip(usual, means, strict=True)] if usual else means
        assert layer.usual.tolist() == pytest.approx(usual, abs=1e-9)
    assert "usual" in layer.state_dict()


def test_relative_support_is_shared_at_once_where_boosts_take_long() -> None:
    """Supports of 9, 1 and 4, a tenth more or less: an average tells them apart, boosts grow by tenths."""
    noise = 1 + 0.1 * torch.randn(60, 64, 3, generator=torch.Generator().manual_seed(0))
    most = {}
    for relative in (False, True):
        layer = SparseMask(3, every=5, alpha=0.9, relative=relative)
        shares = []
        for batch in noise * torch.tensor([9.0, 1.0, 4.0]):
            _, ranks = layer(batch)
            layer.observe_support(batch.mean(0))
            layer.observe(ranks)
            shares.append((ranks == 0).float().mean(0))
        most[relative] = float(torch.stack(shares[5:]).amax(1).mean())
    assert most[True] < 0.5 < 0.9 < most[False]


def test_gamma_rises_over_the_ramp_in_training_alone() -> None:
    layer, support = SparseMask(3, gamma=6.0, ramp=4), torch.tensor([[3.0, 2.0, 1.0]])
    for seen in range(7):
        gamma = 6.0 * min(seen, 4) / 4
        wanted = [m if m >= 0.01 else 0.0 for m in (math.exp(-gamma * r / 2) for r in range(3))]
        assert layer.train()(support)[0].tolist() == [pytest.approx(wanted)]
        assert layer.eval()(support)[0].tolist() == [pytest.approx([1.0, math.exp(-3), 0.0])]
        layer.train().observe(layer(support)[1])
    assert SparseMask(3, gamma=6.0).train()(support)[0].tolist() == [pytest.approx([1.0, math.exp(-3), 0.0])]


def test_support_of_nothing_is_ranked_all_the_same() -> None:
    layer = SparseMask(3, relative=True)
    layer.observe_support(torch.tensor([0.0, 1.0, 1.0]))
    assert layer(torch.tensor([[0.0, 1.0, 2.0]]))[1].tolist() == [[2, 1, 0]], "nothing over nothing is nothing"
    layer = SparseMask(3)
    layer.observe_support(torch.ones(3))
    assert set(layer.state_dict()) == {"frequency", "boost", "batches"}


def test_boost_wins_a_neglected_capsule_its_turn() -> None:
    """The constraint's purpose: with one capsule always slightly ahead, all take part in the end."""
    layer = SparseMask(4, every=5, alpha=0.9)
    psi = torch.rand(400, 16, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.5, 2.0, 1.5, 1.0])
    wins = torch.zeros(4)
    for n, batch in enumerate(psi):
        _, ranks = layer(batch)
        layer.observe(ranks)
        if n >= 200:
            wins += (ranks == 0).float().mean(0) / 200
    assert (rank(psi) == 0).float().mean((0, 1))[-1] == 0  # without boosts the last would never win
    assert float(wins.min()) > 0.05
    assert float(wins.sum()) == pytest.approx(1, abs=1e-4)


# --- Ranks --------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_ranks_with_many_ties_against_loops(rows: list[list[int]]) -> None:
    support = torch.tensor(rows, dtype=torch.float32)
    assert rank(support).tolist() == [slow_rank(row) for row in support.tolist()]


def test_the_largest_has_rank_0_and_ties_go_to_the_lower_index() -> None:
    assert rank(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [[2, 0, 1]]
    assert rank(torch.tensor([[2.0, 5.0, 2.0, 5.0]])).tolist() == [[2, 0, 3, 1]]
    assert rank(torch.zeros(2, 40)).tolist() == [list(range(40))] * 2
    assert rank(torch.tensor([7.0])).tolist() == [0]


# --- Masks --------------------------------------------------------------------------------------------------


def test_sixteen_capsules_at_gamma_12_leave_one_active_and_two_partly() -> None:
    """Section 2.2: "approximately 1 capsule is fully active and another two are partially active"."""
    mask = sorted(rank_mask(torch.arange(16).flip(0), 12.0).tolist(), reverse=True)
    assert mask[0] == 1
    assert mask[1:3] == pytest.approx([math.exp(-12 / 15), math.exp(-24 / 15)])  # .45 and .20
    assert mask[3] < 0.1
    assert mask[6:] == [0] * 10
    assert sum(value > 0.1 for value in mask) == 3
    assert mask[5] == pytest.approx(math.exp(-4)) and mask[5] >= 0.01 > math.exp(-12 * 6 / 15)


@pytest.mark.parametrize("L", [2, 3, 10, 20])
@pytest.mark.parametrize("gamma", [0.0, 1.0, 12.0, 120.0])
@pytest.mark.parametrize("cut", [0.0, 0.01, 0.3])
def test_masks_against_loops(L: int, gamma: float, cut: float) -> None:
    found = rank_mask(torch.arange(L), gamma, cut).tolist()
    for r, value in enumerate(found):
        m = math.exp(-gamma * r / (L - 1))
        assert value == pytest.approx(m if m >= cut else 0.0, rel=1e-5, abs=1e-30)


def test_a_mask_value_at_the_cut_itself_stays() -> None:
    assert rank_mask(torch.arange(3), 0.0, 1.0).tolist() == [1.0, 1.0, 1.0]


def test_a_lone_capsule_is_never_masked_nor_boosted() -> None:
    layer = SparseMask(1, gamma=120.0, every=1)
    for _ in range(5):
        mask, ranks = layer(torch.rand(3, 1))
        assert mask.tolist() == [[1.0]] * 3
        layer.observe(ranks)
    assert layer.boost.tolist() == [1.0]
    assert layer.frequency.tolist() == pytest.approx([1.0])


def test_the_product_with_the_mask_passes_gradients_to_the_winners_alone() -> None:
    """Eq. (4): v' = v * m; the mask itself is a constant."""
    support = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    v = torch.ones(1, 3, 4, requires_grad=True)
    mask, ranks = SparseMask(3, gamma=6.0)(support)
    assert not mask.requires_grad
    assert not ranks.requires_grad
    (v * mask.unsqueeze(-1)).sum().backward()
    assert v.grad is not None
    assert v.grad[0, :, 0].tolist() == pytest.approx([0.0, 1.0, math.exp(-3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mask_has_the_type_of_the_support(dtype: torch.dtype) -> None:
    assert SparseMask(4)(torch.rand(2, 4, dtype=dtype))[0].dtype == dtype


# --- Lifetime statistics ------------------------------------------------------------------------------------


def test_update_frequency_is_equation_7() -> None:
    found = update_frequency(torch.tensor([0.5, 0.1]), torch.tensor([0.0, 1.0]), 0.99)
    assert found.tolist() == pytest.approx([0.495, 0.109])


def test_update_boost_is_algorithm_1() -> None:
    """Raised twice, kept at 1 twice, lowered once, and left alone twice on the very edge of the band."""
    boost = torch.tensor([1.0, 1.3, 1.0, 1.05, 1.3, 2.0, 2.0], dtype=torch.float64)
    frequency = torch.tensor([0.01, 0.039, 0.2, 0.2, 0.11, 0.04, 0.1], dtype=torch.float64)
    found = update_boost(boost, frequency, 0.04, 0.1, 0.1)
    assert found.tolist() == pytest.approx([1.1, 1.4, 1.0, 1.0, 1.2, 2.0, 2.0])


def test_frequencies_start_fair_and_stay_a_distribution() -> None:
    layer = SparseMask(7)
    assert layer.frequency.tolist() == pytest.approx([1 / 7] * 7)
    assert layer.boost.tolist() == [1.0] * 7
    for psi in supports(20, 5, 7).float():
        layer.observe(layer(psi)[1])
        assert float(layer.frequency.sum()) == pytest.approx(1, abs=1e-5)


def test_the_band_is_the_papers_at_16_capsules_and_can_be_given() -> None:
    assert (SparseMask(16).low, SparseMask(16).high) == pytest.approx((0.04, 0.1))
    assert (SparseMask(5, band=(0.03, 0.12)).low, SparseMask(5, band=(0.03, 0.12)).high) == (0.03, 0.12)


def test_capsules_that_come_first_too_seldom_share_the_images_of_the_busiest() -> None:
    mask = SparseMask(4)
    mask.frequency.copy_(torch.tensor([0.01, 0.6, 0.02, 0.37]))
    mask.boost.copy_(torch.tensor([1.5, 1.0, 1.4, 1.2]))
    # An even part is .25: below a fifth of it are the first and the third; the second halves, then the fourth leads
    assert mask.pick_restarts(0.2) == [(0, 1), (2, 3)]
    torch.testing.assert_close(mask.frequency, torch.tensor([0.3, 0.3, 0.185, 0.185]))
    torch.testing.assert_close(mask.boost, torch.tensor([1.0, 1.0, 1.2, 1.2]))
    assert mask.pick_restarts(0.2) == []


def test_asking_for_a_mask_changes_no_statistics() -> None:
    layer = SparseMask(4, every=1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for mode in (True, False):
        layer.train(mode)
        layer(torch.rand(8, 4))
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_statistics_are_part_of_the_state_and_a_copy_goes_on_alike() -> None:
    one, two = SparseMask(5, every=3), SparseMask(5, every=3)
    psi = supports(40, 6, 5).float()
    for batch in psi[:20]:
        one.observe(one(batch)[1])
    state = one.state_dict()
    assert set(state) == {"frequency", "boost", "batches"}
    assert not list(one.parameters())
    two.load_state_dict(state)
    for batch in psi[20:]:
        (a, ranks), (b, others) = one(batch), two(batch)
        assert torch.equal(a, b)
        one.observe(ranks)
        two.observe(others)
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    assert int(two.batches) == 40


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"capsules": 0}, {"capsules": -1}, {"capsules": 4, "every": 0}])
def test_counts_below_1_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match="at least 1"):
        SparseMask(**options)


def test_a_ramp_of_less_than_no_batch_is_refused() -> None:
    with pytest.raises(RecipeError, match="ramp = -1"):
        SparseMask(3, ramp=-1)


@pytest.mark.parametrize("band", [(0.2, 0.1), (-0.1, 0.5)])
def test_a_band_that_is_none_is_refused(band: tuple[float, float]) -> None:
    with pytest.raises(RecipeError, match="low <= high") as caught:
        SparseMask(4, band=band)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 4, 1)])
def test_supports_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TorchcapsError, match=r"\[b 4\] is wanted") as caught:
        SparseMask(4)(torch.zeros(shape))
    assert "\n" not in str(caught.value)
