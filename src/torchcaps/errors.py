"""What torchcaps raises when its input is wrong: one line that says what came, what was wanted and what to do.

The command line prints that line and exits with code 2; a library user catches `TorchcapsError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DataError",
    "RecipeError",
    "ShapeError",
    "TorchcapsError",
    "TrainingError",
    "suggestion",
]


class TorchcapsError(ValueError):
    """Base of every error that a user's input can cause; its text is one line."""


class ShapeError(TorchcapsError):
    """A tensor or an image of the wrong size, or sizes that cannot fit together."""


class RecipeError(TorchcapsError):
    """A recipe, a setting or a flag with an unknown name or a value out of range."""


class DataError(TorchcapsError):
    """A data set that is absent, or images and labels that are not what they should be."""


class CheckpointError(TorchcapsError):
    """A file that is not a whole checkpoint of torchcaps, or one that belongs to something else."""


class TrainingError(TorchcapsError):
    """Training cannot go on: the loss is not finite, the disk is full, the output folder cannot be written."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error line: the closest known name, or the list of what is known.

    Args:
        name: What was given.
        known: What would have been right.

    Returns:
        Text to append to the error.

    >>> suggestion("dynamc", ["dynamic", "em"])
    "; did you mean 'dynamic'?"
    >>> suggestion("zzz", ["dynamic", "em"])
    '; known: dynamic, em'
    """
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(options)}" if options else ""
