"""Samples in lanes, for both kernels; and the passes of dynamic routing on tensors, their work split over threads.

What a pass writes belongs to one thread alone, so results are the same for any number of threads. Tensors in lanes are
X [i n d L] and Q, S [n j k L]; a coupling is [i j (n L)], with a batch padded to whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels.threads import in_threads
from torchcaps.math.squash import norm

__all__ = ["Looped", "from_lanes", "grad", "lanes", "reverse", "shares", "suits", "to_lanes", "weigh"]

BYTES = 64
"""Of a vector of lanes, as `loops.vector` has it; EM has narrower ones."""


def suits(*tensors: Tensor) -> bool:
    """Whether there are loops for these tensors: on the CPU, all float32 or all float64."""
    kinds = {t.dtype for t in tensors}
    return all(t.device.type == "cpu" for t in tensors) and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}


@cache
def _loops(name: str) -> Any:
    """The module of loops, imported only when one of them runs."""
    return import_module(f"torchcaps.kernels.loops.{name}")


def lanes(dtype: torch.dtype, size: int = BYTES) -> int:
    """Samples in a block, with vectors of so many bytes."""
    return size // dtype.itemsize


def _padded(b: int, dtype: torch.dtype) -> int:
    """The batch in whole blocks."""
    L = lanes(dtype)
    return -(-b // L) * L


def _floor(dtype: torch.dtype) -> float:
    """What `norm` adds below the root."""
    return float(norm(torch.zeros(1, dtype=dtype))) ** 2


def _array(t: Tensor) -> Any:
    return t.detach().contiguous().numpy()


def to_lanes(x: Tensor, *, children: bool = False, size: int = BYTES) -> Tensor:
    """[b j k] -> [n j k L], or of children [b i d] -> [i n d L]; samples that fill the last block are 0."""
    (b, i, d) = x.shape
    L = lanes(x.dtype, size)
    n = -(-b // L)
    X = x.new_empty(i, n, d, L) if children else x.new_empty(n, i, d, L)
    flat = _array(x)
    blocks = (X.transpose(0, 1) if children else X).numpy()
    in_threads(lambda _, start, stop: _loops("layout").to_lanes(flat, blocks, start, stop), n)
    return X


def from_lanes(X: Tensor, b: int) -> Tensor:
    """[n j k L], as `to_lanes` makes it of parents, -> [b j k]."""
    n, j, k, _ = X.shape
    x = X.new_empty(b, j, k)
    in_threads(lambda _, start, stop: _loops("layout").from_lanes(X.numpy(), x.numpy(), start, stop), n)
    return x


def shares(c: Tensor) -> Tensor:
    """A coupling [.. b i j] as [.. i j (n L)]: no copy if it is such a view and its batch is whole blocks."""
    turned = c.movedim(-3, -1)  # [.. i j b]
    missing = _padded(c.shape[-3], c.dtype) - c.shape[-3]
    return torch.nn.functional.pad(turned, (0, missing)) if missing else turned.contiguous()


def _split(work: Callable[[tuple[int, int], tuple[int, int]], None], blocks: int, parents: int) -> None:
    """work(blocks, parents) in threads, over the blocks, or over the parents where there are too few blocks."""
    if blocks >= torch.get_num_threads():
        in_threads(lambda _, start, stop: work((start, stop), (0, parents)), blocks)
    else:
        in_threads(lambda _, start, stop: work((0, blocks), (start, stop)), parents)


def weigh(W: Tensor, X: Tensor, C: Tensor | None, share: float = 1.0) -> Tensor:
    """s_j = share sum_i c_ij W_ij x_i, with c = 1 for none -> [n j k L]."""
    S = X.new_zeros(X.shape[1], *W.shape[1:3], X.shape[3])
    given = X.new_empty(0, 0, 0) if C is None else C
    arrays = _array(W), _array(X), _array(given), share, _array(S)
    _split(lambda blocks, parents: _loops("dynamic").weigh(*arrays, blocks, parents), *S.shape[:2])
    return S


def reverse(W: Tensor, C: Tensor, H: Tensor, b: int) -> Tensor:
    """sum_j c_ij W_ij^T h_j: C [i j (n L)] and H [n j k L] of a batch b -> [b i d]."""
    dx = H.new_empty(b, W.shape[0], W.shape[3])
    arrays = *map(_array, (W, C, H)), dx.numpy()
    in_threads(lambda _, start, stop: _loops("dynamic_grads").reverse(*arrays, start, stop), len(W))
    return dx


def grad(X: Tensor, C: Tensor, A: Tensor, onto: Tensor | None = None) -> Tensor:
    """sum_b c_ij a_j x_i^T: X [i n d L], C [i j (n L)] and A [n j k L] -> [i j k d]; added `onto` one, if given."""
    (i, _, d, _) = X.shape
    (_, j, k, _) = A.shape
    dW = X.new_zeros(i, j, k, d) if onto is None else onto
    arrays = *map(_array, (X, C, A)), dW.numpy()
    in_threads(lambda _, start, stop: _loops("dynamic_grads").grad(*arrays, start, stop), i)
    return dW


class Looped:
    """The passes of dynamic routing (`kernels.dynamic.Passes`) over children x [b i d] with weights W [i j k d]."""

    def __init__(self, x: Tensor, W: Tensor, *, cosine: bool, over: str, share: float) -> None:
        self.x = x.detach().contiguous()
        self.W = W.detach().contiguous()
        self.b = len(x)
        self.floor = _floor(x.dtype) if cosine else 0.0
        self.over = over
        self.share = share

    @cached_property
    def X(self) -> Tensor:
        """The children in lanes."""
        return to_lanes(self.x, children=True)

    def coupling(self) -> Tensor:
        """Room for C [i j (n L)]."""
        return self.x.new_empty(*self.W.shape[:2], _padded(self.b, self.x.dtype))

    def marks(self, count: int) -> Tensor:
        """Room for Z [t 3 i j (n L)], with a single child or a single parent."""
        i, j, *_ = self.W.shape
        own = (i, 1) if self.over == "parents" else (1, j)
        return self.x.new_empty(count, 3, *own, _padded(self.b, self.x.dtype))

    def seen(self, C: Tensor) -> Tensor:
        """[b i j], where the batch lies together."""
        return C[..., : self.b].contiguous().movedim(-1, 0)

    def first(self) -> Tensor:
        """s of the uniform coupling."""
        return from_lanes(weigh(self.W, self.X, None, self.share), self.b)

    def again(self, q: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """s = sum_i c V with c = softmax(V . q), which goes into C; top and part [2 j b] of one over children."""
        Q = to_lanes(q)
        (n, j, _, L) = Q.shape
        S = torch.zeros_like(Q)
        Z = Q.new_empty(2, 0 if self.over == "parents" else j, n * L)
        given = Q.new_empty(0, 0, 0) if C is None else C
        arrays = *map(_array, (self.W, self.X, Q)), self.floor, _array(given), S.numpy()
        if self.over == "parents":
            in_threads(lambda _, start, stop: _loops("dynamic").route_parents(*arrays, start, stop), n)
        else:
            _split(lambda *part: _loops("dynamic").route_children(*arrays, Z.numpy(), *part), n, j)
        return from_lanes(S, self.b), Z[..., : self.b]

    def pull(self, q: Tensor, s: Tensor, ds: Tensor, scale: Tensor, Z: Tensor) -> Tensor:
        """dq; fills Z."""
        Q = to_lanes(q)
        dS = to_lanes(ds)
        (n, j, _, _) = Q.shape
        dQ = torch.zeros_like(Q)
        arrays = *map(_array, (self.W, self.X, Q)), self.floor, _array(dS), Z.numpy(), dQ.numpy()
        loops = _loops("dynamic_backward")
        if self.over == "parents":
            in_threads(lambda _, start, stop: loops.pull_parents(*arrays, start, stop), n)
        else:
            Z.zero_()[:2, 0, :, : self.b] = scale
            Z[2, 0] = (to_lanes(s) * dS).sum(2).transpose(0, 1).flatten(1)  # [j (n L)]
            _split(lambda *part: loops.pull_children(*arrays, *part), n, j)
        return from_lanes(dQ, self.b)

    def scatter(self, q: list[Tensor], ds: list[Tensor], Z: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """dx [b i d] and dW [i j k d]; no pass comes after it, so X makes room for dx."""
        vars(self).pop("X", None)
        B = to_lanes(base)
        dx = torch.empty_like(self.x)
        dW = torch.zeros_like(self.W)
        none = B.new_empty(0, *B.shape)
        Q, dS = (torch.stack([to_lanes(t) for t in each]) if each else none for each in (q, ds))
        read = *map(_array, (self.W, self.x, Q)), self.floor, *map(_array, (dS, Z, B))
        arrays = *read, dx.numpy(), dW.numpy()
        in_threads(lambda _, start, stop: _loops("dynamic_grads").scatter(*arrays, start, stop), len(dW))
        return dx, dW

    def straight(self, c: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
        """dx [b i d] and dW [i j k d] for dV = c ds."""
        C = shares(c)
        H = to_lanes(ds)
        return reverse(self.W, C, H, self.b), grad(self.X, C, H)
