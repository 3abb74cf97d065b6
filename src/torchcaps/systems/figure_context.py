"""What pictures of classifiers share: the scene that is drawn, and the front door that refuses what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.evaluate.factors import class_capsules
from torchcaps.evaluate.figures import pixels
from torchcaps.models.capsnet import CapsNet
from torchcaps.models.matrix import MatrixCaps
from torchcaps.systems.poe.figures import FigureOptions
from torchcaps.types import Capsules
from torchcaps.utils.random import permutation

__all__ = ["FigureContext", "draw_figure"]

M = TypeVar("M", CapsNet, MatrixCaps)


@dataclass(frozen=True)
class FigureContext(Generic[M]):
    """What is drawn: a model, what is wished, test images, and the class capsules of all of them if they are known."""

    model: M
    wish: FigureOptions
    data: Dataset
    known: Capsules | None = None

    @cached_property
    def classes(self) -> Capsules:
        """The class capsules of all images: those that are known, or else computed."""
        return class_capsules(self.model, self.data) if self.known is None else self.known

    @property
    def rows(self) -> Tensor:
        """As many images as are wished, picked by the seed."""
        return self.pick(torch.arange(len(self.data)))

    def pick(self, rows: Tensor) -> Tensor:
        """As many of the rows as are wished, picked by the seed."""
        return rows[permutation(self.wish.seed, 0, len(rows))[: self.wish.count]]

    def images(self, rows: Tensor) -> Tensor:
        """[b h w] or [b h w 3] the images as they are, whatever the model is shown of them."""
        return pixels(self.data.pixels(rows))

    def names(self, classes: Tensor) -> list[str]:
        """Of classes [b] or [b m]."""
        return [", ".join(map(self.data.name_of, row)) for row in classes.view(len(classes), -1).tolist()]


@torch.inference_mode()
def draw_figure(
    kind: str,
    figures: Mapping[str, Callable[[FigureContext[M]], dict[str, bytes]]],
    possible: Sequence[str],
    scene: FigureContext[M],
) -> dict[str, bytes]:
    """File name (without .png) -> PNG of one kind of the figures, of which the scene's data have some `possible`."""
    classes = scene.model.spec.classes
    labels = scene.data.labels
    if kind not in figures:
        raise RecipeError(f"unknown figure '{kind}'{suggestion(kind, figures)}")
    if kind not in possible:
        raise RecipeError(
            f"figure '{kind}' is not drawn of labels {list(labels.shape)}; ask for: {', '.join(possible)}"
        )
    for j in scene.wish.capsules:
        if not 0 <= j < classes:
            raise ShapeError(f"capsule {j} is wanted; there are 0 to {classes - 1}")
    scene.model.eval()
    return figures[kind](scene)
