"""The base class of models: what training and evaluation ask of a model and of its stages; checks of images."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from torchcaps.errors import CheckpointError, DataError, RecipeError, ShapeError
from torchcaps.types import Batch, ImageSpec

__all__ = ["Model", "ModelConfig", "check_classes", "check_images", "check_spec", "is_correct"]


class Model(nn.Module):
    """A network with an objective: `objective(batch, step)["loss"]` is the scalar that training lowers.

    The other entries of that dictionary are means over the batch worth a line in the journal.

    A model may be trained in `stages()`, one after the other. A stage is a Model itself: its `parameters()` are the
    ones that it trains, and they and all else that it learns belong to the whole model, whose state is what a
    checkpoint holds. All else does not change and is in evaluation mode. A stage goes through

        prepare(images), objective(batch, 0), objective(batch, 1), ..., finish()

    and, if the run was cut off at step s, through prepare(images), objective(batch, s), ..., finish() again.

    A model may have `encode`, `scores` and `reconstruct`. Each is marked `@in_chunks` (`models.chunking`): in
    evaluation mode and without gradients it takes any number of images, in bounded memory.
    """

    spec: ImageSpec
    recipe: object | None = None
    """The recipe that it was built by, if it was built by one."""

    by_gradient: bool = True
    """If False, `objective` itself learns, by gathering sums into buffers: it is called without gradients, and there
    is no optimizer. Each process has its own share of the batch: gather `mean_over_processes`."""

    takes_shares: bool = False
    """If True, `objective` reads `batch.targets`, and so can be trained with mixup and label smoothing."""

    needs_whole_batch: bool = False
    """If True, `objective` is no mean over images: it uses statistics of the batch, which micro-batches change."""

    training_sums: tuple[str, ...] = ()
    """Buffers that only training reads, by their names in the state: a model that is given away may leave their rows
    out, and loads with zeros in their place."""

    uses_images: bool = True
    """If False, `objective` reads only `batch.indices`, and training prepares no pixels for it: `batch.images` is
    empty."""

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the loss of a batch, and means over the batch worth a line in the journal.

        Args:
            batch: Images, labels and indices.
            step: Number of the training step in this stage, from 0.

        Returns:
            Name -> scalar; "loss" is the one that training lowers.
        """
        raise TypeError(f"{type(self).__name__} states no objective to train by")

    def loss(self, images: Tensor, labels: Tensor | None = None, step: int = 0) -> Tensor:
        """Return the loss of a batch, for a training loop of your own.

        Args:
            images: Floats [b c h w] in [0, 1].
            labels: Class numbers [b]; None for models that learn without labels.
            step: Number of the training step, for losses that change in the course of training.

        Returns:
            A scalar, to call `backward` on.

        Raises:
            RecipeError: if the model is trained in stages: each stage of `stages()` has a loss.
            ShapeError: if the images are not of the model's shape, or there is not one label for each.
        """
        names = list(self.stages())
        if len(names) > 1:
            kind = type(self).__name__
            raise RecipeError(f"{kind} is trained in stages ({', '.join(names)}); use torchcaps.fit, or stages()")
        given = torch.zeros(len(images), dtype=torch.int64, device=images.device) if labels is None else labels
        if given.shape[:1] != images.shape[:1]:
            raise ShapeError(f"labels {list(given.shape)} for images {list(images.shape)}; one label each is wanted")
        return self.objective(Batch(images, given, torch.arange(len(images))), step)["loss"]

    def scores(self, images: Tensor) -> Tensor:
        """Return scores [b j] of images [b c h w], one number a class, larger = more likely.

        Raises:
            TypeError: If the model is not a classifier.
        """
        raise TypeError(f"{type(self).__name__} is not a classifier")

    @property
    def is_classifier(self) -> bool:
        """True if the model has scores of classes."""
        # Asked of the type, so that no image has to be passed
        return type(self).scores is not Model.scores

    def save_pretrained(self, folder: Path | str) -> Path:
        """Write the model as a folder in the form of model hubs, see `torchcaps.zoo.hub.save_pretrained`.

        Args:
            folder: Where to write; it is made if it does not exist.

        Returns:
            The folder: `model.safetensors`, `config.json`, `README.md`.
        """
        path: Path = _hub().save_pretrained(self, folder)
        return path

    @classmethod
    def from_pretrained(cls, name: Path | str) -> Self:
        """Load a model of this class by the name of a shipped one, from a folder, or from a model hub.

        Args:
            name: As in "capsnet-digits", a folder that `save_pretrained` wrote, or "user/name" on the hub.

        Returns:
            The model, in evaluation mode.

        Raises:
            CheckpointError: There is none, or it is of another class.
        """
        model = _hub().load_pretrained(name)
        if not isinstance(model, cls):
            raise CheckpointError(
                f"'{name}' is a {type(model).__name__}, not a {cls.__name__}; load it by its own class"
            )
        return model

    def push_to_hub(self, repository: str) -> str:
        """Upload the model to a model hub by `huggingface_hub`, the extra `hub`.

        Args:
            repository: As in "user/name".

        Returns:
            The address of the commit.
        """
        address: str = _hub().push_to_hub(self, repository)
        return address

    def stages(self) -> dict[str, Model]:
        """Return name -> stage in the order of training; the names are `STAGES` of the model's configuration."""
        return {"all": self}

    def prepare(self, images: Tensor) -> None:
        """Get ready for a stage: called before its first step, and before the next one after a resumption.

        A stage may store what layers that do not change compute of the images (as a plain attribute: a buffer would be
        sent between processes at every step). Called in evaluation mode, without gradients, and with the same random
        numbers each time, which the seed of the run decides.

        Args:
            images: All training images [n c h w] as bytes; `batch.indices` are rows of them.
        """

    def finish(self) -> None:
        """Conclude a stage: called after its last step, in evaluation mode, without gradients; safe to repeat.

        What it changes it must change in place (`copy_`), so that memory is laid out as after a resumption.
        """


def _hub() -> ModuleType:
    """Import what writes and reads folders of models, when it is first used: it is above models, and knows recipes."""
    return import_module("torchcaps.zoo.hub")


class ModelConfig(Protocol):
    """A frozen dataclass of a network's sizes and losses, which builds it for images of a given shape.

    If the network is trained in stages, `STAGES: ClassVar[tuple[str, ...]]` names them in their order.
    """

    def build(self, spec: ImageSpec) -> Model: ...


def is_correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Return where a classifier is right: the highest score is that of the label, or the m highest those of m labels.

    Args:
        scores: [b j].
        labels: Class numbers [b], or [b m] of images that show m things.

    Returns:
        [b] truth values.
    """
    # One label: the highest score
    if labels.ndim == 1:
        return scores.argmax(-1) == labels
    # Several labels: the same set, in any order
    highest = scores.topk(labels.shape[1], dim=-1).indices.sort(-1).values  # [b m]
    return (highest == labels.sort(-1).values).all(-1)


def check_spec(spec: ImageSpec, smallest: int) -> None:
    """Refuse, when a model is built, images that it cannot be built for.

    Args:
        spec: Shape of the images, and classes.
        smallest: The side that the model needs, in pixels.

    Raises:
        ShapeError: If the images are smaller, or something is below 1.
    """
    for name, count in spec._asdict().items():
        if count < 1:
            raise ShapeError(f"{name} = {count}; at least 1 is wanted")
    if min(spec.height, spec.width) < smallest:
        raise ShapeError(
            f"images of {spec.height}x{spec.width} are too small for this network: it needs {smallest}x{smallest} "
            "or more; use larger images, smaller kernels or fewer layers"
        )


def check_classes(spec: ImageSpec) -> None:
    """Refuse, when a classifier is built, images that are all of one class.

    Raises:
        DataError: If there is a single class.
    """
    if spec.classes == 1:
        raise DataError("all images are of a single class; a classifier needs two or more to tell apart")


def check_images(images: Tensor, spec: ImageSpec) -> None:
    """Refuse images that are not of the model's shape, floating point and finite.

    Args:
        images: What came for [b c h w].
        spec: What the model was built for.

    Raises:
        ShapeError: If shape or type are others.
        DataError: If a value is not finite; not checked inside `torch.compile`.
    """
    # Shape and type
    wanted = f"[b {spec.channels} {spec.height} {spec.width}]"
    if images.ndim != 4 or tuple(images.shape[1:]) != tuple(spec[:3]):
        raise ShapeError(f"images have shape {list(images.shape)}; this model wants {wanted}")
    if images.shape[0] == 0:
        raise ShapeError(f"an empty batch: images have shape {list(images.shape)}; at least one is wanted")
    if not images.dtype.is_floating_point:
        raise ShapeError(f"images are {images.dtype}; floating numbers in [0, 1] are wanted (divide bytes by 255)")
    # Values, which a traced graph does not have
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(images).all()):
        raise DataError("images hold NaN or infinite values; finite numbers, in [0, 1] or standardized, are wanted")
