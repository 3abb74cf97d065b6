"""Dynamic routing straight from children and weights, with its gradient: votes are computed, used and dropped.

    dynamic_routing(x [b i d], W [i j k d], ...) -> total s [b j k], coupling c [b i j]

is `routing.dynamic.route` on the votes W_ij x_i. Two operators of torch's library do the work, one forward and one
back, by the equations of `loops.dynamic`. On a CPU the passes over the votes are its compiled loops; for any other
device or type they compute the votes of a few children at a time. Stored for the backward pass are the totals of the
iterations [t b j k] and what a softmax over children divides by [t 2 j b]: couplings are computed again with the votes.
Only with gradient="last", for which the other iterations do not count, the last coupling is stored instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchcaps.kernels.chunked_dynamic import ChunkedPasses
from torchcaps.kernels.compiled_dynamic import CompiledPasses
from torchcaps.kernels.operators import GradContext, OperatorInputs
from torchcaps.kernels.simd_layout import has_loops
from torchcaps.math.squash import norm, squash

__all__ = ["Passes", "dynamic_routing", "iterate"]


class Passes(Protocol):
    """Sums over the votes that dynamic routing needs; no vote is asked for alone.

    There are two: compiled loops (`compiled_dynamic`), and plain torch for other devices and types (`chunked_dynamic`).
    """

    share: float
    """The uniform coupling."""

    def new_coupling(self) -> Tensor:
        """Allocate a coupling C, which `batch_first` turns into [b i j]."""

    def batch_first(self, C: Tensor) -> Tensor:
        """Return a coupling C as [b i j]."""

    def new_softmax(self, count: int) -> Tensor:
        """Allocate Z [t ..], what `query_grad` of each iteration leaves for `input_grads`."""

    def uniform_total(self) -> Tensor:
        """Return s [b j k] of the uniform coupling."""

    def total(self, q: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return s = sum_i c V [b j k] with c = softmax(V . q), and the scale of the softmax.

        Args:
            q: Queries [b j k].
            C: Takes the coupling, if given.

        Returns:
            s, and of a softmax over children its largest logit and 1 / its sum [2 j b]; over parents [2 0 b].
        """

    def query_grad(self, q: Tensor, s: Tensor, ds: Tensor, scale: Tensor, Z: Tensor) -> Tensor:
        """Return dq [b j k] of a pass `total` whose s has the derivative ds; fill Z of one iteration."""

    def input_grads(self, q: list[Tensor], ds: list[Tensor], Z: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx and dW for dV = base + sum_t (c_t ds_t + e_t q_t) + u V (`loops.dynamic`)."""

    def coupled_input_grads(self, c: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx and dW for dV = c ds."""


def dynamic_routing(
    x: Tensor,
    W: Tensor,
    iterations: int = 3,
    agreement: str = "dot",
    over: str = "parents",
    logits: str = "accumulated",
    gradient: str = "all",
) -> tuple[Tensor, Tensor]:
    """Route children to parents without storing a vote.

    Args:
        x: Children [b i d].
        W: Weights [i j k d].
        iterations: This and all settings below are those of `routing.Dynamic`.
        agreement: "dot" or "cosine".
        over: What the coupling is normalized over, "parents" or "children".
        logits: "accumulated" or "replaced".
        gradient: "all" iterations, or the "last" one only.

    Returns:
        The last total s [b j k], before squash, and the coupling [b i j], detached, a view in which the batch lies
        together.
    """
    # "last" stores the least, and without a backward pass nothing else is needed
    learns = torch.is_grad_enabled() and (x.requires_grad or W.requires_grad)
    total, _, _, coupling = _forward(
        x, W, iterations, agreement=agreement, over=over, logits=logits, gradient=gradient if learns else "last"
    )
    return total, coupling.detach()


# --- The operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::dynamic_forward", mutates_args=())
def _forward(
    x: Tensor, W: Tensor, iterations: int, agreement: str, over: str, logits: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the last total [b j k], those before it [t b j k], the scales [t 2 j b] and the last coupling [b i j].

    `_backward` takes totals and scales, of all iterations but the first, or with gradient="last" the coupling alone.
    """
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        totals, scales, C = iterate(passes, iterations, agreement, logits)
        total = totals[-1]
        earlier = totals[:-1]
        # The coupling alone is enough for that gradient
        if gradient == "last":
            earlier = []
            scales = []
        return total, _kept(earlier, x, total.shape), _kept(scales, x, _scale(x, W, over)), passes.batch_first(C)


@_forward.register_fake
def _(
    x: Tensor, W: Tensor, iterations: int, agreement: str, over: str, logits: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, i, _) = x.shape
    (_, j, k, _) = W.shape
    kept = 0 if gradient == "last" else iterations - 1
    coupling = x.new_empty(i, j, b).movedim(-1, 0)
    return x.new_empty(b, j, k), x.new_empty(kept, b, j, k), x.new_empty(kept, *_scale(x, W, over)), coupling


def _kept(tensors: list[Tensor], like: Tensor, shape: Sequence[int]) -> Tensor:
    """Stack tensors of a shape, [t ..]; [0 ..] if there is none."""
    return torch.stack(tensors) if tensors else like.new_empty(0, *shape)


def _scale(x: Tensor, W: Tensor, over: str) -> tuple[int, int, int]:
    """Return the shape of what a softmax over children divides by; one over parents computes it again."""
    return 2, W.shape[1] if over == "children" else 0, len(x)


@torch.library.custom_op("torchcaps::dynamic_backward", mutates_args=())
def _backward(
    ds: Tensor,
    x: Tensor,
    W: Tensor,
    total: Tensor,
    earlier: Tensor,
    scales: Tensor,
    coupling: Tensor | None,
    agreement: str,
    over: str,
    logits: str,
) -> tuple[Tensor, Tensor]:
    """Return dx [b i d] and dW [i j k d] for the derivative ds [b j k] of the last total.

    With a coupling [b i j], of gradient="last", the iterations before do not count.
    """
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        if coupling is not None:
            return passes.coupled_input_grads(coupling, ds)
        return _retrace(passes, ds, [*earlier, total], scales, agreement, logits)


@_backward.register_fake
def _(ds: Tensor, x: Tensor, W: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), W.new_empty(W.shape)


def _setup(ctx: GradContext, inputs: OperatorInputs, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    (x, W, _, *settings, gradient) = inputs
    ctx.settings = tuple(settings)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, W, *output[:3], output[3] if gradient == "last" else None)


def _grads(ctx: GradContext, ds: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    dx, dW = _backward(ds, *ctx.saved_tensors, *ctx.settings)
    return dx, dW, None, None, None, None, None


_forward.register_autograd(_grads, setup_context=_setup)


# --- The equations --------------------------------------------------------------------------------------------------


def _passes(x: Tensor, W: Tensor, agreement: str, over: str) -> Passes:
    """Return compiled loops where there are some, else plain torch."""
    kind: type[CompiledPasses] | type[ChunkedPasses] = CompiledPasses if has_loops(x, W) else ChunkedPasses
    return kind(x, W, cosine=agreement == "cosine", over=over, share=_uniform(W, over))


def iterate(passes: Passes, iterations: int, agreement: str, logits: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the totals of all iterations, the scales of all but the first, and the last coupling C."""
    C = passes.new_coupling()
    totals = [passes.uniform_total()]
    scales = []
    q = None
    # The first iteration has no logits; only the last one's coupling is stored.
    for n in range(iterations - 1):
        v = _parent(totals[-1], agreement)
        q = v if q is None or logits == "replaced" else q + v
        total, scale = passes.total(q, C if n == iterations - 2 else None)
        totals.append(total)
        scales.append(scale)
    return totals, scales, C if iterations > 1 else C.fill_(passes.share)


def _retrace(
    passes: Passes, ds: Tensor, totals: list[Tensor], scales: Tensor, agreement: str, logits: str
) -> tuple[Tensor, Tensor]:
    """Differentiate all iterations, the last one first, then all votes at once."""
    # Queries of all iterations again, from the stored totals
    v = [_parent(s, agreement) for s in totals[:-1]]  # [b j k] each
    q = v
    if logits == "accumulated" and v:
        q = list(torch.stack(v).cumsum(0))
    Z = passes.new_softmax(len(q))
    slopes: list[Tensor] = []
    g: Tensor | None = None
    # Each iteration's query is a function of the total before it: ds of that total comes from dq.
    for n in reversed(range(len(q))):
        slopes.insert(0, ds)
        dq = passes.query_grad(q[n], totals[n + 1], ds, scales[n], Z[n])
        g = dq if g is None or logits == "replaced" else g + dq  # dv, of every later iteration that it is part of
        ds = _parent_back(totals[n], g, agreement)
    return passes.input_grads(q, slopes, Z, passes.share * ds)


def _uniform(W: Tensor, over: str) -> float:
    return 1 / W.shape[1 if over == "parents" else 0]


def _parent(s: Tensor, agreement: str) -> Tensor:
    """Return what votes are compared with: v = squash(s), or its direction."""
    return squash(s) if agreement == "dot" else s / norm(s, keepdim=True)


def _parent_back(s: Tensor, dv: Tensor, agreement: str) -> Tensor:
    """Return ds of `_parent`: f dv + r f' (u . dv) u, with r = |s|, u = s / r, v = f(r) s, f = r / (1 + r²) or 1/r."""
    r = norm(s, keepdim=True)
    u = s / r
    # The derivative along s, and across it, where only the factor f acts
    along = (u * dv).sum(-1, keepdim=True) * u  # [b j k]
    if agreement == "cosine":
        return (dv - along) / r
    f = r / (1 + r * r)
    return f * dv + along * (f * (1 - 2 * r * f))
