"""Dynamic routing as passes over the children, in each of which a vote is computed once, used and dropped.

With accumulated logits b_ij = V_ij . v_1 + V_ij . v_2 + ... = V_ij . q_j, where q is the sum of the parents so far (of
their directions, and V_ij / |V_ij|, for cosines). So no logit is stored: routing is attention whose keys are its
values. One pass is s = sum_i softmax(V . q) V, and its derivatives, for the given ds and with c = softmax(V . q), are

    dc = V . ds      db = c (dc - sum c dc)      dq = sum_i db V      dV = c ds + db q

The sum of c dc over parents takes one child; over children it is s . ds, known beforehand. For cosines V is
V / |V| in b and dq, which adds -(db b / |V|^2) V to dV, where db q becomes db q / |V|.

No coupling is stored for the backward pass either. With the vote computed again, c = exp(V . q - top) inverse and db
need only what the softmax sums over: its largest logit `top`, `inverse` = 1 / sum exp(b - top) and `mean` = sum
c dc. top and inverse stay apart, since large logits leave no digits of their one logarithm; V . q is added up in the
same order everywhere.

The arrays, with blocks of L samples, one in each lane of a SIMD vector:

    W [i j k d]    X [i n d L]    Q, S, dS, dQ [n j k L]    C [i j (n L)]    V [.. k L], the votes of the moment
    Z [3 i j (n L)], top, inverse and mean, with a single child or a single parent: the one that the softmax is over

Votes are computed for four k at once, and a few children at a time for all blocks, so that their W stays in the cache.
"""

from __future__ import annotations

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.elementary import exp, root
from torchcaps.kernels.loops.simd import Array, Vector, Vector4, broadcast, fill, fma, fma4, load, load4, maximum, store
from torchcaps.kernels.records import CoupledVotes, DynamicProblem, Range

__all__ = [
    "NEAR",
    "ROWS",
    "add_weighted_votes",
    "dot_query",
    "exponentiate",
    "inverse_length",
    "route_children",
    "route_parents",
    "vote",
    "weighted_sum",
]

ROWS = 8
"""Children whose votes for one parent are held at once."""
NEAR = 16
"""Children whose weights stay in the cache while all blocks pass."""


# --- One child and one parent -----------------------------------------------------------------------------------------


@inline
def column(W: Array, i: int, j: int, k: int, d: int) -> Vector4:
    """Return four rows of W_ij from k on, in column d, each number in every lane."""
    w0 = broadcast(W, (i, j, k, d))
    w1 = broadcast(W, (i, j, k + 1, d))
    return w0, w1, broadcast(W, (i, j, k + 2, d)), broadcast(W, (i, j, k + 3, d))


@inline
def vote(problem: DynamicProblem, V: Array, row: int, n: int, i: int, j: int) -> Vector:
    """Compute V[row] = W_ij x_i; return V_ij . q_j."""
    W = problem.weights
    X = problem.children
    Q = problem.query
    K = W.shape[2]
    D = W.shape[3]
    zero = b = fill(X, 0.0)
    # Four numbers of the vote in registers, then their share of V . q
    for k in range(0, K - 3, 4):
        v = zero, zero, zero, zero
        for d in range(D):
            v = fma4(load(X, (i, n, d)), column(W, i=i, j=j, k=k, d=d), v)
        store(V, (row, k), v)
        q = load4(Q, (n, j, k))
        b = fma(v[3], q[3], fma(v[2], q[2], fma(v[1], q[1], fma(v[0], q[0], b))))
    # Numbers that are left, one by one
    for k in range(K // 4 * 4, K):
        u = zero
        for d in range(D):
            u = fma(broadcast(W, (i, j, k, d)), load(X, (i, n, d)), u)
        store(V, (row, k), u)
        b = fma(u, load(Q, (n, j, k)), b)
    return b


@inline
def inverse_length(V: Array, row: int, floor: float) -> Vector:
    """Return 1 / sqrt(|V[row]|^2 + floor)."""
    square = fill(V, floor)
    for k in range(V.shape[1]):
        v = load(V, (row, k))
        square = fma(v, v, square)
    return 1.0 / root(square)


@inline
def dot_query(V: Array, row: int, Q: Array, n: int, j: int) -> Vector:
    """Return V[row] . q_j."""
    b = fill(V, 0.0)
    for k in range(V.shape[1]):
        b = fma(load(V, (row, k)), load(Q, (n, j, k)), b)
    return b


@inline
def add_weighted_votes(S: Array, n: int, j: int, V: Array, weight: Array, row: int, rows: int) -> None:
    """Add the sum of weight[r] V[r] over some rows r, from `row` on, to s_j."""
    K = S.shape[2]
    for k in range(0, K - 3, 4):
        s = load4(S, (n, j, k))
        for r in range(row, row + rows):
            s = fma4(load(weight, r), load4(V, (r, k)), s)
        store(S, (n, j, k), s)
    for k in range(K // 4 * 4, K):
        t = load(S, (n, j, k))
        for r in range(row, row + rows):
            t = fma(load(weight, r), load(V, (r, k)), t)
        store(S, (n, j, k), t)


@inline
def scale(S: Array, n: int, j: int, factor: Vector) -> None:
    """Multiply s_j by a factor."""
    for k in range(S.shape[2]):
        store(S, (n, j, k), factor * load(S, (n, j, k)))


@inline
def exponentiate(c: Array, top: Vector) -> Vector:
    """Turn the logits c [j L] into exp(c - top); return 1 / their sum."""
    whole = fill(c, 0.0)
    for j in range(c.shape[0]):
        e = exp(load(c, (j,)) - top)
        store(c, (j,), e)
        whole = whole + e
    return 1.0 / whole


# --- Passes -----------------------------------------------------------------------------------------------------------


@loop
def weighted_sum(votes: CoupledVotes, S: Array, blocks: Range, parents: Range) -> None:
    """Add share sum_i c_ij V_ij to s_j [n j k L], for some blocks and parents."""
    W = votes.weights
    X = votes.children
    C = votes.coupling
    (I, _, D, L) = X.shape
    K = W.shape[2]
    cx = np.empty((NEAR, D, L), W.dtype)
    for first in range(0, I, NEAR):
        rows = min(NEAR, I - first)
        for j in range(parents.start, parents.stop):
            for n in range(blocks.start, blocks.stop):
                # The children times their coupling.
                for r in range(rows):
                    c = fill(X, votes.share)
                    if C.shape[0] > 0:
                        c = c * load(C, (first + r, j, n * L))
                    for d in range(D):
                        store(cx, (r, d), c * load(X, (first + r, n, d)))

                # Times W, four rows at once, then the rows that are left.
                for k in range(0, K - 3, 4):
                    s = load4(S, (n, j, k))
                    for r in range(rows):
                        for d in range(D):
                            s = fma4(load(cx, (r, d)), column(W, i=first + r, j=j, k=k, d=d), s)
                    store(S, (n, j, k), s)
                for k in range(K // 4 * 4, K):
                    t = load(S, (n, j, k))
                    for r in range(rows):
                        for d in range(D):
                            t = fma(broadcast(W, (first + r, j, k, d)), load(cx, (r, d)), t)
                    store(S, (n, j, k), t)


@loop
def route_parents(problem: DynamicProblem, C: Array, S: Array, start: int, stop: int) -> None:
    """Add sum_i c_ij V_ij to s, with c = softmax over parents of V . q, for the blocks from start to stop.

    Args:
        problem: Votes and queries.
        C: [i j (n L)] takes the coupling, unless it is empty.
        S: [n j k L] the totals.
        start: First block.
        stop: Block after the last one.
    """
    (I, J, K, _) = problem.weights.shape
    L = problem.children.shape[3]
    dtype = problem.weights.dtype
    V = np.empty((J, K, L), dtype)
    c = np.empty((J, L), dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                # Logits of the child's votes for all parents.
                top = fill(S, -np.inf)
                for j in range(J):
                    b = vote(problem, V, row=j, n=n, i=i, j=j)
                    if problem.floor > 0:
                        b = b * inverse_length(V, j, problem.floor)
                    store(c, (j,), b)
                    top = maximum(top, b)

                # Their softmax, and the votes times it.
                inverse = exponentiate(c, top)
                for j in range(J):
                    e = load(c, (j,)) * inverse
                    store(c, (j,), e)
                    if C.shape[0] > 0:
                        store(C, (i, j, n * L), e)
                    add_weighted_votes(S, n=n, j=j, V=V, weight=c, row=j, rows=1)


@loop
def route_children(problem: DynamicProblem, C: Array, S: Array, Z: Array, blocks: Range, parents: Range) -> None:
    """Add sum_i c_ij V_ij to s, with c = softmax over children of V . q, for some blocks and parents.

    The softmax grows with the children: what came before is scaled down whenever a larger logit comes.

    Args:
        problem: Votes and queries.
        C: [i j (n L)] takes the coupling, unless it is empty.
        S: [n j k L] the totals.
        Z: [2 j (n L)] takes the largest logit and the inverse sum of each softmax.
        blocks: Which blocks of samples.
        parents: Which parents.
    """
    (I, _, K, _) = problem.weights.shape
    L = problem.children.shape[3]
    dtype = problem.weights.dtype
    V = np.empty((ROWS, K, L), dtype)
    c = np.empty((ROWS, L), dtype)
    for j in range(parents.start, parents.stop):
        for n in range(blocks.start, blocks.stop):
            store(Z, (0, j, n * L), fill(S, -np.inf))
            store(Z, (1, j, n * L), fill(S, 0.0))

    # A few children at a time: their logits, the new largest one, and sums relative to it.
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents.start, parents.stop):
            for n in range(blocks.start, blocks.stop):
                old = new = load(Z, (0, j, n * L))
                for r in range(rows):
                    b = vote(problem, V, row=r, n=n, i=first + r, j=j)
                    if problem.floor > 0:
                        b = b * inverse_length(V, r, problem.floor)
                    store(c, (r,), b)
                    if C.shape[0] > 0:
                        store(C, (first + r, j, n * L), b)
                    new = maximum(new, b)
                # Scale down what came before, and add these children
                shrink = exp(old - new)
                z = shrink * load(Z, (1, j, n * L))
                for r in range(rows):
                    e = exp(load(c, (r,)) - new)
                    store(c, (r,), e)
                    z = z + e
                store(Z, (0, j, n * L), new)
                store(Z, (1, j, n * L), z)
                scale(S, n, j, shrink)
                add_weighted_votes(S, n=n, j=j, V=V, weight=c, row=0, rows=rows)

    # Divide by the sums, the totals and then the coupling.
    for j in range(parents.start, parents.stop):
        for n in range(blocks.start, blocks.stop):
            inverse = fill(S, 1.0) / load(Z, (1, j, n * L))
            store(Z, (1, j, n * L), inverse)
            scale(S, n, j, inverse)
    for i in range(C.shape[0]):
        for j in range(parents.start, parents.stop):
            for n in range(blocks.start, blocks.stop):
                b = load(C, (i, j, n * L)) - load(Z, (0, j, n * L))
                store(C, (i, j, n * L), load(Z, (1, j, n * L)) * exp(b))
