"""Dynamic routing, EM routing and contrastive divergence with stored votes, as a strong user would write them.

Sums over votes are matrix products. Of several forms of dynamic routing `plain_dynamic`, and of EM routing
`MatmulVotes`, is the fastest that was found: it is what ours is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, relu

from torchcaps.kernels.votes import DenseVotes, Moments, Slots
from torchcaps.math.squash import cosine, squash

__all__ = ["MatmulVotes", "PlainCapsNet", "couple", "plain_contrast", "plain_dynamic"]


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


class MatmulVotes(DenseVotes):
    """Stored votes beside their squares: both steps of EM are batched matrix products with the two.

        sum_i w_i V_i and sum_i w_i V_i²              one product with the weights
        sum_k p_k (μ_k - ½ V_ik) V_ik                 one product with (p μ, -½ p), for the precision p

    The variance is E[V²] - E[V]², which loses digits where votes agree; the library's own forms do not.

    Args:
        votes: [b p i j k].
        activation: Activations of the children in [0, 1], [b n].
        slots: Which child stands in which slot.
    """

    def __init__(self, votes: Tensor, activation: Tensor, slots: Slots) -> None:
        super().__init__(votes, activation, slots)
        v = votes.transpose(2, 3)
        self.powers = torch.cat([v, v * v], -1)  # [b p j i (2 k)]

    def moments(self, log_weight: Tensor) -> Moments:
        log_a = self.log_activation  # [b p i]
        most = log_a.detach().amax(-1, keepdim=True)
        log_w = (log_weight + (log_a - most).unsqueeze(-1)).transpose(2, 3)  # [b p j i]
        mean, square = (log_w.softmax(-1).unsqueeze(-2) @ self.powers).squeeze(-2).chunk(2, -1)  # [b p j k]
        return Moments(log_w.logsumexp(-1) + most, mean, (square - mean * mean).clamp_min(0))

    def log_likelihood(self, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        precision = scale * scale  # [b p j k]
        factors = torch.cat([mean * precision, -0.5 * precision], -1)  # [b p j (2 k)]
        constant = bias - 0.5 * (mean * mean * precision).sum(-1)  # [b p j]
        return ((self.powers @ factors.unsqueeze(-1)).squeeze(-1) + constant.unsqueeze(-1)).transpose(2, 3)


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


class PlainCapsNet(nn.Module):
    """CapsNet of Sabour 2017 on 28x28 digits as a strong user would write it: torch's layers, votes stored."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 256, 9)
        self.primary = nn.Conv2d(256, 256, 9, stride=2)
        self.W = nn.Parameter(0.1 * torch.randn(1152, 10, 16, 8))
        self.decoder = nn.Sequential(
            nn.Linear(160, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Sigmoid()
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of digits [b 1 28 28] of classes [b]: margin, and .0005 of the summed squares of the redrawing."""
        features = self.primary(relu(self.conv(images)))  # [b (32 8) 6 6]
        children = features.unflatten(1, (32, 8)).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [b 1152 8]
        classes = plain_dynamic(squash(children), self.W, 3)  # [b 10 16]
        # Margin loss on the lengths
        length = classes.norm(dim=2)  # [b 10]
        present = one_hot(labels, 10).to(length.dtype)
        present_loss = present * relu(0.9 - length).square()
        absent_loss = 0.5 * (1 - present) * relu(length - 0.1).square()
        margin = (present_loss + absent_loss).sum(1).mean()
        # Reconstruction from the right capsule alone
        redrawn = self.decoder((classes * present.unsqueeze(2)).flatten(1))  # [b 784]
        loss: Tensor = margin + 0.0005 * (redrawn - images.flatten(1)).square().sum(1).mean()
        return loss
