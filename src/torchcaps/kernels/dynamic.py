"""Dynamic routing straight from children and weights, with its gradient: votes are made, used and forgotten.

    dynamic_routing(x [b i d], W [i j k d], ...) -> total s [b j k], coupling c [b i j]

is `routing.dynamic.route` on the votes W_ij x_i. Two operators of torch's library do the work, one forward and one
back, by the equations of `loops.dynamic`. On a CPU the passes over the votes are its compiled loops; for any other
device or type they make the votes of a few children at a time. Kept for the way back are the totals of the iterations
[t b j k] and what a softmax over children divides by [t 2 j b]: couplings are made again with the votes. Only with
gradient="last", for which the others do not count, the last coupling is kept instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchcaps.kernels.chunked_dynamic import Tiled
from torchcaps.kernels.simd_layout import Looped, suits
from torchcaps.math.squash import norm, squash

__all__ = ["Passes", "dynamic_routing", "iterate"]


class Passes(Protocol):
    """What routing asks of the votes, never of one vote alone.

    coupling   room for one, C, which `seen` shows as [b i j]; `marks` is room for Z, what `pull` leaves for `scatter`
    first      s [b j k] of the uniform coupling
    again      s = sum_i c V with c = softmax(V . q), and c into C where that is given. With s the scale [2 j b] of a
               softmax over children, its largest logit and 1 / its sum; over parents it is [2 0 b]
    pull       dq of such a pass whose s has the derivative ds; fills one Z
    scatter    dx and dW for dV = base + sum_t (c_t ds_t + e_t q_t) + u V (`loops.dynamic`)
    straight   dx and dW for dV = c ds
    """

    share: float

    def coupling(self) -> Tensor: ...
    def seen(self, C: Tensor) -> Tensor: ...
    def marks(self, count: int) -> Tensor: ...
    def first(self) -> Tensor: ...
    def again(self, q: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    def pull(self, q: Tensor, s: Tensor, ds: Tensor, scale: Tensor, Z: Tensor) -> Tensor: ...
    def scatter(self, q: list[Tensor], ds: list[Tensor], Z: Tensor, base: Tensor) -> tuple[Tensor, Tensor]: ...
    def straight(self, c: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]: ...


def dynamic_routing(
    x: Tensor,
    W: Tensor,
    iterations: int = 3,
    agreement: str = "dot",
    over: str = "parents",
    logits: str = "accumulated",
    gradient: str = "all",
) -> tuple[Tensor, Tensor]:
    """Children [b i d], weights [i j k d] -> the last total s [b j k], before squash, and coupling [b i j], detached.

    The settings are those of `routing.Dynamic`. The coupling is a view in which the batch lies together.
    """
    learns = torch.is_grad_enabled() and (x.requires_grad or W.requires_grad)
    total, _, _, coupling = _forward(x, W, iterations, agreement, over, logits, gradient if learns else "last")
    return total, coupling.detach()


# --- The operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::dynamic_forward", mutates_args=())
def _forward(
    x: Tensor, W: Tensor, iterations: int, agreement: str, over: str, logits: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last total [b j k], those before it [t b j k], the scales [t 2 j b] and the last coupling [b i j].

    `_backward` takes totals and scales, of all iterations but the first, or with gradient="last" the coupling alone.
    """
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        totals, scales, C = iterate(passes, iterations, agreement, logits)
        total = totals[-1]
        earlier = totals[:-1]
        if gradient == "last":
            earlier = []
            scales = []
        return total, _kept(earlier, x, total.shape), _kept(scales, x, _scale(x, W, over)), passes.seen(C)


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
    """Tensors of a shape one after the other, [t ..]; [0 ..] if there is none."""
    return torch.stack(tensors) if tensors else like.new_empty(0, *shape)


def _scale(x: Tensor, W: Tensor, over: str) -> tuple[int, int, int]:
    """The shape of what a softmax over children divides by; one over parents makes it again."""
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
    """dx [b i d] and dW [i j k d] for the derivative ds [b j k] of the last total; a coupling stands for itself."""
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        if coupling is not None:
            return passes.straight(coupling, ds)
        return _retrace(passes, ds, [*earlier, total], scales, agreement, logits)


@_backward.register_fake
def _(ds: Tensor, x: Tensor, W: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), W.new_empty(W.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, W, _, *ctx.settings, gradient = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, W, *output[:3], output[3] if gradient == "last" else None)


def _grads(ctx: Any, ds: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dW = _backward(ds, *ctx.saved_tensors, *ctx.settings)
    return dx, dW, None, None, None, None, None


_forward.register_autograd(_grads, setup_context=_setup)


# --- The equations --------------------------------------------------------------------------------------------------


def _passes(x: Tensor, W: Tensor, agreement: str, over: str) -> Passes:
    """Loops where there are some, else tiles."""
    kind: Any = Looped if suits(x, W) else Tiled
    passes: Passes = kind(x, W, cosine=agreement == "cosine", over=over, share=_uniform(W, over))
    return passes


def iterate(passes: Passes, iterations: int, agreement: str, logits: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The totals of all iterations, the scales of all but the first, and the last coupling C."""
    C = passes.coupling()
    totals = [passes.first()]
    scales = []
    q = None
    for n in range(iterations - 1):
        v = _parent(totals[-1], agreement)
        q = v if q is None or logits == "replaced" else q + v
        total, scale = passes.again(q, C if n == iterations - 2 else None)
        totals.append(total)
        scales.append(scale)
    return totals, scales, C if iterations > 1 else C.fill_(passes.share)


def _retrace(
    passes: Passes, ds: Tensor, totals: list[Tensor], scales: Tensor, agreement: str, logits: str
) -> tuple[Tensor, Tensor]:
    """All iterations backwards, then the derivatives of all votes at once."""
    v = [_parent(s, agreement) for s in totals[:-1]]
    q = v if logits == "replaced" else list(torch.stack(v).cumsum(0)) if v else []
    Z = passes.marks(len(q))
    slopes: list[Tensor] = []
    g: Tensor | None = None
    for n in reversed(range(len(q))):
        slopes.insert(0, ds)
        dq = passes.pull(q[n], totals[n + 1], ds, scales[n], Z[n])
        g = dq if g is None or logits == "replaced" else g + dq  # dv, of every later iteration that it is part of
        ds = _parent_back(totals[n], g, agreement)
    return passes.scatter(q, slopes, Z, passes.share * ds)


def _uniform(W: Tensor, over: str) -> float:
    return 1 / W.shape[1 if over == "parents" else 0]


def _parent(s: Tensor, agreement: str) -> Tensor:
    """What votes are compared with: v = squash(s), or its direction."""
    return squash(s) if agreement == "dot" else s / norm(s, keepdim=True)


def _parent_back(s: Tensor, dv: Tensor, agreement: str) -> Tensor:
    """ds for `_parent`: f dv + r f' (u . dv) u, with r = |s|, u = s / r, v = f(r) s, f = r / (1 + r²) or 1 / r."""
    r = norm(s, keepdim=True)
    u = s / r
    along = (u * dv).sum(-1, keepdim=True) * u
    if agreement == "cosine":
        return (dv - along) / r
    f = r / (1 + r * r)
    return f * dv + along * (f * (1 - 2 * r * f))
