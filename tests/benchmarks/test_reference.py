"""The plain step of contrastive divergence is the one that the library takes."""

from __future__ import annotations

import pytest
import torch
from benchmarks.reference import couple, plain_contrast

from torchcaps.math.squash import squash
from torchcaps.models.poe.config import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.routing import Dynamic


def problem(iterations: int, b: int = 3, i: int = 5, d: int = 4, j: int = 3, k: int = 6):
    torch.manual_seed(1)
    routing = Dynamic(iterations=iterations, agreement="cosine", over="children")
    energy = CapsuleEnergy(EnergyConfig(mode="paper", routing=routing), i, j, d, k).double()
    with torch.no_grad():
        energy.W.mul_(20)
    return energy, squash(3 * torch.randn(b, i, d, dtype=torch.float64))


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_its_gradient_is_that_of_the_capsule_energy(iterations):
    energy, x = problem(iterations)
    energy.contrast(x, 0, SampleDraws(0, torch.arange(len(x))))["gap"].backward()
    assert float(energy.W.grad.abs().max()) > 1e-3
    torch.testing.assert_close(plain_contrast(x, energy.W.detach(), iterations), energy.W.grad, rtol=1e-9, atol=1e-12)


def test_its_coupling_and_pose_are_those_the_energy_looks_at():
    energy, x = problem(3)
    c, z = couple(x, energy.W.detach(), 3)
    seen = energy.infer(x)
    torch.testing.assert_close(c, seen.coupling, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(z, seen.z, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(c.sum(1), torch.ones_like(c[:, 0]))
    assert float(c.std()) > 1e-3
