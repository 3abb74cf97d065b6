"""The energy of expert capsules (Hauser 2019, section 3), as pure functions.

    z_j = sum_i c_ij W_ij x_i + b_j                          the forward pass (eq. 3; b_j is ours, 0 in the paper)
    E(x, h) = -sum_j h_j log |z_j|²                          h_j = 1: capsule j is on (eq. 7)
    P(h_j = 1 | x) = |z_j|² / (1 + |z_j|²) = |squash(z_j)|   (eq. 12)
    F(x) = -log sum_h exp(-E) = -sum_j log(1 + |z_j|²)       the free energy (eq. 10 is exp(-F) / Z)
    -dF/dW_ij = 2 c_ij z_j x_iᵀ / (1 + |z_j|²)               what data raises and the model's own images lower (eq. 18)

A gate m_j in [0, 1] multiplies h_j everywhere: F = -sum_j m_j log(1 + |z_j|²). The paper's own model has m = 1.

Eqs. (15)-(17) of the paper lose the minus sign of E; eq. (18) and Algorithm 1 are right, and are what is here. With the
coupling c, the gate m and the model's images held fixed, eq. (18) is exactly the gradient of F(model) - F(data), so
that training is the lowering of an ordinary loss: `contrast`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels import contrastive_ops
from torchcaps.math.squash import norm, squash

__all__ = ["Coupling", "contrast", "free_energy", "free_energy_grad", "hidden", "probability_on", "reverse"]

Coupling = Tensor | float
"""[b i j], or one number where the coupling is uniform."""


def probability_on(z: Tensor) -> Tensor:
    """Eq. 12: |z|² / (1 + |z|²) over the last axis."""
    q = z.square().sum(-1)
    return q / (1 + q)


def free_energy(z: Tensor, gate: Tensor | None = None) -> Tensor:
    """F [b] = -sum_j m_j log(1 + |z_j|²) of z [b j k]."""
    experts = torch.log1p(z.square().sum(-1))  # [b j]
    return -(experts if gate is None else gate * experts).sum(-1)


def free_energy_grad(z: Tensor, gate: Tensor | None = None) -> Tensor:
    """-dF/dz = 2 m_j z_j / (1 + |z_j|²): the factor of eq. 18 that belongs to capsule j, [b j k]."""
    share = 2 / (1 + z.square().sum(-1, keepdim=True))
    return z * (share if gate is None else share * gate.unsqueeze(-1))


def hidden(z: Tensor, gate: Tensor | None = None, draw: Tensor | None = None) -> Tensor:
    """Hidden capsules x_j [b j k]: squash(z_j); or, with uniform numbers `draw` [b j], the direction of z_j where
    capsule j is drawn to be on and 0 where not. Then the gate."""
    if draw is None:
        x = squash(z)
    else:
        on = (draw < probability_on(z)).to(z.dtype)
        x = z / norm(z, keepdim=True) * on.unsqueeze(-1)
    return x if gate is None else x * gate.unsqueeze(-1)


def reverse(x: Tensor, W: Tensor, c: Coupling, gain: float = 1.0) -> Tensor:
    """Algorithm 1, lines 4-5: squash(sum_j c_ij W_ijᵀ x_j) [b i d], what hidden capsules x [b j k] expect to see.

    The gain before squash is ours, 1 in the paper.
    """
    return squash(gain * contrastive_ops.reverse(x, W, c))


class _Contrast(torch.autograd.Function):
    """mean_b F(data) - F(model), whose backward pass is eq. 18 in closed form."""

    @staticmethod
    def forward(
        ctx: Any, W: Tensor, b: Tensor, data: tuple[Any, ...], model: tuple[Any, ...], seen: Tensor | None
    ) -> Tensor:
        total = W.new_zeros(())
        kept = []
        for sign, (x, c, gate), known in ((1, data, seen), (-1, model, None)):
            z = contrastive_ops.forward(x, W, c) + b if known is None else known
            total = total + sign * free_energy(z, gate).mean()
            kept.append((sign, x, c, free_energy_grad(z, gate) / len(x)))
        ctx.kept = kept
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dW: Tensor | None = None
        db: list[Tensor] = []
        for sign, x, c, a in ctx.kept:
            slope = -sign * grads[0] * a  # [b j k]
            dW = contrastive_ops.grad(x, c, slope, onto=dW)  # [i j k d]
            db.append(slope.sum(0))  # [j k]
        return dW, db[0] + db[1], None, None, None


def contrast(
    W: Tensor,
    b: Tensor,
    data: tuple[Tensor, Coupling, Tensor | None],
    model: tuple[Tensor, Coupling, Tensor | None],
    *,
    z: Tensor | None = None,
    closed_form: bool = True,
) -> Tensor:
    """mean F(data) - mean F(model), for W [i j k d] and b [j k]; each phase is (x [b i d], coupling, gate [b j]).

    The data's z [b j k], where it is known already, spares a pass.

    Its gradient is minus eq. 18. `closed_form` computes it by that equation, without a graph and without the votes;
    else autograd does, from the same forward pass.
    """
    if closed_form:
        apply: Any = _Contrast.apply
        loss: Tensor = apply(W, b, data, model, z)
        return loss
    terms = [free_energy(_graphed_forward(x, W, c) + b, gate).mean() for x, c, gate in (data, model)]
    return terms[0] - terms[1]


def _graphed_forward(x: Tensor, W: Tensor, c: Coupling) -> Tensor:
    if isinstance(c, float):
        return c * torch.einsum("ijkd,bid->bjk", W, x)
    return torch.einsum("bij,ijkd,bid->bjk", c, W, x)
