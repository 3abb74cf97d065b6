"""Likelihoods of products of expert capsules: exact sums, brute force, and annealed importance sampling."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from likelihood import (
    _ball,
    _Chains,
    _fold,
    _free_energy,
    _slice_step,
    ais,
    free_energy,
    log_hidden_exact,
    log_likelihood,
    log_partition_exact,
    log_volume,
)
from torchcaps.errors import DataError, RecipeError, ShapeError


class Parts(NamedTuple):
    W: Tensor  # [i j k d]
    c: Tensor  # [i j]
    b: Tensor  # [j k]


def some(I: int, J: int, K: int, d: int, scale: float = 2.0, seed: int = 0) -> Parts:
    make = torch.Generator().manual_seed(seed)
    W = scale * torch.randn(I, J, K, d, generator=make, dtype=torch.float64)
    c = torch.rand(I, J, generator=make, dtype=torch.float64).softmax(0)
    return Parts(W, c, torch.randn(J, K, generator=make, dtype=torch.float64))


def cube(n: int, I: int, d: int, seed: int = 0) -> Tensor:  # [n i d]
    return 2 * torch.rand(n, I, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def balls(n: int, I: int, d: int) -> Tensor:
    """Uniform in the balls by rejection from the cube: none of the code's own ways."""
    x = cube(n, I, d)
    return x[(x.square().sum(-1) < 1).all(-1)]


# Loop-only reading of the definitions -------------------------------------------------------------------------------


def loop_free_energy(x: Tensor, W: Tensor, c: Tensor, b: Tensor) -> float:
    I, J, K, d = W.shape
    F = 0.0
    for j in range(J):
        length2 = 0.0
        for k in range(K):
            z = float(b[j, k])
            for i in range(I):
                for n in range(d):
                    z += float(c[i, j]) * float(W[i, j, k, n]) * float(x[i, n])
            length2 += z * z
        F -= math.log(1 + length2)
    return F


Polynomial = dict[tuple[int, ...], float]
"""Coefficients by the exponents of x_11 ... x_1d, x_21 ... x_Id."""


def times(p: Polynomial, q: Polynomial) -> Polynomial:
    product: Polynomial = defaultdict(float)
    for m, u in p.items():
        for n, v in q.items():
            product[tuple(a + b for a, b in zip(m, n, strict=True))] += u * v
    return product


def integral(powers: tuple[int, ...]) -> float:
    """of a monomial over the unit ball (Folland 2001): 2 prod Γ((n + 1) / 2) / Γ(sum) / degree, 0 if one is odd."""
    if any(n % 2 for n in powers):
        return 0.0
    halves = [(n + 1) / 2 for n in powers]
    radial = sum(powers) + len(powers)
    return 2 * math.prod(map(math.gamma, halves)) / math.gamma(sum(halves)) / radial


def loop_partition(W: Tensor, c: Tensor, b: Tensor, hidden: int | None = None) -> float:
    """Z in any dimension by multiplying out prod_j (1 + |z_j|^2), or one hidden state's prod_j |z_j|^(2 h_j)."""
    I, J, K, d = W.shape
    unit = [tuple(int(n == m) for n in range(I * d)) for m in range(I * d)]
    none = (0,) * (I * d)
    density: Polynomial = {none: 1.0}
    for j in range(J):
        expert: Polynomial = defaultdict(float)
        if hidden is None or not hidden >> j & 1:
            expert[none] += 1.0
        for k in range(K):
            if hidden is not None and not hidden >> j & 1:
                continue
            z: Polynomial = {none: float(b[j, k])}
            for i in range(I):
                for n in range(d):
                    z[unit[i * d + n]] = float(c[i, j] * W[i, j, k, n])
            for m, u in times(z, z).items():
                expert[m] += u
        density = times(density, expert)
    return sum(u * math.prod(integral(m[i * d : i * d + d]) for i in range(I)) for m, u in density.items())


# Free energy and likelihood -----------------------------------------------------------------------------------------


def test_free_energy_is_the_loops():
    parts = some(3, 4, 2, 5)
    x = cube(6, 3, 5)
    expected = [loop_free_energy(one, *parts) for one in x]
    assert free_energy(x, *parts).tolist() == pytest.approx(expected, rel=1e-13)
    assert free_energy(x.float(), *(p.float() for p in parts)).dtype == torch.float64


def test_volumes_of_balls():
    assert [math.exp(log_volume(1, d)) for d in (1, 2, 3, 4)] == pytest.approx(
        [2, math.pi, 4 / 3 * math.pi, math.pi**2 / 2]
    )
    assert log_volume(5, 3) == pytest.approx(5 * math.log(4 / 3 * math.pi))
    with pytest.raises(ShapeError, match="0 balls of dimension 2"):
        log_volume(0, 2)


def test_the_density_integrates_to_one_and_is_nothing_outside():
    parts = some(2, 3, 2, 1)
    log_Z = log_partition_exact(*parts)
    middles = (torch.arange(500, dtype=torch.float64) + 0.5) / 200 - 1.25  # a grid over [-1.25, 1.25]
    x = torch.cartesian_prod(middles, middles)[..., None]
    log_p = log_likelihood(x, *parts, log_Z)
    assert float(log_p.exp().sum()) / 200**2 == pytest.approx(1, abs=1e-3)
    outside = (x.abs() > 1).any(1).flatten()
    assert bool((log_p[outside] == -math.inf).all()) and bool(log_p[~outside].isfinite().all())
    assert log_p[~outside].tolist() == pytest.approx((-free_energy(x[~outside], *parts) - log_Z).tolist())


def test_a_length_of_one_in_float32_is_still_inside():
    parts = some(1, 2, 2, 3)
    x = torch.nn.functional.normalize(cube(100, 1, 3).float(), dim=-1)
    assert bool((x.double().norm(dim=-1) > 1).any())
    assert bool(log_likelihood(x, *parts, 0.0).isfinite().all())


# Exact log Z --------------------------------------------------------------------------------------------------------


def test_one_expert_on_an_interval():
    """Integral of 1 + (a x + b)^2 over [-1, 1] is 2 + 2 a^2 / 3 + 2 b^2; here a = c W = 0.5 * 3."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    expected = math.log(2 + 2 * 1.5**2 / 3 + 2 * 0.7**2)
    assert log_partition_exact(3 * one, 0.5 * one[0, 0], 0.7 * one[0, 0]) == pytest.approx(expected, abs=1e-13)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_one_expert_in_closed_form(I, K, d, seed):
    """J = 1: Z / volume = 1 + |b|^2 + sum_i c_i^2 |W_i|^2 / (d + 2), for E x x^T = 1 / (d + 2) in a ball."""
    parts = some(I, 1, K, d, seed=seed)
    A = parts.c[..., None, None] * parts.W
    relative = 1 + float(parts.b.square().sum()) + float(A.square().sum()) / (d + 2)
    assert log_partition_exact(*parts) == pytest.approx(math.log(relative) + log_volume(I, d), abs=1e-12)


@pytest.mark.parametrize("I, J, K, d", [(1, 6, 1, 1), (2, 4, 2, 1), (4, 2, 1, 1), (1, 5, 2, 2), (2, 3, 2, 2)])
def test_exact_is_the_polynomial_multiplied_out(I, J, K, d):
    parts = some(I, J, K, d)
    assert log_partition_exact(*parts) == pytest.approx(math.log(loop_partition(*parts)), abs=1e-12)
    expected = [loop_partition(*parts, hidden=s) for s in range(2**J)]
    assert log_hidden_exact(*parts).exp().tolist() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("d", [1, 2])
def test_exact_is_what_brute_force_says(d):
    parts = some(2, 3, 2, d)
    f = (-free_energy(balls(200_000, 2, d), *parts)).exp()
    Z = math.exp(log_partition_exact(*parts) - log_volume(2, d))
    assert abs(float(f.mean()) - Z) < 4 * float(f.std()) / math.sqrt(len(f))
    assert float(f.std()) / math.sqrt(len(f)) < 0.01 * Z


@pytest.mark.parametrize("d", [1, 2])
def test_without_weights_only_the_bias_counts(d):
    parts = some(3, 2, 2, d)._replace(W=torch.zeros(3, 2, 2, d))
    expected = log_volume(3, d) + float(parts.b.square().sum(-1).log1p().sum())
    assert log_partition_exact(*parts) == pytest.approx(expected, abs=1e-12)
    log_Z, error, size = ais(*parts, chains=7, steps=3, seed=0)
    assert (log_Z, error, size) == pytest.approx((expected, 0, 7), abs=1e-12)


def test_nothing_at_all_is_the_volume():
    parts = Parts(torch.zeros(2, 2, 1, 2), torch.ones(2, 2), torch.zeros(2, 1))
    assert log_partition_exact(*parts) == pytest.approx(2 * math.log(math.pi), abs=1e-12)
    assert log_hidden_exact(*parts)[1:].tolist() == [-math.inf] * 3


def rotation(n: int, seed: int) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=make, dtype=torch.float64))[0]


def test_turning_an_expert_or_a_child_changes_nothing():
    W, c, b = some(2, 3, 3, 2)
    Z = log_partition_exact(W, c, b)
    R = torch.stack([rotation(3, j) for j in range(3)])  # [j k k]
    S = torch.stack([rotation(2, i) for i in range(2)])  # [i d d]
    turned = torch.einsum("jlk,ijkd->ijld", R, W)
    assert log_partition_exact(turned, c, torch.einsum("jlk,jk->jl", R, b)) == pytest.approx(Z, abs=1e-12)
    assert log_partition_exact(torch.einsum("ijkd,ide->ijke", W, S), c, b) == pytest.approx(Z, abs=1e-12)
    assert log_partition_exact(turned, c, b) != pytest.approx(Z, abs=1e-3)  # the bias must turn with it


# Annealed importance sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "I, J, K, d, scale",
    [(1, 1, 1, 1, 2), (2, 3, 2, 1, 5), (1, 4, 2, 2, 20), (3, 2, 2, 2, 3), (1, 3, 2, 3, 5), (2, 2, 2, 4, 8)],
)
def test_ais_is_within_three_errors_of_exact(I, J, K, d, scale):
    parts = some(I, J, K, d, scale)
    exact = log_partition_exact(*parts) if d < 3 else math.log(loop_partition(*parts))
    log_Z, error, size = ais(*parts, chains=200, steps=100, seed=1)
    assert abs(log_Z - exact) < 3 * error
    assert error < 0.05 and 100 < size <= 200


def test_the_standard_error_is_the_spread_over_seeds():
    parts = some(2, 3, 2, 2, 4)
    runs = [ais(*parts, chains=50, steps=10, seed=seed) for seed in range(40)]
    deviations = torch.tensor([run.log_partition - log_partition_exact(*parts) for run in runs])
    claimed = torch.tensor([run.standard_error for run in runs]).square().mean().sqrt()
    assert 0.7 < float(deviations.square().mean().sqrt() / claimed) < 1.4
    assert abs(float(deviations.mean())) < 3 * float(claimed) / math.sqrt(40)


def test_one_step_is_plain_monte_carlo_and_more_steps_are_better():
    parts = some(2, 4, 2, 2, 10)
    once, often = (ais(*parts, chains=400, steps=steps, seed=0) for steps in (1, 50))
    f = (-free_energy(balls(200_000, 2, 2), *parts)).exp()
    size = 400 * float(f.mean().square() / f.square().mean())
    assert once.effective_sample_size == pytest.approx(size, rel=0.25)
    assert often.effective_sample_size > 2 * once.effective_sample_size
    assert often.standard_error < once.standard_error / 2


def test_effective_sample_size_and_error_are_one_law():
    """se^2 = (n / ess - 1) / (n - 1), for both come from the mean square of the weights."""
    _, error, size = ais(*some(2, 3, 2, 3), chains=30, steps=4, seed=0)
    assert error**2 == pytest.approx((30 / size - 1) / 29, rel=1e-9)


def test_the_kernel_leaves_the_model_invariant():
    """After many steps at β = 1, P(h_j = 1) = E |z_j|^2 / (1 + |z_j|^2) is that of the exact hidden states."""
    parts = some(2, 3, 2, 1, 6)
    experts, make = _fold(*parts), torch.Generator().manual_seed(0)
    g = torch.randn(4000, 2, 3, generator=make, dtype=torch.float64)
    state = _Chains(g, -_free_energy(_ball(g), experts))
    for _ in range(25):
        state = _slice_step(state, 1.0, experts, make)
    x = _ball(state.g)
    assert torch.allclose(state.log_f, -free_energy(x, *parts), rtol=1e-12)
    z = torch.einsum("ij,ijkd,bid->bjk", parts.c, parts.W, x) + parts.b
    on = z.square().sum(-1) / (1 + z.square().sum(-1))  # [b j]
    P = log_hidden_exact(*parts).softmax(0)  # [s]
    for j in range(3):
        exact = sum(float(P[s]) for s in range(8) if s >> j & 1)
        assert abs(float(on[:, j].mean()) - exact) < 4 * float(on[:, j].std()) / math.sqrt(4000)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_directions_of_normal_numbers_give_uniform_balls(d):
    """|x|^d is uniform on [0, 1] for x uniform in a ball, and x x^T averages to 1 / (d + 2)."""
    x = _ball(torch.randn(40_000, d + 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    u = x.norm(dim=-1).pow(d).sort().values
    assert float((u - torch.linspace(0, 1, 40_000)).abs().max()) < 1.63 / 200  # Kolmogorov, 1 %
    assert torch.allclose(x.T @ x / 40_000, torch.eye(d).double() / (d + 2), atol=0.01)


def test_a_seed_is_a_result():
    parts = some(2, 2, 2, 2)
    first, same, other = (ais(*parts, chains=10, steps=5, seed=seed) for seed in (3, 3, 4))
    assert first == same and first != other


# What is refused ----------------------------------------------------------------------------------------------------


def test_wrong_input_is_refused_in_one_line():
    W, c, b = some(2, 3, 2, 2)
    for wrong, text in [
        ((W[0], c, b), r"W is \[3, 2, 2\]"),
        ((W, c[None].expand(5, 2, 3), b), r"c is \[5, 2, 3\], wanted \[2, 3\].*freeze"),
        ((W, c, b[:2]), r"b is \[2, 2\], wanted \[3, 2\]"),
        ((torch.zeros(1, 2, 2, 3), c[:1, :2], b[:2]), "dimension 3.*use ais"),
        ((torch.zeros(9, 3, 2, 2), torch.ones(9, 3), b), "9 children and 3 parents is too large"),
    ]:
        with pytest.raises(ShapeError, match=text) as caught:
            log_partition_exact(*wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="c holds NaN"):
        log_partition_exact(W, c / 0, b)
    with pytest.raises(ShapeError, match=r"x is \[4, 2, 3\], wanted \[b 2 2\]"):
        log_likelihood(torch.zeros(4, 2, 3), W, c, b, 0.0)
    with pytest.raises(DataError, match="x holds NaN"):
        log_likelihood(torch.full((4, 2, 2), math.nan), W, c, b, 0.0)
    for chains, steps in ((1, 5), (5, 0)):
        with pytest.raises(RecipeError, match=f"{chains} chains and {steps} steps"):
            ais(W, c, b, chains=chains, steps=steps, seed=0)
