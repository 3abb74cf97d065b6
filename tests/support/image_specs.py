"""The images of each data set by its settings alone, so that a network can be built without loading data."""

from __future__ import annotations

from torchcaps.config import to_dict
from torchcaps.train import Recipe
from torchcaps.types import ImageSpec

SPECS = {
    "mnist": ImageSpec(1, 28, 28, 10),
    "fashion-mnist": ImageSpec(1, 28, 28, 10),
    "affnist": ImageSpec(1, 40, 40, 10),
    "multimnist": ImageSpec(1, 36, 36, 10),
    "cifar10": ImageSpec(3, 32, 32, 10),
    "smallnorb": ImageSpec(2, 48, 48, 5),
    "glyphs": ImageSpec(1, 28, 28, 10),
    "folder": ImageSpec(3, 28, 28, 4),
}


def spec_of(recipe: Recipe) -> ImageSpec:
    """Channels, height, width and classes of the images that a recipe's network takes."""
    data = to_dict(recipe)["data"]
    spec = SPECS[data["name"]]
    side = data.get("view", "none")
    return spec if side == "none" else ImageSpec(spec.channels, side, side, spec.classes)
