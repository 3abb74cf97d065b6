"""Your own images: a folder with one folder a class, each with PNG or JPEG files of one size.

    animals/cat/a.png  animals/cat/b.jpg  animals/dog/c.png   ->  labels 0 0 1, names ["cat", "dog"]

Classes are sorted by name (by code points: capitals first) and numbered from 0; images are sorted by class, then by
file name. Names that begin with a dot are passed over, and so are files beside the class folders; anything else that
is not an image is refused. The content of a file, not its ending, tells what it is. Transparency is dropped, deep
grays are cut to 8 bits, and a photo's orientation tag is not applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import MOST, bad, byte_count, opened
from torchcaps.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["class_folders", "read_picture", "read_pictures"]

_FORMATS = ("PNG", "JPEG")
_MOST_PIXELS = 1 << 22
_GRAY = {"1", "L", "LA", "I", "I;16"}


class _Head(NamedTuple):
    """What is known of an image before its pixels are decoded."""

    width: int
    height: int
    gray: bool


def read_pictures(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Images [n c h w] (c = 1 if all are gray, else 3), labels [n] and the names of the classes, sorted."""
    module = _pillow()
    names, paths, labels = _listed(folder)
    heads = [_head(module, path) for path in paths]
    first = heads[0]
    for path, head in zip(paths, heads, strict=True):
        if head[:2] != first[:2]:
            size = f"{head.width}x{head.height}"
            wanted = f"{first.width}x{first.height}"
            raise bad(path, f"is {size}; all images must have the size of the first, {wanted} ({paths[0].name})")
    channels = 1 if all(head.gray for head in heads) else 3
    shape = (len(paths), channels, first.height, first.width)
    byte_count(folder, shape, 1, MOST)
    images = np.empty(shape, np.uint8)
    for n, path in enumerate(paths):
        images[n] = _pixels(module, path, first, channels)
    return images, np.array(labels, np.int64), names


def read_picture(path: Path, channels: int | None = None) -> NDArray[np.uint8]:
    """One image [c h w] in its own channels, 1 if it is gray and else 3, or in those that are asked for."""
    module = _pillow()
    head = _head(module, path)
    return _pixels(module, path, head, channels or (1 if head.gray else 3))


def class_folders(folder: Path) -> list[str]:
    """The names of the classes, sorted, as `read_pictures` numbers them; no image is opened."""
    with _listing(folder):
        return [path.name for path in _classes(folder, folder.resolve(strict=True))]


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading PNG and JPEG needs Pillow, which is absent: pip install 'torchcaps[images]'"
        ) from error
    return Image


def _listed(folder: Path) -> tuple[list[str], list[Path], list[int]]:
    """Class names, image files in order, and the label of each."""
    with _listing(folder):
        root = folder.resolve(strict=True)
        classes = _classes(folder, root)
        found = [(label, path) for label, place in enumerate(classes) for path in _files(place, root)]
    return [path.name for path in classes], [path for _, path in found], [label for label, _ in found]


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    """Whatever the system has against looking into a folder becomes one `DataError`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise bad(folder, f"cannot be listed: {error}") from error


def _classes(folder: Path, root: Path) -> list[Path]:
    classes = [path for path in _entries(folder, root) if path.is_dir()]
    if not classes:
        raise bad(folder, "has no class folder; one folder a class is wanted, each with PNG or JPEG files")
    return classes


def _entries(folder: Path, root: Path) -> list[Path]:
    """What is in a folder, by name, without what is hidden; no link may lead out of `root`."""
    entries = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    for path in entries:
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise bad(path, "is a link out of the folder; put the images themselves there")
    return entries


def _files(place: Path, root: Path) -> list[Path]:
    entries = _entries(place, root)
    if not entries:
        raise bad(place, "is an empty class; put PNG or JPEG files there, or remove the folder")
    for path in entries:
        if not path.is_file():
            raise bad(path, "is not a file; a class folder holds PNG and JPEG files only")
    return entries


@contextmanager
def _picture(module: ModuleType, path: Path) -> Iterator[Image]:
    """An image, open and of an allowed size; Pillow raises errors of any kind on damaged files, so all are caught."""
    with opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with module.open(file, formats=_FORMATS) as image:
                if image.width * image.height > _MOST_PIXELS:
                    size = f"{image.width}x{image.height}"
                    raise bad(path, f"is {size}; at most {_MOST_PIXELS:,} pixels are read, so make it smaller")
                if image.format not in _FORMATS or getattr(image, "n_frames", 1) > 1:
                    raise bad(path, "holds more than one picture; single PNG and JPEG images are wanted")
                yield image
        except DataError:
            raise
        except Exception as error:
            raise bad(path, "is damaged, too large, or not a PNG or JPEG image; replace or remove it") from error


def _head(module: ModuleType, path: Path) -> _Head:
    with _picture(module, path) as image:
        return _Head(image.width, image.height, image.mode in _GRAY)


def _pixels(module: ModuleType, path: Path, head: _Head, channels: int) -> NDArray[np.uint8]:
    """[c h w] the pixels as bytes."""
    with _picture(module, path) as image:
        image.load()
        pixels = _bytes(image, channels)  # [h w] or [h w c]
    if pixels.shape[:2] != (head.height, head.width):
        raise bad(path, "changed while it was read")
    return pixels.reshape(head.height, head.width, channels).transpose(2, 0, 1)


def _bytes(image: Image, channels: int) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8  # [h w], of 16 bits
        return np.repeat(deep.astype(np.uint8)[..., None], channels, -1)
    wanted = "L" if channels == 1 else "RGB"
    return np.asarray(image if image.mode == wanted else image.convert(wanted))
