"""The passes of dynamic routing in plain torch, for any device and type, the votes of a few children at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcaps.math.pose import vector_votes
from torchcaps.math.squash import norm

__all__ = ["TILE", "Tiled"]

TILE = 2**21
"""Votes that may exist at once, unless those of a single child are more."""


class Tiled:
    """The passes (`kernels.dynamic.Passes`) over children x [b i d] with weights W [i j k d]."""

    def __init__(self, x: Tensor, W: Tensor, *, cosine: bool, over: str, share: float) -> None:
        self.x, self.W, self.cosine, self.over, self.share = x, W, cosine, over, share

    def room(self, count: int) -> Tensor:
        """Couplings [t i j b]."""
        return self.x.new_empty(count, *self.W.shape[:2], len(self.x))

    def seen(self, room: Tensor) -> Tensor:
        """[t b i j]."""
        return room.movedim(-1, 1)

    def kept(self, couplings: Tensor) -> Tensor:
        """What `seen` has made of them."""
        return couplings.movedim(1, -1).contiguous()

    def first(self) -> Tensor:
        """s of the uniform coupling, one matrix product."""
        return torch.einsum("ijkd,bid->bjk", self.W, self.x) * self.share

    def again(self, q: Tensor, C: Tensor, *, summed: bool = True) -> Tensor:
        """c = softmax(V . q) into C, and s = sum_i c V."""
        c, s = C.permute(2, 0, 1), torch.zeros_like(q)  # [b i j]
        for n, V in self._votes():
            c[:, n] = torch.einsum("bijk,bjk->bij", V * self._inverse(V), q)
        c.copy_(c.softmax(2 if self.over == "parents" else 1))
        for n, V in self._votes() if summed else ():
            s += torch.einsum("bij,bijk->bjk", c[:, n], V)
        return s

    def pull(self, q: Tensor, C: Tensor, s: Tensor, ds: Tensor, E: Tensor, U: Tensor | None) -> Tensor:
        """dq; fills E and adds to U."""
        c, e, dq = C.permute(2, 0, 1), E.permute(2, 0, 1), torch.zeros_like(q)
        for n, V in self._votes():
            dc = torch.einsum("bijk,bjk->bij", V, ds)
            mean = (c[:, n] * dc).sum(2, keepdim=True) if self.over == "parents" else (s * ds).sum(-1).unsqueeze(1)
            inverse = self._inverse(V).squeeze(-1)
            e[:, n] = c[:, n] * (dc - mean) * inverse
            dq += torch.einsum("bij,bijk->bjk", e[:, n], V)
            if U is not None:
                U.permute(2, 0, 1)[:, n] -= e[:, n] * torch.einsum("bijk,bjk->bij", V, q) * inverse * inverse
        return dq

    def scatter(
        self, C: Tensor, ds: list[Tensor], E: Tensor | None, q: list[Tensor], U: Tensor | None, base: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """dx [b i d] and dW [i j k d]."""
        dx, dW = torch.empty_like(self.x), torch.empty_like(self.W)
        terms = [*zip(C, ds, strict=True), *zip([] if E is None else E, q, strict=True)]
        for n, V in self._votes():
            dV = torch.zeros_like(V) if U is None else U.permute(2, 0, 1)[:, n].unsqueeze(-1) * V
            for share, parent in terms:
                dV += share.permute(2, 0, 1)[:, n].unsqueeze(-1) * parent.unsqueeze(1)
            if base is not None:
                dV += base.unsqueeze(1)
            dx[:, n] = torch.einsum("bijk,ijkd->bid", dV, self.W[n])
            dW[n] = torch.einsum("bijk,bid->ijkd", dV, self.x[:, n])
        return dx, dW

    def _votes(self) -> Iterator[tuple[slice, Tensor]]:
        """Some children at a time, and their votes [b n j k]."""
        (b, i, _), (_, j, k, _) = self.x.shape, self.W.shape
        rows = max(1, TILE // max(1, b * j * k))
        for first in range(0, i, rows):
            n = slice(first, first + rows)
            yield n, vector_votes(self.x[:, n], self.W[n])

    def _inverse(self, V: Tensor) -> Tensor:
        """1 / |V| [b i j 1] for cosines, else 1."""
        return 1 / norm(V, keepdim=True) if self.cosine else torch.ones_like(V[..., :1])
