"""A checkpoint to give away: the weights without what only training needs, and nothing of the machine it comes from."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from torchcaps.train.checkpoint import Checkpoint

__all__ = ["EXAMPLES", "strip_to_weights"]

EXAMPLES = ("examples.images", "examples.labels")
"""The names of the images, bytes [n c h w], and labels [n] that may go along."""


def strip_to_weights(
    checkpoint: Checkpoint, *, half: bool = False, examples: tuple[Tensor, Tensor] | None = None
) -> Checkpoint:
    """The model's state alone, in half precision if wanted; it loads as any run does, but cannot be resumed.

    `examples` are images, bytes [n c h w], and labels [n] to show the model without its data.
    """
    kept = {name: value for name, value in checkpoint.tensors.items() if name.startswith("state.model.")}
    if half:
        kept = {name: value.half() if value.dtype == torch.float32 else value for name, value in kept.items()}
    state = {"model": checkpoint.meta["state"]["model"], "optimizer": None, "schedule": None}
    meta = {**checkpoint.meta, "recipe": _anonymous(checkpoint.meta["recipe"]), "state": state, "slim": True}
    return Checkpoint(kept | dict(zip(EXAMPLES, examples or (), strict=False)), meta)


def _anonymous(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without folders of one's own: where data lie, and all but the name of the run it started from."""
    data = {key: None if key == "data_dir" else value for key, value in recipe["data"].items()}
    start = recipe.get("start")
    return {**recipe, "data": data, "start": start and PurePath(start).name}
