"""Join many small groups of images into fewer, those first between which there is no gap.

More ranking capsules than are wanted learn first: each knows few forms, and few of them stand for two classes. How near
two of them are is seen at the images that either wins: how much support the other has for them.

    n_j = share of the images that j wins
    a_jk = mean, over pairs of an image that j wins or k wins, of exp(-(s_j - s_k) / width), the winner first
    join the j and k with the smallest  n_j n_k / (n_j + n_k) / a_jk,  and so on

This is Ward's rule, by which small groups join before large ones, with 1 / a_jk for a squared distance. Groups that
together would win more than `LARGEST` even shares of the images do not join as long as others can.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_groups", "nearness"]

WIDTH = 0.05
"""Difference of two supports, on a scale from 0 to 2, at which an image stops being between two groups."""

LARGEST = 1.5
"""Even shares of the images that a group may win: two classes hardly ever fit into one such group of as many as there
are classes, and no class is left with one group of many."""


def nearness(support: Tensor) -> Tensor:
    """Measure how much support the other capsules have for the images that each wins.

    Args:
        support: s [b j].

    Returns:
        [j j]: row j, column k is the mean over images of [j wins] exp(-(s_j - s_k) / width).
    """
    best, winner = support.max(1)
    close = torch.exp((support - best.unsqueeze(1)) / WIDTH)  # [b k]
    wins = torch.nn.functional.one_hot(winner, support.shape[1]).to(support.dtype)  # [b j]
    return wins.T @ close / len(support)


def join_groups(near: Tensor, count: int) -> Tensor:
    """Join capsules, the nearest two at a time, until `count` groups are left.

    Args:
        near: Mean of `nearness` [j j] over many images; its diagonal is the share of images that each capsule wins.
        count: How many groups are wanted, at most j.

    Returns:
        [j] the number of each capsule's group, 0 to count - 1; a group has the place of its first capsule.
    """
    A = near.double()
    # The floor gives a capsule without images a finite cost
    n = A.diagonal().clamp_min(1e-6).clone()
    largest = LARGEST * float(n.sum()) / count
    A = A + A.T
    group = torch.arange(len(A))
    left = torch.ones(len(A), dtype=torch.bool)
    for _ in range(len(A) - count):
        # Each pair of what is left once: the upper triangle
        product = n.unsqueeze(1) * n
        cost = product.square() / ((n.unsqueeze(1) + n) * A.clamp_min(1e-12))
        pairs = (left.unsqueeze(1) & left).triu(1)
        fits = pairs & (n.unsqueeze(1) + n <= largest)
        allowed = fits if bool(fits.any()) else pairs
        j, k = divmod(int(cost.masked_fill(~allowed, torch.inf).argmin()), len(A))
        # Group k becomes part of group j
        A[j] += A[k]
        A[:, j] += A[:, k]
        n[j] += n[k]
        left[k] = False
        group[group == k] = j
    # Number the groups that are left
    numbers = torch.cumsum(left, 0) - 1
    return numbers[group]
