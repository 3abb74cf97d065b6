"""EM routing of matrix capsules, forward: L samples at a time, votes recomputed for each parent and iteration.

Letters: c = (n i) a slot of a window, C slots, S window positions, J parent types, T iterations; the arrays are those
of `records.EmProblem` and `records.EmTrace`. A row of a Gaussian (`fits`) is

    mean 16, variance 16, then LSE = log sum_c exp(s_c) with s = log R + log a relative to the largest log a of the
    window, MASS = sum_c R a, and LOGIT of the parent's activation

For a window position and a parent the votes of all slots (C x 16 x L numbers) stay in the cache between the mean,
the variance and the next logits. The assignments of a child are normalized when all positions are done.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.barrier import wait_for_all
from torchcaps.kernels.loops.elementary import exp, exponent, log, mantissa
from torchcaps.kernels.loops.simd import Array, Vector, fma4, maximum, memory, where_negative
from torchcaps.kernels.records import (
    EM_VECTOR_BYTES,
    FIT,
    LOGIT,
    LSE,
    MASS,
    POSE,
    EmProblem,
    EmThreadWork,
    EmTrace,
    IntArray,
    Range,
)

__all__ = [
    "cast_votes",
    "fill",
    "forward",
    "load",
    "load4",
    "log_volume",
    "logistic",
    "max_log_activation",
    "store",
]

load, load4, store, fill = memory(EM_VECTOR_BYTES)

LN2 = math.log(2)
LOG_2PI = math.log(2 * math.pi)
LOW = -1e30
"""Below every logit."""


class Workspace(NamedTuple):
    """Arrays of one window position and parent, and of all children of a block.

    votes      [(c 16) L]
    weight     [c L] s_c, then the weights w_c of the Gaussian
    logit      [c L] log R, then distances, then the next logits
    top, norm  [(child group) L] the largest logit and the log of the sum of a child's assignments
    previous   [16 L] the mean before damping
    """

    votes: Array
    weight: Array
    logit: Array
    top: Array
    norm: Array
    previous: Array


# --- Votes and activations --------------------------------------------------------------------------------------------


@inline
def cast_votes(problem: EmProblem, first_child: int, s: int, j: int, votes: Array) -> None:
    """Compute the votes M W_j + offset [c 16] of the slots of position s; `first_child` is the first of the block."""
    pose = problem.pose
    W = problem.weights
    offset = problem.offset
    w = 0  # c % m, the row of W
    for c in range(problem.child.shape[1]):
        # A row of M times the columns of W
        for row in range(0, POSE, 4):
            m0, m1, m2, m3 = load4(pose, (first_child + problem.child[s, c]) * POSE + row)
            for k in range(4):
                v = m0 * W[j, w, k] + offset[c, row + k]
                v = m1 * W[j, w, k + 4] + v
                v = m2 * W[j, w, k + 8] + v
                store(votes, c * POSE + row + k, m3 * W[j, w, k + 12] + v)
        w = w + 1 if w + 1 < W.shape[1] else 0


@inline
def max_log_activation(problem: EmProblem, first_child: int, s: int) -> Vector:
    """Return the largest log activation in the window at position s."""
    most = load(problem.log_activation, first_child + problem.child[s, 0])
    for c in range(1, problem.child.shape[1]):
        most = maximum(most, load(problem.log_activation, first_child + problem.child[s, c]))
    return most


@inline
def log_volume(fits: Array, at: int) -> Vector:
    """Return sum_h log variance_h: exponents are added and mantissas multiplied, so that it takes one logarithm."""
    whole = fill(fits, 0.0)
    # A product of 16 mantissas stays below 2^16: it cannot overflow
    product = fill(fits, 1.0)
    for h in range(POSE):
        v = load(fits, at + POSE + h)
        whole = whole + exponent(v)
        product = product * mantissa(v)
    return whole * LN2 + log(product)


@inline
def logistic(z: Vector) -> Vector:
    """Return 1 / (1 + e^-z)."""
    e = exp(maximum(z, z * -1.0) * -1.0)  # e^-|z|
    return where_negative(z, e, e * 0.0 + 1.0) / (e + 1.0)


@inline
def _log_logistic(z: Vector) -> Vector:
    """Return log logistic(z) = min(z, 0) - log(1 + e^-|z|)."""
    e = exp(maximum(z, z * -1.0) * -1.0)
    return where_negative(z, z, z * 0.0) - log(e + 1.0)


# --- Assignments of a child -------------------------------------------------------------------------------------------


@inline
def _slots_between(child: IntArray, s: int, who: Range) -> Range:
    """Return the shortest range of slots of position s that holds all children from who.start to who.stop."""
    first = child.shape[1]
    last = 0
    for c in range(child.shape[1]):
        if who.start <= child[s, c] < who.stop:
            first = min(first, c)
            last = c + 1
    return Range(first, last)


@inline
def _normalize_assignments(problem: EmProblem, logits: Array, at: int, work: Workspace, who: Range) -> None:
    """Turn the logits [s j c] from row `at` on into log R: log-softmax over the parents that compete for a child.

    Only those of the children from who.start to who.stop.
    """
    child = problem.child
    groups = problem.groups
    J = len(problem.weights)
    S, C = child.shape
    top = work.top
    norm = work.norm
    for row in range(who.start * groups, who.stop * groups):
        store(top, row, LOW)
        store(norm, row, 0.0)

    # The largest logit of each child.
    for s in range(S):
        slots = _slots_between(child, s, who)
        for j in range(J):
            for c in range(slots.start, slots.stop):
                if child[s, c] < who.start or child[s, c] >= who.stop:
                    continue
                g = child[s, c] * groups + j % groups
                store(top, g, maximum(load(top, g), load(logits, at + (s * J + j) * C + c)))

    # Relative to it, the sum of the exponentials.
    for s in range(S):
        slots = _slots_between(child, s, who)
        for j in range(J):
            for c in range(slots.start, slots.stop):
                if child[s, c] < who.start or child[s, c] >= who.stop:
                    continue
                g = child[s, c] * groups + j % groups
                here = at + (s * J + j) * C + c
                above = load(logits, here) - load(top, g)
                store(logits, here, above)
                store(norm, g, load(norm, g) + exp(above))

    # Subtract its logarithm.
    for row in range(who.start * groups, who.stop * groups):
        store(norm, row, log(load(norm, row)))
    for s in range(S):
        slots = _slots_between(child, s, who)
        for j in range(J):
            for c in range(slots.start, slots.stop):
                if child[s, c] < who.start or child[s, c] >= who.stop:
                    continue
                g = child[s, c] * groups + j % groups
                here = at + (s * J + j) * C + c
                store(logits, here, load(logits, here) - load(norm, g))


# --- M-step of a parent -----------------------------------------------------------------------------------------------


@inline
def _softmax(weight: Array) -> Vector:
    """Turn s_c into exp(s_c) / sum_c exp(s_c) in place; return log sum_c exp(s_c)."""
    C = len(weight)
    # Relative to the largest, so that no exponential overflows
    top = load(weight, 0)
    for c in range(1, C):
        top = maximum(top, load(weight, c))
    whole = fill(weight, 0.0)
    for c in range(C):
        e = exp(load(weight, c) - top)
        store(weight, c, e)
        whole = whole + e
    inverse = 1.0 / whole
    for c in range(C):
        store(weight, c, load(weight, c) * inverse)
    return top + log(whole)


@inline
def _fit_mean(work: Workspace, fits: Array, at: int) -> None:
    """Compute mean_h = sum_c w_c V_ch."""
    zero = fill(fits, 0.0)
    # Four numbers of the pose in registers while all slots pass
    for row in range(0, POSE, 4):
        mean = zero, zero, zero, zero
        for c in range(len(work.weight)):
            mean = fma4(load(work.weight, c), load4(work.votes, c * POSE + row), mean)
        store(fits, at + row, mean)


@inline
def _fit_variance(work: Workspace, fits: Array, at: int, min_variance: float) -> None:
    """Compute variance_h = sum_c w_c (V_ch - mean_h)^2 + min_variance."""
    zero = fill(fits, 0.0)
    # About the mean that was just stored, damped if there is damping
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, at + row)
        variance = zero, zero, zero, zero
        for c in range(len(work.weight)):
            v0, v1, v2, v3 = load4(work.votes, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            variance = fma4(load(work.weight, c), (d0 * d0, d1 * d1, d2 * d2, d3 * d3), variance)
        v0, v1, v2, v3 = variance
        store(fits, at + POSE + row, (v0 + min_variance, v1 + min_variance, v2 + min_variance, v3 + min_variance))


@inline
def _copy_mean(fits: Array, at: int, previous: Array) -> None:
    """Copy the mean at row `at`, or the origin before the first iteration (at < 0)."""
    for h in range(POSE):
        store(previous, h, load(fits, at + h) if at >= 0 else fill(fits, 0.0))


@inline
def _damp(fits: Array, at: int, previous: Array, damping: float) -> None:
    """Replace the mean by mean + damping (previous - mean)."""
    for h in range(POSE):
        mean = load(fits, at + h)
        store(fits, at + h, mean + (load(previous, h) - mean) * damping)


@inline
def _activate(problem: EmProblem, fits: Array, at: int, lse: Vector, most: Vector, t: int, j: int) -> None:
    """Compute mass = sum_c R a and logit = lambda (beta_a - mass sum_h (beta_u + log sigma_h))."""
    # lse was relative to the largest log activation of the window
    mass = exp(lse + most)
    cost = (log_volume(fits, at) * 0.5 + POSE * problem.beta_u[j]) * mass
    store(fits, at + LSE, lse)
    store(fits, at + MASS, mass)
    store(fits, at + LOGIT, (problem.beta_a[j] - cost) * problem.inverse_temperature[t])


# --- E-step of a parent -----------------------------------------------------------------------------------------------


@inline
def _distances(work: Workspace, fits: Array, at: int) -> None:
    """Compute sum_h (V_ch - mean_h)^2 / variance_h for each slot, into `work.logit`."""
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, at + row)
        r0, r1, r2, r3 = load4(fits, at + POSE + row)
        # One division a parent instead of one for each slot
        r0 = 1.0 / r0
        r1 = 1.0 / r1
        r2 = 1.0 / r2
        r3 = 1.0 / r3
        for c in range(len(work.logit)):
            v0, v1, v2, v3 = load4(work.votes, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            some = (d0 * d0) * r0 + (d1 * d1) * r1
            some = some + ((d2 * d2) * r2 + (d3 * d3) * r3)
            store(work.logit, c, some if row == 0 else load(work.logit, c) + some)


@inline
def _distances_to_logits(problem: EmProblem, logit: Array, fits: Array, at: int, j: int) -> None:
    """Turn the distances [c] into logits: log (a_j N_ij), or -a_j energy_ij for the step that descends."""
    # Logits are linear in the distance: base + slope * distance
    z = load(fits, at + LOGIT)
    volume = log_volume(fits, at)
    if problem.descent:
        on = logistic(z)
        floor = fill(fits, 0.0)
        for h in range(POSE):
            floor = floor + problem.min_variance / load(fits, at + POSE + h)
        base = on * -1.0 * ((volume + floor) * 0.5 + POSE * (problem.beta_u[j] - 0.5))
        slope = on * -0.5
    else:
        base = _log_logistic(z) - (volume + POSE * LOG_2PI) * 0.5
        slope = fill(fits, -0.5)
    for c in range(len(logit)):
        store(logit, c, base + slope * load(logit, c))


@inline
def _store_coupling(log_R: Array, coupling: Array, b: int, s: int, j: int) -> None:
    """Store R = exp(log_R [c]) in coupling [b s c j] for those of the samples b, b + 1 ... that exist."""
    C = len(log_R)
    for c in range(C):
        store(log_R, c, exp(load(log_R, c)))
    # Back to one sample after another; lanes that fill the block have none
    for l in range(min(log_R.shape[1], len(coupling) - b)):
        for c in range(C):
            coupling[b + l, s, c, j] = log_R[c, l]


# --- The loop ---------------------------------------------------------------------------------------------------------


@loop
def forward(
    start: int, stop: int, problem: EmProblem, trace: EmTrace, coupling: Array, keep_all: bool, share: EmThreadWork
) -> None:
    """Route the blocks from start to stop, or one thread's share of the work on them.

    Args:
        start: First block.
        stop: Block after the last one.
        problem: What is routed.
        trace: Results of the iterations.
        coupling: [b s c j] R of the last iteration.
        keep_all: Whether `trace` has room for all iterations, or only for the last Gaussians and no assignments.
        share: All pairs and children; or, with `keep_all`, those of one of the threads that share the blocks.
    """
    # Sizes, and the workspace of this thread
    child = problem.child
    fits = trace.fits
    damping = problem.damping
    (S, C) = child.shape
    J = len(problem.weights)
    T = len(problem.inverse_temperature)
    children = len(problem.first_log_assignment)
    L = problem.pose.shape[1]
    dtype = problem.pose.dtype
    work = Workspace(
        np.empty((C * POSE, L), dtype),
        np.empty((C, L), dtype),
        np.empty((C, L), dtype),
        np.empty((children * problem.groups, L), dtype),
        np.empty((children * problem.groups, L), dtype),
        np.empty((POSE, L), dtype),
    )
    logits = trace.log_assignment if keep_all else np.empty((S * J * C, L), dtype)
    for block in range(start, stop):
        first_child = block * children
        for t in range(T):
            # Where this iteration's log R lie, and where the next one's go: the same rows unless all are kept.
            old = (block * (T - 1) + t - 1) * S * J * C if keep_all else 0
            new = (block * (T - 1) + t) * S * J * C if keep_all else 0
            if t > 0:
                # All logits are there before they are normalized, and all are normalized before they are used
                wait_for_all(share.arrivals, share.threads)
                _normalize_assignments(problem, logits, old, work, share.children)
                wait_for_all(share.arrivals, share.threads)
            most = max_log_activation(problem, first_child, 0)
            for pair in range(share.pairs.start, share.pairs.stop):
                s = pair // J
                j = pair % J
                if j == 0 or pair == share.pairs.start:
                    most = max_log_activation(problem, first_child, s)
                here = pair * C
                at = (((block * T + t) if keep_all else block) * S * J + pair) * FIT
                before = -1 if t == 0 else (at - S * J * FIT if keep_all else at)

                # The weights of the slots: softmax of log R + log a.
                for c in range(C):
                    i = child[s, c]
                    log_R = load(logits, old + here + c) if t > 0 else fill(fits, problem.first_log_assignment[i])
                    store(work.logit, c, log_R)
                    store(work.weight, c, log_R + (load(problem.log_activation, first_child + i) - most))
                lse = _softmax(work.weight)

                # M-step: votes, mean, variance, activation.
                cast_votes(problem, first_child, s, j, work.votes)
                if damping > 0:
                    _copy_mean(fits, before, work.previous)
                _fit_mean(work, fits, at)
                if damping > 0:
                    _damp(fits, at, work.previous, damping)
                _fit_variance(work, fits, at, problem.min_variance)
                _activate(problem, fits, at, lse=lse, most=most, t=t, j=j)

                # The last iteration's assignments are the result; else the E-step prepares the next ones.
                if t + 1 == T:
                    _store_coupling(work.logit, coupling, block * L, s, j)
                else:
                    _distances(work, fits, at)
                    _distances_to_logits(problem, work.logit, fits, at, j)
                    for c in range(C):
                        store(logits, new + here + c, load(work.logit, c))
