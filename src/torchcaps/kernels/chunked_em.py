"""EM routing of matrix capsules in tensor operations, one parent type at a time: any device, any dtype.

The votes [b s c 16] of one parent type exist at a time, a J-th of all. The equations, forward and backward, are those
of `loops.em` and `loops.em_backward`; letters as there: s window position, c = (n i) slot of a window, FIT rows of a
Gaussian. It is what a GPU runs, where its speed was never measured; its results are tested on CPU tensors
(tests/kernels/test_em_kernel.py, "chunks").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcaps.kernels.records import FIT, LOGIT, LSE, MASS, POSE
from torchcaps.math.gaussian import LOG_2PI
from torchcaps.math.pose import as_matrix

__all__ = ["EmInputGrads", "EmInputs", "backward", "forward"]


class EmInputs(NamedTuple):
    """What EM routing routes, and its settings.

    pose                  [b P i 16] poses of the children at P places
    log_activation        [b P i]
    weights               [m j 4 4]; slot c takes row c % m
    offset                [c 16] added to the votes, or None
    beta_a, beta_u        [j] learned costs of the paper
    windows               [s n] the places of each window position
    inverse_temperature   lambda of each iteration
    min_variance          added to each variance
    damping               share of the previous mean in the new one
    descent               whether the assignment step is the one that lowers the free energy
    across                whether all parents compete for a child, or only those of one type
    """

    pose: Tensor
    log_activation: Tensor
    weights: Tensor
    offset: Tensor | None
    beta_a: Tensor
    beta_u: Tensor
    windows: Tensor
    inverse_temperature: list[float]
    min_variance: float
    damping: float
    descent: bool
    across: bool

    @property
    def slot_children(self) -> Tensor:
        """The child (P i) in each slot, [s c]."""
        types = self.pose.shape[2]
        return (self.windows.unsqueeze(-1) * types + torch.arange(types, device=self.windows.device)).flatten(1)

    @property
    def first_log_assignment(self) -> Tensor:
        """Log R of the first iteration [(P i)]: minus the log of the number of parents that see the child."""
        # All parents whose window holds the child share it equally
        count = torch.bincount(self.slot_children.flatten(), minlength=self.pose.shape[1] * self.pose.shape[2])
        parents = self.weights.shape[1] if self.across else 1
        return -(count.clamp_min(1) * parents).to(self.pose.dtype).log()

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of children, [b P i ...], in each slot, [b s c ...]."""
        return x.flatten(1, 2)[:, self.slot_children]

    def scatter(self, x: Tensor) -> Tensor:
        """Sum values [b s c ...] over the slots of each child, to [b (P i) ...]."""
        children = self.pose.shape[1] * self.pose.shape[2]
        return x.new_zeros(len(x), children, *x.shape[3:]).index_add_(1, self.slot_children.flatten(), x.flatten(1, 2))

    def row(self) -> Tensor:
        """Return the row of the weights that each slot takes, [c]."""
        return torch.arange(self.slot_children.shape[1], device=self.weights.device) % len(self.weights)

    def normalize(self, logits: Tensor) -> Tensor:
        """Return log R [b s j c]: log-softmax of the logits over the parents that compete for a child."""
        # The largest logit of each child, over all slots that hold it
        index = self.slot_children.flatten()  # [(s c)]
        slots = logits.transpose(1, 2).flatten(2)  # [b j (s c)]
        most = slots.amax(1, keepdim=True) if self.across else slots  # [b g (s c)]
        wide = index.expand_as(most)
        children = self.pose.shape[1] * self.pose.shape[2]
        top = most.new_zeros(*most.shape[:2], children).scatter_reduce(2, wide, most, "amax", include_self=False)
        # Sum of the exponentials above it, then the logarithm of that
        above = slots - top[..., index]
        e = above.exp()
        norm = torch.zeros_like(top).index_add_(2, index, e.sum(1, keepdim=True) if self.across else e)
        return (above - norm[..., index].log()).view_as(logits.transpose(1, 2)).transpose(1, 2)

    def competitor_sum(self, g: Tensor) -> Tensor:
        """Sum g [b s j c] over the parents that compete for a child, in each slot of it: [b s 1|j c]."""
        total = (g.sum(2, keepdim=True) if self.across else g).permute(0, 1, 3, 2)  # [b s c g]
        return self.scatter(total)[:, self.slot_children].permute(0, 1, 3, 2)


class EmInputGrads(NamedTuple):
    """Derivatives of the loss by the tensors of `EmInputs`."""

    pose: Tensor
    log_activation: Tensor
    weights: Tensor
    beta_a: Tensor
    beta_u: Tensor


def _votes(layer: EmInputs, M: Tensor, W: Tensor) -> Tensor:
    """Return the votes [b s c 16] of M [b s c 4 4] for one parent with weights W [c 4 4]."""
    V = torch.einsum("bscrk,ckq->bscrq", M, W).flatten(3)  # [b s c 16]
    return V if layer.offset is None else V + layer.offset


def _m_step(layer: EmInputs, V: Tensor, log_R: Tensor, log_a: Tensor, previous: Tensor, t: int, j: int) -> Tensor:
    """M-step of one parent: from V [b s c 16], log R and log a [b s c], previous mean [b s 16] to [b s FIT]."""
    # Weights of the slots, relative to the largest activation of the window.
    most = log_a.amax(-1, keepdim=True)
    total = log_R + (log_a - most)
    w = total.softmax(-1)
    lse = total.logsumexp(-1)
    # The Gaussian.
    mean = torch.einsum("bsc,bsck->bsk", w, V)
    mean = mean + layer.damping * (previous - mean)
    variance = torch.einsum("bsc,bsck->bsk", w, (V - mean.unsqueeze(2)).square()) + layer.min_variance
    # The activation.
    mass = (lse + most.squeeze(-1)).exp()
    cost = mass * (POSE * layer.beta_u[j] + 0.5 * variance.log().sum(-1))
    logit = layer.inverse_temperature[t] * (layer.beta_a[j] - cost)
    return torch.cat([mean, variance, torch.stack([lse, mass, logit], -1)], -1)


def _energy(layer: EmInputs, fit: Tensor, j: int) -> Tensor:
    """Return the term of descent's energy that is the same for all slots, [b s]."""
    variance = fit[..., POSE:LSE]
    each = POSE * (layer.beta_u[j] - 0.5)
    return 0.5 * (variance.log() + layer.min_variance / variance).sum(-1) + each


def _e_step(layer: EmInputs, V: Tensor, fit: Tensor, j: int) -> Tensor:
    """E-step of one parent: logits [b s c]."""
    # Squared distance from the mean, and logits: -a energy (descent) or log (a N) (paper)
    mean = fit[..., None, :POSE]
    variance = fit[..., None, POSE:LSE]
    logit = fit[..., LOGIT]
    far = 0.5 * ((V - mean).square() / variance).sum(-1)  # [b s c]
    if layer.descent:
        return -logit.sigmoid().unsqueeze(-1) * (far + _energy(layer, fit, j).unsqueeze(-1))
    base = logsigmoid(logit) - 0.5 * (variance.squeeze(2).log().sum(-1) + POSE * LOG_2PI)
    return base.unsqueeze(-1) - far


def forward(layer: EmInputs) -> tuple[Tensor, Tensor]:
    """Route, and return what the backward pass needs.

    Args:
        layer: What is routed.

    Returns:
        log R of all iterations but the first [b t-1 s j c], and the Gaussians of all [b t s j FIT].
    """
    # What every slot holds, and the uniform assignment of the first iteration
    W = layer.weights[layer.row()].unbind(1)  # J times [c 4 4]
    M = as_matrix(layer.gather(layer.pose))
    log_a = layer.gather(layer.log_activation)
    log_R = layer.first_log_assignment[layer.slot_children].expand(len(M), len(W), -1, -1).transpose(1, 2)  # [b s j c]
    shares = []
    fits = [M.new_zeros(*log_R.shape[:3], FIT)]
    # An iteration: of each parent the M-step and, but for the last time, its next logits
    for t in range(len(layer.inverse_temperature)):
        now = []
        bids = []
        for j, W_j in enumerate(W):
            V = _votes(layer, M, W_j)
            now.append(_m_step(layer, V, log_R[:, :, j], log_a, previous=fits[-1][:, :, j, :POSE], t=t, j=j))
            if t + 1 < len(layer.inverse_temperature):
                bids.append(_e_step(layer, V, now[-1], j))
        fits.append(torch.stack(now, 2))
        # Parents compete when the logits of all of them are known
        if bids:
            log_R = layer.normalize(torch.stack(bids, 2))
            shares.append(log_R)
    # The zeros before the first iteration, which damping starts from, are not returned
    kept = torch.stack(shares, 1) if shares else log_R.new_empty(len(M), 0, *log_R.shape[1:])
    return kept, torch.stack(fits[1:], 1)


def backward(layer: EmInputs, log_assignments: Tensor, fits: Tensor, g_mean: Tensor, g_logit: Tensor) -> EmInputGrads:
    """Differentiate by the inputs; see `loops.em_backward` for the equations and steps.

    Args:
        layer: What was routed.
        log_assignments: log R of all iterations but the first [b t-1 s j c].
        fits: Gaussians of all iterations [b t s j FIT].
        g_mean: Derivative by the last mean [b s j 16].
        g_logit: Derivative by the last logit [b s j].

    Returns:
        The derivatives by the tensors of `layer`.
    """
    # The inputs again, as in the forward pass
    W = layer.weights[layer.row()].unbind(1)
    T = len(layer.inverse_temperature)
    M = as_matrix(layer.gather(layer.pose))
    log_a = layer.gather(layer.log_activation)
    first = layer.first_log_assignment[layer.slot_children].expand(len(M), len(W), -1, -1).transpose(1, 2)
    # The assignments and weights of every iteration again.
    log_R = [first, *log_assignments.unbind(1)]  # [b s j c] each
    total = (log_a - log_a.amax(-1, keepdim=True)).unsqueeze(2)  # [b s 1 c]
    w = [(r + total - fits[:, t, ..., LSE, None]).exp() for t, r in enumerate(log_R)]
    beta_a = torch.zeros_like(layer.beta_a)
    beta_u = torch.zeros_like(layer.beta_u)
    g_s: list[Tensor] = []
    g_l: list[Tensor | None] = [None] * T
    slopes: list[tuple[Tensor, Tensor]] = [(g_mean, g_mean)] * T
    # Steps 1 and 2, from the last iteration to the first.
    for t in reversed(range(T)):
        if t + 1 < T:
            g_l[t] = g_s[-1] - log_R[t + 1].exp() * layer.competitor_sum(g_s[-1])
        each = [
            _parent_back(layer, _votes(layer, M, W[j]), w[t], fits, g_l[t], slopes, g_mean, g_logit, t, j)
            for j in range(len(W))
        ]
        g_mu, g_v, g, a, u = (torch.stack(part, 2) for part in zip(*each, strict=True))
        slopes[t] = g_mu, g_v
        g_s.append(g)
        beta_a = beta_a + a.sum((0, 1))
        beta_u = beta_u + u.sum((0, 1))
    # Step 3: through the votes to poses and weights.
    g_M = torch.zeros_like(M)
    g_W = torch.zeros_like(layer.weights)
    for j, W_j in enumerate(W):
        G = as_matrix(_votes_back(layer, _votes(layer, M, W_j), w, fits, g_l, slopes, j))
        g_M = g_M + torch.einsum("bscrq,ckq->bscrk", G, W_j)
        g_W[:, j] = torch.zeros_like(g_W[:, j]).index_add_(0, layer.row(), torch.einsum("bscrk,bscrq->ckq", M, G))
    # A child gets the sum over all slots that hold it
    g_pose = layer.scatter(g_M.flatten(3))
    g_log_a = layer.scatter(sum(g_s[1:], g_s[0]).sum(2))
    return EmInputGrads(g_pose.view_as(layer.pose), g_log_a.view_as(layer.log_activation), g_W, beta_a, beta_u)


def _parent_back(
    layer: EmInputs,
    V: Tensor,
    w: Tensor,
    fits: Tensor,
    g_l: Tensor | None,
    slopes: list[tuple[Tensor, Tensor]],
    g_mean: Tensor,
    g_logit: Tensor,
    t: int,
    j: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Steps 1 and 2 for parent j: g_mu, g_v [b s 16], g_s [b s c], and what beta_a and beta_u get [b s]."""
    fit = fits[:, t, :, j]
    least = layer.min_variance
    damping = layer.damping
    mean = fit[..., :POSE]
    v = fit[..., POSE:LSE]
    mass = fit[..., MASS]
    d = V - mean.unsqueeze(2)
    on = fit[..., LOGIT].sigmoid()
    u = torch.zeros_like(on)
    # Step 1: from the next iteration's logits, or the loss, to the Gaussian.
    if g_l is None:
        g_mu = g_mean[:, :, j]
        g_v = torch.zeros_like(mean)
        g_z = g_logit[:, :, j]
    else:
        g = g_l[:, :, j]
        # S0, S1 and S2 are all that the logits' derivatives contribute
        S0 = g.sum(-1)
        k = (on if layer.descent else torch.ones_like(on)).unsqueeze(-1)
        S1 = torch.einsum("bsc,bsck->bsk", g, d)
        S2 = torch.einsum("bsc,bsck->bsk", g, d * d)
        more = least * S0.unsqueeze(-1) if layer.descent else torch.zeros_like(S2)
        g_mu = k * S1 / v + damping * slopes[t + 1][0][:, :, j]
        g_v = k * ((S2 + more) / v - S0.unsqueeze(-1)) / (2 * v)
        g_z = S0 * (1 - on)
        if layer.descent:
            g_z = on * (on - 1) * (0.5 * (S2 / v).sum(-1) + S0 * _energy(layer, fit, j))
            u = -POSE * on * S0
    # Step 2: through the fit to log R + log a.
    g_cost = -layer.inverse_temperature[t] * g_z
    g_v = g_v + (0.5 * mass * g_cost).unsqueeze(-1) / v
    before = fits[:, t - 1, :, j, :POSE] if t > 0 else torch.zeros_like(mean)
    gap = (mean - before) * (damping / (1 - damping) if damping < 1 else 0.0)  # m - mu
    g_mu = g_mu - 2 * g_v * gap
    g_m = (1 - damping) * g_mu
    g_mass = g_cost * (POSE * layer.beta_u[j] + 0.5 * v.log().sum(-1))
    constant = mass * g_mass - (g_m * gap + g_v * (v - least)).sum(-1)
    pull = ((g_m.unsqueeze(2) + g_v.unsqueeze(2) * d) * d).sum(-1)  # [b s c]
    return g_mu, g_v, w[:, :, j] * (pull + constant.unsqueeze(-1)), -g_cost, u + POSE * mass * g_cost


def _votes_back(
    layer: EmInputs,
    V: Tensor,
    w: list[Tensor],
    fits: Tensor,
    g_l: list[Tensor | None],
    slopes: list[tuple[Tensor, Tensor]],
    j: int,
) -> Tensor:
    """Step 3 for parent j: g_V [b s c 16]."""
    # Through mean and variance of every iteration, and through the logits that followed
    G = torch.zeros_like(V)
    for t, (g_mu, g_v) in enumerate(slopes):
        d = V - fits[:, t, :, None, j, :POSE]
        w_t = w[t][:, :, j].unsqueeze(-1)
        G = G + w_t * ((1 - layer.damping) * g_mu[:, :, None, j] + 2 * g_v[:, :, None, j] * d)
        g = g_l[t]
        if g is not None:
            k = fits[:, t, :, j, LOGIT].sigmoid() if layer.descent else torch.ones_like(fits[:, t, :, j, LOGIT])
            G = G - g[:, :, j].unsqueeze(-1) * d * (k[..., None] / fits[:, t, :, j, POSE:LSE]).unsqueeze(2)
    return G
