"""Half precision and torch.func: routers give finite gradients in the first, and work inside of the second."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchcaps.layers import DenseCapsules
from torchcaps.routing import EM, Dynamic, route
from torchcaps.types import Capsules


def problem(seed: int, dtype: torch.dtype, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Poses [b i 16], activations [b i] and W [i j 4 4] at an ordinary scale, all with gradients."""
    draw = torch.Generator().manual_seed(seed)
    pose = torch.randn(count, 9, 16, generator=draw)
    weights = torch.randn(9, 5, 4, 4, generator=draw) * 0.5
    activation = torch.rand(count, 9, generator=draw)
    return tuple(x.to(dtype).requires_grad_() for x in (pose, activation, weights))  # type: ignore[return-value]


def test_em_in_float16_has_finite_gradients_and_the_values_of_float32() -> None:
    """Before, 71 of 100 cases had gradients that were not finite, and `min_variance` was 0."""
    for seed in range(100):
        half = problem(seed, torch.float16)
        parents, _ = route(Capsules(half[0], half[1]), half[2], EM(min_variance=1e-9), pose="matrix")
        assert parents.pose.dtype == parents.activation.dtype == torch.float16
        gradients = torch.autograd.grad(parents.pose.sum() + parents.activation.sum(), half)
        assert all(g.dtype == torch.float16 and bool(torch.isfinite(g).all()) for g in gradients)
        single = [x.detach().float() for x in half]
        exact, _ = route(Capsules(single[0], single[1]), single[2], EM(min_variance=1e-9), pose="matrix")
        torch.testing.assert_close(parents.pose.float(), exact.pose, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("routing", [EM(), Dynamic()], ids=["em", "dynamic"])
def test_torch_func_differentiates_layers_that_take_kernels(routing) -> None:
    """Before, torch.func.grad ended with an error about operators that it cannot transform."""
    torch.manual_seed(0)
    layer = DenseCapsules(16, 8, 16, 16, routing=routing, pose="matrix" if isinstance(routing, EM) else "vector")
    pose, activation = torch.randn(8, 16, 16), torch.rand(8, 16)  # 1,024 votes: enough for a kernel

    def loss(parameters: dict[str, Tensor], pose: Tensor) -> Tensor:
        parents, _ = torch.func.functional_call(layer, parameters, (Capsules(pose, activation),))
        return parents.pose.square().sum() + parents.activation.sum()

    parameters = dict(layer.named_parameters())
    found = torch.func.grad(loss)({name: x.detach() for name, x in parameters.items()}, pose)
    expected = torch.autograd.grad(loss(parameters, pose), list(parameters.values()))
    for own, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
