"""
1. Capsules from scratch in forty lines
=======================================

A capsule is a short vector. Its length says whether something is present, its direction says how it looks. This
tutorial writes a capsule network in plain PyTorch, trains it for some seconds, and compares it with the library.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torchcaps import Capsules, route
from torchcaps.data import GlyphsConfig

# %%
# Images
# ------
# Digits drawn by code: no download, and any number of them. Each image is 20x20 pixels.

splits = GlyphsConfig(train=1000, test=200, size=20).load()
images = splits.train.model_input(slice(None))  # [n 1 20 20], from 0 to 1
labels = splits.train.labels

fig, axes = plt.subplots(1, 8, figsize=(8, 1.2))
for axis, image in zip(axes, images, strict=False):
    axis.imshow(image[0], cmap="gray")
    axis.axis("off")

# %%
# Forty lines
# -----------
# Each child capsule i predicts each parent capsule j with a matrix of its own: its *vote* is V_ij = W_ij x_i. Routing
# then repeats three steps: share each child among the parents (softmax), add up the votes, and give more of a child to
# the parents that agree with its vote. These are the letters of every shape here: b batch, i child, j parent, d and k
# numbers of a child's and of a parent's pose.


def squash(s, dim=-1):
    """Keep the direction and shrink the length into [0, 1)."""
    square = s.square().sum(dim, keepdim=True)
    return s * square.sqrt() / (1 + square)


def dynamic_routing(votes, iterations=3):
    """Votes [b i j k] -> parents [b j k] and the coupling [b i j] of each iteration."""
    logits = torch.zeros(votes.shape[:3])
    history = []
    for _ in range(iterations):
        coupling = logits.softmax(dim=2)  # each child shares itself among the parents
        parents = squash(torch.einsum("bij,bijk->bjk", coupling, votes))
        logits = logits + torch.einsum("bijk,bjk->bij", votes, parents)  # agreement
        history.append(coupling.detach())
    return parents, history


class CapsuleNetwork(nn.Module):
    """20x20 image -> 8 types of children at 4x4 positions -> 10 class capsules of 12 numbers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8 * 8, kernel_size=8, stride=4)
        self.W = nn.Parameter(0.1 * torch.randn(128, 10, 12, 8))  # [i j k d]

    def children(self, images):
        x = self.conv(images).unflatten(1, (8, 8))  # [b type d h w]
        return squash(x.permute(0, 3, 4, 1, 2).flatten(1, 3))  # [b i d]

    def forward(self, images):
        votes = torch.einsum("ijkd,bid->bijk", self.W, self.children(images))
        return dynamic_routing(votes)


def margin_loss(lengths, labels):
    """Ask for a length over .9 for the class in the image and under .1 for all others."""
    present = nn.functional.one_hot(labels, 10)
    loss = present * (0.9 - lengths).clamp_min(0) ** 2 + 0.5 * (1 - present) * (lengths - 0.1).clamp_min(0) ** 2
    return loss.sum(1).mean()


# %%
# Training
# --------
# Nothing special: any optimizer of torch.

torch.manual_seed(0)
network = CapsuleNetwork()
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
losses = []
for _ in range(60):
    chosen = torch.randint(len(images), (50,))
    parents, _coupling = network(images[chosen])
    loss = margin_loss(parents.norm(dim=-1), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

with torch.no_grad():
    parents, history = network(splits.test.model_input(slice(None)))
accuracy = (parents.norm(dim=-1).argmax(1) == splits.test.labels).float().mean()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy on new images {accuracy:.0%}")

# %%
# What routing did
# ----------------
# At first each child shares itself equally among the ten classes. Then it prefers the classes that its vote agrees
# with. Bright cells are children (rows) that give most of themselves to one class (column).

fig, axes = plt.subplots(1, 3, figsize=(8, 3.4), sharey=True)
for axis, coupling, number in zip(axes, history, range(1, 4), strict=True):
    axis.imshow(coupling[0], aspect="auto", vmin=0, vmax=float(history[-1][0].max()))
    axis.set(title=f"iteration {number}", xlabel="class")
axes[0].set_ylabel("child")
fig.suptitle(f"Coupling of one image, a {splits.test.labels[0].item()}")
fig.tight_layout()

# %%
# The same with the library
# -------------------------
# ``torchcaps.route`` takes children and weights and never stores the votes, so it needs a fraction of the time and
# memory at larger sizes. It gives the same parents.

children = network.children(splits.test.model_input(slice(4)))
record = Capsules(children, children.norm(dim=-1))
ours, info = route(record, network.W, "dynamic", iterations=3)
print("largest difference", (ours.pose - parents[:4]).abs().max().item())

# %%
# Next: :doc:`train on your own pictures <plot_2_your_own_pictures>`, or read :doc:`what routing is
# </systems/routing>`.
