"""Test images that are stored with the weights of a model, for machines without its data."""

from __future__ import annotations

from torchcaps.data import Dataset
from torchcaps.data.preprocess import Preprocess
from torchcaps.train.run import TrainedRun
from torchcaps.train.weights_export import EXAMPLES, FACTOR_PREFIX

__all__ = ["stored_examples"]


def stored_examples(run: TrainedRun) -> Dataset | None:
    """Return the test images that are stored with the weights of a run.

    Args:
        run: A run, or weights alone.

    Returns:
        Images, labels and factors, to be preprocessed as the model's own data; None if there are none.
    """
    # Only weights that were given away bring images; the checkpoint of a run has none.
    if not all(name in run.extra for name in EXAMPLES):
        return None
    images, labels = (run.extra[name] for name in EXAMPLES)
    data = run.recipe.data
    return Dataset(
        images,
        labels,
        run.model.spec.classes,
        factors={
            name.removeprefix(FACTOR_PREFIX): values
            for name, values in run.extra.items()
            if name.startswith(FACTOR_PREFIX)
        },
        names=run.class_names,
        preprocess=Preprocess(
            None,
            bool(getattr(data, "standardize", False)),
            per_channel=getattr(data, "standardize_per", "image") == "channel",
        ),
    )
