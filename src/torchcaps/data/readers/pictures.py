"""The user's own images: a folder with one folder a class, each with picture files of one size.

    animals/cat/a.png  animals/cat/b.jpg  animals/dog/c.png   ->  labels 0 0 1, names ["cat", "dog"]

Classes are sorted by name (by code points: capitals first) and numbered from 0; images are sorted by class, then by
file name. Names that begin with a dot are passed over, and so are files beside the class folders; anything else that
is not a picture is refused. The content of a file, not its ending, tells its format. Transparency is dropped, deep
grays are cut to 8 bits, of a GIF or WebP that moves the first frame is taken, and a photo's orientation tag is not
applied. GIF and WebP pictures count as colored.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchcaps.data.readers.safe_io import MOST, bad, opened
from torchcaps.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Pictures", "class_folders", "read_picture", "read_pictures"]

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_MOVING = ("GIF", "WEBP")
_READ = "PNG, JPEG, GIF and WebP pictures are read"
_LAYOUT = "one folder a class is wanted, such as cat/1.png and dog/1.png"
_MOST_PIXELS = 1 << 22
_GRAY = {"1", "L", "LA", "I", "I;16"}


class Pictures(NamedTuple):
    """A folder of pictures as arrays.

    Attributes:
        images: uint8 [n c h w]; c is 1 if all are gray, else 3.
        labels: int64 [n].
        names: The names of the classes, sorted.
    """

    images: np.ndarray
    labels: np.ndarray
    names: list[str]


class _Header(NamedTuple):
    """What is known of a picture before its pixels are decoded."""

    width: int
    height: int
    is_gray: bool


def read_pictures(folder: Path) -> Pictures:
    """Read all pictures of a folder of class folders.

    Raises:
        DataError: if there is no class folder, or a file in one is not a picture or has another size than the first.
    """
    pillow = _import_pillow()
    classes = _class_paths(folder)
    with _listing(folder):
        root = folder.resolve(strict=True)
        labeled = [(label, path) for label, place in enumerate(classes) for path in _picture_paths(place, root)]
    paths = [path for _, path in labeled]
    headers = [_read_header(pillow, path) for path in paths]

    # All headers are compared, and the memory is bounded, before the first pixel is decoded.
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        if header[:2] != first[:2]:
            wanted = f"{first.width}x{first.height} ({paths[0].name})"
            raise bad(path, f"is {header.width}x{header.height}; all must have the size of the first, {wanted}")
    channels = 1 if all(header.is_gray for header in headers) else 3
    shape = (len(paths), channels, first.height, first.width)
    if np.prod(shape, dtype=object) > MOST:
        raise bad(folder, f"holds pictures of {list(shape)} bytes; at most {MOST:,} bytes are read")

    images = np.empty(shape, np.uint8)
    for n, path in enumerate(paths):
        images[n] = _read_pixels(pillow, path, first, channels)
    return Pictures(images, np.array([label for label, _ in labeled], np.int64), [path.name for path in classes])


def read_picture(path: Path, channels: int | None = None) -> np.ndarray:
    """Read one picture.

    Args:
        path: The file.
        channels: 1 or 3; None takes 1 for a gray picture and 3 for a colored one.

    Returns:
        uint8 [c h w].
    """
    pillow = _import_pillow()
    header = _read_header(pillow, path)
    return _read_pixels(pillow, path, header, channels or (1 if header.is_gray else 3))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the classes, sorted, as `read_pictures` numbers them; no picture is opened."""
    return [path.name for path in _class_paths(folder)]


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading pictures needs Pillow, which is absent: pip install 'torchcaps[images]'") from error
    return Image


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    """Turn whatever the system has against listing a folder into one `DataError`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise bad(folder, f"cannot be listed: {error}") from error


def _class_paths(folder: Path) -> list[Path]:
    """List the class folders, sorted by name."""
    with _listing(folder):
        if not folder.exists():
            raise bad(folder, f"there is no such folder; {_LAYOUT}")
        if not folder.is_dir():
            raise bad(folder, f"is not a folder; {_LAYOUT}")
        classes = [path for path in _visible_paths(folder, folder.resolve(strict=True)) if path.is_dir()]
    if not classes:
        raise bad(folder, f"has no class folder; {_LAYOUT}")
    return classes


def _visible_paths(folder: Path, root: Path) -> list[Path]:
    """List a folder by name, without what is hidden; no link may lead out of `root`."""
    paths = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    for path in paths:
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise bad(path, "is a link out of the folder; put the pictures themselves there")
    return paths


def _picture_paths(place: Path, root: Path) -> list[Path]:
    """List the files of a class folder."""
    paths = _visible_paths(place, root)
    if not paths:
        raise bad(place, f"is an empty class folder; put pictures there, or remove it ({_READ})")
    for path in paths:
        if not path.is_file():
            raise bad(path, f"is not a file; a class folder holds picture files only ({_READ})")
    return paths


@contextmanager
def _opened_picture(pillow: ModuleType, path: Path) -> Iterator[Image]:
    """Open a picture of an allowed format and size."""
    with opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with pillow.open(file, formats=_FORMATS) as image:
                if not 1 <= image.width * image.height <= _MOST_PIXELS:
                    size = f"{image.width}x{image.height}"
                    raise bad(path, f"is {size}; 1 to {_MOST_PIXELS:,} pixels are read, so make it smaller")
                if image.format not in _FORMATS or (image.format not in _MOVING and getattr(image, "n_frames", 1) > 1):
                    raise bad(path, "holds more than one picture; save one of them as PNG or JPEG")
                yield image
        except DataError:
            raise
        except pillow.UnidentifiedImageError as error:
            raise bad(path, f"is damaged or of another format; {_READ}, so convert or remove it") from error
        except Exception as error:  # Pillow raises errors of any kind on damaged files
            raise bad(path, "is damaged or too large; replace or remove it") from error


def _read_header(pillow: ModuleType, path: Path) -> _Header:
    with _opened_picture(pillow, path) as image:
        return _Header(image.width, image.height, image.mode in _GRAY)


def _read_pixels(pillow: ModuleType, path: Path, header: _Header, channels: int) -> np.ndarray:
    """Decode a picture to bytes [c h w]."""
    with _opened_picture(pillow, path) as image:
        image.load()
        pixels = _to_bytes(image, channels)  # [h w] or [h w c]
    if pixels.shape[:2] != (header.height, header.width):
        raise bad(path, "changed while it was read")
    return pixels.reshape(header.height, header.width, channels).transpose(2, 0, 1)


def _to_bytes(image: Image, channels: int) -> np.ndarray:
    """Convert the pixels of a loaded picture to bytes [h w] or [h w 3], gray or RGB."""
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8  # [h w], of 16 bits
        return np.repeat(deep.astype(np.uint8)[..., None], channels, -1)
    mode = "L" if channels == 1 else "RGB"
    return np.asarray(image if image.mode == mode else image.convert(mode))
