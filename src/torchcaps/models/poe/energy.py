"""The energy of expert capsules (Hauser 2019, section 3), as pure functions.

    z_j = sum_i c_ij W_ij x_i + b_j                          the forward pass (eq. 3; b_j is ours, 0 in the paper)
    E(x, h) = -sum_j h_j log |z_j|²                          h_j = 1: capsule j is on (eq. 7)
    P(h_j = 1 | x) = |z_j|² / (1 + |z_j|²) = |squash(z_j)|   (eq. 12)
    F(x) = -log sum_h exp(-E) = -sum_j log(1 + |z_j|²)       the free energy (eq. 10 is exp(-F) / Z)
    -dF/dW_ij = 2 c_ij z_j x_iᵀ / (1 + |z_j|²)               what data raises and the model's own images lower (eq. 18)

A capsule on S^m x R^n x (0, 1), which section 4.2 wishes for, has a slab beside the direction: the last n of the
numbers z_j = (s_j, r_j) are real, s_j in R^(m+1) and r_j in R^n, and a hidden rho_j in R^n goes with h_j:

    E(x, h, rho) = 1/2 sum_j |rho_j|² - sum_j h_j (log |s_j|² + rho_j . r_j)
    P(h_j = 1 | x) = sigmoid(log |s_j|² + 1/2 |r_j|²)        rho_j | x, h_j = 1 ~ N(r_j, 1)
    F(x) = -sum_j log(1 + |s_j|² exp(1/2 |r_j|²))            but for the constant of the Gaussian integrals
    -dF/ds_j = P_j 2 s_j / |s_j|²                            -dF/dr_j = P_j r_j

Every function takes n as `slab`; the paper's capsule is slab = 0. `docs/systems/poe.md` derives these lines.

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
from torchcaps.math.squash import norm, squash, unsquash

__all__ = [
    "Coupling",
    "Phase",
    "contrast",
    "free_energy",
    "free_energy_grad",
    "hidden",
    "probability_on",
    "reverse",
    "split",
    "unhide",
]

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


def probability_on(z: Tensor, slab: int = 0) -> Tensor:
    """Return P(h_j = 1 | x) = |s_j|² / (exp(-|r_j|² / 2) + |s_j|²), which is eq. 12 without a slab.

    Args:
        z: (s, r) [... k].
        slab: n, how many of the k numbers are r.

    Returns:
        [...] in [0, 1).
    """
    q, rest = _weights(z, slab)
    return q / (rest + q)


def free_energy(z: Tensor, gate: Tensor | None = None, slab: int = 0) -> Tensor:
    """Return F = -sum_j m_j log(1 + |s_j|² exp(|r_j|² / 2)).

    Args:
        z: (s, r) [b j k].
        gate: m [b j], or None for 1.
        slab: n, how many of the k numbers are r.

    Returns:
        [b].
    """
    direction, real = split(z, slab)
    if slab:
        # log(1 + exp(a)), a = log |s|² + |r|² / 2; the floor gives a capsule without a direction a finite slope
        q = direction.square().sum(-1)
        logit = q.clamp_min(torch.finfo(z.dtype).tiny).log() + real.square().sum(-1) / 2
        experts = torch.nn.functional.softplus(logit, threshold=40)  # [b j]
    else:
        experts = torch.log1p(direction.square().sum(-1))  # [b j]
    return -(experts if gate is None else gate * experts).sum(-1)


def free_energy_grad(z: Tensor, gate: Tensor | None = None, slab: int = 0) -> Tensor:
    """Return -dF/dz, the factor of eq. 18 that belongs to capsule j: m_j P_j (2 s_j / |s_j|², r_j).

    Args:
        z: (s, r) [b j k].
        gate: m [b j], or None for 1.
        slab: n, how many of the k numbers are r.

    Returns:
        [b j k].
    """
    q, rest = _weights(z, slab)
    # P / |s|² = 1 / (exp(-|r|² / 2) + |s|²), which has no pole at s = 0
    share = (2 / (rest + q)).unsqueeze(-1)
    weight = share if gate is None else share * gate.unsqueeze(-1)
    if not slab:
        return z * weight
    direction, real = split(z, slab)
    return torch.cat([direction * weight, real * (weight * q.unsqueeze(-1) / 2)], -1)


def hidden(
    z: Tensor, gate: Tensor | None = None, draw: Tensor | None = None, slab: int = 0, noise: Tensor | None = None
) -> Tensor:
    """Return the hidden capsules x_j = (h_j s_j / |s_j|, h_j rho_j), in expectation or drawn.

    Without a slab and without draws this is squash(z_j).

    Args:
        z: (s, r) [b j k].
        gate: [b j] which multiplies the result, or None for 1.
        draw: Uniform numbers [b j]: h_j is 1 where its number is below `probability_on(z)`, else 0. None for the
            expectation P_j.
        slab: n, how many of the k numbers are r.
        noise: Standard normal numbers [b j n]: rho_j is r_j + its noise. None for the expectation r_j.

    Returns:
        [b j k].
    """
    direction, real = split(z, slab)
    # Expected length
    if draw is None and not slab:
        x = squash(z)
    else:
        # Drawn on or off, length 1 or 0; or as long as it is probable
        on = probability_on(z, slab) if draw is None else (draw < probability_on(z, slab)).to(z.dtype)  # [b j]
        x = direction / norm(direction, keepdim=True) * on.unsqueeze(-1)
        if slab:
            x = torch.cat([x, (real if noise is None else real + noise) * on.unsqueeze(-1)], -1)
    return x if gate is None else x * gate.unsqueeze(-1)


def unhide(x: Tensor, slab: int = 0) -> Tensor:
    """Return z of the expected hidden capsules x = hidden(z), the inverse of `hidden`.

    Args:
        x: [... k], the direction shorter than 1.
        slab: n, how many of the k numbers are real.

    Returns:
        (s, r) [... k]; 0 where x is 0.
    """
    if not slab:
        return unsquash(x)
    # P is the direction's length; it says |s|² = P / (1 - P) exp(-|r|² / 2)
    direction, real = split(x, slab)
    on = norm(direction, keepdim=True)
    r = torch.where(on > norm(torch.zeros_like(direction), keepdim=True), real / on, 0.0)
    return torch.cat([unsquash(direction) * torch.exp(-r.square().sum(-1, keepdim=True) / 4), r], -1)


def split(z: Tensor, slab: int) -> tuple[Tensor, Tensor]:
    """Return the direction s [... k - n] and the slab r [... n] of z [... k], as views."""
    k = z.shape[-1]
    return z[..., : k - slab], z[..., k - slab :]


def _weights(z: Tensor, slab: int) -> tuple[Tensor, Tensor]:
    """|s|² [...] and exp(-|r|² / 2) [...], whose ratio is P / (1 - P); the second is 1 without a slab."""
    direction, real = split(z, slab)
    q = direction.square().sum(-1)
    if not slab:
        return q, torch.ones_like(q)
    # The floor keeps P defined where s is 0 and r so long that its weight is
    return q, torch.exp(-real.square().sum(-1) / 2).clamp_min(torch.finfo(z.dtype).tiny)


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
    def forward(
        ctx: _Context, W: Tensor, b: Tensor, data: Phase, model: Phase, data_z: Tensor | None, slab: int
    ) -> Tensor:
        total = W.new_zeros(())
        ctx.terms = []
        # The same two steps for data and model; the data's z is often known from inference
        for sign, phase, known in ((1, data, data_z), (-1, model, None)):
            z = contrastive_ops.forward(phase.x, W, phase.coupling) + b if known is None else known
            total = total + sign * free_energy(z, phase.gate, slab).mean()
            slope = free_energy_grad(z, phase.gate, slab) / len(phase.x)  # [b j k]
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
        return dW, db[0] + db[1], None, None, None, None


def contrast(
    W: Tensor,
    b: Tensor,
    data: Phase,
    model: Phase,
    *,
    z: Tensor | None = None,
    closed_form: bool = True,
    slab: int = 0,
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
        slab: n, how many of a capsule's k numbers are real.

    Returns:
        A scalar.
    """
    # Eq. 18 by hand: x, coupling and gate are constants, only W and b have gradients
    if closed_form:
        apply: Any = _Contrast.apply
        loss: Tensor = apply(W, b, data, model, z, slab)
        return loss
    # The same loss by autograd
    terms = [free_energy(_graphed_forward(p.x, W, p.coupling) + b, p.gate, slab).mean() for p in (data, model)]
    return terms[0] - terms[1]


def _graphed_forward(x: Tensor, W: Tensor, c: Coupling) -> Tensor:
    """z [b j k] without the bias, by operations that autograd differentiates."""
    if isinstance(c, float):
        return c * torch.einsum("ijkd,bid->bjk", W, x)
    return torch.einsum("bij,ijkd,bid->bjk", c, W, x)
