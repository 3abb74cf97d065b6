"""Capsules on S^m x R^n x (0, 1): the energy with a slab against loops, integrals and autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import poe_reference as paper
from torchcaps.errors import RecipeError
from torchcaps.kernels import contrastive_ops
from torchcaps.models.poe import EnergyConfig, PoEConfig, energy
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.models.poe.pose_sampling import sample_poses
from torchcaps.testing import assert_finite

B, I, J, K, D = 2, 4, 3, 4, 2
SLABS = (1, 2, 3)


def near(value: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_sums_over_states_and_an_integral_over_the_slab_give_the_free_energy_and_the_probability() -> None:
    """exp(-F) = sum_h integral exp(-E) d rho / (2 pi)^(J n / 2), here with two capsules and n = 1, on a fine grid."""
    z = normal(2, 3, seed=1)
    s, r = (part.tolist() for part in energy.split(z, 1))
    step, reach = 0.05, 9.0
    grid = [step * n - reach for n in range(round(2 * reach / step) + 1)]
    mass = {}
    for h in paper.states(2):
        # The capsules are independent: the integral over both slabs is a product of two sums
        factors = [[math.exp(-paper.slab_energy([s[j]], [r[j]], (h[j],), [[p]])) for p in grid] for j in range(2)]
        mass[h] = math.prod(sum(f) * step / math.sqrt(2 * math.pi) for f in factors)
    assert float(energy.free_energy(z.unsqueeze(0), slab=1)) == pytest.approx(-math.log(sum(mass.values())), abs=1e-12)
    for j in range(2):
        wanted = sum(m for h, m in mass.items() if h[j]) / sum(mass.values())
        assert float(energy.probability_on(z, 1)[j]) == pytest.approx(wanted, abs=1e-12)
    # The mean of rho_0 where capsule 0 is on is r_0
    weights = [math.exp(-paper.slab_energy([s[0]], [r[0]], (1,), [[p]])) for p in grid]
    assert sum(w * p for w, p in zip(weights, grid, strict=True)) / sum(weights) == pytest.approx(r[0][0], abs=1e-12)


@pytest.mark.parametrize("slab", SLABS)
@pytest.mark.parametrize("how", ["one number", "routed"])
def test_the_gradient_equals_loops_and_autograd(slab: int, how: str) -> None:
    W = normal(I, J, K, D, seed=2)
    x = normal(B, I, D, seed=3).tanh()
    y = normal(B + 1, I, D, seed=4).tanh()
    full = [torch.rand(len(v), I, J, generator=torch.Generator().manual_seed(5)).double() for v in (x, y)]
    full = full if how == "routed" else [torch.full_like(c, 0.25) for c in full]
    coupling: list[energy.Coupling] = [c if how == "routed" else 0.25 for c in full]
    # Loops
    wanted = torch.zeros_like(W)
    for sign, v, c in ((1, x, full[0]), (-1, y, full[1])):
        for x_n, c_n in zip(v.tolist(), c.tolist(), strict=True):
            s, r = (part.tolist() for part in energy.split(number(paper.weigh(x_n, W.tolist(), c_n)), slab))
            wanted += sign / len(v) * number(paper.slab_phase(s, r, x_n, c_n))
    # Closed form and autograd
    found = []
    for closed in (True, False):
        V = W.clone().requires_grad_()
        phases = [energy.Phase(v, c, None) for v, c in zip((x, y), coupling, strict=True)]
        loss = energy.contrast(V, normal(J, K, seed=6) * 0, phases[0], phases[1], closed_form=closed, slab=slab)
        loss.backward()
        assert V.grad is not None
        near(V.grad, -wanted)
        found.append(loss.detach())
    near(found[0], found[1])


@pytest.mark.parametrize("slab", (0, *SLABS))
def test_the_slope_is_that_of_the_free_energy(slab: int) -> None:
    z = normal(B, J, K, seed=7).requires_grad_()
    gate = number([[1.0, 0.3, 0.0], [0.2, 0.0, 0.9]])
    assert torch.autograd.gradcheck(lambda z: energy.free_energy(z, gate, slab), (z,))
    (slope,) = torch.autograd.grad(energy.free_energy(z, gate, slab).sum(), z)
    near(energy.free_energy_grad(z.detach(), gate, slab), -slope)


@pytest.mark.parametrize("slab", SLABS)
def test_hidden_capsules_and_their_inverse(slab: int) -> None:
    z = normal(B, J, K, seed=8)
    P = energy.probability_on(z, slab).unsqueeze(-1)
    s, r = energy.split(z, slab)
    near(energy.hidden(z, slab=slab), torch.cat([P * s / s.norm(dim=-1, keepdim=True), P * r], -1))
    torch.testing.assert_close(energy.unhide(energy.hidden(z, slab=slab), slab), z, rtol=1e-9, atol=1e-9)
    assert not energy.unhide(torch.zeros_like(z), slab).any()
    # Drawn: on below P, and then the slab has its noise
    noise = normal(B, J, slab, seed=9)
    on = energy.hidden(z, None, P.squeeze(-1) * 0.99, slab, noise)
    near(on, torch.cat([s / s.norm(dim=-1, keepdim=True), r + noise], -1))
    assert not energy.hidden(z, None, P.squeeze(-1), slab, noise).any()


def test_no_slab_is_the_capsule_of_the_paper_to_the_bit() -> None:
    z = normal(B, J, K, seed=10).float()
    q = z.square().sum(-1)
    assert torch.equal(energy.probability_on(z), q / (1 + q))
    assert torch.equal(energy.free_energy(z), -torch.log1p(q).sum(-1))
    assert torch.equal(energy.free_energy_grad(z), z * (2 / (1 + q)).unsqueeze(-1))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e3, 1e18])
def test_every_length_is_finite(scale: float) -> None:
    for s, r in itertools.product((0.0, scale), (0.0, scale)):
        z = torch.tensor([[[s, s, r, r]]])
        assert_finite([energy.probability_on(z, 2), energy.free_energy_grad(z, None, 2), energy.hidden(z, slab=2)])


def test_a_step_with_a_slab_needs_the_same_products_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, list[str]] = {0: [], 3: []}
    slab = 0

    def counted(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **more: object) -> Tensor:
            calls[slab].append(name)
            return original(*args, **more)

        return call

    for name in ("forward", "reverse", "grad"):
        monkeypatch.setattr(contrastive_ops, name, counted(name, getattr(contrastive_ops, name)))
    x = normal(16, I, D, seed=11).float().tanh()
    for slab in calls:
        torch.manual_seed(0)
        model = CapsuleEnergy(EnergyConfig(slab=slab, gain=4.0), I, J, child_dimension=D, dimension=K)
        model.contrast(x, 0, SampleDraws(0, torch.arange(16)))["loss"].backward()
        assert model.W.grad is not None and model.W.grad.isfinite().all() and model.W.grad.any()
    assert calls[0] == calls[3] and len(calls[0]) > 3


def test_standard_normal_samples_of_a_slab_have_the_moments_of_its_poses() -> None:
    decoder = CapsuleDecoder(PoEConfig().decoder, I, 1, D, K, slab=3)
    mix = normal(3, 3, seed=12)
    mean, covariance = number([-2.0, 0.5, -0.25, 1.0]), torch.eye(4, dtype=torch.float64) * 0.04
    covariance[1:, 1:] = mix @ mix.T / 100
    decoder.weight.fill_(1.0)
    decoder.first.copy_(mean)
    decoder.second.copy_(covariance + torch.outer(mean, mean))
    for domain, signs in (("complete", {-1.0, 1.0}), ("restricted", {-1.0})):
        z = energy.unhide(sample_poses(decoder, 0, 4000, domain, 0).double(), 3)
        assert set(z[:, 0].sign().tolist()) == signs
        torch.testing.assert_close(z[:, 0].abs(), torch.full((4000,), 2.0).double(), atol=1e-3, rtol=0)
        torch.testing.assert_close(z[:, 1:].mean(0), mean[1:], atol=0.02, rtol=0)
        torch.testing.assert_close(z[:, 1:].T.cov(), covariance[1:, 1:], atol=0.005, rtol=0)


def test_a_slab_leaves_a_number_for_the_direction() -> None:
    with pytest.raises(RecipeError, match="at least one is left for the direction"):
        PoEConfig(dimension=4, energy=EnergyConfig(slab=4))
