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
    EmPart,
    EmProblem,
    EmSlopes,
    EmTrace,
    Range,
)
from torchcaps.kernels.simd_layout import as_array, block_size, from_blocks, has_loops, to_blocks
from torchcaps.kernels.threads import in_threads, split_range
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


def _problem(layer: EmInputs) -> EmProblem:
    """Lay a layer out as the loops want it."""
    x = layer.pose
    slots = layer.slot_children
    # Weights by parent, since a loop works on one parent at a time
    W = layer.weights.transpose(0, 1).reshape(layer.weights.shape[1], -1, POSE)
    offset = x.new_zeros(slots.shape[1], POSE) if layer.offset is None else layer.offset.to(x.dtype)
    return EmProblem(
        pose=as_array(_rows(x)),
        log_activation=as_array(_rows(layer.log_activation)),
        weights=as_array(W),
        offset=as_array(offset),
        beta_a=as_array(layer.beta_a),
        beta_u=as_array(layer.beta_u),
        child=as_array(slots),
        first_log_assignment=as_array(layer.first_log_assignment),
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
    problem = _problem(layer)
    trace = EmTrace(log_assignments.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy())
    result = coupling.numpy()
    whole = _whole(problem)

    def run(first: int, last: int, part: EmPart) -> None:
        em.forward(first, last, problem, trace, result, keep_all or shared, part)

    if shared:
        _share_forward(lambda part: run(0, blocks, part), whole)
    else:
        in_threads(lambda _, start, stop: run(start, stop, whole), blocks)
    # The results of the last iteration, one sample after another again.
    last = fits[:, -1].permute(0, 4, 1, 2, 3).flatten(0, 1)[: len(pose)]  # [b p j FIT]
    mean.copy_(last[..., :POSE])
    logit.copy_(last[..., LOGIT])
    if shared and not keep_all:
        return mean, logit, coupling, log_assignments[:, :0].clone(), fits[:, -1:].clone()
    return mean, logit, coupling, log_assignments, fits


def _share_forward(run: Callable[[EmPart], None], whole: EmPart) -> None:
    """Run all iterations on all threads: each takes some children, then some pairs of a position and a parent."""
    nothing = Range(0, 0)
    for t in range(whole.steps.stop):
        step = Range(t, t + 1)
        if t > 0:
            in_threads(lambda _, *some: run(EmPart(step, nothing, Range(*some))), whole.children.stop)  # noqa: B023
        in_threads(lambda _, *some: run(EmPart(step, Range(*some), nothing)), whole.pairs.stop)  # noqa: B023


def _whole(problem: EmProblem) -> EmPart:
    """All work on a block of samples."""
    pairs = len(problem.child) * len(problem.weights)
    steps = len(problem.inverse_temperature)
    return EmPart(Range(0, steps), Range(0, pairs), Range(0, len(problem.first_log_assignment)))


def _backward_loops(
    layer: EmInputs, log_assignments: Tensor, fits: Tensor, g_mean: Tensor, g_logit: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from torchcaps.kernels.loops import em_backward

    # Blocks for the threads or, where there are too few, parts of one block after another
    problem = _problem(layer)
    trace = EmTrace(log_assignments.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy())
    pose = layer.pose
    W = layer.weights
    blocks = len(fits)
    threads = torch.get_num_threads()
    shared = 0 < blocks < threads
    # Derivatives: of the weights one copy for each thread, since all blocks add to them; of the rest if they share.
    j = W.shape[1]
    L = fits.shape[-1]
    copies = threads if shared else 1
    g_pose = pose.new_zeros(copies, *problem.pose.shape)
    g_log_a = pose.new_zeros(copies, *problem.log_activation.shape)
    g_W = pose.new_zeros(threads, *problem.weights.shape)
    g_beta = pose.new_zeros(copies, blocks * j * 2, L)
    above = (as_array(_rows(g_mean)), as_array(_rows(g_logit)))
    whole = _whole(problem)
    carried = _new_slopes(problem, 1 if shared else max(1, min(threads, blocks)), copies)

    def work(n: int, start: int, stop: int, part: EmPart, slopes: EmSlopes) -> None:
        own = n if shared else 0
        below = (g_pose[own].numpy(), g_log_a[own].numpy(), g_W[n].numpy(), g_beta[own].numpy())
        em_backward.backward(start, stop, problem, trace, EmGrads(*above, *below), part, slopes)

    if shared:
        for block in range(blocks):
            for t in reversed(range(whole.steps.stop)):
                _share_step(work, block, t, whole, carried)
    else:
        in_threads(lambda n, start, stop: work(n, start, stop, whole, carried[n]), blocks)
    # Sums over the blocks and threads, in a fixed order, and samples one after another again.
    beta = g_beta.view(copies * blocks, j, 2, L).sum((0, 3))
    weights = g_W.sum(0).transpose(0, 1).reshape(W.shape)
    poses = _samples(g_pose.sum(0) if shared else g_pose[0], pose)
    log_as = _samples(g_log_a.sum(0) if shared else g_log_a[0], layer.log_activation)
    return poses, log_as, weights.contiguous(), beta[:, 0].clone(), beta[:, 1].clone()


def _new_slopes(problem: EmProblem, blocks: int, copies: int) -> list[EmSlopes]:
    """Memory for what iterations hand on: of so many blocks, or of one that all threads share."""
    whole = _whole(problem)
    L = problem.pose.shape[1]
    kind = problem.pose.dtype
    steps = whole.steps.stop
    slots = whole.pairs.stop * problem.child.shape[1]
    sums = whole.children.stop * problem.groups
    made = [
        EmSlopes(
            np.empty(((steps - 1) * slots, L), kind),
            np.empty((steps * whole.pairs.stop * SLOPE, L), kind),
            np.empty((sums, L), kind),
            np.empty((sums, L), kind),
        )
        for _ in range(blocks)
    ]
    return made + [made[0]._replace(own_sums=np.empty((sums, L), kind)) for _ in range(copies - 1)]


def _share_step(
    work: Callable[[int, int, int, EmPart, EmSlopes], None], block: int, t: int, whole: EmPart, carried: list[EmSlopes]
) -> None:
    """Take iteration t of one block backward, its pairs on all threads, and add up the sums of their shares."""
    part = whole._replace(steps=Range(t, t + 1))
    runs = split_range(whole.pairs.stop, len(carried))

    def share(n: int, first: int, last: int) -> None:
        work(n, block, block + 1, part._replace(pairs=Range(first, last)), carried[n])

    in_threads(share, whole.pairs.stop)
    carried[0].sums[:] = carried[0].own_sums
    for n in range(1, len(runs)):
        carried[0].sums[:] += carried[n].own_sums
