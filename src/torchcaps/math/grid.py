"""Grids of places at which capsules stand, and the windows through which convolutional parents receive them.

A `Grid` is a set of places with the image coordinates of their receptive fields' centers; a `Window` slides over
one and makes the next. Layers are built from grids, so sizes that cannot fit fail at construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchcaps.errors import ShapeError

__all__ = ["Grid", "Window"]

_LONGEST_STRIDE = 256
"""Convolutions with absurd strides can crash the process."""


@dataclass(frozen=True)
class Grid:
    """height x width places; the center of place (row, column) lies at start + step * (row, column) pixels.

    Attributes:
        height: Rows of places.
        width: Columns of places.
        step: Pixels from one place to the next.
        start: Center of the first place's receptive field, in pixels, along both axes.

    Raises:
        ShapeError: If there is no place.

    >>> Grid.of_image(28, 28).window(9, 1).out.window(9, 2).out
    Grid(height=6, width=6, step=2.0, start=8.5)
    """

    height: int
    width: int
    step: float = 1.0
    start: float = 0.5

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ShapeError(f"a grid of {self.height}x{self.width} places has none; at least 1x1 is needed")

    @staticmethod
    def of_image(height: int, width: int, padding: int = 0) -> Grid:
        """Return the grid of the pixels themselves, with `padding` more on each side.

        The center of the image's first pixel is at (.5, .5), whatever the padding.
        """
        return Grid(height + 2 * padding, width + 2 * padding, start=0.5 - padding)

    @property
    def places(self) -> int:
        """How many places there are."""
        return self.height * self.width

    def window(self, kernel: int, stride: int) -> Window:
        """Return a kernel x kernel window that moves by `stride` places over this grid.

        Raises:
            ShapeError: If it does not fit.
        """
        return Window(self, kernel, stride)

    def centers(self, scale: float = 1.0) -> Tensor:
        """Return the center [(h w) 2] (row, column) of each place's receptive field, in pixels times `scale`."""
        rows = self.start + self.step * torch.arange(self.height)
        columns = self.start + self.step * torch.arange(self.width)
        return torch.cartesian_prod(rows, columns).view(-1, 2) * scale


@dataclass(frozen=True)
class Window:
    """A square window over a grid: position p of the grid `out` covers n = kernel^2 places below it.

    Places that the last stride does not reach belong to no window, as in a convolution without padding.

    Attributes:
        grid: The places below.
        kernel: Side of the window, in places.
        stride: Places from one position to the next.

    Raises:
        ShapeError: If kernel or stride are below 1, or the window does not fit.
    """

    grid: Grid
    kernel: int
    stride: int

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.stride < 1:
            raise ShapeError(f"a window needs kernel and stride of 1 or more, got {self.kernel} and {self.stride}")
        if self.stride > _LONGEST_STRIDE:
            raise ShapeError(f"a stride of {self.stride}; at most {_LONGEST_STRIDE} is wanted")
        if self.kernel > min(self.grid.height, self.grid.width):
            # The error speaks of pixels, as that is what a user can change
            pixels = int(2 * self.grid.start + self.grid.step * (self.kernel - 1))  # what the first window sees
            raise ShapeError(
                f"a {self.kernel}x{self.kernel} window does not fit {self.grid.height}x{self.grid.width} places; "
                f"images of at least {pixels}x{pixels} pixels or a smaller kernel are wanted"
            )

    @property
    def out(self) -> Grid:
        """The grid of window positions, each at the center of the places that it covers."""
        below = self.grid
        reach = self.kernel
        return Grid(
            (below.height - reach) // self.stride + 1,
            (below.width - reach) // self.stride + 1,
            below.step * self.stride,
            below.start + below.step * (reach - 1) / 2,
        )

    def covered(self, device: torch.device) -> Tensor:
        """Return the places [p n] of the flat grid that each window position covers, in row order."""
        return _covered_places(self).to(device)

    def gather(self, x: Tensor) -> Tensor:
        """Copy, for each window position, every capsule that it covers.

        Args:
            x: [b h w i d].

        Returns:
            [b p (n i) d].
        """
        # One index operation on flat places, with all numbers of a place as one row
        b, _, _, i, d = x.shape
        covered = self.covered(x.device)
        patches = x.reshape(b, self.grid.places, i * d)[:, covered.flatten()]  # [b (p n) (i d)]
        return patches.view(b, len(covered), covered.shape[1] * i, d)


def _covered_lists(window: Window) -> list[list[int]]:
    """For each window position, the flat places that it covers, in row order. Plain lists: compilers follow them."""
    out = window.out
    width = window.grid.width
    # Places relative to the first one of a window, and that first place for every position
    inside = [row * width + column for row in range(window.kernel) for column in range(window.kernel)]
    corners = [(row * width + column) * window.stride for row in range(out.height) for column in range(out.width)]
    return [[corner + place for place in inside] for corner in corners]


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _covered_places(window: Window) -> Tensor:
    """[p n] index into the flat grid of each place that each window position covers, in row order."""
    return torch.tensor(_covered_lists(window), device="cpu")
