"""The user's own pictures: a folder with one folder a class, each with picture files of any size and kind.

    animals/cat/a.png  animals/cat/b.jpg  animals/dog/c.png   ->  labels 0 0 1, names ("cat", "dog")
    animals/train/cat/a.png  animals/test/cat/b.png           ->  the same with a split of the user's own

Classes are sorted by name (by code points: capitals first) and numbered from 0; files are sorted by class, then by
name. Names that begin with a dot are passed over, and so are files beside the class folders. The content of a file,
not its ending, tells its format. The orientation tag of a photograph is applied, transparency is composed on a
background, grays of 16 bits are scaled to 8, and of a file with several pictures, such as a GIF that moves, the first
is taken. GIF, WebP and pictures with a palette count as colored.

Sizes are compared with bounds before a pixel is decoded, and JPEG files are decoded at the scale that is wanted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from torchcaps.data.readers.safe_io import bad, opened, size_of
from torchcaps.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MOST_PIXELS",
    "SPLITS",
    "Header",
    "Listing",
    "PictureFile",
    "class_folders",
    "list_pictures",
    "read_header",
    "read_picture",
]

SPLITS = ("train", "validation", "test")
"""Folders of a split that the user made; `validation` may be absent."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_READ = "PNG, JPEG, GIF, WebP and BMP pictures are read"
_LAYOUT = "one folder a class is wanted, such as cat/1.png and dog/1.png"
MOST_PIXELS = 1 << 26
_LONGEST_SIDE = 1 << 16
_MOST_BYTES = 1 << 28
"""Bounds of a picture file: 67 million pixels, no side beyond 65,536, and 268 MB."""
_SMALL = 1 << 22
_MOST_EXPANSION = 2048
"""Pictures of more pixels than `_SMALL` have at most so many a byte of their file."""
_GRAY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L"}
_ALPHA = {"LA", "La", "PA", "RGBA", "RGBa"}
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""The EXIF tag that says how a camera was held, and its values that swap width and height."""
_SIXTEEN_BITS = ((np.arange(1 << 16) * 255 + 32767) // 65535).astype(np.uint8)
"""Gray of 16 bits -> gray of 8 bits, rounded."""
_REDUCED = 2
"""A picture is reduced by means over whole pixels while it stays this many times as large as wanted."""


class PictureFile(NamedTuple):
    """A file of a class folder.

    Attributes:
        split: "train", "test" or "validation" where the user split the pictures, else "".
        label: Number of its class.
        path: The file, which need not be a picture.
    """

    split: str
    label: int
    path: Path


class Listing(NamedTuple):
    """The files of a folder of class folders, sorted by split, class and name, and the names of the classes."""

    names: tuple[str, ...]
    files: list[PictureFile]


class Header(NamedTuple):
    """What is known of a picture before its pixels are decoded.

    Attributes:
        height: In pixels, as the picture is seen upright.
        width: Likewise.
        is_gray: Whether one channel holds it all.
        format: "PNG", "JPEG", "GIF", "WEBP" or "BMP".
        is_turned: Whether its orientation tag turns or mirrors it.
        has_alpha: Whether it may be transparent.
        is_deep: Whether its grays have more than 8 bits.
    """

    height: int
    width: int
    is_gray: bool
    format: str
    is_turned: bool
    has_alpha: bool
    is_deep: bool


def list_pictures(folder: Path) -> Listing:
    """List the files of all classes; nothing is opened.

    Args:
        folder: Holds a folder for each class or, for a split of the user's own, the folders `train` and `test` (and
            `validation`) which do.

    Returns:
        The files and the names of the classes, of all splits together.

    Raises:
        DataError: if there is no class folder, one is empty, or a link leads out of the folder.
    """
    _import_pillow()
    root = _resolved(folder)
    by_split = {split: _class_paths(place, root) for split, place in _split_folders(folder, root).items()}
    names = tuple(sorted({path.name for classes in by_split.values() for path in classes}))
    with _listing(folder):
        files = [
            PictureFile(split, names.index(place.name), path)
            for split, classes in by_split.items()
            for place in classes
            for path in _class_files(place, root)
        ]
    # A class without training pictures could not be learned.
    for label in sorted({f.label for f in files} - {f.label for f in files if f.split in ("", "train")}):
        raise bad(folder / "train", f"has no class folder {names[label]!r}, which is in another split; add it")
    return Listing(names, files)


def class_folders(folder: Path) -> list[str]:
    """Return the names of the classes, sorted, as `list_pictures` numbers them; no picture is opened."""
    root = _resolved(folder)
    splits = _split_folders(folder, root).values()
    return sorted({path.name for place in splits for path in _class_paths(place, root)})


def read_header(path: Path) -> Header:
    """Read what a picture says about itself.

    Raises:
        DataError: if the file is not a picture that can be read, or is too large.
    """
    with _opened_picture(_import_pillow(), path) as image:
        turn = _orientation(image)
        width, height = image.size[::-1] if turn in _TURNED else image.size
        return Header(
            height=height,
            width=width,
            is_gray=image.mode in _GRAY,
            format="JPEG" if image.format == "MPO" else image.format or "",
            is_turned=turn != 1,
            has_alpha=_has_alpha(image),
            is_deep=image.mode.startswith("I"),
        )


def read_picture(
    path: Path, channels: int | None = None, *, background: int = 255, least: tuple[int, int] | None = None
) -> np.ndarray:
    """Decode a picture, upright and opaque.

    Args:
        path: The file.
        channels: 1 or 3; None takes 1 for a gray picture and 3 for a colored one.
        background: The gray, 0 to 255, that is seen through what is transparent.
        least: (height, width) that are enough: a picture that is several times as large may come reduced by a whole
            factor, which takes less memory and time.

    Returns:
        uint8 [c h w].

    Raises:
        DataError: if the file is not a picture that can be read, or is too large.
    """
    pillow = _import_pillow()
    with _opened_picture(pillow, path) as image:
        count = channels or (1 if image.mode in _GRAY else 3)
        turn = _orientation(image)
        # The wanted size as the file stores it: lying, if the camera was held upright.
        wanted = None if least is None else (least if turn in _TURNED else least[::-1])  # (width, height)
        if wanted is not None and image.format in ("JPEG", "MPO"):
            image.draft(None, (_REDUCED * wanted[0], _REDUCED * wanted[1]))
        image.load()
        pixels = _upright(pillow, _reduced(_opaque(pillow, image, count, background), wanted), turn)
        array = np.asarray(pixels)  # [h w] or [h w c]
    return array.reshape(*array.shape[:2], count).transpose(2, 0, 1)


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading pictures needs Pillow, which is absent: pip install 'torchcaps[images]'") from error
    return Image


# ----------------------------------------------------------------------------------------- folders


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    """Turn whatever the system has against listing a folder into one `DataError`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise bad(folder, f"cannot be listed: {error}") from error


def _resolved(folder: Path) -> Path:
    """Return the folder without links, if it is one."""
    with _listing(folder):
        if not folder.exists():
            raise bad(folder, f"there is no such folder; {_LAYOUT}")
        if not folder.is_dir():
            raise bad(folder, f"is not a folder; {_LAYOUT}")
        return folder.resolve(strict=True)


def _split_folders(folder: Path, root: Path) -> dict[str, Path]:
    """Return split -> folder of its classes; the split "" stands for a folder that the user did not split."""
    with _listing(folder):
        places = {path.name: path for path in _visible_paths(folder, root) if path.is_dir()}
        # Classes may be called "train" and "test", too: only folders of folders are a split.
        is_split = all(
            name in places and any(path.is_dir() for path in _visible_paths(places[name], root))
            for name in ("train", "test")
        )
    if not is_split:
        return {"": folder}
    return {name: places[name] for name in SPLITS if name in places}


def _class_paths(folder: Path, root: Path) -> list[Path]:
    """List the class folders, sorted by name."""
    with _listing(folder):
        classes = [path for path in _visible_paths(folder, root) if path.is_dir()]
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


def _class_files(place: Path, root: Path) -> list[Path]:
    """List what a class folder holds."""
    paths = _visible_paths(place, root)
    if not paths:
        raise bad(place, f"is an empty class folder; put pictures there, or remove it ({_READ})")
    return paths


# ----------------------------------------------------------------------------------------- one file


class _ClippedFile:
    """An open file that is never asked for more bytes than it has: Python would reserve memory for all of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = size_of(file)

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._file.tell())
        return self._file.read(left if count < 0 else min(count, left))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _opened_picture(pillow: ModuleType, path: Path) -> Iterator[Image]:
    """Open a picture of an allowed format and size."""
    with opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if size_of(file) > _MOST_BYTES:
            raise bad(path, f"has {size_of(file):,} bytes; at most {_MOST_BYTES:,} are read, so make it smaller")
        try:
            with pillow.open(_ClippedFile(file), formats=_FORMATS) as image:
                if not 1 <= image.width * image.height <= MOST_PIXELS or max(image.size) > _LONGEST_SIDE:
                    size = f"{image.width}x{image.height}"
                    raise bad(path, f"is {size}; 1 to {MOST_PIXELS:,} pixels are read, so make it smaller")
                # A photograph has a byte for some pixels: few bytes that claim many are damaged, or a bomb.
                if image.width * image.height > max(_SMALL, _MOST_EXPANSION * size_of(file)):
                    raise bad(path, f"claims {image.width}x{image.height} pixels, which cannot be; it is damaged")
                yield image
        except DataError:
            raise
        except pillow.UnidentifiedImageError as error:
            raise bad(path, f"is damaged or of another format; {_READ}, so convert or remove it") from error
        except Exception as error:  # Pillow raises errors of any kind on damaged files
            raise bad(path, "is damaged or too large; replace or remove it") from error


def _orientation(image: Image) -> int:
    """Return the orientation tag, 1 to 8; 1, upright, where there is none or it says nothing."""
    # Pillow would decode a whole PNG in search of a tag behind its pixels.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    turn = image.getexif().get(_ORIENTATION, 1)
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def _has_alpha(image: Image) -> bool:
    return image.mode in _ALPHA or "transparency" in image.info


def _opaque(pillow: ModuleType, image: Image, channels: int, background: int) -> Image:
    """Convert a loaded picture to 8 bits, gray or RGB, on a background."""
    mode = "L" if channels == 1 else "RGB"
    # Pillow cuts deep grays at 255 where it should scale them.
    if image.mode.startswith("I"):
        deep = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16)
        gray: Image = pillow.fromarray(_SIXTEEN_BITS[deep])
        return gray.convert(mode)
    if not _has_alpha(image):
        return image if image.mode == mode else image.convert(mode)
    layered = image.convert("RGBA")
    below: Image = pillow.new(mode, image.size, background if channels == 1 else (background,) * 3)
    below.paste(layered.convert(mode), mask=layered.getchannel("A"))
    return below


def _reduced(image: Image, wanted: tuple[int, int] | None) -> Image:
    """Reduce a picture by a whole factor if it is much larger than wanted."""
    if wanted is None:
        return image
    factor = min(image.width // (_REDUCED * wanted[0]), image.height // (_REDUCED * wanted[1]))
    return image.reduce(factor) if factor > 1 else image


def _upright(pillow: ModuleType, image: Image, turn: int) -> Image:
    """Turn or mirror a picture as its orientation tag asks."""
    how = pillow.Transpose
    steps: dict[int, Callable[[], Image]] = {
        2: lambda: image.transpose(how.FLIP_LEFT_RIGHT),
        3: lambda: image.transpose(how.ROTATE_180),
        4: lambda: image.transpose(how.FLIP_TOP_BOTTOM),
        5: lambda: image.transpose(how.TRANSPOSE),
        6: lambda: image.transpose(how.ROTATE_270),
        7: lambda: image.transpose(how.TRANSVERSE),
        8: lambda: image.transpose(how.ROTATE_90),
    }
    return steps[turn]() if turn in steps else image
