"""Dynamic routing, back through one pass: from ds of its total to dq; equations and arrays as in `loops.dynamic`."""

from __future__ import annotations

import numpy as np

from torchcaps.kernels.loops import loop
from torchcaps.kernels.loops.dynamic import (
    NEAR,
    ROWS,
    add_weighted_votes,
    dot_query,
    exponentiate,
    inverse_length,
    vote,
)
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.simd import Array, fill, fma, load, maximum, store
from torchcaps.kernels.records import DynamicProblem, Range

__all__ = ["query_grad_children", "query_grad_parents"]


@loop
def query_grad_parents(problem: DynamicProblem, dS: Array, Z: Array, dQ: Array, start: int, stop: int) -> None:
    """Add sum_i db V to dq, for a softmax over parents and the blocks from start to stop.

    Args:
        problem: Votes and queries of the pass.
        dS: [n j k L] derivative of its totals.
        Z: [3 i 1 (n L)] takes the largest logit, the inverse sum and the mean of c dc of each child's softmax.
        dQ: [n j k L] derivative of the queries.
        start: First block.
        stop: Block after the last one.
    """
    (I, J, K, _) = problem.weights.shape
    L = problem.children.shape[3]
    dtype = problem.weights.dtype
    floor = problem.floor
    V = np.empty((J, K, L), dtype)
    c = np.empty((J, L), dtype)
    dc = np.empty((J, L), dtype)
    length = np.empty((J, L), dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                # The child's votes, their logits and dc = V . ds.
                top = fill(dS, -np.inf)
                for j in range(J):
                    b = vote(problem, V, row=j, n=n, i=i, j=j)
                    store(dc, (j,), dot_query(V, j, dS, n, j))
                    if floor > 0:
                        store(length, (j,), inverse_length(V, j, floor))
                        b = b * load(length, (j,))
                    store(c, (j,), b)
                    top = maximum(top, b)

                # The softmax again, and the mean of dc under it.
                inverse = exponentiate(c, top)
                mean = fill(dS, 0.0)
                for j in range(J):
                    mean = fma(load(c, (j,)) * inverse, load(dc, (j,)), mean)
                store(Z, (0, i, 0, n * L), top)
                store(Z, (1, i, 0, n * L), inverse)
                store(Z, (2, i, 0, n * L), mean)

                # db = c (dc - mean), over the vote's length for cosines.
                for j in range(J):
                    e = (load(c, (j,)) * inverse) * (load(dc, (j,)) - mean)
                    if floor > 0:
                        e = e * load(length, (j,))
                    store(c, (j,), e)
                    add_weighted_votes(dQ, n=n, j=j, V=V, weight=c, row=j, rows=1)


@loop
def query_grad_children(problem: DynamicProblem, dS: Array, Z: Array, dQ: Array, blocks: Range, parents: Range) -> None:
    """Add sum_i db V to dq, for a softmax over children, and some blocks and parents.

    Args:
        problem: Votes and queries of the pass.
        dS: [n j k L] derivative of its totals.
        Z: [3 1 j (n L)] the largest logit, the inverse sum and the mean of c dc of each parent's softmax.
        dQ: [n j k L] derivative of the queries.
        blocks: Which blocks of samples.
        parents: Which parents.
    """
    (I, _, K, _) = problem.weights.shape
    L = problem.children.shape[3]
    dtype = problem.weights.dtype
    floor = problem.floor
    V = np.empty((ROWS, K, L), dtype)
    e = np.empty((ROWS, L), dtype)
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents.start, parents.stop):
            for n in range(blocks.start, blocks.stop):
                # The softmax is known from the forward pass, its mean from s . ds
                top = load(Z, (0, 0, j, n * L))
                inverse = load(Z, (1, 0, j, n * L))
                mean = load(Z, (2, 0, j, n * L))
                for r in range(rows):
                    # db = c (dc - mean), over the vote's length for cosines
                    b = vote(problem, V, row=r, n=n, i=first + r, j=j)
                    dc = dot_query(V, r, dS, n, j) - mean
                    if floor > 0:
                        length = inverse_length(V, r, floor)
                        b = b * length
                        dc = dc * length
                    store(e, (r,), ((exp(b - top) * inverse) * dc))
                add_weighted_votes(dQ, n=n, j=j, V=V, weight=e, row=0, rows=rows)
