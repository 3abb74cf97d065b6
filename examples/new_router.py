"""A router of your own
====================

A router of your own in one file, used by name in a model (docs/develop/new_router.md).

Attention routing takes one step. The mean of a parent's votes is its query, and a child looks for the parents whose
query its votes resemble:

    q_j = mean_i V_ij      c_ij = softmax_j(sharpness cos(V_ij, q_j))      v_j = squash(sum_i c_ij V_ij)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import torchcaps
from torchcaps.config import PositiveFloat
from torchcaps.math import cosine, norm, squash
from torchcaps.routing import ROUTERS, Compete, Router, stack_info
from torchcaps.testing import assert_router
from torchcaps.types import Capsules, ImageSpec, RoutingInfo


@dataclass(frozen=True)
class Attention:
    """Settings of attention routing; `sharpness` 0 would be uniform coupling."""

    sharpness: PositiveFloat = 4.0


def route(
    votes: Tensor, activation: Tensor, settings: Attention, compete: Compete, trace: bool
) -> tuple[Capsules, RoutingInfo]:
    """Votes [b i j k] -> parents (v_j, |v_j|) and the record of the only iteration."""
    query = votes.mean(1, keepdim=True)  # [b 1 j k]
    coupling = compete(settings.sharpness * cosine(votes, query)).exp()  # [b i j]
    pose = squash(torch.einsum("bij,bijk->bjk", coupling, votes))
    parents = Capsules(pose, norm(pose))
    return parents, stack_info([RoutingInfo(coupling, parents=parents if trace else None)])


ROUTERS["attention"] = Router(Attention, route, activation_is_length=True)


def main() -> None:
    """Hold the router to the contract, then choose it by name in a recipe, as `--model.routing.name attention` does."""
    assert_router("attention", Attention(sharpness=2.0))
    recipe = torchcaps.load_recipe("capsnet-glyphs", {"model": {"routing": {"name": "attention", "sharpness": 2.0}}})
    torch.manual_seed(0)
    model = recipe.model.build(ImageSpec(channels=1, height=28, width=28, classes=10))
    out = model(torch.rand(4, 1, 28, 28))
    entropy = out.info.entropy.mean() / torch.tensor(10.0).log()
    print(f"attention keeps the contract; classes {list(out.classes.pose.shape)}, entropy {entropy:.3f} of log J")


if __name__ == "__main__":
    main()
