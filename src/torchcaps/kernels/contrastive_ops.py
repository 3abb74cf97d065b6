"""Dynamic routing that never stores the votes V_ij = W_ij x_i [b i j k], and the sums of contrastive divergence.

On a CPU these are compiled loops (`compiled_dynamic`), which compute the votes of a child, use and drop them.
For other devices and types, and with TORCHCAPS_KERNELS=plain, there is a form without loops. What routing needs of the
votes are sums over them, and each is a matrix product for every parent j:

    z_j = sum_i c_ij W_ij x_i          the children times their coupling [b (d i)], times W_j [(d i) k]
    V_ij . v_j = x_i . (W_ij^T v_j)    v_j [b k] times W_j^T, then times the children and summed over d
    |V_ij|                             from the votes of a few children at a time, once for all iterations

One buffer of the children's size serves all parents. Inside, the batch is the last axis and d the first, so that
coupling a child and summing over d are plain passes over memory: x is [d i b], c is [j i b], W is [d i j k]. The
lengths could come from Gram matrices, x_i^T (W_ij^T W_ij) x_i, in about half the time; but that form loses half of the
digits of a vote that nearly cancels.

There is no gradient: nothing is recorded for autograd. With one number for c, `forward`, `reverse` and `grad` are one
matrix product each, loops or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from torchcaps.kernels import compiled_dynamic as compiled
from torchcaps.kernels.dynamic import iterate
from torchcaps.kernels.simd_layout import from_blocks, has_loops, to_blocks
from torchcaps.kernels.threads import kernels_enabled
from torchcaps.math.squash import norm, squash

__all__ = ["forward", "grad", "reverse", "route"]

MAX_VOTES = 2**19
"""Votes that may exist at once (2 MB in float32), unless those of a single child are more."""


@torch.no_grad()
def route(
    x: Tensor,
    W: Tensor,
    *,
    iterations: int = 3,
    agreement: Literal["dot", "cosine"] = "dot",
    over: Literal["parents", "children"] = "parents",
    logits: Literal["accumulated", "replaced"] = "accumulated",
) -> tuple[Tensor, Tensor]:
    """Route children without storing a vote; equal to `routing.dynamic` but for rounding.

    Finite for all finite float32 (routed in float64 where a squared length may overflow) and for float64 whose votes
    stay below 1e150.

    Args:
        x: Children [b i d].
        W: Weights [i j k d].
        iterations: This and all settings below are those of `routing.Dynamic`.
        agreement: "dot" or "cosine".
        over: What the coupling is normalized over, "parents" or "children".
        logits: "accumulated" or "replaced".

    Returns:
        The last iteration's coupling c [b i j], a view in which the batch lies together, as the other functions here
        want it, and its sum z [b j k], before squash.
    """
    wide = torch.float64 if _may_overflow(x, W) else x.dtype
    # Compiled loops, unless a single iteration needs one matrix product only
    if iterations > 1 and _loops(x, W):
        passes = compiled.CompiledPasses(
            x.to(wide), W.to(wide), cosine=agreement == "cosine", over=over, share=_uniform(W, over)
        )
        totals, _, C = iterate(passes, iterations, agreement, logits)
        return passes.batch_first(C).to(x.dtype), totals[-1].to(x.dtype)  # [b i j], [b j k]
    # Without loops: one matrix product for each parent, on a buffer of the children's size.
    x_t = _turn(x).to(wide)
    P = _ordered(W).to(wide)  # [d i b], [d i j k]
    # Lengths of the votes once for all iterations
    inverse = _inverse_lengths(x_t, P) if agreement == "cosine" and iterations > 1 else None
    b: Tensor | None = None
    c: Tensor | float = _uniform(W, over)
    # Each iteration: totals, agreement of the votes with them, and the coupling from that
    for _ in range(iterations - 1):
        z = _forward(x_t, P, c)  # [b j k]
        agreed = _agree(x_t, P, squash(z) if inverse is None else z / norm(z, keepdim=True), inverse)  # [j i b]
        b = agreed if b is None or logits == "replaced" else b.add_(agreed)
        c = b.softmax(0 if over == "parents" else 1)
    # The last total, with the coupling that is returned
    z = _forward(x_t, P, c).to(x.dtype)
    if not isinstance(c, Tensor):
        c = x_t.new_full((P.shape[2], *x_t.shape[1:]), c)
    return c.permute(2, 1, 0).to(x.dtype), z  # [b i j], [b j k]


@torch.no_grad()
def forward(x: Tensor, W: Tensor, c: Tensor | float) -> Tensor:
    """Compute z_j = sum_i c_ij W_ij x_i.

    Args:
        x: Children [b i d].
        W: Weights [i j k d].
        c: Coupling [b i j], or one number for all.

    Returns:
        z [b j k].
    """
    if isinstance(c, Tensor) and _loops(x, W, c):
        total = compiled.weighted_sum(W, to_blocks(x, children=True), compiled.blocked_coupling(c))
        return from_blocks(total, len(x))
    return _forward(_turn(x), _ordered(W), _turned(c))


@torch.no_grad()
def reverse(h: Tensor, W: Tensor, c: Tensor | float) -> Tensor:
    """Compute sum_j c_ij W_ij^T h_j.

    Args:
        h: Parents [b j k].
        W: Weights [i j k d].
        c: Coupling [b i j], or one number for all.

    Returns:
        Children [b i d], a view.
    """
    if isinstance(c, Tensor) and _loops(h, W, c):
        return compiled.reverse(W, compiled.blocked_coupling(c), to_blocks(h), len(h))
    # A uniform coupling leaves one product over all parents
    P = _ordered(W)  # [d i j k]
    c = _turned(c)
    d, i, j, k = P.shape
    if not isinstance(c, Tensor):
        y = torch.mm(P.view(d * i, j * k), h.flatten(1).t()).mul_(c)  # [(d i) b]
        return y.view(d, i, -1).permute(2, 1, 0)  # [b i d]
    # Else one for each parent, into the same buffer
    total = h.new_zeros(d, i, len(h))  # [d i b]
    buffer = torch.empty_like(total)
    for n, P_n in _parents(P):
        torch.mm(P_n, h[:, n].t(), out=buffer.view(d * i, -1))
        total.addcmul_(buffer, c[n])
    return total.permute(2, 1, 0)  # [b i d]


@torch.no_grad()
def grad(x: Tensor, c: Tensor | float, a: Tensor, onto: Tensor | None = None) -> Tensor:
    """Compute sum_b c_ij a_j x_i^T: with a = 2 z / (1 + |z|^2) one phase of Hauser 2019, eq. 18, over the batch.

    Args:
        x: Children [b i d].
        c: Coupling [b i j], or one number for all.
        a: Parents [b j k].
        onto: Another such sum, which this one is added to; it may not be used any more.

    Returns:
        [i j k d].
    """
    (_, i, d) = x.shape
    (_, j, k) = a.shape
    if isinstance(c, Tensor) and _loops(x, a, c):
        return compiled.weight_grad(to_blocks(x, children=True), compiled.blocked_coupling(c), to_blocks(a), onto)
    # The same two cases as in `reverse`, transposed
    x_t = _turn(x)  # [d i b]
    c = _turned(c)
    total = a.new_empty(d, i, j, k)
    if not isinstance(c, Tensor):
        torch.mm(x_t.view(d * i, -1), a.flatten(1), out=total.view(d * i, j * k)).mul_(c)
    else:
        buffer = torch.empty_like(x_t)
        for n, total_n in _parents(total):
            torch.mul(x_t, c[n], out=buffer)
            torch.mm(buffer.view(d * i, -1), a[:, n], out=total_n)
    made = total.permute(1, 2, 3, 0)  # [i j k d]
    return made.contiguous() if onto is None else onto.add_(made)


def _loops(*tensors: Tensor) -> bool:
    return kernels_enabled() and has_loops(*tensors)


def _uniform(W: Tensor, over: str) -> float:
    return 1 / W.shape[1 if over == "parents" else 0]


def _ordered(W: Tensor) -> Tensor:
    """Weights [i j k d] -> [d i j k], the order in which every product here reads them."""
    return W.permute(3, 0, 1, 2).contiguous()


def _turn(x: Tensor) -> Tensor:
    """[b i d] -> [d i b] and, the same, [b i j] -> [j i b]."""
    return x.permute(2, 1, 0).contiguous()


def _turned(c: Tensor | float) -> Tensor | float:
    """A coupling as `_turn` makes it; a number stays one."""
    return _turn(c) if isinstance(c, Tensor) else c


def _parents(P: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The number n of each parent and its part [(d i) k] of [d i j k], a view."""
    return enumerate(P.flatten(0, 1).unbind(1))


def _forward(x: Tensor, P: Tensor, c: Tensor | float) -> Tensor:
    """z [b j k] from x [d i b], W as [d i j k] and c [j i b] or a number."""
    d, i, j, k = P.shape
    if not isinstance(c, Tensor):
        return torch.mm(x.view(d * i, -1).t(), P.view(d * i, j * k)).mul_(c).view(-1, j, k)
    # One parent at a time: the children times their coupling, then times W_j
    z = x.new_empty(x.shape[2], j, k)  # [b j k]
    buffer = torch.empty_like(x)
    for n, P_n in _parents(P):
        torch.mul(x, c[n], out=buffer)
        torch.mm(buffer.view(d * i, -1).t(), P_n, out=z[:, n])
    return z


def _agree(x: Tensor, P: Tensor, v: Tensor, inverse: Tensor | None) -> Tensor:
    """x_i . (W_ij^T v_j) [j i b], times 1 / |V_ij| where that is given, which makes it a cosine."""
    # One parent at a time: W_j^T v_j, then the dot product with each child
    agreed = x.new_empty(P.shape[2], *x.shape[1:])  # [j i b]
    buffer = torch.empty_like(x)
    for n, P_n in _parents(P):
        torch.mm(P_n, v[:, n].t(), out=buffer.flatten(0, 1))
        torch.sum(buffer.mul_(x), 0, out=agreed[n])
    return agreed if inverse is None else agreed.mul_(inverse).clamp_(-1, 1)


def _inverse_lengths(x: Tensor, P: Tensor) -> Tensor:
    """1 / |W_ij x_i| [j i b], and 0 for a vote of length 0, which agrees with nobody."""
    (_, i, j, k) = P.shape
    b = x.shape[2]
    square = x.new_empty(j, i, b)
    # The only place where votes exist: those of a few children at a time
    rows = max(1, MAX_VOTES // (b * j * k))
    for n in range(0, i, rows):
        W_n = P[:, n : n + rows].flatten(2).permute(1, 2, 0)  # [n (j k) d]
        x_n = x[:, n : n + rows].transpose(0, 1).contiguous()  # [n d b]
        votes = torch.bmm(W_n, x_n).view(-1, j, k, b)  # [n j k b]
        torch.sum(votes.mul_(votes), 2, out=square[:, n : n + rows].transpose(0, 1))
    # Without this mask a vote of length 0 would get 1 / sqrt(floor), a huge number
    some = square > 0
    floor = float(norm(x.new_zeros(1))) ** 2  # what `norm` adds below the root
    return square.add_(floor).rsqrt_().mul_(some)


def _may_overflow(x: Tensor, W: Tensor) -> bool:
    """Whether the squared length of a vote or of a sum of votes could be more than the largest number."""
    # A bound from the largest numbers alone: two cheap passes, no vote
    i, _, k, d = W.shape
    largest = [max(-float(low), float(high)) for low, high in (x.aminmax(), W.aminmax())]
    return i * d * math.sqrt(k) * math.prod(largest) > math.sqrt(torch.finfo(x.dtype).max)
