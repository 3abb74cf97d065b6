"""Prepare a folder of pictures: look at every file, choose a size, decode and resize, and say what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.base import split_rows, spread_classes
from torchcaps.data.fitting import PictureFormat, read_fitted
from torchcaps.data.prepared import ImageWriter, Made, prepare
from torchcaps.data.readers.pictures import Header, Listing, PictureFile, list_pictures, read_header
from torchcaps.errors import DataError
from torchcaps.utils.progress import progress

if TYPE_CHECKING:
    from torchcaps.data.user_data import FolderConfig

__all__ = ["FolderReport", "PreparedFolder", "prepare_folder"]

LARGEST_SIDE = 64
"""The longer side of images, in pixels, where the user names no size."""
_NAMED = 3
"""Files that are named in a line; a report lists them all."""


@dataclass(frozen=True)
class FolderReport:
    """What was found in a folder, and what was made of it.

    Attributes:
        files: Number of files in the class folders.
        formats: Format -> number of pictures.
        gray: Number of gray pictures.
        turned: Number of pictures whose orientation tag was applied.
        transparent: Number of pictures with transparency.
        deep: Number of pictures whose grays have 16 bits.
        smallest: (height, width): least height and least width.
        median: Median height and width.
        largest: Greatest height and greatest width.
        shape: (channels, height, width) of the stored images.
        resized: Number of pictures that had another size.
        chosen: Whether the size was chosen here, since the user named none.
        skipped: File -> why it could not be read.
    """

    files: int
    formats: dict[str, int]
    gray: int
    turned: int
    transparent: int
    deep: int
    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    shape: tuple[int, int, int]
    resized: int
    chosen: bool
    skipped: dict[str, str]

    def remarks(self) -> list[str]:
        """Say what a person should know before training: a size that was chosen, and files that were skipped."""
        lines = []
        if self.chosen and self.resized:
            sizes = f"{_size(self.smallest)} to {_size(self.largest)}, median {_size(self.median)}"
            wanted = _size(self.shape[1:])
            lines.append(f"pictures of {sizes} (height x width) become {wanted}; --data.size chooses another size")
        if self.skipped:
            named = [f"{path} ({reason})" for path, reason in list(self.skipped.items())[:_NAMED]]
            more = f" and {len(self.skipped) - _NAMED} more" if len(self.skipped) > _NAMED else ""
            count = f"{len(self.skipped)} of {self.files} files cannot be read and are skipped"
            lines.append(f"{count}: {', '.join(named)}{more}; --data.strict refuses them")
        return lines


class PreparedFolder(NamedTuple):
    """Pictures in one format, those to train on first, then those to validate and to test by.

    Attributes:
        images: uint8 [n c h w].
        labels: Class number of each.
        names: Names of the classes.
        counts: Number of pictures to train on and to validate by.
        digest: Names images and labels.
        report: What was found.
    """

    images: Tensor
    labels: list[int]
    names: tuple[str, ...]
    counts: tuple[int, int]
    digest: str
    report: FolderReport


class _Surveyed(NamedTuple):
    """A picture whose header can be read."""

    file: PictureFile
    header: Header


def prepare_folder(folder: Path, config: FolderConfig) -> PreparedFolder:
    """Prepare the pictures of a folder, or find them prepared.

    Args:
        folder: Holds the class folders, see `list_pictures`.
        config: How pictures are resized, colored and split.

    Raises:
        DataError: if there is no class folder, or no picture of a class can be read; with `config.strict`, if any
            cannot be.
    """
    listing = list_pictures(folder)
    found = prepare(_identity(folder, listing, config), lambda writer: _make(writer, folder, listing, config))
    report = _report(found.report)
    # Found prepared by a run that was not strict.
    if config.strict and report.skipped:
        path, reason = next(iter(report.skipped.items()))
        raise _refused(folder / path, reason)
    record = found.record
    counts = (record["train"], record["validation"])
    return PreparedFolder(found.images, record["labels"], tuple(record["names"]), counts, found.digest, report)


def _identity(folder: Path, listing: Listing, config: FolderConfig) -> object:
    """Return what the prepared images depend on, without opening a file."""
    import PIL

    # Held-out images and strictness change nothing in what is stored.
    settings = {k: v for k, v in asdict(config).items() if k not in ("path", "validation", "strict")}
    try:
        stats = [(str(f.path.relative_to(folder)), f.path.stat()) for f in listing.files]
    except OSError as error:
        raise DataError(f"'{folder}' cannot be listed: {error.strerror or error}") from error
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return {"kind": "folder", "pillow": PIL.__version__, "settings": settings, "files": files}


def _make(writer: ImageWriter, folder: Path, listing: Listing, config: FolderConfig) -> Made:
    """Write all pictures in one format, in the order of their splits."""
    # Headers first: they say which files are pictures, and which size and color the images get.
    skipped: dict[str, str] = {}
    surveyed = list(_survey(listing.files, folder, skipped, strict=config.strict))
    _check_classes(folder, listing, [s.file for s in surveyed])
    wanted = _choose_format(config, [s.header for s in surveyed])
    # Then the pixels; a damaged file may still be found here.
    labels: list[int] = []
    headers: list[Header] = []
    counts: Counter[str] = Counter()
    for split, one in progress(_in_splits(surveyed, listing.names, config), "reading pictures"):
        try:
            writer.append(read_fitted(one.file.path, wanted).numpy())
        except DataError as error:
            _skip(one.file.path, folder, error, skipped, strict=config.strict)
            continue
        labels.append(one.file.label)
        headers.append(one.header)
        counts[split] += 1
    trained = {label for label, _ in zip(labels, range(counts["train"]), strict=False)}
    for label, name in enumerate(listing.names):
        if label not in trained:
            raise DataError(f"'{folder}': no picture of the class {name!r} to train on can be read; add some")
    if not counts["test"]:
        raise DataError(f"'{folder}': no picture to test on can be read; add some")
    record = {
        "labels": labels,
        "names": list(listing.names),
        "train": counts["train"],
        "validation": counts["validation"],
    }
    report = _describe(
        len(listing.files), headers, wanted, config, skipped, sizes=_sizes_of([s.header for s in surveyed])
    )
    return Made(record, asdict(report))


def _survey(
    files: Sequence[PictureFile], folder: Path, skipped: dict[str, str], *, strict: bool
) -> Iterable[_Surveyed]:
    """Read the header of every file, and write down those that have none."""
    for file in progress(files, "looking at pictures"):
        try:
            yield _Surveyed(file, read_header(file.path))
        except DataError as error:
            _skip(file.path, folder, error, skipped, strict=strict)


def _skip(path: Path, folder: Path, error: DataError, skipped: dict[str, str], *, strict: bool) -> None:
    # The text of a reader begins with the whole path; a report is about one folder.
    reason = str(error).removeprefix(f"{str(path)!r}: ")
    if strict:
        raise _refused(path, reason) from error
    skipped[str(path.relative_to(folder))] = reason


def _refused(path: Path, reason: str) -> DataError:
    return DataError(f"{str(path)!r}: {reason} (data.strict is set; without it, such files are skipped)")


def _check_classes(folder: Path, listing: Listing, readable: Sequence[PictureFile]) -> None:
    """Refuse a class without a picture."""
    for label, name in enumerate(listing.names):
        if all(file.label != label for file in readable):
            raise DataError(f"'{folder}': no picture of the class {name!r} can be read; replace or remove its folder")


def _choose_format(config: FolderConfig, headers: Sequence[Header]) -> PictureFormat:
    """Choose the format of all images: as the user wants, or by the pictures."""
    is_gray = all(h.is_gray for h in headers) if config.color == "auto" else config.color == "gray"
    if isinstance(config.size, tuple):
        height, width = config.size
    elif config.size is not None:
        height = width = config.size
    else:
        height, width = _default_size(headers)
        if config.fit == "random-crop":
            height = width = min(height, width)
    return config.picture_format(1 if is_gray else 3, height, width)


def _default_size(headers: Sequence[Header]) -> tuple[int, int]:
    """Return the median height and width, scaled in proportion so that neither is beyond `LARGEST_SIDE`."""
    height, width = _sizes_of(headers).median
    scale = min(1.0, LARGEST_SIDE / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))


class _Sizes(NamedTuple):
    """Least, median and greatest (height, width) of pictures."""

    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]


def _sizes_of(headers: Sequence[Header]) -> _Sizes:
    heights = torch.tensor([h.height for h in headers])
    widths = torch.tensor([h.width for h in headers])
    return _Sizes(
        smallest=(int(heights.min()), int(widths.min())),
        median=(int(heights.median()), int(widths.median())),
        largest=(int(heights.max()), int(widths.max())),
    )


class _InSplit(NamedTuple):
    """A picture and the split that it belongs to."""

    split: str
    picture: _Surveyed


def _in_splits(surveyed: Sequence[_Surveyed], names: tuple[str, ...], config: FolderConfig) -> list[_InSplit]:
    """Order pictures by split: the user's own, or a share of each class to test on.

    Classes take turns in the training pictures: the last ones may be held out for validation.
    """
    by_split: dict[str, list[_Surveyed]] = {"train": [], "validation": [], "test": []}
    if surveyed[0].file.split:
        for one in surveyed:
            by_split[one.file.split].append(one)
    else:
        rows = split_rows(torch.tensor([s.file.label for s in surveyed]), names, config.test, config.drawn)
        by_split["train"] = [surveyed[row] for row in rows.train.tolist()]
        by_split["test"] = [surveyed[row] for row in rows.test.tolist()]
    order = spread_classes(torch.tensor([s.file.label for s in by_split["train"]]))
    by_split["train"] = [by_split["train"][row] for row in order.tolist()]
    return [_InSplit(split, one) for split, pictures in by_split.items() for one in pictures]


def _describe(
    files: int,
    headers: Sequence[Header],
    wanted: PictureFormat,
    config: FolderConfig,
    skipped: dict[str, str],
    *,
    sizes: _Sizes,
) -> FolderReport:
    """Describe the pictures that were read; `sizes` are those by which the size of the images was chosen."""
    return FolderReport(
        files=files,
        formats=dict(Counter(sorted(h.format for h in headers)).most_common()),
        gray=sum(h.is_gray for h in headers),
        turned=sum(h.is_turned for h in headers),
        transparent=sum(h.has_alpha for h in headers),
        deep=sum(h.is_deep for h in headers),
        smallest=sizes.smallest,
        median=sizes.median,
        largest=sizes.largest,
        shape=wanted[:3],
        resized=sum((h.height, h.width) != wanted[1:3] for h in headers),
        chosen=config.size is None,
        skipped=skipped,
    )


def _report(table: dict[str, object]) -> FolderReport:
    """Read a report back from JSON, which has no tuples."""
    return FolderReport(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})  # type: ignore[arg-type]


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
