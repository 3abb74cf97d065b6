"""A router of your own
====================

Soft k-means routing in one file, used by name in a model (docs/develop/new_router.md). A parent is the mean of the
votes that it holds, and a child goes to the parents whose mean is near::

    m_j = sum_i R_ij a_i V_ij / sum_i R_ij a_i   R_ij = softmax_j(-sharpness |V_ij - m_j|^2 / 2)   a_j = exp(-variance)

No vote is stored: `Votes` computes them again where they are used, in compiled loops, forwards and backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import torchcaps
from torchcaps.config import Count, PositiveFloat
from torchcaps.kernels.votes import Votes
from torchcaps.routing import ROUTERS, Router, stack_info
from torchcaps.testing import assert_router
from torchcaps.types import Capsules, ImageSpec, RoutingInfo


@dataclass(frozen=True)
class KMeans:
    """Settings of soft k-means routing; `sharpness` 0 would be uniform coupling."""

    iterations: Count = 3
    sharpness: PositiveFloat = 4.0


def route(votes: Votes, settings: KMeans, trace: bool) -> tuple[Capsules, RoutingInfo]:
    """Votes -> parents (m_j [b p j k], a_j [b p j]) and the record of each iteration."""
    log_share = votes.uniform_log_share()  # log R_ij [b p i j]
    found = votes.moments(log_share)
    infos: list[RoutingInfo] = []
    for t in range(settings.iterations):
        if t > 0:  # children choose again among the parents of all places whose window holds them
            nothing = torch.zeros_like(found.log_mass)
            scale = torch.full_like(found.mean, settings.sharpness**0.5)
            log_share = votes.compete(votes.log_likelihood(found.mean, scale, nothing))
            found = votes.moments(log_share)
        parents = Capsules(found.mean, (-found.variance.mean(-1)).exp())
        record = RoutingInfo(log_share.detach().exp(), parents=parents if trace else None)
        infos = [*(infos if trace else []), record]
    return parents, stack_info(infos)


ROUTERS["k-means"] = Router(KMeans, route)

# %%
# Check the router against the contract, then choose it by name in a recipe, as `--model.routing.name k-means` does.

assert_router("k-means", KMeans(sharpness=2.0))
recipe = torchcaps.load_recipe("capsnet-glyphs", {"model": {"routing": {"name": "k-means", "sharpness": 2.0}}})
torch.manual_seed(0)
model = recipe.model.build(ImageSpec(channels=1, height=28, width=28, classes=10))
out = model(torch.rand(4, 1, 28, 28))
entropy = out.info.entropy.mean() / torch.tensor(10.0).log()
print(f"k-means satisfies the contract; class capsules {list(out.classes.pose.shape)}, entropy {entropy:.3f} of log J")
