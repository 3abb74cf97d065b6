"""Windows over grids for tests, and which places each sees, found step by step."""

from __future__ import annotations

from torchcaps.math.grid import Grid, Window

__all__ = ["UNREACHED", "WINDOWS", "Place", "places_seen", "positions"]

Place = tuple[int, int]

UNREACHED = Grid(14, 14).window(3, 2)
"""Its last window ends at place 12: row 13 and column 13 belong to none."""

WINDOWS = [
    Grid(3, 3).window(3, 1),
    Grid(4, 5).window(2, 1),
    Grid(5, 4).window(3, 2),
    Grid(6, 6).window(3, 3),
    Grid(7, 5).window(2, 3),
    Grid(6, 7).window(1, 2),
    UNREACHED,
]


def positions(window: Window) -> list[Place]:
    """The top left place of every window position, in row order: as long as the window fits, step by step."""
    grid, found = window.grid, []
    for top in range(0, grid.height, window.stride):
        for left in range(0, grid.width, window.stride):
            if top + window.kernel <= grid.height and left + window.kernel <= grid.width:
                found.append((top, left))
    return found


def places_seen(window: Window) -> list[list[Place]]:
    """For each window position the n places that it sees, in row order."""
    inside = range(window.kernel)
    return [[(top + y, left + x) for y in inside for x in inside] for top, left in positions(window)]
