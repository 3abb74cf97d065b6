"""Equations 7 to 18 of Hauser 2019, against sums over every hidden state and against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import poe_reference as paper
from torchcaps.kernels import contrastive_ops
from torchcaps.math.squash import norm, squash
from torchcaps.models.poe import energy
from torchcaps.testing import assert_finite

B, I, J, K, D = 3, 4, 3, 3, 2
sizes = st.floats(1e-3, 1e3)


def near(value: Any, wanted: Any) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def weights() -> tuple[Tensor, Tensor]:
    """W [i j k d] and b [j k]."""
    return normal(I, J, K, D, seed=1), normal(J, K, seed=2)


def children(seed: int, b: int = B) -> Tensor:
    return squash(2 * normal(b, I, D, seed=seed))


def routed(x: Tensor, W: Tensor, over: str) -> Tensor:
    """[b i j] by the loops of the reference, for each image its own."""
    return number([paper.couple(x_b, W.tolist(), 3, over) for x_b in x.tolist()])


def shares(x: Tensor, W: Tensor, how: str) -> tuple[energy.Coupling, Tensor]:
    """A coupling as the library takes it, and the same as [b i j]."""
    if how == "uniform":
        return 1 / I, x.new_full((len(x), I, J), 1 / I)
    c = routed(x, W, how)
    return c, c


def capsules(scale: float, seed: int, J: int = J) -> Tensor:
    """z [j k] of one image, none of it 0."""
    return scale * normal(J, K, seed=seed)


# --- Eqs. 10 to 13 ----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(scale=sizes, seed=st.integers(0, 10**6))
def test_a_capsule_is_on_with_the_probability_of_the_states_in_which_it_is(scale: float, seed: int) -> None:
    """Eq. 12 from eqs. 7 and 8: P(h_j = 1 | x) is the share of exp(-E) in the states with h_j = 1."""
    z = capsules(scale, seed)
    mass = {h: math.exp(-paper.energy(z.tolist(), h)) for h in paper.states(J)}
    wanted = [sum(m for h, m in mass.items() if h[j]) / sum(mass.values()) for j in range(J)]
    near(energy.probability_on(z), number(wanted))
    near(norm(squash(z)), number(wanted))  # eq. 13
    near(norm(energy.hidden(z)), number(wanted))


def test_the_states_of_capsules_are_independent() -> None:
    """Eq. 11."""
    z = capsules(1.5, 7)
    mass = {h: math.exp(-paper.energy(z.tolist(), h)) for h in paper.states(J)}
    p = energy.probability_on(z).tolist()
    for h, m in mass.items():
        wanted = math.prod(p[j] if h[j] else 1 - p[j] for j in range(J))
        assert m / sum(mass.values()) == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(scale=sizes, seed=st.integers(0, 10**6), J=st.integers(1, 6))
def test_the_free_energy_sums_over_every_hidden_state(scale: float, seed: int, J: int) -> None:
    """Eq. 10: F = -log sum_h exp(-E), over 2^J states."""
    z = capsules(scale, seed, J)
    wanted = -math.log(math.fsum(math.exp(-paper.energy(z.tolist(), h)) for h in paper.states(J)))
    near(energy.free_energy(z.unsqueeze(0)), number([wanted]))


@pytest.mark.parametrize("gate", list(paper.states(J)))
def test_a_gate_of_0_takes_away_the_states_in_which_a_capsule_is_on(gate: tuple[int, ...]) -> None:
    z = capsules(1.0, 3)
    allowed = [h for h in paper.states(J) if all(on <= m for on, m in zip(h, gate, strict=True))]
    wanted = -math.log(sum(math.exp(-paper.energy(z.tolist(), h)) for h in allowed))
    near(energy.free_energy(z.unsqueeze(0), number([gate])), number([wanted]))


def test_a_gate_between_0_and_1_weighs_the_experts() -> None:
    z, gate = torch.stack([capsules(1.0, 3), capsules(2.0, 4)]), number([[1.0, 0.3, 0.0], [0.2, 0.0, 0.9]])
    wanted = [paper.free_energy(z_b, m_b) for z_b, m_b in zip(z.tolist(), gate.tolist(), strict=True)]
    near(energy.free_energy(z, gate), number(wanted))


# --- Eqs. 16 to 18 ----------------------------------------------------------------------------------------------------


def test_the_expectation_over_hidden_states_is_the_probability_times_the_slope() -> None:
    """Eq. 17, without the sign that it lost: sum_h P(h|x) d(-E)/dW_ij = P(h_j = 1|x) d log|z_j|² / dW_ij."""
    W, _ = weights()
    x = children(5, b=1)
    c = routed(x, W, "children")
    z = paper.weigh(x[0].tolist(), W.tolist(), c[0].tolist())
    slope = number(paper.log_slope(z, x[0].tolist(), c[0].tolist()))  # [i j k d]

    V = W.clone().requires_grad_()
    again = torch.einsum("ij,ijkd,id->jk", c[0], V, x[0])
    for j in range(J):  # the slope itself
        (own,) = torch.autograd.grad(again[j].square().sum().log(), V, retain_graph=True)
        near(own[:, j], slope[:, j])
        assert not own[:, [n for n in range(J) if n != j]].any()  # eq. 16: no other capsule's weights take part

    mass = {h: math.exp(-paper.energy(z, h)) for h in paper.states(J)}
    mean = torch.zeros_like(W)
    for h, m in mass.items():
        mean += m / sum(mass.values()) * slope * number(h).view(1, J, 1, 1)
    near(energy.probability_on(number(z)).view(1, J, 1, 1) * slope, mean)
    near(contrastive_ops.grad(x, c, energy.free_energy_grad(number([z]))), mean)


def equation_18(phases: list[tuple[Tensor, Tensor, Tensor | None]], W: Tensor, b: Tensor) -> Tensor:
    """Mean over the images of data minus mean over those of the model, by loops."""
    total = torch.zeros_like(W)
    for sign, (x, c, gate) in zip((1, -1), phases, strict=True):
        for n in range(len(x)):
            x_n, c_n = x[n].tolist(), c[n].tolist()
            z = paper.weigh(x_n, W.tolist(), c_n, b.tolist())
            total += sign / len(x) * number(paper.phase(z, x_n, c_n, None if gate is None else gate[n].tolist()))
    return total


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("how", ["uniform", "children", "parents"])
def test_equation_18_is_the_gradient_of_the_free_energies(how: str, gated: bool) -> None:
    """Closed form, autograd and loops; the model's phase has a number of images of its own."""
    W, b = weights()
    data, model = children(5), children(6, b=5)
    (c, c_full), (e, e_full) = shares(data, W, how), shares(model, W, how)
    gates = [torch.rand(n, J, generator=torch.Generator().manual_seed(n)).double() for n in (3, 5)] if gated else None
    m, n = gates or (None, None)
    wanted = equation_18([(data, c_full, m), (model, e_full, n)], W, b)
    values, slopes = [], []
    for closed in (True, False):
        V, a = W.clone().requires_grad_(), b.clone().requires_grad_()
        loss = energy.contrast(V, a, energy.Phase(data, c, m), energy.Phase(model, e, n), closed_form=closed)
        (3 * loss).backward()
        assert V.grad is not None and a.grad is not None
        near(V.grad, -3 * wanted)
        values.append(loss.detach())
        slopes.append((V.grad, a.grad))
    near(slopes[0], slopes[1])
    near(values[0], values[1])
    F = [
        [
            paper.free_energy(paper.weigh(x_n, W.tolist(), c_n, b.tolist()), m_n)
            for x_n, c_n, m_n in zip(x.tolist(), c.tolist(), [None] * len(x) if g is None else g.tolist(), strict=True)
        ]
        for x, c, g in ((data, c_full, m), (model, e_full, n))
    ]
    near(values[0], number(sum(F[0]) / len(F[0]) - sum(F[1]) / len(F[1])))


def test_one_number_for_the_coupling_is_that_number_everywhere() -> None:
    W, b = weights()
    data, model = children(5), children(6)
    results = []
    for c in (0.3, data.new_full((B, I, J), 0.3)):
        for closed in (True, False):
            V = W.clone().requires_grad_()
            energy.contrast(
                V, b, energy.Phase(data, c, None), energy.Phase(model, c, None), closed_form=closed
            ).backward()
            results.append(V.grad)
    for other in results[1:]:
        near(other, results[0])


def test_images_that_the_model_would_dream_itself_teach_nothing() -> None:
    W, b = weights()
    x = children(5)
    V = W.clone().requires_grad_()
    loss = energy.contrast(V, b, energy.Phase(x, 0.25, None), energy.Phase(x, 0.25, None))
    loss.backward()
    assert float(loss.detach()) == 0 and V.grad is not None and not V.grad.any()


@pytest.mark.parametrize("gate", [None, number([[1.0, 0.3, 0.0], [0.2, 0.0, 0.9]])])
def test_gradcheck(gate: Tensor | None) -> None:
    z = normal(2, J, K, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: energy.free_energy(z, gate), (z,))
    assert torch.autograd.gradgradcheck(lambda z: energy.free_energy(z, gate), (z,))
    (slope,) = torch.autograd.grad(energy.free_energy(z, gate).sum(), z)
    near(energy.free_energy_grad(z.detach(), gate), -slope)
    W, b = (t.requires_grad_() for t in weights())
    x, y = children(5, b=2), children(6, b=2)
    c = routed(x, W.detach(), "parents")
    for closed in (True, False):
        assert torch.autograd.gradcheck(
            lambda W, b, closed=closed: energy.contrast(
                W, b, energy.Phase(x, c, gate), energy.Phase(y, 0.25, gate), closed_form=closed
            ),
            (W, b),
        )


def test_children_that_see_nothing_have_a_gradient() -> None:
    W, b = weights()
    nothing = torch.zeros(2, I, D, dtype=torch.float64)
    V = W.clone().requires_grad_()
    loss = energy.contrast(V, 0 * b, energy.Phase(nothing, 0.25, None), energy.Phase(children(6), 0.25, None))
    loss.backward()
    assert_finite([loss.detach(), V.grad])
    z = torch.zeros(2, J, K, dtype=torch.float64)
    assert energy.free_energy(z).tolist() == [0, 0] and not energy.probability_on(z).any()
    assert not energy.hidden(z).any() and not energy.hidden(z, None, torch.zeros(2, J)).any()


# --- Hidden and visible capsules --------------------------------------------------------------------------------------


def test_a_capsule_that_is_drawn_on_has_length_1_and_its_direction() -> None:
    z = normal(1, J, K, seed=11)
    p = energy.probability_on(z)
    below, above = torch.nextafter(p, torch.zeros(())), p  # on where the number drawn is less than the probability
    near(energy.hidden(z, None, below), z / z.norm(dim=-1, keepdim=True))
    assert not energy.hidden(z, None, above).any()
    gate = number([[1.0, 0.5, 0.0]])
    near(energy.hidden(z, gate, below).norm(dim=-1), gate)
    near(energy.hidden(z, gate), squash(z) * gate.unsqueeze(-1))


@pytest.mark.parametrize("how", ["uniform", "children", "parents"])
def test_reverse(how: str) -> None:
    W, _ = weights()
    c, full = shares(children(5), W, how)
    h = squash(normal(B, J, K, seed=12))
    wanted = [
        [paper.squash(z_i) for z_i in paper.expect(h_b, W.tolist(), c_b)]
        for h_b, c_b in zip(h.tolist(), full.tolist(), strict=True)
    ]
    near(energy.reverse(h, W, c), number(wanted))
