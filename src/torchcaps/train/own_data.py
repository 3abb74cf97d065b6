"""Train on what a Python program has at hand: tensors, a torch Dataset, or batches of a DataLoader."""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from torchcaps.data import Dataset, GivenConfig, Splits
from torchcaps.data.readers.labeled_arrays import MOST_CLASSES
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.models import Model, ModelConfig
from torchcaps.train.batches import BatchSource, DatasetSource, LoaderSource, as_numbers, labeled_batch
from torchcaps.train.loop import Callback, Outcome, TrainingData, train
from torchcaps.train.recipe import OptimizerConfig, Recipe, TrainConfig, load_recipe
from torchcaps.train.run import Resume
from torchcaps.train.validation import final_images
from torchcaps.types import ImageSpec
from torchcaps.utils.files import cache_dir
from torchcaps.utils.mapped import RELEASE, release, scratch
from torchcaps.utils.notices import notice

__all__ = ["as_dataset", "fit"]

IN_MEMORY = 1 << 30
"""Bytes of images that are kept in memory; more go to a mapped file in the cache."""


class Items(Protocol):
    """A torch Dataset with a length: `data[n]` is (image, label)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


Data = Dataset | Splits | tuple[object, object] | Items | Iterable[object] | Callable[[], Iterable[object]]


def fit(
    model: Recipe | str | Model,
    data: Data,
    *,
    folder: Path | str | None = None,
    validation: Data | None = None,
    epochs: float | None = None,
    batch: int | None = None,
    lr: float | None = None,
    classes: int | None = None,
    resume: Resume = False,
    quiet: bool = False,
    callback: Callback | None = None,
) -> Outcome:
    """Train a recipe, or a model of this library, on data of your own.

    Tensors and Datasets are stored as bytes and read in an order of the recipe's seed, so that a run is resumed bit for
    bit. A Dataset whose items differ each time they are read, and an iterable of batches, are read anew in every epoch;
    such a run cannot be resumed.

    Args:
        model: A recipe or its name, of which the data are replaced; or a model, which is trained in place from the
            weights it has.
        data: One of: (images, labels), bytes or floats in [0, 1] [n c h w] and class numbers [n]; a
            `torch.utils.data.Dataset` of such items; a `DataLoader` or another iterable of batches (images, labels), or
            a function that returns one; a `Dataset` or `Splits` of torchcaps.
        folder: Where the run is written; None keeps no files.
        validation: Data to measure the accuracy on after every epoch; no iterable.
        epochs: Passes over the data instead of the recipe's.
        batch: Images in a step instead of the recipe's; batches of an iterable have their own size.
        lr: Learning rate instead of the recipe's; for a model, 0.001 by default.
        classes: Number of classes; None takes it from the labels or, for an iterable, from the model or the attribute
            `classes` of its Dataset.
        resume: Go on with the run in `folder`, see `train`.
        quiet: Show no progress.
        callback: Called after every epoch with the model, in evaluation mode, and the number of steps. The numbers that
            it returns by name are written to the journal.

    Returns:
        The model and where the run stands.

    Raises:
        TorchcapsError: if the data, the recipe or the folder are wrong; one line says how.

    Example:
        >>> images = torch.rand(64, 1, 20, 20)
        >>> outcome = fit("cnn-glyphs", (images, torch.arange(64) % 2), epochs=1, batch=32, quiet=True)
        >>> outcome.finished, outcome.step
        (True, 2)
    """
    if callback is not None and not callable(callback):
        raise RecipeError(f"callback is a {type(callback).__name__}; a function of the model and the step is wanted")
    if resume is True and folder is None:
        raise RecipeError("resume=True needs the folder of the run: fit(..., folder='runs/mine', resume=True)")
    recipe = _recipe_of(model, epochs=epochs, batch=batch, lr=lr)
    if isinstance(model, Model) and classes is None:
        classes = model.spec.classes
    given = _training_data(data, validation, classes, recipe)
    shape = list(given.source.spec[:3])
    if isinstance(model, Model) and shape != list(model.spec[:3]):
        raise ShapeError(f"images are {shape}; this model takes {list(model.spec[:3])}, [c h w]")
    if isinstance(given.source, LoaderSource):
        size = given.source.first_batch
        recipe = replace(recipe, train=replace(recipe.train, batch=size), stages={})
    # Validated after every epoch, unless the recipe says when.
    if given.validation is not None and not recipe.train.validates:
        every = max(1, given.source.images // recipe.train.batch)
        recipe = replace(recipe, train=replace(recipe.train, validate_every=every))
    with _folder(folder) as place:
        outcome = train(
            recipe,
            place,
            resume=resume,
            quiet=quiet,
            data=given,
            weights=model if isinstance(model, Model) else None,
            callback=callback,
        )
    if not isinstance(model, Model):
        return outcome
    # The user's own object gets what was learned.
    model.load_state_dict(outcome.model.state_dict())
    return replace(outcome, model=model.eval())


def _recipe_of(model: Recipe | str | Model, *, epochs: float | None, batch: int | None, lr: float | None) -> Recipe:
    """Return the recipe of a run, on data that are given."""
    if isinstance(model, str):
        model = load_recipe(model)
    if isinstance(model, Model):
        config: ModelConfig | None = getattr(model, "config", None)
        name = type(model).__name__.lower()
        if config is None:
            raise RecipeError(f"the {name} has no `config` to build it again from; write a training loop of your own")
        recipe = Recipe(name=name, model=config, optimizer=OptimizerConfig(lr=0.001), train=TrainConfig(batch=32))
    elif isinstance(model, Recipe):
        recipe = model
    else:
        raise RecipeError(
            f"fit got a {type(model).__name__}; a recipe, its name, or a model of torchcaps is wanted (for a module of "
            "your own, write a training loop)"
        )
    settings = recipe.train
    for name, value in {"epochs": epochs, "lr": lr}.items():
        if value is not None and not (isinstance(value, int | float | np.number) and value > 0):
            raise RecipeError(f"{name} = {value!r}; a number above 0 is wanted")
    if epochs is not None:
        # Who says how many epochs means them.
        settings = replace(settings, epochs=float(epochs), min_steps=0)
    if batch is not None:
        settings = replace(settings, batch=batch)
    optimizer = recipe.optimizer if lr is None else replace(recipe.optimizer, lr=lr)
    schedule = recipe.schedule
    if lr is not None and "max_lr" in schedule.options:
        schedule = replace(schedule, options={**schedule.options, "max_lr": lr})
    if recipe.stages and (epochs, batch, lr) != (None, None, None):
        raise RecipeError("this recipe is trained in stages, each with its own settings; change them in the recipe")
    return replace(recipe, data=GivenConfig(), optimizer=optimizer, schedule=schedule, train=settings)


@contextmanager
def _folder(folder: Path | str | None) -> Iterator[Path]:
    """Yield the folder of a run, or one that is removed afterwards."""
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place) / "run"


def _training_data(data: Data, validation: Data | None, classes: int | None, recipe: Recipe) -> TrainingData:
    """Bring data of any kind into the form that training takes."""
    if isinstance(data, Splits):
        return TrainingData(DatasetSource(data.train), data.validation, final_images(data.test))
    source = _source(data, classes, recipe)
    if validation is None:
        return TrainingData(source)
    checked = as_dataset(validation, classes)
    shape = list(source.spec[:3])
    if list(checked.spec[:3]) != shape:
        raise ShapeError(f"images to validate by are {list(checked.spec[:3])}, those to train on {shape}, [c h w]")
    if int(checked.labels.max()) >= source.spec.classes:
        raise DataError(
            f"labels to validate by go up to {int(checked.labels.max())}, and there are {source.spec.classes} classes "
            "to train on; fit(..., classes=) sets another number"
        )
    return TrainingData(source, checked)


def _source(data: Data, classes: int | None, recipe: Recipe) -> BatchSource:
    """Return where batches come from: a data set of bytes, or a loader."""
    if isinstance(data, Dataset) or _is_pair(data):
        return DatasetSource(as_dataset(data, classes))
    if _is_items(data):
        if _is_the_same_twice(data):
            return DatasetSource(as_dataset(data, classes))
        notice("items of the Dataset differ each time they are read; it is read in every epoch, without exact resume")
        data = _loader(data, recipe)
    return _loader_source(data, classes)


def as_dataset(data: Data, classes: int | None = None) -> Dataset:
    """Store tensors, or the items of a torch Dataset, as a data set of bytes.

    Args:
        data: (images, labels), or a Dataset of such pairs; images are bytes, or floats in [0, 1], which are rounded to
            the nearest of 256 values.
        classes: Number of classes; None for one more than the largest label.

    Returns:
        The data set.

    Raises:
        DataError: if it is something else, images have different sizes, or values are no pixels.
    """
    if isinstance(data, Dataset):
        return data
    if _is_pair(data):
        if len(data) != 2 or data[1] is None:
            raise DataError(
                "images came without labels, or with something else; a pair (images, labels) is wanted, with zeros as "
                "labels for a model that learns without them"
            )
        images = _bytes(as_numbers(data[0], "images"), "images")
        labels = _labels(as_numbers(data[1], "labels"), len(images))
    elif _is_items(data):
        images, labels = _read_items(data)
    else:
        raise DataError(f"a {type(data).__name__} came; tensors (images, labels) or a Dataset with a length are wanted")
    names = tuple(map(str, getattr(data, "classes", ())))
    count = _class_count(classes) or max(len(names), 1 + int(labels.max()))
    if count > MOST_CLASSES:
        raise DataError(f"labels go up to {count - 1}; class numbers 0 to {MOST_CLASSES - 1} are wanted")
    return Dataset(images, labels, count, names=names if len(names) == count else ())


def _class_count(classes: int | None) -> int | None:
    """Check a number of classes that the user gave; None if there is none."""
    if classes is None:
        return None
    if isinstance(classes, bool) or not isinstance(classes, int) or not 1 <= classes <= MOST_CLASSES:
        raise DataError(f"classes = {classes!r}; a whole number from 1 to {MOST_CLASSES} is wanted")
    return classes


def _is_pair(data: object) -> TypeGuard[Sequence[object]]:
    """Tell (images, labels) from a Dataset or a list of batches: images are numbers, a batch is a pair."""
    kinds = Tensor | np.ndarray
    return isinstance(data, kinds) or (isinstance(data, tuple | list) and bool(data) and isinstance(data[0], kinds))


def _is_items(data: object) -> TypeGuard[Items]:
    """Tell a Dataset with a length and numbered items from an iterable of batches."""
    return isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__getitem__") and isinstance(data, Sized)


def _is_the_same_twice(data: Items) -> bool:
    """Tell whether an item is the same each time it is read: random augmentation makes it another one."""
    first = _item(data, 0)[0]
    return all(torch.equal(_item(data, 0)[0], first) for _ in range(3))


def _item(data: Items, n: int) -> tuple[Tensor, int]:
    """Read an item as bytes [c h w] and its label."""
    item = data[n]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"item {n} of the Dataset is a {type(item).__name__}; a pair (image, label) is wanted")
    picture = item[0]
    image = picture if isinstance(picture, Tensor) else as_numbers(np.array(picture), f"item {n} of the Dataset")
    # Pillow and numpy keep channels last.
    if image.ndim == 3 and not isinstance(picture, Tensor) and image.shape[-1] in (1, 3, 4):
        image = image.permute(2, 0, 1)
    image = image.unsqueeze(0) if image.ndim == 2 else image
    if image.ndim != 3:
        raise DataError(f"item {n} of the Dataset has an image of shape {list(image.shape)}; [c h w] is wanted")
    # `int` would cut fractions and read text.
    try:
        label = operator.index(item[1])
    except (TypeError, ValueError, RuntimeError):
        shown = " ".join(repr(item[1]).split())[:60]
        raise DataError(f"item {n} of the Dataset has the label {shown}; a whole class number is wanted") from None
    return _bytes(image.unsqueeze(0), f"item {n} of the Dataset").squeeze(0), label


def _read_items(data: Items) -> tuple[Tensor, Tensor]:  # [n c h w], [n]
    """Read all items once."""
    from torchcaps.utils.progress import progress

    if not len(data):
        raise DataError("the Dataset is empty; at least one item is wanted")
    shape = _item(data, 0)[0].shape
    size = (len(data), *shape)
    is_large = len(data) * shape.numel() > IN_MEMORY
    images = scratch(cache_dir() / "scratch", size, torch.uint8) if is_large else torch.empty(size, dtype=torch.uint8)
    labels = torch.empty(len(data), dtype=torch.int64)
    for n in progress(range(len(data)), "reading the Dataset"):
        image, label = _item(data, n)
        if image.shape != shape:
            raise DataError(f"item {n} of the Dataset is {list(image.shape)}, item 0 {list(shape)}; one size is wanted")
        images[n] = image
        labels[n] = label
        # Pages that were written count as memory of this process until they are given back.
        if (n + 1) % max(1, RELEASE // shape.numel()) == 0:
            release(images)
    return images, _labels(labels, len(images))


def _bytes(images: Tensor, what: str) -> Tensor:
    """Return images [n c h w] as bytes."""
    if images.layout != torch.strided or images.is_meta:
        raise DataError(f"{what}: a tensor without values of its own, or a sparse one; an ordinary one is wanted")
    images = images.detach().cpu()
    images = images.unsqueeze(1) if images.ndim == 3 else images
    if images.ndim != 4 or images.numel() == 0:
        raise DataError(f"{what}: shape {list(images.shape)}; [n c h w] or [n h w] with at least one image is wanted")
    if images.shape[-1] in (1, 3, 4) and images.shape[1] not in (1, 2, 3, 4):
        raise DataError(f"{what}: shape {list(images.shape)} has its channels last; use images.permute(0, 3, 1, 2)")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise DataError(f"{what}: {images.dtype} came; bytes (torch.uint8), or floats in [0, 1], are wanted")
    _check_unit(images, what)
    return (images * 255).round().to(torch.uint8)


def _check_unit(images: Tensor, what: str) -> None:
    """Refuse floats beyond [0, 1]."""
    low = float(images.min())
    high = float(images.max())
    if low >= 0 and high <= 1:
        return
    advice = "divide by 255" if low >= 0 and 1 < high <= 255 else "leave out a normalization"
    came = f"{images.dtype} from {low:.3g} to {high:.3g}"
    raise DataError(f"{what}: {came}; bytes, or floats in [0, 1], are wanted: {advice}")


def _labels(labels: Tensor, count: int) -> Tensor:
    """Return class numbers [n]."""
    if labels.shape != (count,) or labels.is_floating_point() or labels.is_complex():
        came = f"{labels.dtype} {list(labels.shape)}"
        raise DataError(f"labels are {came}; whole class numbers [{count}], one for each image, are wanted")
    if int(labels.min()) < 0:
        raise DataError(f"labels run from {int(labels.min())} to {int(labels.max())}; class numbers from 0 are wanted")
    return labels.detach().cpu().long()


def _loader(data: Items, recipe: Recipe) -> Iterable[object]:
    """Read a Dataset anew in every epoch, in an order of the recipe's seed."""
    order = torch.Generator().manual_seed(recipe.seed)
    size = min(recipe.train.batch, len(data))
    return torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=size,
        shuffle=True,
        drop_last=True,
        generator=order,
    )


def _loader_source(data: object, classes: int | None) -> LoaderSource:
    """Look at the first batch of an iterable to see what it gives."""
    if isinstance(data, torch.utils.data.IterableDataset):
        raise DataError("an IterableDataset gives single images; make batches of them: DataLoader(data, batch_size=32)")
    if isinstance(data, str | bytes | Path | Mapping):
        raise DataError(
            f"a {type(data).__name__} came; tensors (images, labels), a Dataset or a DataLoader are wanted; for a "
            "folder of pictures, torchcaps.data.FolderConfig('pictures').load()"
        )
    passes: Callable[[], Iterable[object]] = data if callable(data) else lambda: data  # type: ignore[assignment,return-value]
    if not callable(data) and not isinstance(data, Iterable):
        kinds = "tensors (images, labels), a Dataset, a DataLoader or another iterable of batches"
        raise DataError(f"a {type(data).__name__} came; {kinds} are wanted")
    if isinstance(data, Iterator):
        raise DataError(
            "an iterator ends after one pass; give a DataLoader, a list, or a function that returns a new one"
        )
    first = next(iter(passes()), None)
    if first is None:
        raise DataError("the iterable gave no batch; at least one is wanted")
    batch = labeled_batch(first)
    _check_unit(batch.images, "the first batch")
    known = _class_count(classes) or len(getattr(getattr(data, "dataset", None), "classes", ()))
    if not known:
        raise DataError("how many classes a loader gives cannot be known; say so: fit(..., classes=10)")
    shape = batch.images.shape[1:]
    spec = ImageSpec(int(shape[0]), int(shape[1]), int(shape[2]), known)
    size = len(batch.labels)
    # A DataLoader of an IterableDataset has a length that cannot be asked for.
    try:
        number = len(data)  # type: ignore[arg-type]
    except TypeError:
        number = sum(1 for _ in passes())
    return LoaderSource(passes, number * size, spec, size)
