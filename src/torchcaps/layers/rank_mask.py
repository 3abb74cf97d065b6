"""Rank-sparse competition with a lifetime constraint (Rawlinson 2018, eqs. 1-7 and algorithm 1).

    z_j = s_j g_j     r_j = rank of z_j (0 = largest)     m_j = exp(-gamma r_j / (J - 1)), 0 below the cut     v' = v m
    mu_j <- alpha mu_j + (1 - alpha) phi_j, phi_j = share of the batch in which j came first
    every `every` batches: g_j + delta where mu_j < low, max(1, g_j - delta) where mu_j > high

(s_j the support that routing gave capsule j; psi in the paper. Relative, it is s_j over its own moving average, so that
what counts is for whom a capsule has more support than usual: of EM routing, whose capsules differ more from each other
than one does from image to image, one capsule would come first for all images, then the next.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers.capsules import check_positive

__all__ = ["Restart", "SparseMask", "rank", "rank_mask", "update_boost", "update_frequency"]


def rank(support: Tensor) -> Tensor:
    """Return the rank of each number: 0 for the largest of a row, J - 1 for the smallest; ties go to the lower index.

    Args:
        support: [... j].

    Returns:
        [... j] integers.
    """
    # The second argsort inverts the permutation of the first: places in the order become ranks
    return support.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)


def rank_mask(ranks: Tensor, gamma: float, cut: float = 0.01) -> Tensor:
    """Return the mask m = exp(-gamma r / (J - 1)), and 0 where that is below `cut`; a lone capsule is never masked.

    Args:
        ranks: r [... j].
        gamma: How fast the mask falls.
        cut: The least mask that counts.

    Returns:
        [... j] in [0, 1].
    """
    # With a single capsule J - 1 is 0, and so is its rank
    relative = ranks / max(ranks.shape[-1] - 1, 1)
    # Cut to exactly 0: small masks would still leak the pose to the decoder
    mask = torch.exp(-gamma * relative)
    return mask.masked_fill(mask < cut, 0.0)


def update_frequency(frequency: Tensor, first: Tensor, alpha: float) -> Tensor:
    """Return the moving average alpha mu + (1 - alpha) phi.

    Args:
        frequency: mu [j].
        first: phi [j], the share of samples in which each capsule came first.
        alpha: In [0, 1].

    Returns:
        [j].
    """
    return alpha * frequency + (1 - alpha) * first


def update_boost(boost: Tensor, frequency: Tensor, low: float, high: float, delta: float) -> Tensor:
    """Raise the boost of capsules that win too seldom, and lower it, down to 1, of those that win too often.

    Algorithm 1 of Rawlinson 2018.

    Args:
        boost: g [j].
        frequency: mu [j], how often each capsule came first.
        low: Below it, a boost rises by `delta`.
        high: Above it, a boost falls by `delta`.
        delta: The step.

    Returns:
        [j].
    """
    # Not below 1: frequent winners only lose the boost that they were given
    raised = torch.where(frequency < low, boost + delta, boost)
    return torch.where(frequency > high, (raised - delta).clamp_min(1.0), raised)


class Restart(NamedTuple):
    """A capsule that is to become a noisy copy of another.

    Attributes:
        capsule: Which comes first too seldom.
        source: Which comes first most often.
    """

    capsule: int
    source: int


class SparseMask(nn.Module):
    """support [b j] -> mask [b j]; its lifetime statistics are buffers, so they are part of every checkpoint.

    Args:
        capsules: J.
        gamma: How fast the mask falls with the rank.
        cut: The least mask that counts.
        alpha: Of the moving averages.
        delta: Step of a boost.
        every: Training batches from one boost to the next.
        band: Lifetime frequencies (low, high) within which a boost stays; None for (.64, 1.6) / J, the paper's
            [.04, .1] at its J = 16.
        relative: Rank by the support over its own moving average.
        ramp: Training batches over which gamma rises from 0 (not in the paper), so that all capsules learn to draw
            before they specialize; 0 = none.

    Raises:
        ShapeError: If `capsules` or `every` are below 1.
        RecipeError: If the band or the ramp make no sense.
    """

    frequency: Tensor
    boost: Tensor
    batches: Tensor
    usual: Tensor

    def __init__(
        self,
        capsules: int,
        *,
        gamma: float = 12.0,
        cut: float = 0.01,
        alpha: float = 0.99,
        delta: float = 0.1,
        every: int = 50,
        band: tuple[float, float] | None = None,
        relative: bool = False,
        ramp: int = 0,
    ) -> None:
        super().__init__()
        check_positive(capsules=capsules, every=every)
        # Check the settings
        low, high = band or (0.64 / capsules, 1.6 / capsules)
        if not 0 <= low <= high:
            raise RecipeError(f"the band of lifetime frequencies is ({low}, {high}); 0 <= low <= high is wanted")
        if ramp < 0:
            raise RecipeError(f"ramp = {ramp}; 0 batches or more are wanted")
        self.gamma = gamma
        self.cut = cut
        self.alpha = alpha
        self.delta = delta
        self.every = every
        self.low = low
        self.high = high
        self.relative = relative
        self.ramp = ramp
        # Lifetime statistics: every capsule starts as an average one, and without a boost
        if relative:
            self.register_buffer("usual", torch.ones(capsules))
        self.register_buffer("frequency", torch.full((capsules,), 1 / capsules))
        self.register_buffer("boost", torch.ones(capsules))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, support: Tensor) -> tuple[Tensor, Tensor]:
        """Rank the capsules of each sample by their support.

        Args:
            support: [b j].

        Returns:
            The mask [b j] in [0, 1], and the ranks [b j] that made it.

        Raises:
            ShapeError: If there is not one number for each capsule.
        """
        if support.ndim != 2 or support.shape[1] != len(self.boost):
            raise ShapeError(f"support has shape {list(support.shape)}; [b {len(self.boost)}] is wanted")
        # Ranks have no gradient: the mask is a constant of the sample
        ranks = rank(self.score(support.detach()))
        return rank_mask(ranks, self.gamma * self._gamma_now(), self.cut).to(support.dtype), ranks

    def score(self, support: Tensor) -> Tensor:
        """Return what capsules are ranked by [b j]: support [b j] times boost, over the usual support if relative."""
        z = support * self.boost  # [b j]
        return z / self.usual.clamp_min(torch.finfo(z.dtype).tiny) if self.relative else z

    def _gamma_now(self) -> float:
        """The share of gamma that the ramp has reached: in evaluation, all of it."""
        return min(1.0, int(self.batches) / self.ramp) if self.training and self.ramp else 1.0

    def count_in_band(self, share: Tensor) -> Tensor:
        """How many capsules are inside the band, by the share [j] of images in which each comes first."""
        return ((share >= self.low) & (share <= self.high)).sum()

    @torch.no_grad()
    def observe(self, ranks: Tensor) -> None:
        """Account for one training batch of ranks [b j]; call it once a step, on every process with the whole batch."""
        self.observe_share((ranks == 0).to(self.frequency.dtype).mean(0))

    @torch.no_grad()
    def observe_support(self, mean: Tensor) -> None:
        """If support is relative: the mean [j] over one training batch, before `observe_share` counts the batch."""
        if self.relative:
            self.usual.copy_(mean if int(self.batches) == 0 else update_frequency(self.usual, mean, self.alpha))

    @torch.no_grad()
    def observe_share(self, first: Tensor) -> None:
        """As `observe`, from the share [j] of the batch in which each capsule came first."""
        self.frequency.copy_(update_frequency(self.frequency, first, self.alpha))
        self.batches.add_(1)
        if int(self.batches) % self.every == 0:
            self.boost.copy_(update_boost(self.boost, self.frequency, self.low, self.high, self.delta))

    @torch.no_grad()
    def pick_restarts(self, share: float) -> list[Restart]:
        """Pick the capsules that come first too seldom; each is counted as sharing its source's images from now on.

        Args:
            share: Of an even part of the images, below which a capsule is picked.

        Returns:
            The copies to make, in this order: a capsule that was just copied may be the next one's source.
        """
        picked = []
        for j in range(len(self.frequency)):
            source = int(self.frequency.argmax())
            if j == source or float(self.frequency[j]) * len(self.frequency) >= share:
                continue
            picked.append(Restart(j, source))
            self.frequency[source] /= 2
            self.frequency[j] = self.frequency[source]
            self.boost[j] = self.boost[source]
        return picked
