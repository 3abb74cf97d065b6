"""EM routing of matrix capsules that never stores the votes, as an operator with a gradient.

`em_routing` equals `routing.em` on the votes V_ij = M_i W_ij + offset of a window or of a layer without places. On a
CPU in float32 and float64 it runs in compiled loops over blocks of samples (`loops.em`, `loops.em_backward`); elsewhere
one parent type at a time in tensor operations (`chunked_em`). Stored for the backward pass are log R of every iteration
but the first, and the Gaussians.

Inside, a tensor [b ...] is [blocks ... L] with a block's L samples last; `chunked_em` has blocks of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.kernels import chunked_em
from torchcaps.kernels.chunked_em import EmInputs
from torchcaps.kernels.operators import GradContext, OperatorInputs
from torchcaps.kernels.records import (
    EM_VECTOR_BYTES,
    FIT,
    LOGIT,
    POSE,
    SLOPE,
    EmGrads,
    EmProblem,
    EmSlopes,
    EmThreadWork,
    EmTrace,
    FloatArray,
    IntArray,
)
from torchcaps.kernels.simd_layout import as_array, block_size, from_blocks, has_loops, to_blocks
from torchcaps.kernels.threads import ThreadRank, in_threads, piece_of, run_together
from torchcaps.math.logspace import log_floor

__all__ = ["em_routing"]


def em_routing(
    pose: Tensor,
    activation: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    windows: Tensor,
    *,
    iterations: int = 3,
    final_inverse_temperature: float = 0.01,
    decay: float = 0.95,
    min_variance: float = 5e-4,
    damping: float = 0.0,
    assignment: str = "paper",
    competition: str = "all",
) -> tuple[Tensor, Tensor, Tensor]:
    """Route children at P places to parents at p window positions, without storing a vote.

    Args:
        pose: Children [b P i 16].
        activation: Their activations [b P i].
        W: Weights [m j 4 4]; slot c = (n i) of a window takes row c % m: m = n * i, or m = i if all places share W.
        offset: [(n i) 16], added to the votes, or None; it gets no gradient.
        beta_a: Learned activation cost [j].
        beta_u: Learned description cost [j].
        windows: [p n] the places (int64, below P) in each window; a layer without places has [[0]] and P = 1.
        iterations: This and all settings below are those of `routing.EM`.

    Returns:
        The mean mu [b p j 16], the logit of the activation [b p j], and R [b p (n i) j] of the last iteration,
        detached.
    """
    # lambda rises toward its final value from iteration to iteration
    lam = [final_inverse_temperature * (1 - decay ** (t + 1)) for t in range(iterations)]
    log_a = log_floor(activation)
    # Iterations are stored only if there will be a backward pass
    inputs = (pose, log_a, W, offset, beta_a, beta_u)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    mean, logit, coupling, _, _ = _forward(
        pose=pose,
        log_a=log_a,
        W=W,
        offset=offset,
        beta_a=beta_a,
        beta_u=beta_u,
        windows=windows,
        lam=lam,
        min_variance=min_variance,
        damping=damping,
        descent=assignment == "descent",
        across=competition == "all",
        keep_all=learns,
    )
    return mean, logit, coupling.detach()


# --- The operators ----------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::em_routing", mutates_args=())
def _forward(
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    windows: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
    keep_all: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return mean, logit, coupling; for the backward pass log R [blocks t-1 p j c L] and fits [blocks t p j FIT L]."""
    layer = EmInputs(
        pose=pose,
        log_activation=log_a,
        weights=W,
        offset=offset,
        beta_a=beta_a,
        beta_u=beta_u,
        windows=windows,
        inverse_temperature=lam,
        min_variance=min_variance,
        damping=damping,
        descent=descent,
        across=across,
    )
    if has_loops(pose):
        return _forward_loops(layer, keep_all)

    # Other devices and types: tensor operations, with blocks of one sample.
    log_assignments, fits = chunked_em.forward(layer)
    # The last assignments; with a single iteration they are the uniform ones
    last = fits[:, -1]  # [b p j FIT]
    if len(lam) > 1:
        log_R = log_assignments[:, -1]
    else:
        first = layer.first_log_assignment[layer.slot_children]
        log_R = first.unsqueeze(1).expand(len(pose), -1, W.shape[1], -1)
    coupling = log_R.exp().transpose(2, 3).contiguous()
    if not keep_all:
        log_assignments = log_assignments[:, :0]
        fits = fits[:, -1:]
    # Operators may not return views of their inputs or of each other, hence the clones
    return (
        last[..., :POSE].clone(),
        last[..., LOGIT].clone(),
        coupling,
        log_assignments[..., None],
        fits[..., None].clone(),
    )


@torch.library.custom_op("torchcaps::em_routing_backward", mutates_args=())
def _backward(
    g_mean: Tensor,
    g_logit: Tensor,
    log_assignments: Tensor,
    fits: Tensor,
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    windows: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the derivatives by pose, log_a, W, beta_a and beta_u."""
    layer = EmInputs(
        pose=pose,
        log_activation=log_a,
        weights=W,
        offset=offset,
        beta_a=beta_a,
        beta_u=beta_u,
        windows=windows,
        inverse_temperature=lam,
        min_variance=min_variance,
        damping=damping,
        descent=descent,
        across=across,
    )
    if has_loops(pose):
        return _backward_loops(layer, log_assignments, fits, g_mean, g_logit)
    return chunked_em.backward(layer, log_assignments[..., 0], fits[..., 0], g_mean=g_mean, g_logit=g_logit)


@_forward.register_fake
def _(
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    windows: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
    keep_all: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    L = block_size(pose.dtype, EM_VECTOR_BYTES) if has_loops(pose) else 1
    return _empty(pose, W, windows, len(lam), keep_all, L)


@_backward.register_fake
def _(
    g_mean: Tensor,
    g_logit: Tensor,
    log_assignments: Tensor,
    fits: Tensor,
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    windows: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (pose, log_a, W, beta_a, beta_u)
    a, b, c, d, e = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    return a, b, c, d, e


def _empty(
    pose: Tensor, W: Tensor, windows: Tensor, t: int, keep_all: bool, L: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate what the forward operator returns, for t iterations and blocks of L samples."""
    # Without a backward pass, room for the last Gaussians only
    (b, _, i, _) = pose.shape
    (p, n) = windows.shape
    j = W.shape[1]
    blocks = -(-b // L)
    log_assignments = pose.new_empty(blocks, t - 1 if keep_all else 0, p, j, n * i, L)
    fits = pose.new_empty(blocks, t if keep_all else 1, p, j, FIT, L)
    mean = pose.new_empty(b, p, j, POSE)
    logit = pose.new_empty(b, p, j)
    coupling = pose.new_empty(b, p, n * i, j)
    return mean, logit, coupling, log_assignments, fits


def _setup(ctx: GradContext, inputs: OperatorInputs, output: tuple[Tensor, ...]) -> None:
    # log R and fits, then the tensors; of the settings all but `keep_all`
    ctx.save_for_backward(*output[3:], *inputs[:7])
    ctx.settings = inputs[7:12]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(True)


def _grads(ctx: GradContext, g_mean: Tensor, g_logit: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    pose, log_a, W, beta_a, beta_u = _backward(g_mean, g_logit, *ctx.saved_tensors, *ctx.settings)
    # None for offset, windows and the settings
    return pose, log_a, W, None, beta_a, beta_u, *[None] * 7


_forward.register_autograd(_grads, setup_context=_setup)


# --- Compiled loops ---------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """Lay [b ... h] out as [(blocks ... h) L]."""
    return to_blocks(x.flatten(1, -2), size=EM_VECTOR_BYTES).flatten(0, 2)


def _samples(rows: Tensor, like: Tensor) -> Tensor:
    """Undo `_rows`, to a tensor like the given one."""
    flat = like.flatten(1, -2)
    blocks = len(rows) // math.prod(flat.shape[1:])
    return from_blocks(rows.view(blocks, *flat.shape[1:], rows.shape[1]), len(like)).view(like.shape)


class _SlotTables(NamedTuple):
    """The child in each slot of each window position [s c], and minus the log of how many slots a child is in."""

    child: IntArray
    log_share: FloatArray


@lru_cache(maxsize=64)
def _slot_tables(windows: bytes, positions: int, places: int, types: int) -> _SlotTables:
    """Make the tables of a layer once, and not in every step: windows [p n] do not change.

    Args:
        windows: Memory of the places (int64) in each window.
        positions: p.
        places: P, how many places there are.
        types: i, how many children stand at a place.
    """
    covered = np.frombuffer(windows, np.int64).reshape(positions, -1)
    child = (covered[:, :, None] * types + np.arange(types)).reshape(positions, -1)
    count = np.bincount(child.ravel(), minlength=places * types)
    return _SlotTables(child, -np.log(np.maximum(count, 1)))


def _problem(layer: EmInputs) -> EmProblem:
    """Lay a layer out as the loops want it."""
    x = layer.pose
    poses = as_array(_rows(x))
    (_, places, types, _) = x.shape
    covered = as_array(layer.windows)
    competitors = layer.weights.shape[1] if layer.across else 1
    slots = _slot_tables(covered.tobytes(), len(covered), places, types)
    # Weights by parent, since a loop works on one parent at a time
    W = layer.weights.transpose(0, 1).reshape(layer.weights.shape[1], -1, POSE)
    offset = x.new_zeros(slots.child.shape[1], POSE) if layer.offset is None else layer.offset.to(x.dtype)
    return EmProblem(
        pose=poses,
        log_activation=as_array(_rows(layer.log_activation)),
        weights=as_array(W),
        offset=as_array(offset),
        beta_a=as_array(layer.beta_a),
        beta_u=as_array(layer.beta_u),
        child=slots.child,
        first_log_assignment=(slots.log_share - math.log(competitors)).astype(poses.dtype),
        inverse_temperature=np.array(layer.inverse_temperature, dtype=np.float64),
        min_variance=layer.min_variance,
        damping=layer.damping,
        descent=layer.descent,
        groups=1 if layer.across else layer.weights.shape[1],
    )


def _forward_loops(layer: EmInputs, keep_all: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from torchcaps.kernels.loops import em

    # Results, allocated here and filled by the threads; threads that share a block need all iterations of it
    pose = layer.pose
    blocks = -(-len(pose) // block_size(pose.dtype, EM_VECTOR_BYTES))
    shared = 0 < blocks < torch.get_num_threads()
    mean, logit, coupling, log_assignments, fits = _empty(
        pose,
        layer.weights,
        layer.windows,
        len(layer.inverse_temperature),
        keep_all or shared,
        block_size(pose.dtype, EM_VECTOR_BYTES),
    )
    trace = EmTrace(log_assignments.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy())
    result = coupling.numpy()

    def run(problem: EmProblem, first: int, last: int, share: EmThreadWork) -> None:
        em.forward(first, last, problem, trace, result, keep_all or shared, share)

    if shared:
        run_together(lambda: _problem(layer), lambda made, rank: run(made, 0, blocks, _thread_work(made, rank)))
    else:
        problem = _problem(layer)
        whole = _thread_work(problem)
        in_threads(lambda _, start, stop: run(problem, start, stop, whole), blocks)
    # The results of the last iteration, one sample after another again.
    last = fits[:, -1].permute(0, 4, 1, 2, 3).flatten(0, 1)[: len(pose)]  # [b p j FIT]
    mean.copy_(last[..., :POSE])
    logit.copy_(last[..., LOGIT])
    if shared and not keep_all:
        return mean, logit, coupling, log_assignments[:, :0].clone(), fits[:, -1:].clone()
    return mean, logit, coupling, log_assignments, fits


def _thread_work(problem: EmProblem, thread: ThreadRank | None = None) -> EmThreadWork:
    """Return one thread's share of the work on a block; without a thread, all of it."""
    (rank, threads, arrivals) = thread or ThreadRank(0, 1, np.zeros(1, np.int64))
    pairs = piece_of(len(problem.child) * len(problem.weights), rank, threads)
    children = piece_of(len(problem.first_log_assignment), rank, threads)
    return EmThreadWork(pairs, children, rank, threads, arrivals)


class _BackwardArrays(NamedTuple):
    """What a backward pass reads, and the derivatives that it fills, as tensors.

    pose, log_activation, beta   of threads that share a block one copy each, else one
    weights                      one copy for each thread, since all blocks add to them
    """

    problem: EmProblem
    above: tuple[FloatArray, FloatArray]
    pose: Tensor
    log_activation: Tensor
    weights: Tensor
    beta: Tensor


def _backward_arrays(layer: EmInputs, g_mean: Tensor, g_logit: Tensor, copies: int) -> _BackwardArrays:
    problem = _problem(layer)
    above = (as_array(_rows(g_mean)), as_array(_rows(g_logit)))
    new = layer.pose
    (rows, L) = problem.log_activation.shape
    blocks = rows // max(1, len(problem.first_log_assignment))
    return _BackwardArrays(
        problem,
        above,
        pose=new.new_empty(copies, *problem.pose.shape),
        log_activation=new.new_empty(copies, rows, L),
        weights=new.new_zeros(torch.get_num_threads(), *problem.weights.shape),
        beta=new.new_zeros(copies, blocks * len(problem.weights) * 2, L),
    )


def _backward_loops(
    layer: EmInputs, log_assignments: Tensor, fits: Tensor, g_mean: Tensor, g_logit: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from torchcaps.kernels.loops import em_backward

    # Each thread takes some blocks or, where there are fewer blocks than threads, a share of each
    trace = EmTrace(log_assignments.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy())
    blocks = len(fits)
    threads = torch.get_num_threads()

    def work(n: int, start: int, stop: int, arrays: _BackwardArrays, share: EmThreadWork, carried: EmSlopes) -> None:
        below = (arrays.pose.numpy(), arrays.log_activation.numpy())
        grads = EmGrads(*arrays.above, *below, arrays.weights[n].numpy(), arrays.beta[share.rank].numpy())
        em_backward.backward(start, stop, arrays.problem, trace, grads, share, carried)

    if 0 < blocks < threads:
        made = _share_backward(lambda: _backward_arrays(layer, g_mean, g_logit, threads), blocks, work)
    else:
        made = _backward_arrays(layer, g_mean, g_logit, 1)
        whole = _thread_work(made.problem)
        in_threads(lambda n, start, stop: work(n, start, stop, made, whole, _new_slopes(made.problem, 1)), blocks)
    # Sums over the blocks and threads, in a fixed order, and samples one after another again.
    W = layer.weights
    beta = made.beta.view(-1, W.shape[1], 2, fits.shape[-1]).sum((0, 3))
    weights = made.weights.sum(0).transpose(0, 1).reshape(W.shape)
    poses = _samples(made.pose[0], layer.pose)
    log_as = _samples(made.log_activation[0], layer.log_activation)
    return poses, log_as, weights.contiguous(), beta[:, 0].clone(), beta[:, 1].clone()


def _share_backward(
    prepare: Callable[[], _BackwardArrays],
    blocks: int,
    work: Callable[[int, int, int, _BackwardArrays, EmThreadWork, EmSlopes], None],
) -> _BackwardArrays:
    """Let all threads work on each block, and return the arrays that they filled."""
    kept: list[tuple[_BackwardArrays, EmSlopes]] = []

    def make() -> tuple[_BackwardArrays, EmSlopes]:
        arrays = prepare()
        kept.append((arrays, _new_slopes(arrays.problem, torch.get_num_threads())))
        return kept[0]

    def run(made: tuple[_BackwardArrays, EmSlopes], thread: ThreadRank) -> None:
        arrays, carried = made
        work(thread.rank, 0, blocks, arrays, _thread_work(arrays.problem, thread), carried)

    run_together(make, run)
    return kept[0][0]


def _new_slopes(problem: EmProblem, threads: int) -> EmSlopes:
    """Allocate what iterations hand on, for a block that so many threads share."""
    (S, C) = problem.child.shape
    L = problem.pose.shape[1]
    kind = problem.pose.dtype
    steps = len(problem.inverse_temperature)
    pairs = S * len(problem.weights)
    sums = len(problem.first_log_assignment) * problem.groups
    return EmSlopes(
        np.empty(((steps - 1) * pairs * C, L), kind),
        np.empty((steps * pairs * SLOPE, L), kind),
        np.empty((sums, L), kind),
        np.empty((threads, sums, L), kind),
    )
