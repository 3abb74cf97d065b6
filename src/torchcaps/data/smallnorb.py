"""smallNORB: stereo pairs of 50 toy objects from known viewpoints, and splits by viewpoint (Hinton 2018, 5.1)."""

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
from torchcaps.data.sets import as_tensor, expanded
from torchcaps.errors import DataError, RecipeError

__all__ = ["SMALLNORB_NAMES", "SmallNorbConfig", "is_familiar"]

SMALLNORB_NAMES = ("animal", "human", "airplane", "truck", "car")
FACTORS = ("instance", "elevation", "azimuth", "lighting")
CAMERAS = 2
"""The two pictures of a stereo pair, left and right, are the channels of one image."""
FAMILIAR = {"azimuth": (30, 32, 34, 0, 2, 4), "elevation": (0, 1, 2)}
"""Viewpoints that the novel-viewpoint splits train on: azimuths of 300 ... 40 degrees (in tens), the three lowest
elevations."""


@dataclass(frozen=True)
class SmallNorbConfig:
    """smallNORB, 48x48: 24,300 + 24,300 stereo pairs of toy objects, the two cameras as two channels.

    Read from the official files, averaged 96 -> 48, or from the JPEG copy at 48x48, whichever is here. Hinton (2018,
    section 5) trains on standardized crops of 32 pixels whose brightness and contrast change. That is the order of
    the text; in the authors' code it is the other one, in which standardizing takes back all changes that the two
    images of a pair have in common.

    Attributes:
        novel: "azimuth" or "elevation" trains on a third of the viewpoints; the test set stays whole, and its factor
            `familiar` (1 or 0) tells the viewpoints that were trained on from those that were not.
        view: Side of the square that a model gets: cropped at a random place in training, from the center in a test.
        standardize: Give each image zero mean and unit variance.
        standardize_per: What is standardized by itself: the pair of a stereo "image", or each "channel", one camera.
        jitter: Change brightness and contrast at random in training.
        jitter_order: "after" standardizing, as the text says; or "before" it, as the authors' code does.
        deform: Strength of random rotation, stretch and shear in training, which the paper does not have: at 1 up to
            10 degrees, a fifth and .17, so that five object instances a class vary more.
        mirror: Mirror half of the training pairs, left camera for right. Mirrored objects have other azimuths, so it is
            refused where azimuths are held out.
        matched: Validate on the familiar third of the test images, as the paper does, to stop two models where they
            are equally good on it.
        aside: Number of an object instance, 4, 6, 7, 8 or 9: that instance of every class is not trained on but
            validated on, so that settings can be chosen by held-out object instances.
        validation: Number of training images that are set aside for validation.
        data_dir: Folder that is searched before TORCHCAPS_DATA and the cache.
    """

    novel: Literal["none", "azimuth", "elevation"] = "none"
    view: Annotated[int, Range(8, 48)] = 48
    standardize: bool = False
    standardize_per: Literal["image", "channel"] = "image"
    jitter: bool = False
    jitter_order: Literal["after", "before"] = "after"
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
                "mirror with novel = 'azimuth': mirrored objects have azimuths that are held out for the test; "
                "set mirror = false"
            )

    def load(self) -> Splits:
        """Read the set from its files; a DataError says which are missing."""
        files = locate("smallnorb", expanded(self.data_dir))
        preprocess = Preprocess(self.view, self.standardize, per_channel=self.standardize_per == "channel")
        augment = Augment(
            mirror=(1, 0) if self.mirror else None,
            deform=self.deform,
            jitter=self.jitter,
            jitter_before=self.jitter_order == "before",
        )
        train = replace(_read_split(files, "train"), preprocess=preprocess, augment=augment)
        test = replace(_read_split(files, "test"), preprocess=preprocess, augment=augment)
        # Novel viewpoints: train on the familiar ones only, and tell them apart in the test set.
        if self.novel != "none":
            train = subset(train, is_familiar(train, self.novel).nonzero().flatten())
            familiar = is_familiar(test, self.novel).long()
            test = replace(test, factors={**test.factors, "familiar": familiar})
            if self.matched:
                return Splits(train, test, subset(test, familiar.nonzero().flatten()))
        # Validation by object instance, or by number of images.
        if self.aside is not None:
            return _hold_out_instance(Splits(train, test), self.aside)
        return hold_out(Splits(train, test), self.validation)


def is_familiar(data: Dataset, by: str) -> Tensor:
    """Tell which images have a viewpoint that the split by azimuth or elevation trains on.

    Args:
        data: smallNORB.
        by: "azimuth" or "elevation".

    Returns:
        bool [n].

    Raises:
        DataError: if the set does not have that factor.
    """
    if by not in data.factors:
        raise DataError(f"a split by {by} needs that factor; this set knows {', '.join(data.factors) or 'none'}")
    return torch.isin(data.factors[by], torch.tensor(FAMILIAR[by]))


def _hold_out_instance(splits: Splits, number: int) -> Splits:
    """Set the training images of an object instance of every class aside for validation."""
    instances = splits.train.factors["instance"]
    if number not in instances:
        known = ", ".join(str(instance) for instance in sorted(set(instances.tolist())))
        raise DataError(f"aside = {number}: the object instances of training have the numbers {known}")
    rest = (instances != number).nonzero().flatten()
    aside = (instances == number).nonzero().flatten()
    return Splits(subset(splits.train, rest), splits.test, subset(splits.train, aside))


def _read_split(files: dict[str, Path], split: str) -> Dataset:
    """Read the "train" or the "test" images from the copy, if it is there, or from the official files."""
    copy = files.get(f"smallnorb48_{split}.npz")
    arrays = read_npz(copy) if copy else _read_official(files, split)
    missing = {"images", "category", *FACTORS} - arrays.keys()
    if missing:
        raise DataError(f"smallnorb {split}: {', '.join(sorted(missing))} missing among {', '.join(sorted(arrays))}")
    images = as_tensor(arrays["images"])
    factors = {name: as_tensor(arrays[name]).long() for name in FACTORS}
    if images.ndim != 4 or images.shape[1] != CAMERAS:
        raise DataError(f"smallnorb {split}: images of shape {list(images.shape)}; pairs [n {CAMERAS} h w] are wanted")
    return Dataset(images, as_tensor(arrays["category"]).long(), len(SMALLNORB_NAMES), factors, SMALLNORB_NAMES)


def _read_official(files: dict[str, Path], split: str) -> dict[str, np.ndarray]:
    """Read the three official files of a split as the arrays of the copy, images averaged to half their side."""
    kinds = {k: next(p for n, p in files.items() if f"{split}ing-{k}" in n) for k in ("dat", "cat", "info")}
    images, category, info = (read_norb(kinds[kind]) for kind in ("dat", "cat", "info"))
    # In chunks: the images as 16-bit numbers would need four times the memory.
    halved = np.concatenate([_halve(chunk) for chunk in np.array_split(images, 100)])
    return {"images": halved, "category": category, **dict(zip(FACTORS, info.T, strict=True))}


def _halve(images: np.ndarray) -> np.ndarray:
    """Average bytes [n c h w] to [n c h/2 w/2], each pixel the rounded mean of four."""
    x = images.astype(np.uint16)
    total = x[:, :, 0::2, 0::2] + x[:, :, 0::2, 1::2] + x[:, :, 1::2, 0::2] + x[:, :, 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)
