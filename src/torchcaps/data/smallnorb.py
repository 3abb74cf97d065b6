"""smallNORB: stereo pairs of 50 toys from known viewpoints, and splits that ask for novel ones (Hinton 2018, 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from torchcaps.config import NonNegativeInt, Range
from torchcaps.data.augment import Augment
from torchcaps.data.base import Dataset, Splits, hold_out, subset
from torchcaps.data.cache import locate
from torchcaps.data.preprocess import Preprocess
from torchcaps.data.readers import read_norb, read_npz
from torchcaps.data.sets import as_tensor, folder
from torchcaps.errors import DataError, RecipeError

__all__ = ["SmallNorbConfig", "familiar"]

SMALLNORB_NAMES = ("animal", "human", "airplane", "truck", "car")
FACTORS = ("instance", "elevation", "azimuth", "lighting")
EYES = 2
"""The two pictures of a stereo pair are the channels of one image."""
FAMILIAR = {"azimuth": (30, 32, 34, 0, 2, 4), "elevation": (0, 1, 2)}
"""What the novel-viewpoint splits train on: azimuths of 300 ... 40 degrees (in tens), the three lowest elevations."""


@dataclass(frozen=True)
class SmallNorbConfig:
    """smallNORB, 48x48: 24,300 + 24,300 stereo pairs of toys, the two eyes as two channels.

    Read from the official files, averaged 96 -> 48, or from the JPEG copy at 48x48, whichever is here.

    `novel` = "azimuth" or "elevation" trains on a third of the viewpoints; the test set stays whole, and its factor
    `familiar` (1 or 0) tells the viewpoints that were trained on from those that were not. `matched` validates on the
    familiar third of the test images, as the paper does, to stop two models where they are equally good on it.

    Hinton (2018, section 5) shows squares of `view` = 32 pixels, cut out at random while training and in the middle
    when tested, of zero mean and unit variance (`standardize`), to which `jitter` adds random brightness and contrast
    while training. That is the order of the text; in the authors' code it is the other one, in which standardizing
    takes back all that the two eyes have in common. `deform`, which the paper does not have, turns, stretches and
    shears the images of training: at 1 by up to 10 degrees, a fifth and .17, so that five toys a class look like more;
    `mirror` shows half of them as a mirror does, left eye for right. That shows azimuths that were not trained on, so
    it is refused where they are novel.

    `aside` is the number of a training toy, 4, 6, 7, 8 or 9: that toy of every class is not trained on but validated
    on, so that settings can be chosen by toys that were never seen.
    """

    novel: Literal["none", "azimuth", "elevation"] = "none"
    view: Annotated[int, Range(8, 48)] = 48
    standardize: bool = False
    jitter: bool = False
    deform: Annotated[float, Range(0.0, 2.0)] = 0.0
    mirror: bool = False
    matched: bool = False
    aside: NonNegativeInt | None = None
    validation: NonNegativeInt = 0
    data_dir: str | None = None

    def __post_init__(self) -> None:
        ways = {"matched": self.matched, "aside": self.aside is not None, "validation": self.validation > 0}
        if sum(ways.values()) > 1:
            came = " and ".join(name for name, is_set in ways.items() if is_set)
            raise RecipeError(f"{came} each say what to validate on; set one of them")
        if self.matched and self.novel == "none":
            raise RecipeError("matched validates on the familiar viewpoints of a novel-viewpoint split; set novel, too")
        if self.mirror and self.novel == "azimuth":
            raise RecipeError(
                "mirror with novel = 'azimuth': a mirror shows azimuths that are kept for the test; set mirror = false"
            )

    def load(self) -> Splits:
        files = locate("smallnorb", folder(self.data_dir))
        preprocess = Preprocess(self.view, self.standardize)
        augment = Augment(mirror=(1, 0) if self.mirror else None, deform=self.deform, jitter=self.jitter)
        train = replace(_part(files, "train"), preprocess=preprocess, augment=augment)
        test = replace(_part(files, "test"), preprocess=preprocess, augment=augment)
        if self.novel != "none":
            train = subset(train, familiar(train, self.novel).nonzero().flatten())
            seen = familiar(test, self.novel).long()
            test = replace(test, factors={**test.factors, "familiar": seen})
            if self.matched:
                return Splits(train, test, subset(test, seen.nonzero().flatten()))
        if self.aside is not None:
            return _without_toy(Splits(train, test), self.aside)
        return hold_out(Splits(train, test), self.validation)


def familiar(data: Dataset, by: str) -> Tensor:
    """[n] true where the viewpoint is one that the split by azimuth or elevation trains on."""
    if by not in data.factors:
        raise DataError(f"a split by {by} needs that factor; this set knows {', '.join(data.factors) or 'none'}")
    return torch.isin(data.factors[by], torch.tensor(FAMILIAR[by]))


def _without_toy(splits: Splits, number: int) -> Splits:
    """The training toys of a number become the validation images."""
    toys = splits.train.factors["instance"]
    if number not in toys:
        known = ", ".join(str(toy) for toy in sorted(set(toys.tolist())))
        raise DataError(f"aside = {number}: the training toys have the numbers {known}")
    kept = (toys != number).nonzero().flatten()
    aside = (toys == number).nonzero().flatten()
    return Splits(subset(splits.train, kept), splits.test, subset(splits.train, aside))


def _part(files: dict[str, Path], part: str) -> Dataset:
    copy = files.get(f"smallnorb48_{part}.npz")
    arrays = read_npz(copy) if copy else _official(files, part)
    missing = {"images", "category", *FACTORS} - arrays.keys()
    if missing:
        raise DataError(f"smallnorb {part}: {', '.join(sorted(missing))} missing among {', '.join(sorted(arrays))}")
    images = as_tensor(arrays["images"])
    factors = {name: as_tensor(arrays[name]).long() for name in FACTORS}
    if images.ndim != 4 or images.shape[1] != EYES:
        raise DataError(f"smallnorb {part}: images of shape {list(images.shape)}; pairs [n {EYES} h w] are wanted")
    return Dataset(images, as_tensor(arrays["category"]).long(), len(SMALLNORB_NAMES), factors, SMALLNORB_NAMES)


def _official(files: dict[str, Path], part: str) -> dict[str, np.ndarray]:
    """The three official files of a part as the arrays of the copy: images averaged to half their side."""
    kinds = {k: next(p for n, p in files.items() if f"{part}ing-{k}" in n) for k in ("dat", "cat", "info")}
    images, category, info = (read_norb(kinds[kind]) for kind in ("dat", "cat", "info"))
    halved = np.concatenate([_halve(chunk) for chunk in np.array_split(images, 100)])
    return {"images": halved, "category": category, **dict(zip(FACTORS, info.T, strict=True))}


def _halve(images: np.ndarray) -> np.ndarray:
    """[n c h w] bytes -> [n c h/2 w/2], each pixel the rounded mean of four."""
    x = images.astype(np.uint16)
    total = x[:, :, 0::2, 0::2] + x[:, :, 0::2, 1::2] + x[:, :, 1::2, 0::2] + x[:, :, 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)
