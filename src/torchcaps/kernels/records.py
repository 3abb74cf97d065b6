"""Named records of arrays that compiled loops take in place of long lists of arguments.

numba compiles a NamedTuple as if its fields were separate arguments, so that naming them costs nothing. The classes
live apart from the loops, because numba is slow to import and filling a record does not need it.

Letters: b batch, i child, j parent, d child dimension, k parent dimension, t iteration, s position of a window,
c = (n i) slot of a window, L samples of a block (one in each lane of a SIMD vector), n number of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EM_VECTOR_BYTES",
    "FIT",
    "LOGIT",
    "LSE",
    "MASS",
    "POSE",
    "SLOPE",
    "VECTOR_BYTES",
    "CoupledVotes",
    "DynamicProblem",
    "DynamicTrace",
    "EmGrads",
    "EmProblem",
    "EmSlopes",
    "EmThreadWork",
    "EmTrace",
    "FloatArray",
    "IntArray",
    "Range",
    "VoteInputs",
    "Waves",
]

VECTOR_BYTES = 64
"""Bytes of a full SIMD vector; LLVM splits it into registers of the machine's own width."""
EM_VECTOR_BYTES = 32
"""Bytes in EM routing: its loops hold a dozen vectors at a time, which at twice the width would not fit registers."""

POSE = 16
LSE = 32
MASS = 33
LOGIT = 34
FIT = 35
SLOPE = 2 * POSE
"""Numbers of a pose; rows of a parent's Gaussian after mean and variance (`loops.em`); how many rows there are; and
the rows of its derivatives, g_mu and g_v."""

FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]


class Range(NamedTuple):
    """The integers from start up to, but not including, stop."""

    start: int
    stop: int


# --- EM routing -------------------------------------------------------------------------------------------------------


class EmProblem(NamedTuple):
    """What EM routing routes, and its settings. Rows of one block of samples come one after another.

    pose                  [(block child 16) L] 4x4 poses of the children, child = place * types + type
    log_activation        [(block child) L]
    weights               [j m 16]; slot c takes row c % m
    offset                [c 16] added to the votes
    beta_a, beta_u        [j] learned costs of the paper
    child                 [s c] the child in each slot of each window position
    first_log_assignment  [child] log R of the first iteration
    inverse_temperature   [t] lambda of each iteration
    min_variance          added to each variance
    damping               share of the previous mean in the new one
    descent               whether the assignment step is the one that lowers the free energy
    groups                into how many groups of competing parents a child is divided: 1, or one for each parent type
    """

    pose: FloatArray
    log_activation: FloatArray
    weights: FloatArray
    offset: FloatArray
    beta_a: FloatArray
    beta_u: FloatArray
    child: IntArray
    first_log_assignment: FloatArray
    inverse_temperature: FloatArray
    min_variance: float
    damping: float
    descent: bool
    groups: int


class EmTrace(NamedTuple):
    """What EM routing computed in each iteration, or in the last one only.

    log_assignment   [(block t-1 s j c) L] log R of iterations 1, 2 ...
    fits             [(block t s j FIT) L] each parent's Gaussian: mean 16, variance 16, LSE, MASS, LOGIT (`loops.em`)
    """

    log_assignment: FloatArray
    fits: FloatArray


class EmThreadWork(NamedTuple):
    """What one thread does of the work on a block of samples, so that several threads can share it.

    pairs      s * J + j, positions of windows with their parents
    children   whose assignments are normalized, and over whose copies sums are taken
    rank       number of this thread, and of its copy of shared sums: 0 if it works alone
    threads    how many share a block
    arrivals   [1] the counter of their barrier (`loops.barrier`)
    """

    pairs: Range
    children: Range
    rank: int
    threads: int
    arrivals: IntArray


class EmSlopes(NamedTuple):
    """What the iterations of a backward pass hand on to each other.

    logit_grad   [(t-1 s j c) L] g_s of the next iteration, then g_l
    slopes       [(t s j SLOPE) L] g_mu and g_v
    sums         [(child group) L] sums of g_s over the parents that compete for a child, of the next iteration
    own_sums     [thread (child group) L] the same of the current one, over the pairs of each thread
    """

    logit_grad: FloatArray
    slopes: FloatArray
    sums: FloatArray
    own_sums: FloatArray


class EmGrads(NamedTuple):
    """Derivatives of the loss: by the results of EM routing, which are given, and by its inputs, which are added to.

    mean             [(block s j 16) L] given
    logit            [(block s j) L] given
    pose             [thread (block child 16) L], of threads that share a block one copy each; the sum is in the first
    log_activation   [thread (block child) L] likewise
    weights          [j m 16], summed over the blocks
    beta             [(block j 2) L], beta_a and beta_u
    """

    mean: FloatArray
    logit: FloatArray
    pose: FloatArray
    log_activation: FloatArray
    weights: FloatArray
    beta: FloatArray


# --- Dynamic routing --------------------------------------------------------------------------------------------------


class DynamicProblem(NamedTuple):
    """What a pass of dynamic routing compares: votes V_ij = W_ij x_i with a query q_j, the sum of the parents so far.

    weights    [i j k d]
    children   [i n d L]
    query      [n j k L]
    floor      0 for dot products; for cosines what is added to a squared length
    """

    weights: FloatArray
    children: FloatArray
    query: FloatArray
    floor: float


class CoupledVotes(NamedTuple):
    """Votes V_ij = W_ij x_i and how much of each counts.

    weights    [i j k d]
    children   [i n d L]
    coupling   [i j (n L)], or [0 0 0] for 1 everywhere
    share      a number that multiplies the coupling
    """

    weights: FloatArray
    children: FloatArray
    coupling: FloatArray
    share: float


class DynamicTrace(NamedTuple):
    """What the iterations contribute to the derivative of the votes, dV = base + sum_t (c_t ds_t + e_t q_t) + u V.

    query        [t n j k L] q of every iteration but the first
    total_grad   [t n j k L] ds, the derivative of its total
    softmax      [t 3 i j (n L)] largest logit, inverse sum and mean; a single child or parent, as the softmax is over
    base         [n j k L] the derivative of the first total, times the uniform coupling
    floor        as in `DynamicProblem`
    """

    query: FloatArray
    total_grad: FloatArray
    softmax: FloatArray
    base: FloatArray
    floor: float


class VoteInputs(NamedTuple):
    """Children and weights of votes, or the derivatives by them.

    children   [b i d]
    weights    [i j k d]
    """

    children: FloatArray
    weights: FloatArray


# --- Convolutions -----------------------------------------------------------------------------------------------------


class Waves(NamedTuple):
    """Cosines and sines of a Fourier transform.

    rows      [2 n a] for row frequencies up to N / 2
    columns   [2 k b] for some column frequencies
    """

    rows: FloatArray
    columns: FloatArray
