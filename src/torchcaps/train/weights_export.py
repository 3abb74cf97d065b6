"""A checkpoint to give away: the weights without what only training needs, and nothing of the machine it comes from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchcaps.config import from_dict
from torchcaps.train.checkpoint import Checkpoint
from torchcaps.train.recipe import Recipe, without_folders

__all__ = ["EXAMPLES", "FACTOR_PREFIX", "strip_to_weights"]

EXAMPLES = ("examples.images", "examples.labels")
"""The names of the images, bytes [n c h w], and labels [n] that may go along."""

FACTOR_PREFIX = "examples.factors."
"""How the names of further facts [n] about these images begin, such as the azimuth of each."""

_MODEL = "state.model."
_AVERAGE = "state.average."
"""How the names of tensors begin: of the weights, and of their moving average."""


def strip_to_weights(
    checkpoint: Checkpoint,
    *,
    half: bool = False,
    examples: tuple[Tensor, Tensor] | None = None,
    names: Sequence[str] = (),
    sums: Collection[str] = (),
) -> Checkpoint:
    """Return the state of the model that is evaluated; it loads as any run does, but cannot be resumed.

    Args:
        checkpoint: The checkpoint of a run.
        half: Store weights in half precision.
        examples: Images, bytes [n c h w], and labels [n] to show the model without its data.
        names: Names of the classes.
        sums: Names of the model's tensors that only training reads (`Model.training_sums`); their rows are left out.
    """
    # Tensors of the model; whole numbers, such as counters, are not rounded.
    # A moving average of the weights takes the place of the weights themselves.
    averaged = any(name.startswith(_AVERAGE) for name in checkpoint.tensors)
    prefix = _AVERAGE if averaged else _MODEL
    kept = {
        _MODEL + name.removeprefix(prefix): value
        for name, value in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    for name in kept.keys() & {_MODEL + name for name in sums}:
        kept[name] = kept[name][:0].clone()
    if half:
        kept = {name: value.half() if value.dtype == torch.float32 else value for name, value in kept.items()}
    # The record: no optimizer, no folders of this machine.
    skeleton = checkpoint.state
    model = skeleton["model"] if isinstance(skeleton, dict) else None
    meta = replace(
        checkpoint.meta,
        recipe=from_dict(Recipe, without_folders(checkpoint.meta.recipe)),
        weights_only=True,
        class_names=tuple(names),
        data_fingerprint=None,
        validation_fingerprint=None,
        test_fingerprint=None,
    )
    state = {"model": model, "optimizer": None, "schedule": None}
    return Checkpoint(kept | dict(zip(EXAMPLES, examples or (), strict=False)), meta, state)
