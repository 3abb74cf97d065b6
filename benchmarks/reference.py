"""Dynamic routing and contrastive divergence without a library: votes are tensors, sums over them are products.

Of several forms of dynamic routing, `plain_dynamic` is the fastest that was found: it is what ours is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.math.squash import cosine, squash

__all__ = ["couple", "plain_contrast", "plain_dynamic"]


def plain_dynamic(x: Tensor, W: Tensor, iterations: int) -> Tensor:
    """Parents [b j k] of children x [b i d] with weights W [i j k d], differentiable through all iterations."""
    # Children beside each other, so that both sums of an iteration are batched matrix products
    votes = torch.einsum("bid,ijkd->bjik", x, W).contiguous()
    logits = torch.zeros_like(votes[..., 0])  # [b j i]
    for t in range(iterations):
        parents = squash((logits.softmax(1).unsqueeze(2) @ votes).squeeze(2))  # [b j k]
        if t + 1 < iterations:
            logits = logits + (votes @ parents.unsqueeze(3)).squeeze(3)
    return parents


def couple(x: Tensor, W: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Coupling c [b i j] by cosine agreement, normalized over the children, and z [b j k] of eq. 3."""
    votes = torch.einsum("ijkd,bid->bijk", W, x)
    logits = torch.zeros_like(votes[..., 0])  # [b i j]
    for _ in range(iterations - 1):
        z = torch.einsum("bij,bijk->bjk", logits.softmax(1), votes)
        logits = logits + cosine(votes, z.unsqueeze(1))
    c = logits.softmax(1)
    return c, torch.einsum("bij,bijk->bjk", c, votes)


@torch.no_grad()
def plain_contrast(x: Tensor, W: Tensor, iterations: int = 3) -> Tensor:
    """d/dW [i j k d] of mean F(data) - mean F(model): minus eq. 18, the data's phase less the model's.

    Forward to z, h = squash(z), in reverse y_i = squash(sum_j c_ij W_ijᵀ h_j), forward again with the same c.
    """
    c, z = couple(x, W, iterations)
    expected = torch.einsum("ijkd,bjk->bijd", W, squash(z))
    y = squash(torch.einsum("bij,bijd->bid", c, expected))
    again = torch.einsum("bij,bijk->bjk", c, torch.einsum("ijkd,bid->bijk", W, y))
    return _phase(y, c, again) - _phase(x, c, z)


def _phase(x: Tensor, c: Tensor, z: Tensor) -> Tensor:
    """mean_b 2 c_ij z_j x_iᵀ / (1 + |z_j|²) [i j k d]."""
    a = 2 * z / (1 + z.square().sum(-1, keepdim=True)) / len(x)  # [b j k]
    return torch.einsum("bijk,bid->ijkd", torch.einsum("bij,bjk->bijk", c, a), x)
