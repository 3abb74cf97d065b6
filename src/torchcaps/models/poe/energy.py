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

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.kernels import contrastive_ops
from torchcaps.math.squash import norm, squash

__all__ = ["Coupling", "Phase", "contrast", "free_energy", "free_energy_grad", "hidden", "probability_on", "reverse"]

Coupling = Tensor | float
"""[b i j], or one number where the coupling is uniform."""


class Phase(NamedTuple):
    """One side of the contrast, the data or the model's own images: what its free energy depends on.

    Attributes:
        x: Visible children [b i d].
        coupling: [b i j] or one number.
        gate: [b j] in [0, 1], or None where nothing competes.
    """

    x: Tensor
    coupling: Coupling
    gate: Tensor | None


def probability_on(z: Tensor) -> Tensor:
    """Return P(h_j = 1 | x) = |z_j|² / (1 + |z_j|²) (eq. 12).

    Args:
        z: [... k].

    Returns:
        [...] in [0, 1).
    """
    q = z.square().sum(-1)  # [...]
    return q / (1 + q)


def free_energy(z: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return F = -sum_j m_j log(1 + |z_j|²).

    Args:
        z: [b j k].
        gate: m [b j], or None for 1.

    Returns:
        [b].
    """
    experts = torch.log1p(z.square().sum(-1))  # [b j]
    return -(experts if gate is None else gate * experts).sum(-1)


def free_energy_grad(z: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return -dF/dz = 2 m_j z_j / (1 + |z_j|²), the factor of eq. 18 that belongs to capsule j.

    Args:
        z: [b j k].
        gate: m [b j], or None for 1.

    Returns:
        [b j k].
    """
    share = 2 / (1 + z.square().sum(-1, keepdim=True))
    return z * (share if gate is None else share * gate.unsqueeze(-1))


def hidden(z: Tensor, gate: Tensor | None = None, draw: Tensor | None = None) -> Tensor:
    """Return the hidden capsules x_j: squash(z_j) or, if magnitudes are drawn, the direction of z_j or 0.

    Args:
        z: [b j k].
        gate: [b j] which multiplies the result, or None for 1.
        draw: Uniform numbers [b j]: capsule j is on where its number is below `probability_on(z)`. None for squash.

    Returns:
        [b j k].
    """
    # Expected length
    if draw is None:
        x = squash(z)
    else:
        # Drawn on or off: length 1 or 0
        on = (draw < probability_on(z)).to(z.dtype)  # [b j]
        x = z / norm(z, keepdim=True) * on.unsqueeze(-1)
    return x if gate is None else x * gate.unsqueeze(-1)


def reverse(x: Tensor, W: Tensor, c: Coupling, gain: float = 1.0) -> Tensor:
    """Return the visible children that hidden capsules expect (Algorithm 1, lines 4-5).

        squash(gain sum_j c_ij W_ijᵀ x_j)

    Args:
        x: Hidden capsules [b j k].
        W: [i j k d].
        c: Coupling [b i j], or one number.
        gain: Before squash; ours, 1 in the paper.

    Returns:
        [b i d].
    """
    return squash(gain * contrastive_ops.reverse(x, W, c))


class _Term(NamedTuple):
    """What the backward pass needs of one phase: its sign in the loss, x, the coupling, and -dF/dz / b [b j k]."""

    sign: int
    x: Tensor
    coupling: Coupling
    slope: Tensor


class _Context(Protocol):
    """What the forward pass leaves for the backward pass: the terms of data and model."""

    terms: list[_Term]


class _Contrast(torch.autograd.Function):
    """mean_b F(data) - F(model), whose backward pass is eq. 18 in closed form."""

    @staticmethod
    def forward(ctx: _Context, W: Tensor, b: Tensor, data: Phase, model: Phase, data_z: Tensor | None) -> Tensor:
        total = W.new_zeros(())
        ctx.terms = []
        # The same two steps for data and model; the data's z is often known from inference
        for sign, phase, known in ((1, data, data_z), (-1, model, None)):
            z = contrastive_ops.forward(phase.x, W, phase.coupling) + b if known is None else known
            total = total + sign * free_energy(z, phase.gate).mean()
            slope = free_energy_grad(z, phase.gate) / len(phase.x)  # [b j k]
            ctx.terms.append(_Term(sign, phase.x, phase.coupling, slope))
        return total

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dW: Tensor | None = None
        db: list[Tensor] = []
        # The second product is added onto the first in place, which saves a tensor of W's size
        for term in ctx.terms:
            slope = -term.sign * grads[0] * term.slope  # [b j k]
            dW = contrastive_ops.grad(term.x, term.coupling, slope, onto=dW)  # [i j k d]
            db.append(slope.sum(0))  # [j k]
        return dW, db[0] + db[1], None, None, None


def contrast(
    W: Tensor,
    b: Tensor,
    data: Phase,
    model: Phase,
    *,
    z: Tensor | None = None,
    closed_form: bool = True,
) -> Tensor:
    """Return the loss mean F(data) - mean F(model), whose gradient is minus eq. 18.

    Args:
        W: [i j k d].
        b: Hidden bias [j k].
        data: The children of images, with their coupling and gate.
        model: The children after the negative phase; its batch may have another size.
        z: [b j k] of the data, where it is known already: it spares a pass.
        closed_form: Compute the gradient by eq. 18, without a graph and without the votes; else autograd does, from
            the same forward pass.

    Returns:
        A scalar.
    """
    # Eq. 18 by hand: x, coupling and gate are constants, only W and b have gradients
    if closed_form:
        apply: Any = _Contrast.apply
        loss: Tensor = apply(W, b, data, model, z)
        return loss
    # The same loss by autograd
    terms = [free_energy(_graphed_forward(p.x, W, p.coupling) + b, p.gate).mean() for p in (data, model)]
    return terms[0] - terms[1]


def _graphed_forward(x: Tensor, W: Tensor, c: Coupling) -> Tensor:
    """z [b j k] without the bias, by operations that autograd differentiates."""
    if isinstance(c, float):
        return c * torch.einsum("ijkd,bid->bjk", W, x)
    return torch.einsum("bij,ijkd,bid->bjk", c, W, x)
