"""What the page may ask, as frozen dataclasses that the configuration's own checks are made of; pictures as text.

A body is JSON in UTF-8. Unknown, missing and repeated keys, numbers that are not finite and sizes out of bounds are
refused, in one line. A picture is {"shape": [c, h, w], "data": base64 of its bytes}; several have more axes before c.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcaps.config import NonNegativeInt, Range, from_dict
from torchcaps.errors import DataError, ShapeError
from torchcaps.math.pixels import to_bytes, to_float

__all__ = [
    "CHILDREN",
    "Draw",
    "Look",
    "Picture",
    "Route",
    "Sample",
    "Sweep",
    "Wall",
    "encode_images",
    "pixels_of",
    "read",
    "to_json",
]

B = TypeVar("B")

CHILDREN = 64
"""The most children whose votes are asked for at once."""

Number = Annotated[float, Range(-1e4, 1e4)]
Seed = Annotated[int, Range(0, (1 << 31) - 1)]


@dataclass(frozen=True)
class Picture:
    """An image on the wire."""

    shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    data: str


@dataclass(frozen=True)
class Look:
    """What do you see?"""

    image: Picture


@dataclass(frozen=True)
class Route:
    """How did the children's votes become this parent?"""

    image: Picture
    parent: NonNegativeInt
    children: tuple[NonNegativeInt, ...] = ()


@dataclass(frozen=True)
class Draw:
    """What does a capsule of this pose look like?"""

    capsule: NonNegativeInt
    pose: tuple[Number, ...]


@dataclass(frozen=True)
class Sweep:
    """And if each number of its pose is moved in turn?"""

    capsule: NonNegativeInt
    pose: tuple[Number, ...]
    steps: Annotated[int, Range(2, 15)] = 9


@dataclass(frozen=True)
class Sample:
    """A pose of this capsule, by chance."""

    capsule: NonNegativeInt
    domain: str
    seed: Seed = 0


@dataclass(frozen=True)
class Wall:
    """So many poses of every capsule, by chance."""

    domain: str
    count: Annotated[int, Range(1, 8)] = 4
    seed: Seed = 0


def read(question: type[B], body: bytes) -> B:
    """The question that a body asks."""
    try:
        data = json.loads(body.decode(), object_pairs_hook=_table, parse_constant=_not_finite)
    except RecursionError:
        raise DataError("the body is nested too deeply; a flat JSON object is wanted") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"the body is not JSON in UTF-8: {error}") from None
    except ValueError as error:  # ours, or a whole number of thousands of digits
        raise DataError(f"the body cannot be read: {error}") from None
    return from_dict(question, data)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return table


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def pixels_of(picture: Picture, shape: Sequence[int]) -> Tensor:  # [c h w]
    """Floats in [0, 1] of a picture that must have the shape given."""
    if picture.shape != tuple(shape):
        raise ShapeError(f"the image is of {list(picture.shape)}; this run's are of {list(shape)} [c h w]")
    try:
        data = base64.b64decode(picture.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"image.data is not base64: {error}") from None
    wanted = torch.Size(shape).numel()
    if len(data) != wanted:
        raise ShapeError(f"image.data is {len(data)} bytes; {wanted} are wanted, one for each number of the image")
    return to_float(torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(*shape))


def encode_images(images: Tensor) -> dict[str, Any]:
    """Images [... h w], floats that are cut to [0, 1] or bytes, as they travel; what is not a number is black."""
    if images.dtype != torch.uint8:
        images = to_bytes(images)
    data = base64.b64encode(images.contiguous().cpu().numpy().tobytes())
    return {"shape": list(images.shape), "data": data.decode("ascii")}


def to_json(values: Any) -> Any:
    """A tensor, or numbers in lists, as JSON may hold them: six digits each, null for what is not finite.

    >>> to_json([1 / 3, float("nan"), 2, None])
    [0.333333, None, 2, None]
    """
    if isinstance(values, Tensor):
        return to_json(values.detach().tolist())
    if isinstance(values, list | tuple):
        return [to_json(value) for value in values]
    if not isinstance(values, float):
        return values
    return float(f"{values:.6g}") if np.isfinite(values) else None
