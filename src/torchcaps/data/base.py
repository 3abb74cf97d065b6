"""A data set in memory or in a mapped file, and how training takes batches from it.

Which images are in a batch, and how each is changed, depends only on (seed, epoch, index): so a run can be stopped
anywhere, resumed with any number of processes, and trains on exactly the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcaps.data.augment import Augment, SampleKey, crop, mixup_partners, mixup_shares, shift
from torchcaps.data.preprocess import TEST_VIEWS, Preprocess
from torchcaps.errors import DataError
from torchcaps.math.pixels import to_float
from torchcaps.types import Batch, ImageSpec
from torchcaps.utils.mapped import take
from torchcaps.utils.random import permutation

__all__ = [
    "BatchPosition",
    "DataConfig",
    "Dataset",
    "RawBatch",
    "SplitRows",
    "Splits",
    "batch_position",
    "check_splits",
    "epoch_order",
    "hold_out",
    "image_hashes",
    "make_batch",
    "split_rows",
    "spread_classes",
    "subset",
]

_PIECE = 4096
"""Images that are hashed at a time."""

Rows = Tensor | slice | None
"""Which images: their numbers [b], a range of them, or all."""


class RawBatch(NamedTuple):
    """Images as they are stored, before preprocessing and augmentation.

    Attributes:
        images: uint8 [b c h w].
        labels: int64 [b], or [b m] where an image shows m objects.
        components: uint8 [b m h w], each object of an image alone, if that is known.
    """

    images: Tensor
    labels: Tensor
    components: Tensor | None = None


@dataclass(frozen=True)
class Dataset:
    """Labeled images, with what is known of them and what is done to them before a model.

    Attributes:
        images: uint8 [n c h w], in memory or mapped from a file (`utils.mapped`).
        labels: int64 [n], or [n m] where an image shows m objects.
        classes: Number of classes; labels run from 0 to `classes` - 1.
        factors: Further facts about each image by name, such as its azimuth, each [n].
        names: Names of the classes; empty where they have none.
        components: uint8 [n m h w], each object of an image alone, if that is known.
        preprocess: What every image goes through before a model.
        augment: How training images are changed at random.
        resample_fn: Maps (epoch, index [b]) to new images, for sets that are generated rather than collected; those of
            epoch 0 are the stored ones. None trains on the stored images in every epoch.
        digest: Names images and labels, if that is known without reading them all; see `fingerprint`.

    Raises:
        DataError: if shapes, types, labels or the view do not fit together.
    """

    images: Tensor
    labels: Tensor
    classes: int
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    components: Tensor | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    augment: Augment = field(default_factory=Augment)
    resample_fn: Callable[[int, Tensor], RawBatch] | None = None
    digest: str = ""

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
        self._check_components()
        view = self.preprocess.view
        h, w = self.images.shape[-2:]
        if view is not None and not 1 <= view <= min(h, w):
            raise DataError(f"a view of {view} pixels of images of {h}x{w}; 1 to {min(h, w)} is wanted")

    def _check_components(self) -> None:
        """Refuse components that are not one image of bytes for each label."""
        if self.components is None:
            return
        n, _, h, w = self.images.shape
        wanted = (n, self.labels[0].numel(), h, w)
        if self.components.shape != wanted or self.components.dtype != torch.uint8:
            came = f"{self.components.dtype} {list(self.components.shape)}"
            raise DataError(f"components are {came}; uint8 {list(wanted)}, one for each label, is wanted")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def spec(self) -> ImageSpec:
        """Shape of the model input and number of classes: what a model is built for."""
        channels, height, width = self.images.shape[1:]
        view = self.preprocess.view
        return ImageSpec(channels, view or height, view or width, self.classes)

    @property
    def cropped(self) -> Tensor:
        """The center of each image, uint8 [n c s s]; whole images [n c h w] where no view is set."""
        return self.preprocess.crop(self.images)

    def pixels(self, rows: Rows = None) -> Tensor:
        """Return the cropped images of some rows in [0, 1], not standardized: what people are shown.

        Args:
            rows: Numbers [b] of the images, a slice of them, or None for all.

        Returns:
            Floats [b c s s].
        """
        return to_float(take(self.cropped, _selection(rows)))

    def model_input(self, rows: Rows = None) -> Tensor:
        """Return what a model gets of some rows in a test: cropped, in [0, 1], standardized if the set is.

        Args:
            rows: Numbers [b] of the images, a slice of them, or None for all.

        Returns:
            Floats [b c s s].
        """
        return self.preprocess(take(self.images, _selection(rows)))

    def views(self, rows: Rows = None, count: int = TEST_VIEWS) -> Tensor:
        """Return several crops of some rows as model input, the center first; see `Preprocess.views`.

        Args:
            rows: Numbers [b] of the images, a slice of them, or None for all.
            count: Number of crops, 1 to 13.

        Returns:
            Floats [count b c s s].
        """
        return self.preprocess.views(take(self.images, _selection(rows)), count)

    def raw_batch(self, epoch: int, index: Tensor) -> RawBatch:
        """Return the images [b] that training takes in an epoch as they are stored, generated anew if the set is."""
        if self.resample_fn is not None:
            return self.resample_fn(epoch, index)
        components = None if self.components is None else self.components[index]
        return RawBatch(take(self.images, index), self.labels[index], components)

    def fingerprint(self) -> str:
        """Return 64 hexadecimal digits that change with any image, component or label: a SHA-256."""
        if self.digest:
            return self.digest
        total = sha256()
        for values in (self.images, self.labels, self.components):
            if values is None:
                continue
            total.update(f"{values.dtype} {list(values.shape)}".encode())
            # In pieces, which bounds the memory of mapped images.
            for start in range(0, len(values), _PIECE):
                total.update(take(values, slice(start, start + _PIECE)).contiguous().numpy().data)
        return total.hexdigest()

    def name_of(self, label: int) -> str:
        """Return the name of a class, or its number where it has none."""
        return self.names[label] if label < len(self.names) else str(label)


class Splits(NamedTuple):
    """The splits of a data set.

    Attributes:
        train: Images to train on.
        test: Images to test on.
        validation: Images to choose settings by, if any were held out.
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


class DataConfig(Protocol):
    """A frozen dataclass that names a data set and loads it: the [data] table of a recipe."""

    def load(self) -> Splits: ...


class BatchPosition(NamedTuple):
    """A position in training.

    Attributes:
        epoch: Number of the epoch, from 0.
        number: Number of the batch in the epoch, from 0.
    """

    epoch: int
    number: int


def subset(data: Dataset, rows: Tensor | slice) -> Dataset:
    """Select images with their labels, factors and components.

    Args:
        data: The set to select from.
        rows: Numbers [m] of the images, or a range of them: mapped images then stay in their file.

    Returns:
        A set of m images; it is never generated anew.
    """
    named = f"{data.digest} {rows.start} {rows.stop}" if data.digest and isinstance(rows, slice) else ""
    return replace(
        data,
        digest=sha256(named.encode()).hexdigest() if named else "",
        images=data.images[rows],
        labels=data.labels[rows],
        factors={name: values[rows] for name, values in data.factors.items()},
        components=None if data.components is None else data.components[rows],
        resample_fn=None,
    )


class SplitRows(NamedTuple):
    """Numbers of the images to train on and to test on, each sorted."""

    train: Tensor
    test: Tensor


def split_rows(labels: Tensor, names: tuple[str, ...], share: float, seed: int) -> SplitRows:
    """Set a share of the images of every class, at least one, aside for testing; the seed decides which.

    Args:
        labels: Class numbers [n].
        names: Names of the classes, for errors; empty where they have none.
        share: Of the images of each class.
        seed: Of the choice.

    Raises:
        DataError: if a class has a single image.
    """
    order = permutation(seed, 0, len(labels))
    shuffled = labels[order]
    chosen: list[Tensor] = []
    for label in sorted(set(labels.tolist())):
        rows = order[shuffled == label]
        if len(rows) == 1:
            name = names[label] if names else label
            raise DataError(f"class {name} has one image; two are wanted, one of them to test")
        chosen.append(rows[: max(1, round(share * len(rows)))])
    test = torch.cat(chosen).sort().values
    is_train = torch.ones(len(labels), dtype=torch.bool)
    is_train[test] = False
    return SplitRows(is_train.nonzero().flatten(), test)


def spread_classes(labels: Tensor) -> Tensor:
    """Order images so that any stretch of them has each class by about its share of all.

    A user's images often come sorted by class, so that the last ones would all be of one.

    Args:
        labels: Class numbers [n].

    Returns:
        Numbers [n] of the images in that order; images of a class stay in theirs.
    """
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().flatten()
        place[rows] = (torch.arange(len(rows), dtype=torch.float64) + 0.5) / len(rows)
    return place.argsort(stable=True)


def hold_out(splits: Splits, count: int) -> Splits:
    """Hold out the last training images for validation.

    Args:
        splits: Of one data set.
        count: How many images to hold out; 0 changes nothing.

    Returns:
        The splits, with fewer training images and a validation set.

    Raises:
        DataError: if no training image would be left.
    """
    n = len(splits.train)
    if count >= n:
        raise DataError(f"{count} validation images of {n} training images leave none; set fewer aside")
    if count == 0:
        return splits
    kept = subset(splits.train, slice(0, n - count))
    return Splits(kept, splits.test, subset(splits.train, slice(n - count, n)))


def batch_position(step: int, images: int, batch: int) -> BatchPosition:
    """Return the position of a training step; images left over at the end of an epoch are not used in it.

    Args:
        step: Number of the step, from 0.
        images: Number of training images.
        batch: Images in a batch.

    Raises:
        DataError: if a batch is larger than the set.
    """
    per_epoch = images // batch
    if per_epoch == 0:
        raise DataError(f"a batch of {batch} is more than the {images} training images; make it smaller")
    return BatchPosition(*divmod(step, per_epoch))


def epoch_order(seed: int, epoch: int, images: int) -> Tensor:
    """Return the order of the images in an epoch.

    Args:
        seed: Of the run.
        epoch: Its number, from 0.
        images: How many images there are.

    Returns:
        A permutation [n] of the numbers of the images.
    """
    return permutation(seed, epoch, images)


def make_batch(
    data: Dataset,
    order: Tensor,
    position: BatchPosition,
    batch: int,
    *,
    seed: int,
    max_shift: int = 0,
    mixup_alpha: float = 0.0,
    label_smoothing: float = 0.0,
    rows: slice = slice(None),
    pixels: bool = True,
) -> Batch:
    """Prepare the training batch at a position.

    Each image is shifted, mirrored, deformed and cropped to the view, and its components with it; then it is
    standardized, and before or after that its brightness and contrast change, each only where the set says so. Mixup
    comes last.

    Args:
        data: The training set.
        order: Order [n] of its images in this epoch, see `epoch_order`.
        position: The epoch and the number of the batch in it.
        batch: Images in a batch, over all processes.
        seed: Seed of the augmentations.
        max_shift: Largest shift of an image along each axis, in pixels.
        mixup_alpha: Mix each image with another one of the set, see `augment.mixup_shares`; 0 mixes none.
        label_smoothing: Share of each label that is divided among all classes.
        rows: Which images of the batch are wanted: the share of this process.
        pixels: Whether images are wanted; without them, `images` has no rows, and labels are those of the set.

    Returns:
        The batch, or those images of it: images [b c s s] and components [b m s s] as floats; shares [b j] of
        the classes if labels are mixed or smoothed.

    Raises:
        DataError: if labels are to be mixed or smoothed and an image has several.
    """
    # The images of this process.
    first = position.number * batch
    index = order[first : first + batch][rows]
    if not pixels:
        return Batch(torch.empty(0, 1, 1, 1), data.labels[index], index)
    key = SampleKey(seed, position.epoch, index)
    made = _augmented(data, key, max_shift)
    if not (mixup_alpha or label_smoothing):
        return made
    if made.labels.ndim != 1:
        raise DataError("mixup and label smoothing need images of one label each; these have several")

    # Mixup: the partner looks as it does in its own place of this epoch.
    images = made.images
    shares = one_hot(made.labels, data.classes).to(images)  # [b j]
    if mixup_alpha:
        partner = _augmented(data, key._replace(indices=mixup_partners(key, len(data))), max_shift)
        own = mixup_shares(key, mixup_alpha).to(images)  # [b]
        images = torch.lerp(partner.images, images, own[:, None, None, None])
        shares = torch.lerp(one_hot(partner.labels, data.classes).to(images), shares, own[:, None])
    # Label smoothing, of what mixup left.
    shares = (1 - label_smoothing) * shares + label_smoothing / data.classes
    return made._replace(images=images, shares=shares)


def _augmented(data: Dataset, key: SampleKey, max_shift: int) -> Batch:
    """Prepare training images by themselves: geometry, standardizing, brightness."""
    raw = data.raw_batch(key.epoch, key.indices)
    view = data.preprocess.view

    # Geometry is shared by an image and its components: all have the key, and so the random numbers, of the image.
    def transformed(images: Tensor, *, components: bool) -> Tensor:
        pixels = shift(to_float(images), max_shift, key)
        pixels = data.augment.geometry(pixels, key, components=components)
        if view is None or pixels.shape[-2:] == (view, view):
            return pixels
        return crop(pixels, view, key)

    # By default brightness changes last, in the order of the text of Hinton 2018: standardizing would take it back.
    cropped = data.augment.pixel_brightness(transformed(raw.images, components=False), key)
    images = data.augment.brightness(data.preprocess.to_input(cropped), key, standardized=data.preprocess.standardize)
    components = None if raw.components is None else transformed(raw.components, components=True)
    return Batch(images, raw.labels, key.indices, components)


def image_hashes(data: Dataset) -> set[bytes]:
    """Return a hash of each image; images that are equal have one."""
    hashes = set()
    for start in range(0, len(data), _PIECE):
        images = take(data.images, slice(start, start + _PIECE)).numpy()
        hashes |= {sha256(image.tobytes()).digest() for image in images}
    return hashes


def check_splits(splits: Splits) -> str:
    """Verify that no two splits share an image.

    Args:
        splits: Of one data set.

    Returns:
        One line with the number of images, their shape and the class balance.

    Raises:
        DataError: if an image is in two splits.
    """
    # Images are compared by hash: two splits may have millions of pairs.
    present = {name: split for name, split in splits._asdict().items() if split is not None}
    split_of: dict[bytes, str] = {}
    for name, split in present.items():
        hashes = image_hashes(split)
        shared = [h for h in hashes if h in split_of]
        if shared:
            raise DataError(f"{len(shared)} images of the {name} set are also in the {split_of[shared[0]]} set")
        split_of |= dict.fromkeys(hashes, name)
    # The line: sizes, shape and class balance.
    train = splits.train
    counts = torch.bincount(train.labels.flatten(), minlength=train.classes)
    sizes = " + ".join(f"{len(split)} {name}" for name, split in present.items())
    shape = "x".join(str(side) for side in train.spec[:3])
    balance = f"{train.classes} classes of {int(counts.min())} to {int(counts.max())}"
    return f"{sizes} images {shape}, {balance}, no image in two splits"


def _selection(rows: Rows) -> Tensor | slice:
    """Return rows as an index of a tensor; None selects all."""
    return slice(None) if rows is None else rows
