"""What training and evaluation ask of a model and of its stages, and the one check of its images."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from torchcaps.errors import DataError, ShapeError
from torchcaps.types import Batch, ImageSpec

__all__ = ["Model", "ModelConfig", "check_classes", "check_images", "check_spec", "is_correct"]


class Model(nn.Module):
    """A network that can say what it wants: `objective(batch, step)["loss"]` is the scalar that training lowers.

    The other entries of that dictionary are means over the batch worth a line in the journal.

    A model may be trained in `stages()`, one after the other. A stage is a Model itself: its `parameters()` are the
    ones that it trains, and they and all else that it learns belong to the whole model, whose state is what a
    checkpoint holds. The rest stands still, in evaluation mode. A stage goes through

        prepare(images), objective(batch, 0), objective(batch, 1), ..., finish()

    and, if the run was cut off at step s, through prepare(images), objective(batch, s), ..., finish() again.

    A model may have `encode`, `scores` and `reconstruct`. Each is marked `@in_chunks` (`models.chunking`): in
    evaluation mode and without gradients it takes any number of images, in bounded memory.
    """

    spec: ImageSpec
    by_gradient: bool = True
    """If False, `objective` itself learns, by gathering sums into buffers: it is called without gradients, and there
    is no optimizer. Each process has its own share of the batch: gather `mean_over_processes`."""

    uses_images: bool = True
    """If False, `objective` reads only `batch.indices`, and training prepares no pixels for it: `batch.images` is
    empty."""

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        raise TypeError(f"{type(self).__name__} states no objective to train by")

    def scores(self, images: Tensor) -> Tensor:
        """[b j] one number a class, larger = more likely; only classifiers have it."""
        raise TypeError(f"{type(self).__name__} is not a classifier")

    @property
    def is_classifier(self) -> bool:
        """True if the model has scores of classes."""
        return type(self).scores is not Model.scores

    def stages(self) -> dict[str, Model]:
        """Name -> stage in the order of training; the names are those of `STAGES` of the model's configuration."""
        return {"all": self}

    def prepare(self, images: Tensor) -> None:
        """Before a stage's first step, and before the next one after a resumption: all training images [n c h w].

        They are bytes, and `batch.indices` counts in them, so that a stage may keep what parts that stand still make
        of them (as a plain attribute: a buffer would travel between processes at every step). Called in evaluation
        mode, without gradients, with the same random numbers each time.
        """

    def finish(self) -> None:
        """After a stage's last step, before it is saved: in evaluation mode, without gradients, safe to repeat.

        What it changes it must change in place (`copy_`), so that memory is laid out as after a resumption.
        """


class ModelConfig(Protocol):
    """A frozen dataclass of a network's sizes and losses, which builds it for images of a given shape.

    If the network is trained in stages, `STAGES: ClassVar[tuple[str, ...]]` names them in their order.
    """

    def build(self, spec: ImageSpec) -> Model: ...


def is_correct(scores: Tensor, labels: Tensor) -> Tensor:
    """[b] true where the highest of the scores [b j] is that of the label [b], or the m highest those of [b m]."""
    if labels.ndim == 1:
        return scores.argmax(-1) == labels
    highest = scores.topk(labels.shape[1], dim=-1).indices.sort(-1).values
    return (highest == labels.sort(-1).values).all(-1)


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


def check_classes(spec: ImageSpec) -> None:
    """Refuse, when a classifier is built, images that are all of one class."""
    if spec.classes == 1:
        raise DataError("all images are of a single class; a classifier needs two or more to tell apart")


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
