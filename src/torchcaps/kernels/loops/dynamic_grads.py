"""From the derivative dV of the votes to those of children and weights, dx_i = sum_j W_ij^T dV_ij, dW_ij = dV_ij x_i^T.

The last pass of dynamic routing backward, and with dV = c h the sums of contrastive divergence; equations and arrays
as in `loops.dynamic`. A loop works on some of the children, whose dx and dW no other thread writes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.dynamic import NEAR, ROWS, inverse_length, vote
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.layout import copy_from_blocks, copy_to_blocks
from torchcaps.kernels.loops.simd import (
    Array,
    Vector,
    add_at,
    broadcast,
    fill,
    fma,
    fma4,
    lane_sum,
    lane_sums,
    load,
    load4,
    load_half,
    store,
)
from torchcaps.kernels.records import DynamicProblem, DynamicTrace, VoteInputs

__all__ = ["reverse", "scatter", "weight_grad"]


class Workspace(NamedTuple):
    """Some children and blocks of samples (rows r), and what belongs to one parent, side by side in the cache.

    children, child_grad   [near r d L]
    votes, vote_grad       [r k L] of one child and parent
    base                   [r k L]
    query, total_grad      [t r k L]
    coefficients           [t 2 L] c and e of every iteration
    """

    children: Array
    child_grad: Array
    votes: Array
    vote_grad: Array
    base: Array
    query: Array
    total_grad: Array
    coefficients: Array


# --- From dV to dx and dW ---------------------------------------------------------------------------------------------


@inline
def add_child_grad(W: Array, i: int, j: int, dV: Array, dX: Array, near: int, rows: int) -> None:
    """Add W_ij^T dV[r] to dX[near, r] for each row r."""
    K = W.shape[2]
    D = W.shape[3]
    for r in range(rows):
        # Four numbers of the child at a time, then those that are left
        for d in range(0, D - 3, 4):
            x = load4(dX, (near, r, d))
            for k in range(K):
                w0 = broadcast(W, (i, j, k, d))
                w1 = broadcast(W, (i, j, k, d + 1))
                w2 = broadcast(W, (i, j, k, d + 2))
                w3 = broadcast(W, (i, j, k, d + 3))
                x = fma4(load(dV, (r, k)), (w0, w1, w2, w3), x)
            store(dX, (near, r, d), x)
        for d in range(D // 4 * 4, D):
            y = load(dX, (near, r, d))
            for k in range(K):
                y = fma(broadcast(W, (i, j, k, d)), load(dV, (r, k)), y)
            store(dX, (near, r, d), y)


@inline
def clear(dX: Array, rows: int) -> None:
    """Set dX[:, :rows] to 0."""
    for near in range(dX.shape[0]):
        for r in range(rows):
            for d in range(dX.shape[2]):
                store(dX, (near, r, d), fill(dX, 0.0))


@inline
def add_weight_grad(dW: Array, i: int, j: int, dV: Array, X: Array, near: int, rows: int) -> None:
    """Add the sum over rows r of dV[r] x^T to dW_ij, where X[near, r] is the child i."""
    (_, _, K, D) = dW.shape
    L = X.shape[3]
    # Two k and four d at once: eight sums in registers of half the width, for which a full one has too few.
    for k in range(0, K - 1, 2):
        for d in range(0, D - 3, 4):
            zero = fill(load_half(X, (near, 0, d, 0)), 0.0)
            a = b = (zero, zero, zero, zero)
            for r in range(rows):
                for at in (0, L // 2):
                    x0 = load_half(X, (near, r, d, at))
                    x1 = load_half(X, (near, r, d + 1, at))
                    x2 = load_half(X, (near, r, d + 2, at))
                    x3 = load_half(X, (near, r, d + 3, at))
                    a = fma4(load_half(dV, (r, k, at)), (x0, x1, x2, x3), a)
                    b = fma4(load_half(dV, (r, k + 1, at)), (x0, x1, x2, x3), b)
            add_at(dW, (i, j, k, d), lane_sums(*a))
            add_at(dW, (i, j, k + 1, d), lane_sums(*b))
    # What is left of k and d.
    for k in range(K):
        for d in range(D // 4 * 4 if k < K // 2 * 2 else 0, D):
            s = fill(X, 0.0)
            for r in range(rows):
                s = fma(load(dV, (r, k)), load(X, (near, r, d)), s)
            dW[i, j, k, d] += lane_sum(s)


@inline
def copy_parent(A: Array, block: int, rows: int, j: int, A_j: Array) -> None:
    """Copy A[block + r, j] to A_j[r]: what belongs to one parent, side by side in the cache."""
    for r in range(rows):
        for k in range(A_j.shape[1]):
            store(A_j, (r, k), load(A, (block + r, j, k)))


# --- Contrastive divergence: dV = c h ---------------------------------------------------------------------------------


@loop
def reverse(weights: Array, coupling: Array, parents: Array, child_grad: Array, start: int, stop: int) -> None:
    """Compute dx_i = sum_j c_ij W_ij^T h_j for the children from start to stop.

    Args:
        weights: [i j k d].
        coupling: [i j (n L)].
        parents: [n j k L] h.
        child_grad: [b i d] takes dx.
        start: First child.
        stop: Child after the last one.
    """
    (N, J, K, L) = parents.shape
    D = weights.shape[3]
    dtype = weights.dtype
    H_j = np.empty((ROWS, K, L), dtype)
    cH = np.empty((ROWS, K, L), dtype)
    dX = np.empty((NEAR, ROWS, D, L), dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            end = min(stop, first + NEAR)
            clear(dX, rows)
            for j in range(J):
                copy_parent(parents, block, rows, j, H_j)
                # The derivative of the votes is c h
                for i in range(first, end):
                    for r in range(rows):
                        c = load(coupling, (i, j, (block + r) * L))
                        for k in range(K):
                            store(cH, (r, k), c * load(H_j, (r, k)))
                    add_child_grad(weights, i=i, j=j, dV=cH, dX=dX, near=i - first, rows=rows)
            copy_from_blocks(dX, child_grad, block=block, rows=rows, first=first, stop=end)


@loop
def weight_grad(children: Array, coupling: Array, parents: Array, grad: Array, start: int, stop: int) -> None:
    """Add sum_b c_ij a_j x_i^T to dW_ij for the children from start to stop.

    Args:
        children: [i n d L] x.
        coupling: [i j (n L)].
        parents: [n j k L] a.
        grad: [i j k d] dW.
        start: First child.
        stop: Child after the last one.
    """
    (N, J, K, L) = parents.shape
    D = children.shape[2]
    A_j = np.empty((ROWS, K, L), children.dtype)
    cx = np.empty((1, ROWS, D, L), children.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            for j in range(J):
                copy_parent(parents, block, rows, j, A_j)
                # The coupling goes to the children here: a is the same for all of them
                for i in range(first, min(stop, first + NEAR)):
                    for r in range(rows):
                        c = load(coupling, (i, j, (block + r) * L))
                        for d in range(D):
                            store(cx, (0, r, d), c * load(children, (i, block + r, d)))
                    add_weight_grad(grad, i=i, j=j, dV=A_j, X=cx, near=0, rows=rows)


# --- Dynamic routing: dV of all iterations ----------------------------------------------------------------------------


@inline
def softmax_coefficients(work: Workspace, trace: DynamicTrace, r: int, i: int, j: int, at: int) -> Vector:
    """Compute c and e of every iteration; return what multiplies V in dV, which is 0 for dot products."""
    V = work.votes
    Z = trace.softmax
    floor = trace.floor
    turn = fill(V, 0.0)
    inverse = fill(V, 1.0)
    if floor > 0:
        inverse = inverse_length(V, r, floor)
    # Z has a single child or a single parent, on the axis that the softmax sums over
    child = min(i, Z.shape[2] - 1)
    parent = min(j, Z.shape[3] - 1)
    for t in range(Z.shape[0]):
        # b = V . q and dc = V . ds.
        b = dc = fill(V, 0.0)
        for k in range(V.shape[1]):
            v = load(V, (r, k))
            b = fma(v, load(work.query, (t, r, k)), b)
            dc = fma(v, load(work.total_grad, (t, r, k)), dc)
        if floor > 0:
            b = b * inverse

        # c = exp(b - top) / sum and e = c (dc - mean).
        c = exp(b - load(Z, (t, 0, child, parent, at))) * load(Z, (t, 1, child, parent, at))
        e = c * (dc - load(Z, (t, 2, child, parent, at)))
        if floor > 0:
            e = e * inverse
            turn = turn - (e * b) * inverse
        store(work.coefficients, (t, 0), c)
        store(work.coefficients, (t, 1), e)
    return turn


@inline
def vote_grads(work: Workspace, r: int) -> None:
    """Compute dV[r] = base[r] + sum_t c ds[t, r] + e q[t, r]."""
    ce = work.coefficients
    K = work.vote_grad.shape[1]
    # Four numbers at a time, then those that are left
    for k in range(0, K - 3, 4):
        g = load4(work.base, (r, k))
        for t in range(ce.shape[0]):
            g = fma4(load(ce, (t, 1)), load4(work.query, (t, r, k)), g)
            g = fma4(load(ce, (t, 0)), load4(work.total_grad, (t, r, k)), g)
        store(work.vote_grad, (r, k), g)
    for k in range(K // 4 * 4, K):
        h = load(work.base, (r, k))
        for t in range(ce.shape[0]):
            h = fma(load(ce, (t, 1)), load(work.query, (t, r, k)), h)
            h = fma(load(ce, (t, 0)), load(work.total_grad, (t, r, k)), h)
        store(work.vote_grad, (r, k), h)


@loop
def scatter(inputs: VoteInputs, trace: DynamicTrace, grads: VoteInputs, start: int, stop: int) -> None:
    """Compute dx_i = sum_j W_ij^T dV_ij and add sum_b dV_ij x_i^T to dW_ij, for the children from start to stop.

    Args:
        inputs: Children and weights; only some children at a time are laid out in blocks.
        trace: What dV is made of.
        grads: Takes dx and dW.
        start: First child.
        stop: Child after the last one.
    """
    W = inputs.weights
    (T, N, J, K, L) = trace.query.shape
    D = W.shape[3]
    dtype = W.dtype
    work = Workspace(
        np.empty((NEAR, ROWS, D, L), dtype),
        np.empty((NEAR, ROWS, D, L), dtype),
        np.empty((ROWS, K, L), dtype),
        np.empty((ROWS, K, L), dtype),
        np.empty((ROWS, K, L), dtype),
        np.empty((T, ROWS, K, L), dtype),
        np.empty((T, ROWS, K, L), dtype),
        np.empty((T, 2, L), dtype),
    )
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            end = min(stop, first + NEAR)
            # The votes of these children; the query that `vote` also multiplies with does not matter here.
            near = DynamicProblem(W[first:], work.children, trace.base, trace.floor)
            clear(work.child_grad, rows)
            copy_to_blocks(inputs.children, work.children, block=block, rows=rows, first=first, stop=end)
            for j in range(J):
                copy_parent(trace.base, block, rows, j, work.base)
                for t in range(T):
                    copy_parent(trace.total_grad[t], block, rows, j, work.total_grad[t])
                    copy_parent(trace.query[t], block, rows, j, work.query[t])
                for i in range(first, end):
                    # dV of the child's votes for parent j.
                    for r in range(rows):
                        vote(near, work.votes, row=r, n=r, i=i - first, j=j)
                        turn = softmax_coefficients(work, trace, r=r, i=i, j=j, at=(block + r) * L)
                        vote_grads(work, r)
                        if trace.floor > 0:
                            for k in range(K):
                                g = fma(turn, load(work.votes, (r, k)), load(work.vote_grad, (r, k)))
                                store(work.vote_grad, (r, k), g)

                    # To the child and to the weights.
                    add_child_grad(W, i=i, j=j, dV=work.vote_grad, dX=work.child_grad, near=i - first, rows=rows)
                    add_weight_grad(
                        grads.weights, i=i, j=j, dV=work.vote_grad, X=work.children, near=i - first, rows=rows
                    )
            copy_from_blocks(work.child_grad, grads.children, block=block, rows=rows, first=first, stop=end)
