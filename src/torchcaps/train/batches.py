"""Where training takes its batches from; those of a data set are prepared in a thread, ahead of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.data import Dataset, batch_position, epoch_order, make_batch
from torchcaps.errors import DataError
from torchcaps.math.pixels import to_float
from torchcaps.train.recipe import TrainConfig
from torchcaps.types import Batch, ImageSpec
from torchcaps.utils.distributed import ProcessGroup

__all__ = ["BatchRequest", "BatchSource", "DatasetSource", "LoaderSource", "PlacedBatch", "as_numbers", "labeled_batch"]

AHEAD = 2
"""Batches that are prepared before they are needed."""


class PlacedBatch(NamedTuple):
    """A batch, and the number of the epoch that it belongs to, from 0."""

    epoch: int
    batch: Batch


NextBatch = Callable[[], PlacedBatch]


@dataclass(frozen=True)
class BatchRequest:
    """What a stage asks of a source.

    Attributes:
        settings: The size of a batch, and how images are augmented.
        seed: Seed of order and augmentation.
        group: The processes that share each batch.
        first: Number of the first step.
        total: Number of steps of the stage.
        pixels: Whether images are wanted, or labels and indices alone.
    """

    settings: TrainConfig
    seed: int
    group: ProcessGroup
    first: int
    total: int
    pixels: bool = True


class BatchSource(Protocol):
    """What training asks of data."""

    @property
    def images(self) -> int:
        """Number of training images, on which the number of steps depends."""
        ...

    @property
    def spec(self) -> ImageSpec:
        """Shape of the images, and classes."""
        ...

    @property
    def dataset(self) -> Dataset | None:
        """The whole set, if there is one."""
        ...

    def fingerprint(self) -> str | None:
        """Return what names the data; None if that cannot be known, so that a run on them cannot be resumed."""
        ...

    def stream(self, request: BatchRequest) -> AbstractContextManager[NextBatch]:
        """Open the batches of a stage, from step `first` on, in order."""
        ...


@dataclass(frozen=True)
class DatasetSource:
    """Batches of a data set: each is a function of the seed and the number of its step."""

    dataset: Dataset

    @property
    def images(self) -> int:
        return len(self.dataset)

    @property
    def spec(self) -> ImageSpec:
        return self.dataset.spec

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()

    @contextmanager
    def stream(self, request: BatchRequest) -> Iterator[NextBatch]:
        """Prepare batches in a thread while the steps before them are taken."""
        # The order of an epoch is kept until the next one begins; only the thread touches it.
        orders: dict[int, Tensor] = {}

        def prepare(step: int) -> PlacedBatch:
            settings = request.settings
            place = batch_position(step, self.images, settings.batch)
            if place.epoch not in orders:
                orders.clear()
                orders[place.epoch] = epoch_order(request.seed, place.epoch, self.images)
            batch = make_batch(
                self.dataset,
                orders[place.epoch],
                place,
                settings.batch,
                seed=request.seed,
                max_shift=settings.max_shift,
                mixup_alpha=settings.mixup_alpha,
                label_smoothing=settings.label_smoothing,
                rows=settings.share(request.group.rank, request.group.size).rows,
                pixels=request.pixels,
            )
            return PlacedBatch(place.epoch, batch)

        waiting: deque[Future[PlacedBatch]] = deque()
        steps = iter(range(request.first, request.total))
        # Flushing of denormal numbers is a setting of each thread; all of training has it.
        worker = ThreadPoolExecutor(1, "batches", initializer=torch.set_flush_denormal, initargs=(True,))

        def following() -> PlacedBatch:
            while len(waiting) <= AHEAD and (step := next(steps, None)) is not None:
                waiting.append(worker.submit(prepare, step))
            return waiting.popleft().result()

        try:
            yield following
        finally:
            worker.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class LoaderSource:
    """Batches that somebody else makes, such as a DataLoader; their order is their own.

    Attributes:
        batches: Starts one pass over the data, each batch (images, labels).
        images: Images of one pass.
        spec: Shape of the images, and classes.
        first_batch: Images in the first batch.
    """

    batches: Callable[[], Iterable[object]]
    images: int
    spec: ImageSpec
    first_batch: int

    @property
    def dataset(self) -> None:
        return None

    def fingerprint(self) -> None:
        """Return None: nobody knows what a loader gives."""

    @contextmanager
    def stream(self, request: BatchRequest) -> Iterator[NextBatch]:
        """Go through the batches once an epoch, for as many epochs as there are steps for."""
        passes = self._all_passes()
        yield lambda: next(passes)

    def _all_passes(self) -> Iterator[PlacedBatch]:
        for epoch in count():
            seen = 0
            for given in self.batches():
                batch = labeled_batch(given, self.spec, first=seen)
                seen += len(batch.labels)
                yield PlacedBatch(epoch, batch)
            if not seen:
                raise DataError(
                    f"pass {epoch + 1} over the batches gave none; a generator ends after one pass: give a DataLoader, "
                    "a list, or a function that returns a new generator"
                )


def as_numbers(values: object, what: str) -> Tensor:
    """Return the tensor that values are, or can be made into.

    Raises:
        DataError: if they are text, None or something else that has no numbers.
    """
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        kind = getattr(values, "dtype", type(values).__name__)
        raise DataError(f"{what}: {kind} came; numbers are wanted, as a tensor or an array") from None


def labeled_batch(given: object, spec: ImageSpec | None = None, first: int = 0) -> Batch:
    """Check a batch of the user's.

    Args:
        given: (images, labels): bytes or floats [b c h w] or [b h w], and class numbers [b].
        spec: The shape that images must have, and classes; None for any.
        first: Number of the first image.

    Returns:
        The batch, images as floats.

    Raises:
        DataError: if it is something else.
    """
    if not isinstance(given, tuple | list) or len(given) < 2:
        raise DataError(f"a batch is a {type(given).__name__}; a pair (images, labels) is wanted")
    images = as_numbers(given[0], "images of a batch")
    labels = as_numbers(given[1], "labels of a batch")
    images = images.unsqueeze(1) if images.ndim == 3 else images
    came = f"images {list(images.shape)} and labels {list(labels.shape)}"
    if images.ndim != 4 or labels.shape != images.shape[:1] or labels.is_floating_point() or not len(labels):
        raise DataError(f"a batch has {came} of {labels.dtype}; [b c h w] and whole class numbers [b] are wanted")
    if spec is not None and tuple(images.shape[1:]) != spec[:3]:
        raise DataError(
            f"a batch has {came}; [b {spec.channels} {spec.height} {spec.width}] is wanted, as in the first"
        )
    if spec is not None and not 0 <= int(labels.min()) <= int(labels.max()) < spec.classes:
        low = int(labels.min())
        raise DataError(f"labels of a batch run from {low} to {int(labels.max())}; 0 to {spec.classes - 1} is wanted")
    pixels = to_float(images) if images.dtype == torch.uint8 else images.float()
    return Batch(pixels, labels.long(), first + torch.arange(len(labels)))
