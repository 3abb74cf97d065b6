"""EM routing of matrix capsules that never stores the votes, as an operator with a gradient.

`em_routing` equals `routing.em` on the votes V_ij = M_i W_ij + offset of a window or of a layer without places. On a
CPU in float32 and float64 it runs in compiled loops over blocks of samples (`loops.em`, `loops.em_backward`); elsewhere
one parent type at a time in tensor operations (`em_tiles`). It keeps for the backward pass log R of every iteration but
the first, and the Gaussians.

Inside, a tensor [b ...] is [blocks ... L] with a block's L samples last; `em_tiles` has blocks of one sample.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels import chunked_em
from torchcaps.kernels.chunked_em import FIT, LOGIT, POSE, Layer
from torchcaps.kernels.simd_layout import from_lanes, lanes, suits, to_lanes
from torchcaps.kernels.threads import in_threads
from torchcaps.math.logspace import log_floor

__all__ = ["em_routing"]

BYTES = 32
"""Of a vector of lanes, as `loops.em` has it."""


def em_routing(
    pose: Tensor,
    activation: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    seen: Tensor,
    *,
    iterations: int = 3,
    final_inverse_temperature: float = 0.01,
    decay: float = 0.95,
    min_variance: float = 5e-4,
    damping: float = 0.0,
    assignment: str = "paper",
    competition: str = "all",
) -> tuple[Tensor, Tensor, Tensor]:
    """Children [b P i 16] at P places and their activations [b P i] -> parents at each of p window positions.

    W [m j 4 4]    slot c = (n i) of a window takes row c % m: m = n * i, or m = i if all places share W
    offset         [(n i) 16], added to the votes, or None; it gets no gradient
    seen [p n]     the places (int64, below P) that each position sees; a layer without places has [[0]] and P = 1
    the settings   are those of `routing.EM`

    Returns the mean mu [b p j 16], the logit of the activation [b p j], and R [b p (n i) j] of the last iteration,
    detached.
    """
    lam = [final_inverse_temperature * (1 - decay ** (t + 1)) for t in range(iterations)]
    inputs = (pose, log_floor(activation), W, offset, beta_a, beta_u)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    settings = (lam, min_variance, damping, assignment == "descent", competition == "all")
    mean, logit, coupling, _, _ = _forward(*inputs, seen, *settings, keep)
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
    seen: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mean, logit, coupling; and for the backward pass log R [blocks t-1 p j c L] and the Gaussians
    [blocks t p j FIT L]."""
    layer = Layer(pose, log_a, W, offset, beta_a, beta_u, seen, lam, min_variance, damping, descent, across)
    if suits(pose):
        return _forward_loops(layer, keep)
    shares, fits = chunked_em.forward(layer)
    last = fits[:, -1]  # [b p j FIT]
    log_R = shares[:, -1] if len(lam) > 1 else layer.first[layer.who].unsqueeze(1).expand(len(pose), -1, W.shape[1], -1)
    coupling = log_R.exp().transpose(2, 3).contiguous()
    if not keep:
        shares = shares[:, :0]
        fits = fits[:, -1:]
    return last[..., :POSE].clone(), last[..., LOGIT].clone(), coupling, shares[..., None], fits[..., None].clone()


@torch.library.custom_op("torchcaps::em_routing_backward", mutates_args=())
def _backward(
    g_mean: Tensor,
    g_logit: Tensor,
    shares: Tensor,
    fits: Tensor,
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    seen: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The derivatives by pose, log_a, W, beta_a and beta_u."""
    layer = Layer(pose, log_a, W, offset, beta_a, beta_u, seen, lam, min_variance, damping, descent, across)
    if suits(pose):
        return _backward_loops(layer, shares, fits, g_mean, g_logit)
    return chunked_em.backward(layer, shares[..., 0], fits[..., 0], g_mean, g_logit)


@_forward.register_fake
def _(
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    seen: Tensor,
    lam: list[float],
    min_variance: float,
    damping: float,
    descent: bool,
    across: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty(pose, W, seen, len(lam), keep, lanes(pose.dtype, BYTES) if suits(pose) else 1)


@_backward.register_fake
def _(
    g_mean: Tensor,
    g_logit: Tensor,
    shares: Tensor,
    fits: Tensor,
    pose: Tensor,
    log_a: Tensor,
    W: Tensor,
    offset: Tensor | None,
    beta_a: Tensor,
    beta_u: Tensor,
    seen: Tensor,
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
    pose: Tensor, W: Tensor, seen: Tensor, t: int, keep: bool, lanes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The shapes of what the forward operator returns."""
    (b, _, i, _) = pose.shape
    (p, n) = seen.shape
    j = W.shape[1]
    blocks = -(-b // lanes)
    shares = pose.new_empty(blocks, t - 1 if keep else 0, p, j, n * i, lanes)
    fits = pose.new_empty(blocks, t if keep else 1, p, j, FIT, lanes)
    return pose.new_empty(b, p, j, POSE), pose.new_empty(b, p, j), pose.new_empty(b, p, n * i, j), shares, fits


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[3:], *inputs[:7])
    ctx.settings = inputs[7:12]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, g_mean: Tensor, g_logit: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    pose, log_a, W, beta_a, beta_u = _backward(g_mean, g_logit, *ctx.saved_tensors, *ctx.settings)
    return pose, log_a, W, None, beta_a, beta_u, *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_remember)


# --- Compiled loops ---------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """[b ... h] -> [(blocks ... h) L]."""
    return to_lanes(x.flatten(1, -2), size=BYTES).flatten(0, 2)


def _samples(rows: Tensor, like: Tensor) -> Tensor:
    """What `_rows` was given, a tensor like that."""
    flat = like.flatten(1, -2)
    blocks = len(rows) // math.prod(flat.shape[1:])
    return from_lanes(rows.view(blocks, *flat.shape[1:], rows.shape[1]), len(like)).view(like.shape)


def _arrays(layer: Layer) -> tuple[Any, ...]:
    """X, A, W [j m 16], offset [c 16], beta_a, beta_u, who, first, lam as the loops want them."""
    x = layer.pose
    who = layer.who
    W = layer.W.transpose(0, 1).reshape(layer.W.shape[1], -1, POSE)
    offset = x.new_zeros(who.shape[1], POSE) if layer.offset is None else layer.offset.to(x.dtype)
    lam = torch.tensor(layer.lam, dtype=torch.float64)
    tensors = (_rows(x), _rows(layer.log_a), W, offset, layer.beta_a, layer.beta_u, who, layer.first, lam)
    return tuple(each.detach().contiguous().numpy() for each in tensors)


def _how(layer: Layer) -> tuple[float, float, bool, int]:
    """min_variance, damping, descent, and in how many groups of rivals a child is shared out."""
    return layer.min_variance, layer.damping, layer.descent, 1 if layer.across else layer.W.shape[1]


def _forward_loops(layer: Layer, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from torchcaps.kernels.loops import em

    pose = layer.pose
    mean, logit, coupling, shares, fits = _empty(
        pose, layer.W, layer.seen, len(layer.lam), keep, lanes(pose.dtype, BYTES)
    )
    out = shares.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy(), coupling.numpy()
    args: tuple[Any, ...] = (*_arrays(layer), *_how(layer), keep, *out)

    def work(n: int, start: int, stop: int) -> None:
        em.forward(start, stop, *args)

    in_threads(work, len(fits))
    last = fits[:, -1].permute(0, 4, 1, 2, 3).flatten(0, 1)[: len(pose)]  # [b p j FIT]
    return mean.copy_(last[..., :POSE]), logit.copy_(last[..., LOGIT]), coupling, shares, fits


def _backward_loops(
    layer: Layer, shares: Tensor, fits: Tensor, g_mean: Tensor, g_logit: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from torchcaps.kernels.loops import em_backward

    pose = layer.pose
    W = layer.W
    X, A, W_j, offsets, _, *rest = _arrays(layer)
    record = shares.flatten(0, -2).numpy(), fits.flatten(0, -2).numpy()
    g = _rows(g_mean).numpy(), _rows(g_logit).numpy()
    blocks = len(fits)
    j = W.shape[1]
    L = fits.shape[-1]
    g_X = pose.new_zeros(X.shape)
    g_A = pose.new_zeros(A.shape)
    g_W = pose.new_zeros(torch.get_num_threads(), *W_j.shape)
    g_beta = pose.new_zeros(blocks * j * 2, L)
    out = g_X.numpy(), g_A.numpy(), g_W.numpy(), g_beta.numpy()

    def work(n: int, start: int, stop: int) -> None:
        args = (X, A, W_j, offsets, *rest, *_how(layer), *record, *g, out[0], out[1], out[2][n], out[3])
        em_backward.backward(start, stop, *args)

    in_threads(work, blocks)
    beta = g_beta.view(blocks, j, 2, L).sum((0, 3))
    weights = g_W.sum(0).transpose(0, 1).reshape(W.shape)
    poses = _samples(g_X, pose)
    log_as = _samples(g_A, layer.log_a)
    return poses, log_as, weights.contiguous(), beta[:, 0].clone(), beta[:, 1].clone()
