"""Classify picture files: read them as images in the format of a run's own data, then score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from torchcaps.data import (
    AffnistConfig,
    Cifar10Config,
    DataConfig,
    Dataset,
    FashionMnistConfig,
    FolderConfig,
    GlyphsConfig,
    MnistConfig,
    MultiMnistConfig,
    NpzConfig,
    Preprocess,
    SmallNorbConfig,
)
from torchcaps.data.readers.pictures import class_folders, read_picture
from torchcaps.data.sets import CIFAR10_NAMES
from torchcaps.data.smallnorb import SMALLNORB_NAMES
from torchcaps.errors import ShapeError, TorchcapsError, TrainingError
from torchcaps.evaluate.multilabel import top
from torchcaps.train.run import TrainedRun

__all__ = ["Prediction", "class_names", "classify", "letterbox", "read_pictures"]

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
}
"""The class names of data that need not be loaded for them; none where numbers are the names."""

SIDES: dict[type, int] = {Cifar10Config: 32, SmallNorbConfig: 48}
"""The side of whole images, of data of which a model may see a view only."""


@dataclass(frozen=True)
class Prediction:
    """What a classifier says about one picture.

    Attributes:
        scores: [j] one number a class.
        named: The classes that it names, the highest score first.
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


def read_pictures(run: TrainedRun, paths: Sequence[Path], *, fit: bool = False, invert: bool = False) -> Dataset:
    """Read picture files as a data set in the format of a run's own.

    Args:
        run: Whose model shall see them.
        paths: PNG or JPEG files.
        fit: Convert pictures of another size or color; otherwise they are refused.
        invert: Swap dark and light.

    Returns:
        The pictures, with the run's class names; all labels are 0.

    Raises:
        ShapeError: If a picture has another size or other channels, without `fit`.
    """
    config = run.recipe.data
    (channels, height, width, classes) = run.model.spec
    # Where the model gets a view of an image, the picture is the whole image.
    view = getattr(config, "view", None)
    if view is not None:
        height = width = SIDES.get(type(config), view)
    images = torch.stack([_read(path, (channels, height, width), fit) for path in paths])  # [n c h w]
    return Dataset(
        255 - images if invert else images,
        torch.zeros(len(paths), dtype=torch.int64),
        classes,
        names=run.class_names or class_names(config, classes),
        preprocess=Preprocess(
            view,
            bool(getattr(config, "standardize", False)),
            per_channel=getattr(config, "standardize_per", "image") == "channel",
        ),
    )


def _read(path: Path, wanted: tuple[int, int, int], fit: bool) -> Tensor:
    """[c h w] the bytes of a picture; a gray one serves as a colored one, the rest is refused without `fit`."""
    channels, height, width = wanted
    # Without `fit`, only gray may become color: that loses nothing.
    found = read_picture(path).shape
    same_channels = found[0] == channels or (found[0], channels) == (1, 3)
    if not (same_channels and found[1:] == (height, width)) and not fit:
        raise ShapeError(
            f"'{path}' is {_describe(found)}; this run's pictures are {_describe(wanted)} (width x height): add --fit "
            "to convert it"
        )
    # Converted by the reader, then repeated over channels where one is not enough.
    pixels = torch.from_numpy(read_picture(path, 3 if channels == 3 else 1).copy())
    return letterbox(pixels.expand(channels, -1, -1), height, width)


def _describe(shape: Sequence[int]) -> str:
    color = {1: "gray", 3: "in color"}.get(shape[0], f"of {shape[0]} channels")
    return f"{shape[2]}x{shape[1]} and {color}"


def letterbox(picture: Tensor, height: int, width: int) -> Tensor:  # [c height width]
    """Scale a picture, bytes [c h w], into the middle of another size, its sides in proportion.

    It is shrunk by means over areas or enlarged bilinearly. The rest gets the median of the border of each channel.
    """
    h, w = picture.shape[1:]
    if (h, w) == (height, width):
        return picture
    # The largest size that fits, its sides in proportion.
    scale = min(height / h, width / w)
    size = max(1, round(scale * h)), max(1, round(scale * w))
    how = {"mode": "area"} if scale < 1 else {"mode": "bilinear", "align_corners": False}
    scaled = interpolate(picture.float().unsqueeze(0), size, **how).squeeze(0).round().to(torch.uint8)
    # Bars in the color of the border; black ones could pass for part of an object.
    border = torch.cat([picture[:, 0], picture[:, -1], picture[:, :, 0], picture[:, :, -1]], 1)  # [c 2(h + w)]
    whole = border.median(1).values[:, None, None].repeat(1, height, width)
    # The picture goes into the middle.
    down = (height - size[0]) // 2
    right = (width - size[1]) // 2
    whole[:, down : down + size[0], right : right + size[1]] = scaled
    return whole


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
    if threshold is None:
        return [Prediction(row, (int(row.argmax()),)) for row in scores]
    # Several classes may be named, the highest score first.
    order = top(scores, scores.shape[1])  # [n j]
    return [
        Prediction(row, tuple(int(j) for j in ranked if row[j] > threshold))
        for row, ranked in zip(scores, order, strict=True)
    ]
