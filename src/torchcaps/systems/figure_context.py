"""What a figure is, and what it is drawn from: a trained model, options, and test images.

A system lists its figures as `Figure` records. All figures of one run share one context, which loads the test images
and runs the network over them at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchcaps.config import Seed, check
from torchcaps.data import Dataset
from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.evaluate.factors import class_capsules
from torchcaps.evaluate.figures import pixels
from torchcaps.models import CapsNet, MatrixCaps, Model
from torchcaps.types import Capsules
from torchcaps.utils.random import permutation

__all__ = ["ClassFigureContext", "ComparedRun", "Figure", "FigureContext", "FigureOptions", "draw_figure"]

M = TypeVar("M", bound=Model)
C = TypeVar("C", CapsNet, MatrixCaps)
F = TypeVar("F", bound="FigureContext[Any]")


@dataclass(frozen=True)
class FigureOptions:
    """What the user asks of a figure.

    Attributes:
        capsules: Indices of capsules to draw; empty for the figure's own choice.
        count: How many samples of a capsule, and how many test images.
        domain: Where poses are sampled, for systems that sample; None for the system's default.
        seed: Picks samples and test images.

    Raises:
        RecipeError: If one has the wrong type, or the seed is negative.
    """

    capsules: tuple[int, ...] = ()
    count: int = 8
    domain: str | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        check(self)


class ComparedRun(NamedTuple):
    """Another run that a figure shows beside the run it is drawn of, with test images of its own."""

    name: str
    system: str
    model: Model
    data: Dataset


@dataclass(frozen=True)
class FigureContext(Generic[M]):
    """What all figures of one run are drawn from.

    Attributes:
        model: The trained model.
        options: What the user asks for.
        load: Loads the test images; called when a figure needs them, once.
        name: What legends call the run.
        compared: Other runs to show beside it.
    """

    model: M
    options: FigureOptions
    load: Callable[[], Dataset]
    name: str = "this run"
    compared: tuple[ComparedRun, ...] = ()

    @property
    def capsule_count(self) -> int:
        """How many capsules there are to choose from: one for each class, unless a subclass says otherwise."""
        return self.model.spec.classes

    @cached_property
    def data(self) -> Dataset:
        """The test images."""
        return self.load()

    @property
    def rows(self) -> Tensor:
        """[b] indices of as many test images as the options ask for, picked by the seed."""
        return self.pick(torch.arange(len(self.data)))

    def pick(self, rows: Tensor) -> Tensor:
        """Choose as many of the indices [n] as the options ask for, by the seed."""
        return rows[permutation(self.options.seed, 0, len(rows))[: self.options.count]]

    def images(self, rows: Tensor) -> Tensor:
        """[b h w] or [b h w 3] test images as they are stored, whatever the model's input format is."""
        return pixels(self.data.pixels(rows))

    def names(self, classes: Tensor) -> list[str]:
        """Name the classes [b], or the several classes [b m] of each image."""
        return [", ".join(map(self.data.name_of, row)) for row in classes.view(len(classes), -1).tolist()]


@dataclass(frozen=True)
class ClassFigureContext(FigureContext[C], Generic[C]):
    """The context of a system that has one capsule for each class.

    Attributes:
        known: The class capsules of all test images, if they have been computed already.
    """

    known: Capsules | None = field(default=None, kw_only=True)

    @cached_property
    def classes(self) -> Capsules:
        """The class capsules [n j k] of all test images."""
        return class_capsules(self.model, self.data) if self.known is None else self.known

    def encode(self, rows: Tensor) -> Capsules:
        """Return the class capsules [b j k] of some test images [b], taken from `classes` if those are computed."""
        # A cached property is in __dict__ once it was computed; asking for it here would encode all images.
        if self.known is not None or "classes" in self.__dict__:
            return Capsules(self.classes.pose[rows], self.classes.activation[rows])
        capsules: Capsules = self.model.encode(self.data.model_input(rows))
        return capsules


def _always_available(context: object) -> None:
    return None


@dataclass(frozen=True)
class Figure(Generic[F]):
    """One kind of figure.

    Attributes:
        caption: What it shows, in one sentence.
        draw: Context -> PNG files by name (without .png). Called in evaluation mode, without gradients.
        options: Which of the options "capsule", "domain" and "beside" it depends on; it is refused with another.
        by_default: False if it is drawn only when it is asked for by name.
        obstacle: Context -> why it cannot be drawn of these options or data, None if it can.
    """

    caption: str
    draw: Callable[[F], dict[str, bytes]]
    options: tuple[str, ...] = ()
    by_default: bool = True
    obstacle: Callable[[F], str | None] = _always_available


@torch.inference_mode()
def draw_figure(figures: Mapping[str, Figure[F]], kind: str, context: F) -> dict[str, bytes]:
    """Draw one kind of figure, or say in one line why it cannot be drawn.

    Args:
        figures: Kind -> figure, those of the model's system.
        kind: Which of them.
        context: What it is drawn from.

    Returns:
        PNG files by name (without .png).

    Raises:
        RecipeError: If the kind is unknown, or cannot be drawn of the options or data at hand.
        ShapeError: If the options name a capsule that does not exist.
    """
    # Refuse what cannot be drawn; where the data are the obstacle, name what can be.
    if kind not in figures:
        raise RecipeError(f"unknown figure '{kind}'{suggestion(kind, figures)}")
    for j in context.options.capsules:
        if not 0 <= j < context.capsule_count:
            raise ShapeError(f"capsule {j} is wanted; there are 0 to {context.capsule_count - 1}")
    if reason := figures[kind].obstacle(context):
        possible = [name for name, figure in figures.items() if not figure.obstacle(context)]
        raise RecipeError(f"figure '{kind}' {reason}; ask for: {', '.join(possible)}")
    model: nn.Module = context.model
    model.eval()
    return figures[kind].draw(context)
