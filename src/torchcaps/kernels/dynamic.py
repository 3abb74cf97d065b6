"""Dynamic routing straight from children and weights, with its gradient: votes are made, used and forgotten.

    dynamic_routing(x [b i d], W [i j k d], ...) -> total s [b j k], coupling c [b i j]

is `routing.dynamic.route` on the votes W_ij x_i. Two operators of torch's library do the work, one forward and one
back, by the equations of `loops.dynamic`. On a CPU the passes over the votes are its compiled loops; for any other
device or type they make the votes of a few children at a time. Kept for the way back are the totals and couplings of
the iterations, numbers [t b i j]; nothing is as large as the votes [b i j k].
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from torchcaps.kernels.lanes import Looped, suits
from torchcaps.kernels.tiles import Tiled
from torchcaps.math.squash import norm, squash

__all__ = ["Passes", "dynamic_routing", "iterate"]


class Passes(Protocol):
    """What routing asks of the votes, never of one vote alone. C, E, U are couplings, as `room` makes them.

    room     so many couplings [t i j ..], and `seen` what is in them: [t b i j]
    first    s [b j k] of the uniform coupling
    again    c = softmax(V . q) into C, and s = sum_i c V if wanted
    pull     dq of such a pass whose s has the derivative ds; fills E, adds to U
    scatter  dx and dW for dV = base + sum_t (c_t ds_t + e_t q_t) + u V, or without E and base for dV = c ds
    """

    def room(self, count: int) -> Tensor: ...
    def seen(self, room: Tensor) -> Tensor: ...
    def kept(self, couplings: Tensor) -> Tensor: ...
    def first(self) -> Tensor: ...
    def again(self, q: Tensor, C: Tensor, *, summed: bool = True) -> Tensor: ...
    def pull(self, q: Tensor, C: Tensor, s: Tensor, ds: Tensor, E: Tensor, U: Tensor | None) -> Tensor: ...
    def scatter(
        self, C: Tensor, ds: list[Tensor], E: Tensor | None, q: list[Tensor], U: Tensor | None, base: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


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
    total, _, couplings = _forward(x, W, iterations, agreement, over, logits, gradient if learns else "last")
    if iterations == 1:
        return total, x.new_full((len(x), *W.shape[:2]), _uniform(W, over))
    return total, couplings[-1].detach()


# --- The operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::dynamic_forward", mutates_args=())
def _forward(
    x: Tensor, W: Tensor, iterations: int, agreement: str, over: str, logits: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The last total [b j k], those before it [t b j k], and couplings [t b i j]: of all iterations but the first
    with gradient="all", else of the last."""
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        totals, room = iterate(passes, iterations, agreement, logits, 1 if gradient == "last" else iterations)
        earlier = torch.stack(totals)[:-1].clone()
        return totals[-1], earlier, passes.seen(room)


@_forward.register_fake
def _(
    x: Tensor, W: Tensor, iterations: int, agreement: str, over: str, logits: str, gradient: str
) -> tuple[Tensor, Tensor, Tensor]:
    (b, i, _), (_, j, k, _) = x.shape, W.shape
    count = min(iterations - 1, 1 if gradient == "last" else iterations)
    couplings = x.new_empty(count, i, j, b).movedim(-1, 1)
    return x.new_empty(b, j, k), x.new_empty(iterations - 1, b, j, k), couplings


@torch.library.custom_op("torchcaps::dynamic_backward", mutates_args=())
def _backward(
    ds: Tensor,
    x: Tensor,
    W: Tensor,
    total: Tensor,
    earlier: Tensor,
    couplings: Tensor,
    agreement: str,
    over: str,
    logits: str,
    gradient: str,
) -> tuple[Tensor, Tensor]:
    """dx [b i d] and dW [i j k d] for the derivative ds [b j k] of the last total."""
    with torch.no_grad():
        passes = _passes(x, W, agreement, over)
        C = passes.kept(couplings)
        if gradient == "last" and len(C):
            return passes.scatter(C, [ds], None, [], None, None)
        return _retrace(passes, ds, [*earlier, total], C, agreement, logits, _uniform(W, over))


@_backward.register_fake
def _(ds: Tensor, x: Tensor, W: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), W.new_empty(W.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, W, _, *ctx.settings = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, W, *output)


def _grads(ctx: Any, ds: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, W, total, earlier, couplings = ctx.saved_tensors
    dx, dW = _backward(ds, x, W, total, earlier, couplings, *ctx.settings)
    return dx, dW, None, None, None, None, None


_forward.register_autograd(_grads, setup_context=_setup)


# --- The equations --------------------------------------------------------------------------------------------------


def _passes(x: Tensor, W: Tensor, agreement: str, over: str) -> Passes:
    """Loops where there are some, else tiles."""
    kind: Any = Looped if suits(x, W) else Tiled
    passes: Passes = kind(x, W, cosine=agreement == "cosine", over=over, share=_uniform(W, over))
    return passes


def iterate(
    passes: Passes, iterations: int, agreement: str, logits: str, keep: int, *, summed: bool = True
) -> tuple[list[Tensor], Tensor]:
    """The totals of all iterations (without the last one's if it is not wanted), and the last `keep` couplings."""
    room = passes.room(min(iterations - 1, keep))
    totals, q = [passes.first()], None
    for n in range(iterations - 1):
        v = _parent(totals[-1], agreement)
        q = v if q is None or logits == "replaced" else q + v
        last = n == iterations - 2
        totals.append(passes.again(q, room[n % len(room)], summed=summed or not last))
    return totals, room


def _retrace(
    passes: Passes, ds: Tensor, totals: list[Tensor], C: Tensor, agreement: str, logits: str, share: float
) -> tuple[Tensor, Tensor]:
    """All iterations backwards, then the derivatives of all votes at once."""
    v = [_parent(s, agreement) for s in totals[:-1]]
    q = v if logits == "replaced" else list(torch.stack(v).cumsum(0)) if v else []
    E = torch.empty_like(C)
    U = torch.zeros_like(C[0]) if agreement == "cosine" and q else None
    slopes: list[Tensor] = []
    g: Tensor | None = None
    for n in reversed(range(len(q))):
        slopes.insert(0, ds)
        dq = passes.pull(q[n], C[n], totals[n + 1], ds, E[n], U)
        g = dq if g is None or logits == "replaced" else g + dq  # dv, of every later iteration that it is part of
        ds = _parent_back(totals[n], g, agreement)
    return passes.scatter(C, slopes, E, q, U, share * ds)


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
