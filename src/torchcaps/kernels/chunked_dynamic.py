"""The passes of dynamic routing in plain torch, for any device and type, the votes of a few children at a time.

It is what a GPU runs, where its speed was never measured; its results are tested on CPU tensors
(tests/kernels/test_dynamic_kernel.py, "chunks").
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcaps.math.pose import vector_votes
from torchcaps.math.squash import norm

__all__ = ["MAX_VOTES", "ChunkedPasses"]

MAX_VOTES = 2**21
"""Votes that may exist at once, unless those of a single child are more."""


class ChunkedPasses:
    """The passes (`kernels.dynamic.Passes`) over children x [b i d] with weights W [i j k d]."""

    def __init__(self, x: Tensor, W: Tensor, *, cosine: bool, over: str, share: float) -> None:
        self.x = x
        self.W = W
        self.cosine = cosine
        self.over = over
        self.share = share

    def new_coupling(self) -> Tensor:
        """Allocate a coupling C [i j b]."""
        return self.x.new_empty(*self.W.shape[:2], len(self.x))

    def new_softmax(self, count: int) -> Tensor:
        """Allocate Z [t 3 b i j], with a single child or a single parent."""
        (b, i, _) = self.x.shape
        j = self.W.shape[1]
        return self.x.new_empty(count, 3, b, *((i, 1) if self.over == "parents" else (1, j)))

    def batch_first(self, C: Tensor) -> Tensor:
        """Return a coupling as [b i j], a view in which the batch lies together."""
        return C.movedim(-1, 0)

    def uniform_total(self) -> Tensor:
        """Return s [b j k] of the uniform coupling, one matrix product."""
        return torch.einsum("ijkd,bid->bjk", self.W, self.x) * self.share

    def total(self, q: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return s = sum_i c V with c = softmax(V . q), and the scale [2 j b] of a softmax over children."""
        c = self.batch_first(self.new_coupling() if C is None else C)
        s = torch.zeros_like(q)
        # One pass over the votes for the logits, one for the sums.
        for n, V in self._votes():
            c[:, n] = self._logits(V, q)
        scale = _exponentials(c, 2 if self.over == "parents" else 1)
        for n, V in self._votes():
            s += torch.einsum("bij,bijk->bjk", c[:, n], V)
        own = scale.squeeze(2).transpose(1, 2).contiguous() if self.over == "children" else c.new_empty(2, 0, len(c))
        return s, own

    def query_grad(self, q: Tensor, s: Tensor, ds: Tensor, scale: Tensor, Z: Tensor) -> Tensor:
        """Return dq [b j k] of such a pass; fill Z."""
        # Over children the softmax is known from the forward pass; over parents it is computed with the votes
        dq = torch.zeros_like(q)
        if self.over == "children":
            Z[:2] = scale.transpose(1, 2).unsqueeze(2)
            Z[2] = (s * ds).sum(-1).unsqueeze(1)
        for n, V in self._votes():
            if self.over == "parents":
                c = self._logits(V, q)
                Z[:2, :, n] = _exponentials(c, 2)
                Z[2, :, n] = (c * torch.einsum("bijk,bjk->bij", V, ds)).sum(2, keepdim=True)
            dq += torch.einsum("bij,bijk->bjk", self._shares(n, V, q, ds, Z)[1], V)
        return dq

    def input_grads(self, q: list[Tensor], ds: list[Tensor], Z: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx [b i d] and dW [i j k d] of all iterations."""
        dx = torch.empty_like(self.x)
        dW = torch.empty_like(self.W)
        for n, V in self._votes():
            # What all iterations say of these votes
            dV = base.unsqueeze(1).expand_as(V).clone()  # [b n j k]
            for q_t, ds_t, Z_t in zip(q, ds, Z, strict=True):
                c, e = self._shares(n, V, q_t, ds_t, Z_t)
                dV += c.unsqueeze(-1) * ds_t.unsqueeze(1) + e.unsqueeze(-1) * q_t.unsqueeze(1)
                # A cosine does not change with the length of a vote: take out the direction of V
                if self.cosine:
                    dV -= (e * self._logits(V, q_t)).unsqueeze(-1) * self._inverse(V) * V
            dx[:, n], dW[n] = self._back(n, dV)
        return dx, dW

    def coupled_input_grads(self, c: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx [b i d] and dW [i j k d] for dV = c ds."""
        dx = torch.empty_like(self.x)
        dW = torch.empty_like(self.W)
        for n in self._chunks():
            dx[:, n], dW[n] = self._back(n, c[:, n].unsqueeze(-1) * ds.unsqueeze(1))
        return dx, dW

    def _back(self, n: slice, dV: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx and dW of some children."""
        return torch.einsum("bijk,ijkd->bid", dV, self.W[n]), torch.einsum("bijk,bid->ijkd", dV, self.x[:, n])

    def _shares(self, n: slice, V: Tensor, q: Tensor, ds: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Return c, and e = c (V . ds - mean), over |V| for cosines: both [b n j]."""
        top, inverse, mean = Z[:, :, n] if self.over == "parents" else Z
        c = (self._logits(V, q) - top).exp() * inverse
        return c, c * (torch.einsum("bijk,bjk->bij", V, ds) - mean) * self._inverse(V).squeeze(-1)

    def _logits(self, V: Tensor, q: Tensor) -> Tensor:
        """Return V . q [b n j], over |V| for cosines."""
        return torch.einsum("bijk,bjk->bij", V * self._inverse(V), q)

    def _chunks(self) -> Iterator[slice]:
        """Yield slices of the children."""
        (b, i, _) = self.x.shape
        (_, j, k, _) = self.W.shape
        # At least one child at a time, and a batch may be empty
        rows = max(1, MAX_VOTES // max(1, b * j * k))
        return (slice(first, first + rows) for first in range(0, i, rows))

    def _votes(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the children, and their votes [b n j k]."""
        return ((n, vector_votes(self.x[:, n], self.W[n])) for n in self._chunks())

    def _inverse(self, V: Tensor) -> Tensor:
        """Return 1 / |V| [b i j 1] for cosines, else 1."""
        return 1 / norm(V, keepdim=True) if self.cosine else torch.ones_like(V[..., :1])


def _exponentials(b: Tensor, axis: int) -> Tensor:
    """Turn b into its softmax in place; return its largest number and 1 / the sum of exp(b - that), [2 ..]."""
    # In place, as b has a number for each pair of child and parent
    top = b.amax(axis, keepdim=True)
    inverse = 1 / b.sub_(top).exp_().sum(axis, keepdim=True)
    b.mul_(inverse)
    return torch.stack([top, inverse])
