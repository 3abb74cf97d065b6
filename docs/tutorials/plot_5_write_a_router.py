"""
5. Write a router
=================

A router is a pure function from votes to parents. This tutorial writes one, checks it against the contract of the
library, and uses it by name in a network.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

import torchcaps
from torchcaps.config import Count, PositiveFloat
from torchcaps.math import norm, squash
from torchcaps.routing import ROUTERS, Router, stack_info
from torchcaps.testing import assert_router
from torchcaps.types import Capsules, ImageSpec, RoutingInfo

# %%
# The idea
# --------
# Dynamic routing adds up agreement over the iterations. Ours forgets: each iteration starts from the parents of the
# last one and sharpens the choice by the cosine between a vote and its parent. In the letters of the library (i child,
# j parent, t iteration)::
#
#     c_ij = softmax_j(sharpness cos(V_ij, v_j))        v_j = squash(sum_i c_ij V_ij)
#
# The settings are a frozen dataclass. Its annotations are the checks.


@dataclass(frozen=True)
class Forgetful:
    """Settings of the router."""

    iterations: Count = 3
    sharpness: PositiveFloat = 4.0


# %%
# The function
# ------------
# ``votes`` is an object that computes the votes where they are used and never stores them. ``compete`` is a log-softmax
# over all parents that compete for a child; in a convolutional layer these are at several places p. The record of
# routing holds every iteration if ``trace`` is set, and the last one otherwise.


def route(votes, settings, trace):
    """Votes -> parents [b p j k], and the record."""
    logits = votes.new_pairs(0.0)  # [b p i j]
    infos = []
    for _ in range(settings.iterations):
        coupling = votes.compete(logits).exp()
        pose = squash(votes.total(coupling))  # [b p j k]
        parents = Capsules(pose, norm(pose))
        infos.append(RoutingInfo(coupling, parents=parents if trace else None))
        logits = settings.sharpness * votes.dot(pose / norm(pose, keepdim=True)) / votes.lengths()
    return parents, stack_info(infos if trace else infos[-1:])


ROUTERS["forgetful"] = Router(Forgetful, route, activation_is_length=True)

# %%
# The contract
# ------------
# ``assert_router`` checks shapes, shares that sum to 1, permutations, determinism, derivatives and more, on small
# random votes. It raises an error that names the law that failed.

assert_router("forgetful", Forgetful(sharpness=2.0))
print("the router satisfies the contract")

# %%
# Compare it
# ----------
# Six children; the first four agree on parent 0. Our router finds that out. Dynamic routing does not: its dot products
# also count how long a vote is, and the votes for the other parents are longer.

torch.manual_seed(1)
children = Capsules(torch.randn(1, 6, 4), torch.ones(1, 6))
weights = torch.randn(6, 3, 4, 4)  # [i j k d]
for i in range(4):
    x = children.pose[0, i]
    weights[i, 0] = torch.outer(torch.tensor([1.0, -1.0, 0.5, 0.0]), x) / (x @ x)
fig, axis = plt.subplots(figsize=(5, 3))
for name in ("dynamic", "forgetful"):
    _, info = torchcaps.route(children, weights, name, iterations=5, trace=True)
    axis.plot(range(1, 6), info.coupling[:, 0, :4, 0].mean(1), "o-", label=name)
axis.set(xlabel="iteration", ylabel="share of parent 0", title="Children that agree")
axis.legend()
fig.tight_layout()

# %%
# Use it
# ------
# The name now works in every layer, model and recipe.

recipe = torchcaps.load_recipe("capsnet-glyphs", {"model": {"routing": {"name": "forgetful", "sharpness": 2.0}}})
model = recipe.model.build(ImageSpec(channels=1, height=28, width=28, classes=10))
print(model(torch.rand(2, 1, 28, 28)).classes.pose.shape)

# %%
# Next: :doc:`the full contract </develop/new_router>`, or :doc:`write a system <plot_6_write_a_system>`.
