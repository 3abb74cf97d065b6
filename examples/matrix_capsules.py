"""A matrix-capsule network by hand
================================

Build the network of Hinton 2018 from layers: a convolution, primary capsules, two convolutional capsule layers and
class capsules, all with EM routing. Then take five training steps.
"""

import torch
from torch import nn

from torchcaps.layers import ClassCapsules, ConvCapsules, PrimaryCapsules
from torchcaps.losses import spread_loss
from torchcaps.math import Grid
from torchcaps.routing import EM


class MatrixCapsules(nn.Module):
    """Hinton 2018, figure 1, with few types: every layer gives its grid of positions to the next."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        stem = Grid.of_image(size, size).window(kernel=5, stride=2)
        self.conv = nn.Conv2d(channels, 16, 5, stride=2)
        self.primary = PrimaryCapsules(stem.out, 16, types=4, dimension=16, activation="logistic")
        self.first = ConvCapsules(self.primary.grid, 4, 6, kernel=3, stride=2, routing=EM(iterations=2))
        self.second = ConvCapsules(self.first.grid, 6, 6, kernel=3, stride=1, routing=EM(iterations=2))
        self.classes = ClassCapsules(self.second.grid, 6, classes, routing=EM(iterations=2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        capsules = self.primary(self.conv(images).relu())
        for layer in (self.first, self.second, self.classes):
            capsules, _ = layer(capsules)
        return capsules.activation  # [b j]


# %%
# Five steps on random images: two channels, as the stereo pairs of smallNORB have.

torch.manual_seed(0)
model = MatrixCapsules(channels=2, size=32, classes=5)
images = torch.randn(8, 2, 32, 32)
labels = torch.arange(8) % 5
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(5):
    loss = spread_loss(model(images), labels, margin=0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
