"""A data set in memory, and how training takes batches from it.

Which images are in a batch, and how each is changed, depends only on (seed, epoch, index): so a run can be stopped
anywhere, and go on with any number of processes, and see exactly what it would have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcaps.data.augment import (
    BRIGHTNESS,
    STANDARD_BRIGHTNESS,
    brightness_contrast,
    center_crop,
    crop,
    crops,
    deform,
    mirror,
    shift,
    standardize,
)
from torchcaps.errors import DataError
from torchcaps.types import Batch, ImageSpec
from torchcaps.utils.random import permutation

__all__ = [
    "BatchPosition",
    "DataConfig",
    "Dataset",
    "Splits",
    "batch_position",
    "check_splits",
    "epoch_order",
    "hold_out",
    "make_batch",
    "subset",
]


@dataclass(frozen=True)
class Dataset:
    """Images [n c h w] as bytes, labels [n] ([n m] where an image shows m things), named factors [n], class names.

    `parts` [n m h w] are bytes too: each thing of an image alone. A model sees squares of side `view`, or whole images
    without it: at random places while training, in the middle when tested. What it sees is of zero mean and unit
    variance if `standardized`; after that, training changes brightness and contrast at random if `jitter`. Before all
    that, training turns, stretches and shears it by `deform` times as much as `augment.deform` says, and of half of the
    images sees their mirror images, if `mirror` says which order the channels then have.
    A set that is drawn rather than collected may be drawn `anew` for each epoch: (epoch, index [b]) -> images, labels,
    parts; those of epoch 0 are the ones it holds.
    """

    images: Tensor
    labels: Tensor
    classes: int
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    components: Tensor | None = None
    view: int | None = None
    standardized: bool = False
    jitter: bool = False
    deform: float = 0.0
    mirror: tuple[int, ...] | None = None
    resample_fn: Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor | None]] | None = None

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise DataError(f"images are {self.images.dtype} {list(self.images.shape)}; uint8 [n c h w] is wanted")
        if self.images.numel() == 0:
            raise DataError(f"a data set of shape {list(self.images.shape)} holds no images")
        for name, values in {"labels": self.labels, **self.factors}.items():
            if values.shape[:1] != self.images.shape[:1] or (values.ndim != 1 and name != "labels"):
                raise DataError(f"{len(self)} images but {name} of shape {list(values.shape)}; one each is wanted")
        low = int(self.labels.min())
        high = int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise DataError(f"labels run from {low} to {high}; 0 to {self.classes - 1} is wanted")
        self._check_looks()

    def _check_looks(self) -> None:
        n, _, h, w = self.images.shape
        things = (n, self.labels[0].numel(), h, w)
        if self.components is not None and (self.components.shape != things or self.components.dtype != torch.uint8):
            came = f"{self.components.dtype} {list(self.components.shape)}"
            raise DataError(f"parts are {came}; uint8 {list(things)}, one for each label, is wanted")
        if self.view is not None and not 1 <= self.view <= min(h, w):
            raise DataError(f"a view of {self.view} pixels of images of {h}x{w}; 1 to {min(h, w)} is wanted")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def spec(self) -> ImageSpec:
        """What a model is built for: the shape of what it sees."""
        channels, height, width = self.images.shape[1:]
        return ImageSpec(channels, self.view or height, self.view or width, self.classes)

    @property
    def cropped(self) -> Tensor:
        """[n c s s] the bytes a model sees when it is tested: the middle of each image."""
        return self.images if self.view is None else center_crop(self.images, self.view)

    def model_input(self, rows: Tensor | slice | None = None) -> Tensor:  # [b c s s]
        """What a model is shown of the rows when it is tested: floats in [0, 1], standardized if the set is."""
        return self.standardize(self.cropped[slice(None) if rows is None else rows].float() / 255)

    def epoch_images(self, epoch: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The images, labels and parts that training takes in an epoch, bytes as they are stored."""
        if self.resample_fn is not None:
            return self.resample_fn(epoch, index)
        return self.images[index], self.labels[index], None if self.components is None else self.components[index]

    def views(self, rows: Tensor | slice | None = None, count: int = 13) -> Tensor:  # [count b c s s]
        """`count` views of the rows, the first in the middle (see `crops`): a test may average what is said of them."""
        if self.view is None:
            raise DataError(f"{count} views of whole images would all be the same; give the data set a view")
        images = self.images[slice(None) if rows is None else rows]
        return torch.stack([self.standardize(v.float() / 255) for v in crops(images, self.view, count)])

    def standardize(self, images: Tensor) -> Tensor:
        """Floats [b c h w] of zero mean and unit variance each, if the set is standardized; else as they came."""
        return standardize(images) if self.standardized else images

    def name_of(self, label: int) -> str:
        """The class's name, or its number where it has none."""
        return self.names[label] if label < len(self.names) else str(label)


class Splits(NamedTuple):
    """What to learn from, what to be judged by, and what to choose settings by, where that was set aside."""

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


def subset(data: Dataset, rows: Tensor) -> Dataset:
    """The images of the given rows [m], with their labels, factors and parts; they stay what they are."""
    factors = {name: values[rows] for name, values in data.factors.items()}
    parts = None if data.components is None else data.components[rows]
    return replace(
        data, images=data.images[rows], labels=data.labels[rows], factors=factors, components=parts, resample_fn=None
    )


def hold_out(splits: Splits, count: int) -> Splits:
    """Set the last `count` training images aside for validation."""
    n = len(splits.train)
    if count >= n:
        raise DataError(f"{count} validation images of {n} training images leave none; set fewer aside")
    if count == 0:
        return splits
    rows = torch.arange(n)
    return Splits(subset(splits.train, rows[: n - count]), splits.test, subset(splits.train, rows[n - count :]))


class DataConfig(Protocol):
    """A frozen dataclass that names a data set and loads it."""

    def load(self) -> Splits: ...


class BatchPosition(NamedTuple):
    """A position in training: the epoch, and the number of the batch in it."""

    epoch: int
    number: int


def batch_position(step: int, images: int, batch: int) -> BatchPosition:
    """Where step number `step` stands; what is left over at the end of an epoch waits for another order."""
    per_epoch = images // batch
    if per_epoch == 0:
        raise DataError(f"a batch of {batch} is more than the {images} training images; make it smaller")
    return BatchPosition(*divmod(step, per_epoch))


def epoch_order(seed: int, epoch: int, images: int) -> Tensor:
    """[n] the order of the images in an epoch."""
    return permutation(seed, epoch, images)


def make_batch(
    data: Dataset,
    order: Tensor,
    place: BatchPosition,
    batch: int,
    *,
    seed: int,
    max_shift: int = 0,
    part: int = 0,
    parts: int = 1,
) -> Batch:
    """The batch at a place as floats in [0, 1]; of `parts` processes each takes its own `part` of it.

    Each image is shifted, mirrored, deformed and cropped to the view, and its parts with it; then it is standardized,
    and then its brightness and contrast change, each only where the set says so.
    """
    share = batch // parts
    first = place.number * batch + part * share
    index = order[first : first + share]
    pixels, labels, things = data.epoch_images(place.epoch, index)

    def placed(pixels: Tensor, order: tuple[int, ...] | None) -> Tensor:
        moved = shift(pixels.float() / 255, max_shift, seed, place.epoch, index)
        if order is not None:
            moved = mirror(moved, order, seed, place.epoch, index)
        moved = deform(moved, data.deform, seed, place.epoch, index)
        if data.view is None or moved.shape[-2:] == (data.view, data.view):
            return moved
        return crop(moved, data.view, seed, place.epoch, index)

    images = data.standardize(placed(pixels, data.mirror))
    if data.jitter:
        most = STANDARD_BRIGHTNESS if data.standardized else BRIGHTNESS
        images = brightness_contrast(images, seed, place.epoch, index, brightness=most)
    kept = None if data.mirror is None or things is None else tuple(range(things.shape[1]))
    return Batch(images, labels, index, None if things is None else placed(things, kept))


def check_splits(splits: Splits) -> str:
    """Counts, class balance, and that no two splits share an image; one line, or DataError."""
    present = {name: split for name, split in splits._asdict().items() if split is not None}
    seen: dict[bytes, str] = {}
    for name, split in present.items():
        hashes = {sha256(image.numpy().tobytes()).digest() for image in split.images}
        shared = [h for h in hashes if h in seen]
        if shared:
            raise DataError(f"{len(shared)} images of the {name} set are also in the {seen[shared[0]]} set")
        seen |= dict.fromkeys(hashes, name)
    train = splits.train
    counts = torch.bincount(train.labels.flatten(), minlength=train.classes)
    sizes = " + ".join(f"{len(split)} {name}" for name, split in present.items())
    shape = "x".join(str(side) for side in train.spec[:3])
    balance = f"{train.classes} classes of {int(counts.min())} to {int(counts.max())}"
    return f"{sizes} images {shape}, {balance}, no image in two splits"
