"""Classify picture files: read them as images in the format of a run's own data, then score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data import (
    AffnistConfig,
    Cifar10Config,
    DataConfig,
    Dataset,
    FashionMnistConfig,
    FolderConfig,
    GivenConfig,
    GlyphsConfig,
    MnistConfig,
    MultiMnistConfig,
    NpzConfig,
    Preprocess,
    SmallNorbConfig,
)
from torchcaps.data.fitting import PictureFormat, read_fitted
from torchcaps.data.readers.pictures import class_folders, read_header
from torchcaps.data.sets import CIFAR10_NAMES
from torchcaps.data.smallnorb import SMALLNORB_NAMES
from torchcaps.errors import DataError, ShapeError, TorchcapsError, TrainingError
from torchcaps.evaluate.multilabel import top
from torchcaps.train.run import TrainedRun

__all__ = ["PicturesRead", "Prediction", "class_names", "classify", "name_above", "read_pictures"]

SEVERAL_THRESHOLD = 0.5
"""The score above which a class is named where images show several."""

NAMES: dict[type, tuple[str, ...]] = {
    MnistConfig: MnistConfig.NAMES,
    FashionMnistConfig: FashionMnistConfig.NAMES,
    Cifar10Config: CIFAR10_NAMES,
    SmallNorbConfig: SMALLNORB_NAMES,
    GlyphsConfig: (),
    AffnistConfig: (),
    MultiMnistConfig: (),
    NpzConfig: (),
    GivenConfig: (),
}
"""The class names of data that need not be loaded for them; none where numbers are the names."""

SIDES: dict[type, int] = {Cifar10Config: 32, SmallNorbConfig: 48}
"""The side of whole images, of data of which a model may see a view only."""


@dataclass(frozen=True)
class Prediction:
    """What a model says about one picture.

    Attributes:
        scores: [j] one number a class, or a capsule.
        named: The classes, or capsules, that it names, the highest score first.
    """

    scores: Tensor
    named: tuple[int, ...]


def class_names(data: DataConfig, classes: int) -> tuple[str, ...]:
    """A name for each class, its number where the data have none or are not here; images are not read if possible."""
    try:
        names = _names(data)
    except TorchcapsError:
        # The data need not be on this machine: numbers serve as names.
        names = ()
    return names if len(names) == classes else tuple(map(str, range(classes)))


def _names(data: DataConfig) -> tuple[str, ...]:
    if isinstance(data, FolderConfig):
        return tuple(class_folders(Path(data.path).expanduser()))
    known = NAMES.get(type(data))
    return data.load().train.names if known is None else known


class PicturesRead(NamedTuple):
    """Pictures in the format of a run, and those that could not be read.

    Attributes:
        data: The pictures that could be read, with the run's class names; all labels are 0. None if there is none.
        paths: Their files.
        failures: (file, why) of the others.
    """

    data: Dataset | None
    paths: tuple[Path, ...]
    failures: tuple[tuple[Path, str], ...]


def read_pictures(run: TrainedRun, paths: Sequence[Path], *, fit: bool = False, invert: bool = False) -> PicturesRead:
    """Read picture files as a data set in the format of a run's own; one that cannot be read does not stop the others.

    Args:
        run: Whose model shall see them. Pictures for a run that was trained on a folder are treated as those were.
        paths: Picture files.
        fit: Convert pictures of another size or color; otherwise they count as unreadable.
        invert: Swap dark and light.
    """
    wanted = _format_of(run)
    read: dict[int, Tensor] = {}
    failures = []
    for n, path in enumerate(paths):
        try:
            read[n] = _read(path, wanted, fit=fit or isinstance(run.recipe.data, FolderConfig))
        except (DataError, ShapeError) as error:
            failures.append((path, str(error)))
    if not read:
        return PicturesRead(None, (), tuple(failures))
    config = run.recipe.data
    classes = run.model.spec.classes
    images = torch.stack(list(read.values()))  # [n c h w]
    data = Dataset(
        255 - images if invert else images,
        torch.zeros(len(images), dtype=torch.int64),
        classes,
        names=run.class_names or class_names(config, classes),
        preprocess=Preprocess(
            _view_of(run, wanted),
            bool(getattr(config, "standardize", False)),
            per_channel=getattr(config, "standardize_per", "image") == "channel",
        ),
    )
    return PicturesRead(data, tuple(paths[n] for n in read), tuple(failures))


def _format_of(run: TrainedRun) -> PictureFormat:
    """Return what whole pictures of a run's data are like: where a model gets a view of them, they are larger."""
    config = run.recipe.data
    channels, height, width, _ = run.model.spec
    if isinstance(config, FolderConfig):
        return config.picture_format(channels, height, width)
    if getattr(config, "view", None) is not None:
        height = width = SIDES.get(type(config), height)
    return PictureFormat(channels, height, width, "letterbox")


def _view_of(run: TrainedRun, wanted: PictureFormat) -> int | None:
    """Return the side of the view that the model gets; None if it gets whole pictures."""
    _, height, width, _ = run.model.spec
    return None if (height, width) == (wanted.height, wanted.width) else height


def _read(path: Path, wanted: PictureFormat, *, fit: bool) -> Tensor:
    """[c h w] the bytes of a picture; a gray one serves as a colored one, the rest is refused without `fit`."""
    if not fit:
        found = read_header(path)
        came = (1 if found.is_gray else 3, found.height, found.width)
        # Only gray may become color: that loses nothing.
        same_channels = came[0] == wanted.channels or (came[0], wanted.channels) == (1, 3)
        if not same_channels or came[1:] != wanted[1:3]:
            raise ShapeError(
                f"'{path}' is {_describe(came)}; this run's pictures are {_describe(wanted[:3])} (width x height): "
                "add --fit to convert it"
            )
    # Converted by the reader, then repeated over channels where one is not enough.
    pixels = read_fitted(path, wanted._replace(channels=3 if wanted.channels == 3 else 1))
    return pixels.expand(wanted.channels, -1, -1)


def _describe(shape: Sequence[int]) -> str:
    color = {1: "gray", 3: "in color"}.get(shape[0], f"of {shape[0]} channels")
    return f"{shape[2]}x{shape[1]} and {color}"


@torch.inference_mode()
def classify(run: TrainedRun, data: Dataset, threshold: float | None = None) -> list[Prediction]:
    """Name the class of the highest score of each picture or, with a threshold, all classes whose score is above it.

    Args:
        run: Of a classifier.
        data: Pictures, see `read_pictures`.
        threshold: None for the best class alone; runs on images that show several things then have
            `SEVERAL_THRESHOLD`.

    Returns:
        One prediction a picture.

    Raises:
        TrainingError: If the scores are not finite.
    """
    # Where images show several things, the best class alone would miss the others.
    if threshold is None and isinstance(run.recipe.data, MultiMnistConfig):
        threshold = SEVERAL_THRESHOLD
    scores = run.model.eval().scores(data.model_input())  # [n j]
    if not bool(scores.isfinite().all()):
        raise TrainingError("the scores of this run are not finite: its training has diverged; train it again")
    return name_above(scores, threshold)


def name_above(scores: Tensor, threshold: float | None) -> list[Prediction]:
    """Name the highest score of each row or, with a threshold, all above it, the highest first.

    Args:
        scores: [n j].
        threshold: None for the highest alone.

    Returns:
        One prediction a row.
    """
    if threshold is None:
        return [Prediction(row, (int(row.argmax()),)) for row in scores]
    order = top(scores, scores.shape[1])  # [n j]
    return [
        Prediction(row, tuple(int(j) for j in ranked if row[j] > threshold))
        for row, ranked in zip(scores, order, strict=True)
    ]
