"""The plain step of contrastive divergence is the one that the library takes."""

from __future__ import annotations

import pytest
import torch
from benchmarks.cases import case_of
from benchmarks.reference import MatmulVotes, PlainCapsNet, couple, plain_contrast

from torchcaps.math.pose import matrix_votes
from torchcaps.math.squash import squash
from torchcaps.models import CapsNetConfig
from torchcaps.models.poe.config import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.routing import EM, Dynamic, route
from torchcaps.routing.em import ROUTER
from torchcaps.types import Batch, Capsules, ImageSpec


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


def test_the_plain_capsnet_is_the_librarys():
    """With the same weights it has the same loss, so that both sides of a comparison do the same work."""
    torch.manual_seed(0)
    ours = CapsNetConfig().build(ImageSpec(1, 28, 28, 10))
    plain = PlainCapsNet()
    weights = [*ours.state_dict().values()]
    assert [list(w.shape) for w in weights] == [list(w.shape) for w in _in_order(plain)]
    for mine, theirs in zip(_in_order(plain), weights, strict=True):
        mine.data.copy_(theirs)
    images = torch.rand(3, 1, 28, 28)
    labels = torch.tensor([0, 7, 9])
    loss = ours.objective(Batch(images, labels, torch.arange(3)), 0)["loss"]
    torch.testing.assert_close(plain(images, labels), loss, rtol=1e-5, atol=1e-6)


def _in_order(plain: PlainCapsNet) -> list[torch.Tensor]:
    """Its weights in the order of the library's CapsNet: convolution, primary capsules, classes, decoder."""
    return [*plain.conv.parameters(), *plain.primary.parameters(), plain.W, *plain.decoder.parameters()]


def test_em_routing_by_matrix_products_is_the_librarys():
    torch.manual_seed(0)
    pose = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    W = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    activation = torch.rand(2, 5, dtype=torch.float64)
    beta = torch.zeros(3, dtype=torch.float64)
    wanted, _ = route(Capsules(pose, activation), W, EM(), pose="matrix", beta_a=beta, beta_u=beta)
    votes = MatmulVotes.at_one_place(matrix_votes(pose, W), activation)
    found, _ = ROUTER.route(votes, EM(), trace=False, beta_a=beta, beta_u=beta)
    torch.testing.assert_close(found.pose.squeeze(1), wanted.pose)
    torch.testing.assert_close(found.activation.squeeze(1), wanted.activation)
    grads = [torch.autograd.grad(parents.pose.square().sum(), [pose, W]) for parents in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_em_networks_are_compared_with_matrix_products(monkeypatch):
    calls = []
    moments = MatmulVotes.moments
    monkeypatch.setattr(MatmulVotes, "moments", lambda *given: calls.append(1) or moments(*given))
    case_of("em-4-2-2-2").ours(2).step()
    case_of("em-mixing-4-2-2-2").plain(2).step()
    assert not calls
    case_of("em-4-2-2-2").plain(2).step()
    assert len(calls) == 9  # three layers, three iterations
