"""What training and evaluation ask of a model, and the one check of its images."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from torchcaps.errors import DataError, ShapeError
from torchcaps.types import Batch, ImageSpec

__all__ = ["Model", "ModelConfig", "check_images", "check_spec"]


class Model(nn.Module):
    """A network that can say what it wants: `objective(batch, step)["loss"]` is the scalar that training lowers.

    The other entries of that dictionary are means over the batch worth a line in the journal.
    """

    spec: ImageSpec

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        raise TypeError(f"{type(self).__name__} states no objective to train by")

    def scores(self, images: Tensor) -> Tensor:
        """[b j] one number a class, larger = more likely; only classifiers have it."""
        raise TypeError(f"{type(self).__name__} is not a classifier")


class ModelConfig(Protocol):
    """A frozen dataclass of a network's sizes and losses, which builds it for images of a given shape."""

    def build(self, spec: ImageSpec) -> Model: ...


def check_spec(spec: ImageSpec, smallest: int) -> None:
    """Refuse, when a model is built, images that it cannot be built for; `smallest` is the side it needs."""
    for name, count in spec._asdict().items():
        if count < 1:
            raise ShapeError(f"{name} = {count}; at least 1 is wanted")
    if min(spec.height, spec.width) < smallest:
        raise ShapeError(
            f"images of {spec.height}x{spec.width} are too small for this network: it needs {smallest}x{smallest} "
            "or more; use larger images, smaller kernels or fewer layers"
        )


def check_images(images: Tensor, spec: ImageSpec) -> None:
    """Images [b c h w] of the model's size with finite values, or one line that says what came instead."""
    wanted = f"[b {spec.channels} {spec.height} {spec.width}]"
    if images.ndim != 4 or tuple(images.shape[1:]) != tuple(spec[:3]):
        raise ShapeError(f"images have shape {list(images.shape)}; this model wants {wanted}")
    if images.shape[0] == 0:
        raise ShapeError(f"an empty batch: images have shape {list(images.shape)}; at least one is wanted")
    if not images.dtype.is_floating_point:
        raise ShapeError(f"images are {images.dtype}; floating numbers in [0, 1] are wanted (divide bytes by 255)")
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(images).all()):
        raise DataError("images hold NaN or infinite values; finite numbers in [0, 1] are wanted")
