"""Requests that the page may send, as frozen dataclasses checked like configuration; images and numbers as JSON.

A body is JSON in UTF-8. Unknown, missing and repeated keys, numbers that are not finite and sizes out of bounds are
refused with one line. An image is {"shape": [c, h, w], "data": base64 of its bytes}; several have more axes before c.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcaps.config import NonNegativeInt, Range, from_dict
from torchcaps.errors import DataError, ShapeError
from torchcaps.math.pixels import to_bytes, to_float

__all__ = [
    "MAX_CHILDREN",
    "DrawRequest",
    "EncodedImage",
    "InferRequest",
    "RoutingRequest",
    "SampleGridRequest",
    "SampleRequest",
    "SweepRequest",
    "decode_image",
    "encode_images",
    "parse_request",
    "to_json",
]

R = TypeVar("R")

MAX_CHILDREN = 64
"""The most children whose votes can be requested at once."""

# Far beyond any pose that a network computes, and small enough that squares stay finite in float32
Number = Annotated[float, Range(-1e4, 1e4)]
Seed = Annotated[int, Range(0, (1 << 31) - 1)]


@dataclass(frozen=True)
class EncodedImage:
    """An image as it travels: its shape (c, h, w) and its bytes in base64."""

    shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    data: str


@dataclass(frozen=True)
class InferRequest:
    """Compute the capsules of an image, and the image reconstructed from them."""

    image: EncodedImage


@dataclass(frozen=True)
class RoutingRequest:
    """Trace how the votes for a parent were routed, and those of some children in particular; by another router too."""

    image: EncodedImage
    parent: NonNegativeInt
    children: tuple[NonNegativeInt, ...] = ()
    router: str | None = None


@dataclass(frozen=True)
class DrawRequest:
    """Decode one capsule in a given pose, upright or in a frame."""

    capsule: NonNegativeInt
    pose: tuple[Number, ...]
    frame: tuple[Number, ...] = ()


@dataclass(frozen=True)
class SweepRequest:
    """Decode one capsule with each number of its pose moved in turn, in `steps` steps."""

    capsule: NonNegativeInt
    pose: tuple[Number, ...]
    steps: Annotated[int, Range(2, 15)] = 9


@dataclass(frozen=True)
class SampleRequest:
    """Draw a random pose of one capsule from a domain."""

    capsule: NonNegativeInt
    domain: str
    seed: Seed = 0


@dataclass(frozen=True)
class SampleGridRequest:
    """Draw `count` random poses of every capsule from a domain."""

    domain: str
    count: Annotated[int, Range(1, 8)] = 4
    seed: Seed = 0


def parse_request(cls: type[R], body: bytes) -> R:
    """Parse and check the body of a request.

    Args:
        cls: one of the dataclasses of this module.
        body: JSON in UTF-8.

    Raises:
        DataError: the body is not JSON.
        RecipeError: it does not fit `cls`.
    """
    # JSON as the standard has it: no NaN, and no key whose first value would be dropped
    try:
        data = json.loads(body.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise DataError("the body is nested too deeply; send a flat JSON object") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"the body is not JSON in UTF-8: {error}") from None
    except ValueError as error:  # ours, or a whole number of thousands of digits
        raise DataError(f"the body cannot be read: {error}") from None
    return from_dict(cls, data)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return table


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def decode_image(image: EncodedImage, shape: Sequence[int]) -> Tensor:
    """Decode an image that must have a given shape.

    Args:
        image: the image as it came.
        shape: (c, h, w) that the model was built for.

    Returns:
        [c h w] floats in [0, 1].

    Raises:
        ShapeError: another shape, or another number of bytes.
        DataError: the bytes are not base64.
    """
    # The shape is compared before anything is decoded: base64 of the largest body is left
    if image.shape != tuple(shape):
        raise ShapeError(f"the image is of {list(image.shape)}; this run's are of {list(shape)} [c h w]")
    try:
        data = base64.b64decode(image.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"image.data is not base64: {error}") from None
    # Compared before the tensor is made, whose error would not name the field
    expected = torch.Size(shape).numel()
    if len(data) != expected:
        raise ShapeError(f"image.data is {len(data)} bytes; send {expected}, one for each number of the image")
    # Copied, because a buffer of bytes is read-only and torch's tensors are not
    return to_float(torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(*shape))


def encode_images(images: Tensor) -> dict[str, object]:
    """Encode images for JSON.

    Args:
        images: [... h w] bytes, or floats, which are clipped to [0, 1]; NaN becomes 0.

    Returns:
        Shape and base64 data, the form of `EncodedImage`.
    """
    if images.dtype != torch.uint8:
        images = to_bytes(images)
    # Raw bytes in base64: about a third of the size of numbers as text, and the page copies them to a canvas
    data = base64.b64encode(images.contiguous().cpu().numpy().tobytes())
    return {"shape": list(images.shape), "data": data.decode("ascii")}


def to_json(values: object) -> object:
    """Convert tensors and nested lists of numbers to lists that JSON can hold.

    Args:
        values: a tensor, a list or tuple, a number, or None.

    Returns:
        The same with six significant digits each, and None for what is not finite.

    >>> to_json([1 / 3, float("nan"), 2, None])
    [0.333333, None, 2, None]
    """
    # Six digits: more than a pixel shows, and half the bytes
    if isinstance(values, Tensor):
        return to_json(values.detach().tolist())
    if isinstance(values, list | tuple):
        return [to_json(value) for value in values]
    if not isinstance(values, float):
        return values
    return float(f"{values:.6g}") if np.isfinite(values) else None
