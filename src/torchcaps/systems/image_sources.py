"""Where the test images of a run come from: its data set, or the images that are stored with its weights."""

from __future__ import annotations

from pathlib import Path

from torchcaps.config import Choice
from torchcaps.data import DATASETS, Dataset
from torchcaps.data.status import USER_DATA, is_here
from torchcaps.systems.base import System
from torchcaps.train.run import TrainedRun
from torchcaps.train.stored_examples import stored_examples

__all__ = ["figure_images", "load_test_images"]


def load_test_images(run: TrainedRun) -> Dataset:
    """Load the test images of a run; without its data set on this machine, those that are stored with its weights.

    Args:
        run: The run.

    Returns:
        Labeled images.

    Raises:
        DataError: The data set is absent and cannot be fetched, and the weights bring no images.
    """
    return _stored_instead(run) or run.recipe.data.load().test


def figure_images(system: System, run: TrainedRun, seed: int) -> Dataset:
    """Load the images that figures of a run are drawn from, as `load_test_images` does.

    Args:
        system: Of the run; it bounds their number.
        run: The run.
        seed: Picks images where there are too many.

    Returns:
        Labeled images.
    """
    return _stored_instead(run) or system.figure_images(run.recipe, seed)


def _stored_instead(run: TrainedRun) -> Dataset | None:
    """Return the images stored with the weights if the data set would have to be downloaded."""
    config = run.recipe.data
    name = Choice(DATASETS).name_of(config)
    # Pictures of the user's own are read where the recipe says; nobody could download them
    if name is None or name in USER_DATA:
        return None
    data_dir = getattr(config, "data_dir", None)
    return None if is_here(name, Path(data_dir) if data_dir else None) else stored_examples(run)
