"""EM routing of matrix capsules, backward through all iterations; names and arrays as in `loops.em`.

Write g_x for the derivative of the loss by x, d = V - mu^t, and let iteration t have been

    s = log R + log a     w = softmax_c s     m = sum_c w V   mu = m + damping (mu^(t-1) - m)   v = sum_c w d^2 + least
    mass = sum_c e^s      z = lambda (beta_a - mass (16 beta_u + 1/2 sum_h log v))
    logit l = log logistic(z) - 1/2 sum_h (d^2 / v + log v + log 2 pi), or -logistic(z) energy

(1) The next iteration's log R = l - logsumexp l gives g_l = g_s - R sum g_s, the sum over the parents that compete
    for the child. With k = 1
    (paper) or logistic(z) (descent), S0 = sum_c g_l, S1 = sum_c g_l d and S2 = sum_c g_l d^2 are all that is needed:

    g_mu = k S1 / v     g_v = k (S2 / v - S0) / (2 v)     g_z = S0 (1 - logistic(z))

    descent: also g_v += k least S0 / (2 v^2), and g_z = -k (1 - k) sum_c g_l energy_c, which S0 and S2 give too.

(2) Backward through the fit, with g_cost = -lambda g_z:

    g_v += mass g_cost / (2 v)     g_mu -= 2 g_v (m - mu)     g_m = (1 - damping) g_mu     g_mu^(t-1) += damping g_mu
    g_s = w (sum_h (g_m d + g_v d^2) + constant),   constant = -sum_h (g_m (m - mu) + g_v (v - least)) + mass g_mass

    where the constant holds what softmax subtracts, sum_c w g_w, which needs no pass over the votes of its own.

(3) When all iterations are through, the votes' own derivative is

    g_V = sum_t w^t (g_m + 2 g_v d) - k g_l^(t+1) d / v,     g_M = g_V W^T     g_W = M^T g_V

Steps 1 (of t + 1) and 2 (of t) of a position and a parent, and for t = 0 also step 3, share one computation of the
votes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.barrier import wait_for_all
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.em import (
    cast_votes,
    fill,
    load,
    load4,
    log_volume,
    logistic,
    max_log_activation,
    store,
)
from torchcaps.kernels.loops.simd import Array, Vector, fma4, lane_sum
from torchcaps.kernels.records import (
    FIT,
    LOGIT,
    LSE,
    MASS,
    POSE,
    SLOPE,
    EmGrads,
    EmProblem,
    EmSlopes,
    EmThreadWork,
    EmTrace,
)

__all__ = ["backward"]


class Workspace(NamedTuple):
    """Arrays of one window position and parent, and derivatives of a whole block.

    votes        [(c 16) L]
    vote_grad    [(c 16) L] g_V
    weight       [c L] w
    slot_grad    [c L] g_s of the current iteration
    logit_grad   [(t-1 s j c) L] g_s of the next iteration, then g_l
    slopes       [(t s j SLOPE) L] g_mu and g_v
    """

    votes: Array
    vote_grad: Array
    weight: Array
    slot_grad: Array
    logit_grad: Array
    slopes: Array


class Rows(NamedTuple):
    """First rows of what belongs to one window position and parent in iteration t.

    fit, slope   of the Gaussian and of its derivatives; `previous_fit` of the Gaussian before it, -1 if there is none
    beta         of the derivatives by beta_a and beta_u
    assignment   of the assignments of iteration t; -1 in the first one
    logit        of the logits' derivatives of iteration t + 1; -1 in the last one
    """

    fit: int
    previous_fit: int
    slope: int
    beta: int
    assignment: int
    logit: int


@inline
def _slot_weights(
    problem: EmProblem, trace: EmTrace, rows: Rows, first_child: int, s: int, most: Vector, weight: Array
) -> None:
    """Compute w [c] = exp(log R + log a - lse) again; the first iteration's log R are given (rows.assignment < 0)."""
    lse = load(trace.fits, rows.fit + LSE)
    for c in range(len(weight)):
        i = problem.child[s, c]
        log_R = (
            load(trace.log_assignment, rows.assignment + c)
            if rows.assignment >= 0
            else fill(weight, problem.first_log_assignment[i])
        )
        store(weight, c, exp(log_R + (load(problem.log_activation, first_child + i) - most) - lse))


# --- Step 1: back through the E-step ----------------------------------------------------------------------------------


@inline
def _softmax_back(
    problem: EmProblem, trace: EmTrace, rows: Rows, next_log_R: int, sums: Array, s: int, j: int, grad: Array
) -> Vector:
    """Turn g_s into g_l = g_s - R sum g_s in place; return S0 = sum_c g_l."""
    groups = problem.groups
    S0 = fill(grad, 0.0)
    for c in range(problem.child.shape[1]):
        R = exp(load(trace.log_assignment, next_log_R + c))
        g_l = load(grad, rows.logit + c) - R * load(sums, problem.child[s, c] * groups + j % groups)
        store(grad, rows.logit + c, g_l)
        S0 = S0 + g_l
    return S0


@inline
def _moments(work: Workspace, fits: Array, rows: Rows) -> None:
    """Compute S1 = sum_c g_l d and S2 = sum_c g_l d^2, into the rows of g_mu and g_v."""
    zero = fill(fits, 0.0)
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, rows.fit + row)
        # Both sums in one pass over the votes
        S1 = S2 = (zero, zero, zero, zero)
        for c in range(len(work.weight)):
            g_l = load(work.logit_grad, rows.logit + c)
            v0, v1, v2, v3 = load4(work.votes, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            S1 = fma4(g_l, (d0, d1, d2, d3), S1)
            S2 = fma4(g_l, (d0 * d0, d1 * d1, d2 * d2, d3 * d3), S2)
        store(work.slopes, rows.slope + row, S1)
        store(work.slopes, rows.slope + POSE + row, S2)


@inline
def _e_step_back(
    problem: EmProblem, fits: Array, slopes: Array, g_beta: Array, rows: Rows, S0: Vector, j: int
) -> Vector:
    """Step 1 from S0, S1, S2 to g_mu and g_v in place; return g_z."""
    # k scales all logits of a parent; `extra` is the term of descent's energy in 1 / v
    least = problem.min_variance
    on = logistic(load(fits, rows.fit + LOGIT))
    k = on if problem.descent else fill(fits, 1.0)
    extra = S0 * least if problem.descent else fill(fits, 0.0)
    # g_mu and g_v; the sums over h are for g_z
    far = fill(fits, 0.0)
    floor = fill(fits, 0.0)
    for h in range(POSE):
        inverse = 1.0 / load(fits, rows.fit + POSE + h)
        S1 = load(slopes, rows.slope + h)
        S2 = load(slopes, rows.slope + POSE + h)
        store(slopes, rows.slope + h, k * S1 * inverse)
        store(slopes, rows.slope + POSE + h, k * ((S2 + extra) * inverse - S0) * (inverse * 0.5))
        far = far + S2 * inverse
        floor = floor + inverse * least
    if not problem.descent:
        g_z: Vector = S0 * (1.0 - on)
        return g_z
    # Descent: beta_u is part of the energy too
    energy: Vector = far * 0.5 + S0 * ((log_volume(fits, rows.fit) + floor) * 0.5 + POSE * (problem.beta_u[j] - 0.5))
    store(g_beta, rows.beta + 1, load(g_beta, rows.beta + 1) - on * S0 * POSE)
    return on * (on - 1.0) * energy


# --- Step 2: back through the M-step ----------------------------------------------------------------------------------


@inline
def _m_step_back(
    problem: EmProblem, fits: Array, slopes: Array, g_beta: Array, rows: Rows, g_z: Vector, t: int, j: int
) -> Vector:
    """Complete g_mu and g_v; return the constant of g_s."""
    damping = problem.damping
    # Derivatives by the learned costs
    mass = load(fits, rows.fit + MASS)
    g_cost = g_z * (-problem.inverse_temperature[t])
    store(g_beta, rows.beta, load(g_beta, rows.beta) - g_cost)
    store(g_beta, rows.beta + 1, load(g_beta, rows.beta + 1) + g_cost * mass * POSE)
    constant: Vector = mass * g_cost * (log_volume(fits, rows.fit) * 0.5 + POSE * problem.beta_u[j])
    # g_v, g_mu, and what softmax subtracts
    for h in range(POSE):
        variance = load(fits, rows.fit + POSE + h)
        g_v = load(slopes, rows.slope + POSE + h) + mass * g_cost * 0.5 / variance
        store(slopes, rows.slope + POSE + h, g_v)
        constant = constant - g_v * (variance - problem.min_variance)
        if 0 < damping < 1:
            before = load(fits, rows.previous_fit + h) if rows.previous_fit >= 0 else fill(fits, 0.0)
            gap = (load(fits, rows.fit + h) - before) * (damping / (1 - damping))  # m - mu
            g_mu = load(slopes, rows.slope + h) - g_v * gap * 2.0
            store(slopes, rows.slope + h, g_mu)
            constant = constant - g_mu * gap * (1 - damping)
    return constant


@inline
def _slot_grads(work: Workspace, fits: Array, rows: Rows, undamped: float, constant: Vector) -> None:
    """Compute g_s = w (sum_h (g_m d + g_v d^2) + constant), with g_m = undamped g_mu, into `work.slot_grad`."""
    C = len(work.weight)
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, rows.fit + row)
        a0, a1, a2, a3 = load4(work.slopes, rows.slope + row)
        a0 = a0 * undamped
        a1 = a1 * undamped
        a2 = a2 * undamped
        a3 = a3 * undamped
        b0, b1, b2, b3 = load4(work.slopes, rows.slope + POSE + row)
        for c in range(C):
            v0, v1, v2, v3 = load4(work.votes, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            some = (a0 + b0 * d0) * d0 + (a1 + b1 * d1) * d1
            some = some + ((a2 + b2 * d2) * d2 + (a3 + b3 * d3) * d3)
            store(work.slot_grad, c, some + (constant if row == 0 else load(work.slot_grad, c)))
    for c in range(C):
        store(work.slot_grad, c, load(work.slot_grad, c) * load(work.weight, c))


# --- Step 3: back through the votes -----------------------------------------------------------------------------------


@inline
def _vote_grads(problem: EmProblem, work: Workspace, fits: Array, rows: Rows, add: bool) -> None:
    """Set or add w (g_m + 2 g_v d) - k g_l d / v to `work.vote_grad`; the last one has no g_l (rows.logit < 0)."""
    undamped = 1 - problem.damping
    k = logistic(load(fits, rows.fit + LOGIT)) if problem.descent else fill(fits, 1.0)
    G = work.vote_grad
    # Two numbers of the pose at a time, with what all slots share in registers
    for h in range(0, POSE, 2):
        m0 = load(fits, rows.fit + h)
        m1 = load(fits, rows.fit + h + 1)
        r0 = k / load(fits, rows.fit + POSE + h)
        r1 = k / load(fits, rows.fit + POSE + h + 1)
        a0 = load(work.slopes, rows.slope + h) * undamped
        a1 = load(work.slopes, rows.slope + h + 1) * undamped
        b0 = load(work.slopes, rows.slope + POSE + h) * 2.0
        b1 = load(work.slopes, rows.slope + POSE + h + 1) * 2.0
        for c in range(len(work.weight)):
            v = c * POSE + h
            w = load(work.weight, c)
            g_l = load(work.logit_grad, rows.logit + c) if rows.logit >= 0 else fill(fits, 0.0)
            x0 = w * a0 + (load(work.votes, v) - m0) * (w * b0 - g_l * r0)
            x1 = w * a1 + (load(work.votes, v + 1) - m1) * (w * b1 - g_l * r1)
            store(G, v, load(G, v) + x0 if add else x0)
            store(G, v + 1, load(G, v + 1) + x1 if add else x1)


@inline
def _product_back(problem: EmProblem, grads: EmGrads, G: Array, first_child: int, s: int, j: int) -> None:
    """Add G W^T to the poses' derivatives, and M^T G, summed over the lanes, to those of the weights."""
    W = problem.weights
    g_W = grads.weights
    w = 0  # c % m, the row of W
    for c in range(problem.child.shape[1]):
        at = (first_child + problem.child[s, c]) * POSE
        v = c * POSE
        # Poses: G W^T, a row at a time
        for row in range(0, POSE, 4):
            g0, g1, g2, g3 = load4(G, v + row)
            for k in range(4):
                some = g0 * W[j, w, 4 * k] + load(grads.pose, at + row + k)
                some = g1 * W[j, w, 4 * k + 1] + some
                some = g2 * W[j, w, 4 * k + 2] + some
                store(grads.pose, at + row + k, g3 * W[j, w, 4 * k + 3] + some)
        # Weights: M^T G, one number of W for all samples of the block
        for k in range(4):
            m0 = load(problem.pose, at + k)
            m1 = load(problem.pose, at + k + 4)
            m2 = load(problem.pose, at + k + 8)
            m3 = load(problem.pose, at + k + 12)
            for n in range(4):
                some = m0 * load(G, v + n) + m1 * load(G, v + n + 4)
                some = m2 * load(G, v + n + 8) + some
                g_W[j, w, 4 * k + n] += lane_sum(m3 * load(G, v + n + 12) + some)
        w = w + 1 if w + 1 < W.shape[1] else 0


# --- What threads share -----------------------------------------------------------------------------------------------


@inline
def _add_sums(carried: EmSlopes, first: int, last: int) -> None:
    """Set the rows from first to last of `sums` to the sum of what the threads have, in their order."""
    for row in range(first, last):
        whole = load(carried.own_sums, (0, row))
        for n in range(1, len(carried.own_sums)):
            whole = whole + load(carried.own_sums, (n, row))
        store(carried.sums, row, whole)


@inline
def _add_copies(copies: Array, first: int, last: int) -> None:
    """Add the rows from first to last of all copies to those of the first one, in their order."""
    for row in range(first, last):
        whole = load(copies, (0, row))
        for n in range(1, len(copies)):
            whole = whole + load(copies, (n, row))
        store(copies, (0, row), whole)


# --- The loop ---------------------------------------------------------------------------------------------------------


@loop
def backward(
    start: int, stop: int, problem: EmProblem, trace: EmTrace, grads: EmGrads, share: EmThreadWork, carried: EmSlopes
) -> None:
    """Differentiate the blocks from start to stop, or do one thread's share of the work on them.

    Args:
        start: First block.
        stop: Block after the last one.
        problem: What was routed.
        trace: Results of all iterations.
        grads: Derivatives of the results, and those of the inputs: of weights and costs these are added to.
        share: All pairs and children; or those of one of the threads that share the blocks.
        carried: What iterations hand on, the same for all threads that share a block.
    """
    # Sizes, and the workspace of this thread
    child = problem.child
    fits = trace.fits
    groups = problem.groups
    damping = problem.damping
    (S, C) = child.shape
    J = len(problem.weights)
    T = len(problem.inverse_temperature)
    children = len(problem.first_log_assignment)
    L = problem.pose.shape[1]
    dtype = problem.pose.dtype
    pairs = S * J * C
    work = Workspace(
        np.empty((C * POSE, L), dtype),
        np.empty((C * POSE, L), dtype),
        np.empty((C, L), dtype),
        np.empty((C, L), dtype),
        carried.logit_grad,
        carried.slopes,
    )
    # Sums of g_s over the parents that compete for a child, of iteration t; and what this thread adds up.
    own_sums = carried.own_sums[share.rank]
    own = EmGrads(
        grads.mean,
        grads.logit,
        grads.pose[share.rank],
        grads.log_activation[share.rank],
        grads.weights,
        grads.beta,
    )
    for block in range(start, stop):
        first_child = block * children
        own.pose[first_child * POSE : (first_child + children) * POSE] = 0
        own.log_activation[first_child : first_child + children] = 0
        for t in range(T - 1, -1, -1):
            own_sums[:] = 0
            most = max_log_activation(problem, first_child, 0)
            for here in range(share.pairs.start, share.pairs.stop):
                s = here // J
                j = here % J
                if j == 0 or here == share.pairs.start:
                    most = max_log_activation(problem, first_child, s)
                next_log_R = (block * (T - 1) + t) * pairs + here * C
                fit = ((block * T + t) * S * J + here) * FIT
                rows = Rows(
                    fit,
                    fit - S * J * FIT if t > 0 else -1,
                    (t * S * J + here) * SLOPE,
                    (block * J + j) * 2,
                    next_log_R - pairs if t > 0 else -1,
                    t * pairs + here * C if t + 1 < T else -1,
                )
                cast_votes(problem, first_child, s, j, work.votes)

                # Step 1: what the next iteration, or the loss, says of this one's Gaussian.
                if t + 1 == T:
                    g_z = load(grads.logit, block * S * J + here)
                    for h in range(POSE):
                        g_mu = load(grads.mean, (block * S * J + here) * POSE + h)
                        store(work.slopes, rows.slope + h, g_mu)
                        store(work.slopes, rows.slope + POSE + h, 0.0)
                else:
                    S0 = _softmax_back(problem, trace, rows, next_log_R, carried.sums, s=s, j=j, grad=work.logit_grad)
                    _moments(work, fits, rows)
                    g_z = _e_step_back(problem, fits, work.slopes, grads.beta, rows, S0, j)
                    if damping > 0:
                        for h in range(POSE):
                            more = load(work.slopes, rows.slope + S * J * SLOPE + h) * damping
                            store(work.slopes, rows.slope + h, load(work.slopes, rows.slope + h) + more)

                # Step 2: through the fit to g_s, which belongs to the activations and to the iteration before.
                constant = _m_step_back(problem, fits, work.slopes, grads.beta, rows, g_z, t=t, j=j)
                _slot_weights(problem, trace, rows, first_child, s, most, work.weight)
                _slot_grads(work, fits, rows, 1 - damping, constant)
                for c in range(C):
                    i = child[s, c]
                    g_s = load(work.slot_grad, c)
                    store(own.log_activation, first_child + i, load(own.log_activation, first_child + i) + g_s)
                    if t > 0:
                        group = i * groups + j % groups
                        store(own_sums, group, load(own_sums, group) + g_s)
                        store(work.logit_grad, (t - 1) * pairs + here * C + c, g_s)
                if t > 0:
                    continue

                # Step 3: every iteration's share in the derivative of the votes, while these are at hand.
                for u in range(T):
                    of_u = Rows(
                        rows.fit + u * S * J * FIT,
                        -1,
                        rows.slope + u * S * J * SLOPE,
                        rows.beta,
                        next_log_R + (u - 1) * pairs if u > 0 else -1,
                        u * pairs + here * C if u + 1 < T else -1,
                    )
                    if u > 0:
                        _slot_weights(problem, trace, of_u, first_child, s, most, work.weight)
                    _vote_grads(problem, work, fits, of_u, u > 0)
                _product_back(problem, own, work.vote_grad, first_child, s, j)

            # The sums over all pairs, when all threads have theirs.
            wait_for_all(share.arrivals, share.threads)
            if t > 0:
                _add_sums(carried, share.children.start * groups, share.children.stop * groups)
                wait_for_all(share.arrivals, share.threads)
        if share.threads > 1:
            first = first_child + share.children.start
            last = first_child + share.children.stop
            _add_copies(grads.pose, first * POSE, last * POSE)
            _add_copies(grads.log_activation, first, last)
