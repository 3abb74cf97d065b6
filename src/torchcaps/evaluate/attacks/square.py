"""Square (Andriushchenko 2020, L-infinity): a random search that asks a model for its answers, never for a gradient.

It starts from stripes, x_0 ± epsilon by column and channel. Then it tries one square after the other, all of it
x_0 ± epsilon by channel, and keeps what lowers the margin by which the label wins. Squares shrink as queries go by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcaps.evaluate.attacks.gradients import Logits, ball, row_numbers
from torchcaps.utils.random import uniform

__all__ = ["margin", "side_at", "square"]

_HALVED = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Of 10,000 queries, those after which squares have half the area: the authors' schedule, scaled to other budgets."""


def margin(logits: Tensor, labels: Tensor) -> Tensor:  # [b]
    """f_t - max_{j != t} f_j of logits [b j] and labels [b]: below 0 where another class wins."""
    t = labels[:, None]
    others = logits.scatter(1, t, -torch.inf).amax(1)
    return logits.gather(1, t).squeeze(1) - others


@torch.no_grad()
def square(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    queries: int = 300,
    share: float = 0.8,
    seed: int = 0,
    rows: Tensor | None = None,
) -> Tensor:
    """Images [b c h w] whose margin is never above that of those that came; one that another class wins is let be.

    `queries` is how many changed images a model is asked about for each image, `share` the area of the first square.
    All is a function of (seed, row): `rows` [b] number the images in their set; 0, 1, ... if not given.
    """
    low, high = ball(images, epsilon)
    rows = row_numbers(images, rows)
    before = margin(logits(images), labels)  # [b]
    best = images.clone()
    # A margin of infinity makes the first query, the stripes, replace the image in any case.
    lowest = torch.full_like(before, torch.inf)
    for query in range(queries if epsilon > 0 else 0):
        # Images that are fooled, or were wrong from the start, need no further query.
        live = ((before >= 0) & (lowest >= 0)).nonzero().flatten()
        if not len(live):
            break
        # Try a square on each of the others, and keep it where it lowers the margin.
        side = side_at(query, queries, share, (images.shape[2], images.shape[3]))
        tried = _tried(best[live], low[live], high[live], rows[live], (seed, query, side))
        m = margin(logits(tried), labels[live])
        better = m < lowest[live]
        best[live[better]] = tried[better]
        lowest[live[better]] = m[better]
    # Where nothing came below the image itself, that is returned.
    return torch.where((lowest < before)[:, None, None, None], best, images)


def side_at(query: int, queries: int, share: float, size: tuple[int, int]) -> int:
    """The side of the square that is tried at a query on an image of this height and width."""
    # The schedule is for 10,000 queries, so the query is scaled to that.
    halvings = sum(10_000 * query / queries > after for after in _HALVED)
    area = share / 2**halvings * size[0] * size[1]
    return min(max(1, round(math.sqrt(area))), *size)


def _tried(best: Tensor, low: Tensor, high: Tensor, rows: Tensor, how: tuple[int, int, int]) -> Tensor:
    """Stripes at first, then `best` with a square in it; `low` and `high` are x_0 ± epsilon, clipped to [0, 1]."""
    seed, query, side = how
    _, c, h, w = best.shape
    if query == 0:
        up = uniform(seed, rows, query, count=c * w).view(-1, c, 1, w) < 0.5
        return torch.where(up, high, low)
    # Two random numbers place the square, the others choose a sign for each channel.
    u = uniform(seed, rows, query, count=2 + c)[..., None, None]  # [b 2+c 1 1]
    inside = _from(u[:, :1], side, h).view(-1, 1, h, 1) & _from(u[:, 1:2], side, w).view(-1, 1, 1, w)
    up = u[:, 2:] < 0.5  # [b c 1 1]
    tried = torch.where(inside, torch.where(up, high, low), best)
    idle = (tried == best).flatten(1).all(1)[:, None, None, None]  # the other signs may do more than nothing
    return torch.where(idle & inside, torch.where(up, low, high), tried)


def _from(u: Tensor, side: int, length: int) -> Tensor:
    """[... length] true at `side` places that start where u in [0, 1) says."""
    start = (u * (length - side + 1)).long()
    at = torch.arange(length, device=u.device)
    return (at >= start) & (at < start + side)
