"""The passes of dynamic routing, and the sums of contrastive divergence, in compiled loops on tensors of a CPU.

Each thread writes results of its own, so they are the same for any number of threads. Tensors in SIMD blocks are
X [i n d L] and Q, S [n j k L]; a coupling is [i j (n L)], with a batch padded to whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from torchcaps.kernels.records import CoupledVotes, DynamicProblem, DynamicTrace, Range, VoteInputs
from torchcaps.kernels.simd_layout import as_array, from_blocks, loops, padded, to_blocks
from torchcaps.kernels.threads import in_threads
from torchcaps.math.squash import norm

__all__ = ["CompiledPasses", "blocked_coupling", "reverse", "weight_grad", "weighted_sum"]


def blocked_coupling(c: Tensor) -> Tensor:
    """Lay a coupling [.. b i j] out as [.. i j (n L)]: no copy if it is such a view and its batch is whole blocks."""
    turned = c.movedim(-3, -1)  # [.. i j b]
    missing = padded(c.shape[-3], c.dtype) - c.shape[-3]
    return torch.nn.functional.pad(turned, (0, missing)) if missing else turned.contiguous()


def weighted_sum(W: Tensor, X: Tensor, C: Tensor | None, share: float = 1.0) -> Tensor:
    """Compute s_j = share sum_i c_ij W_ij x_i.

    Args:
        W: Weights [i j k d].
        X: Children [i n d L].
        C: Coupling [i j (n L)], or None for 1 everywhere.
        share: A number that multiplies the coupling.

    Returns:
        Totals [n j k L].
    """
    # Arrays for the loop; an empty coupling stands for 1 everywhere
    S = X.new_zeros(X.shape[1], *W.shape[1:3], X.shape[3])  # [n j k L]
    coupling = X.new_empty(0, 0, 0) if C is None else C
    votes = CoupledVotes(as_array(W), as_array(X), as_array(coupling), share)
    totals = as_array(S)

    def work(blocks: Range, parents: Range) -> None:
        loops("dynamic").weighted_sum(votes, totals, blocks, parents)

    _split(work, *S.shape[:2])
    return S


def reverse(W: Tensor, C: Tensor, H: Tensor, b: int) -> Tensor:
    """Compute sum_j c_ij W_ij^T h_j.

    Args:
        W: Weights [i j k d].
        C: Coupling [i j (n L)].
        H: Parents [n j k L].
        b: Samples in the batch.

    Returns:
        Children [b i d].
    """
    dx = H.new_empty(b, W.shape[0], W.shape[3])
    weights = as_array(W)
    coupling = as_array(C)
    parents = as_array(H)

    def work(_: int, start: int, stop: int) -> None:
        loops("dynamic_grads").reverse(
            weights=weights, coupling=coupling, parents=parents, child_grad=dx.numpy(), start=start, stop=stop
        )

    in_threads(work, len(W))
    return dx


def weight_grad(X: Tensor, C: Tensor, A: Tensor, onto: Tensor | None = None) -> Tensor:
    """Compute sum_b c_ij a_j x_i^T.

    Args:
        X: Children [i n d L].
        C: Coupling [i j (n L)].
        A: Parents [n j k L].
        onto: [i j k d] another such sum, which is added to in place, or None.

    Returns:
        [i j k d].
    """
    (i, _, d, _) = X.shape
    (_, j, k, _) = A.shape
    dW = X.new_zeros(i, j, k, d) if onto is None else onto
    children = as_array(X)
    coupling = as_array(C)
    parents = as_array(A)

    def work(_: int, start: int, stop: int) -> None:
        loops("dynamic_grads").weight_grad(
            children=children, coupling=coupling, parents=parents, grad=dW.numpy(), start=start, stop=stop
        )

    in_threads(work, i)
    return dW


def _split(work: Callable[[Range, Range], None], blocks: int, parents: int) -> None:
    """Call work(blocks, parents) in threads, over the blocks, or over the parents where there are too few blocks."""
    if blocks >= torch.get_num_threads():
        in_threads(lambda _, start, stop: work(Range(start, stop), Range(0, parents)), blocks)
    else:
        in_threads(lambda _, start, stop: work(Range(0, blocks), Range(start, stop)), parents)


def _norm_floor(dtype: torch.dtype) -> float:
    """Return what `norm` adds below the root."""
    return float(norm(torch.zeros(1, dtype=dtype))) ** 2


class CompiledPasses:
    """The passes of dynamic routing (`kernels.dynamic.Passes`) over children x [b i d] with weights W [i j k d]."""

    def __init__(self, x: Tensor, W: Tensor, *, cosine: bool, over: str, share: float) -> None:
        self.x = x.detach().contiguous()
        self.W = W.detach().contiguous()
        self.b = len(x)
        self.floor = _norm_floor(x.dtype) if cosine else 0.0
        self.over = over
        self.share = share

    @cached_property
    def X(self) -> Tensor:
        """The children in blocks."""
        return to_blocks(self.x, children=True)

    def new_coupling(self) -> Tensor:
        """Allocate a coupling C [i j (n L)]."""
        return self.x.new_empty(*self.W.shape[:2], padded(self.b, self.x.dtype))

    def new_softmax(self, count: int) -> Tensor:
        """Allocate Z [t 3 i j (n L)], with a single child or a single parent."""
        i, j, *_ = self.W.shape
        own = (i, 1) if self.over == "parents" else (1, j)
        return self.x.new_empty(count, 3, *own, padded(self.b, self.x.dtype))

    def batch_first(self, C: Tensor) -> Tensor:
        """Return a coupling as [b i j], a view in which the batch lies together."""
        return C[..., : self.b].contiguous().movedim(-1, 0)

    def uniform_total(self) -> Tensor:
        """Return s [b j k] of the uniform coupling."""
        return from_blocks(weighted_sum(self.W, self.X, None, self.share), self.b)

    def total(self, q: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return s = sum_i c V with c = softmax(V . q), and the scale [2 j b] of a softmax over children."""
        # Blocks for the loops
        Q = to_blocks(q)  # [n j k L]
        (n, j, _, L) = Q.shape
        S = torch.zeros_like(Q)
        Z = Q.new_empty(2, 0 if self.over == "parents" else j, n * L)
        problem = self._problem(Q)
        coupling = as_array(Q.new_empty(0, 0, 0) if C is None else C)
        totals = S.numpy()

        def over_parents(_: int, start: int, stop: int) -> None:
            loops("dynamic").route_parents(problem, coupling, totals, start, stop)

        def over_children(blocks: Range, parents: Range) -> None:
            loops("dynamic").route_children(problem, coupling, totals, Z.numpy(), blocks, parents)

        # A softmax over parents takes one child and all parents; over children, parents are independent
        if self.over == "parents":
            in_threads(over_parents, n)
        else:
            _split(over_children, n, j)
        return from_blocks(S, self.b), Z[..., : self.b]

    def query_grad(self, q: Tensor, s: Tensor, ds: Tensor, scale: Tensor, Z: Tensor) -> Tensor:
        """Return dq [b j k] of such a pass; fill Z."""
        # Blocks for the loops
        Q = to_blocks(q)  # [n j k L]
        dS = to_blocks(ds)
        (n, j, _, _) = Q.shape
        dQ = torch.zeros_like(Q)
        problem = self._problem(Q)
        total_grad = as_array(dS)

        def over_parents(_: int, start: int, stop: int) -> None:
            loops("dynamic_backward").query_grad_parents(problem, total_grad, Z.numpy(), dQ.numpy(), start, stop)

        def over_children(blocks: Range, parents: Range) -> None:
            loops("dynamic_backward").query_grad_children(problem, total_grad, Z.numpy(), dQ.numpy(), blocks, parents)

        if self.over == "parents":
            in_threads(over_parents, n)
        else:
            # A softmax over children was scaled forward already; its mean of c dc is s . ds.
            Z.zero_()[:2, 0, :, : self.b] = scale
            Z[2, 0] = (to_blocks(s) * dS).sum(2).transpose(0, 1).flatten(1)  # [j (n L)]
            _split(over_children, n, j)
        return from_blocks(dQ, self.b)

    def input_grads(self, q: list[Tensor], ds: list[Tensor], Z: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx [b i d] and dW [i j k d]; no pass comes after it, so the memory of X is freed for dx."""
        # The cached property is dropped; this pass lays out a few children at a time
        vars(self).pop("X", None)
        B = to_blocks(base)
        dx = torch.empty_like(self.x)
        dW = torch.zeros_like(self.W)
        trace = DynamicTrace(
            query=as_array(_stacked(q, B)),
            total_grad=as_array(_stacked(ds, B)),
            softmax=as_array(Z),
            base=as_array(B),
            floor=self.floor,
        )
        inputs = VoteInputs(as_array(self.x), as_array(self.W))
        grads = VoteInputs(dx.numpy(), dW.numpy())
        # Threads take children, whose dx and dW nobody else writes
        in_threads(
            lambda _, start, stop: loops("dynamic_grads").scatter(inputs, trace, grads, start, stop), len(self.W)
        )
        return dx, dW

    def coupled_input_grads(self, c: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx [b i d] and dW [i j k d] for dV = c ds."""
        C = blocked_coupling(c)
        H = to_blocks(ds)
        return reverse(self.W, C, H, self.b), weight_grad(self.X, C, H)

    def _problem(self, Q: Tensor) -> DynamicProblem:
        return DynamicProblem(as_array(self.W), as_array(self.X), as_array(Q), self.floor)


def _stacked(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Lay tensors [b j k] out in blocks, one after another; [0 ..] like the given blocks if there is none."""
    return torch.stack([to_blocks(t) for t in tensors]) if tensors else like.new_empty(0, *like.shape)
