"""Say what is in a folder of pictures before anything is trained on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchcaps.config import Table
from torchcaps.data.base import Dataset, image_hashes
from torchcaps.data.picture_folder import FolderReport, prepare_folder
from torchcaps.data.user_data import FolderConfig

__all__ = ["FolderCheck", "check_folder"]


@dataclass(frozen=True)
class FolderCheck:
    """What training on a folder of pictures would get.

    Attributes:
        report: What was found in the folder, and what was made of it.
        counts: Split -> class -> number of pictures.
        repeated: Number of pictures that equal another one of their split.
        leaked: Number of test and validation pictures that are also in the training set.
    """

    report: FolderReport
    counts: dict[str, dict[str, int]]
    repeated: int
    leaked: int

    def lines(self) -> list[str]:
        """Describe all of it, a fact a line."""
        report = self.report
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.formats.items())
        sizes = "-".join("x".join(map(str, size)) for size in (report.smallest, report.median, report.largest))
        kinds_of = {
            "gray": report.gray,
            "turned by their orientation tag": report.turned,
            "with transparency": report.transparent,
            "of 16 bits": report.deep,
        }
        facts = ", ".join(f"{count} {what}" for what, count in kinds_of.items() if count)
        lines = [
            f"files        {report.files}: {kinds}, {len(report.skipped)} that cannot be read",
            f"sizes        {sizes} (smallest-median-largest, height x width)",
            f"pictures     {facts or 'all in color, upright, opaque'}",
            f"images       {'x'.join(map(str, report.shape))} (channels x height x width), {report.resized} resized",
        ]
        for split, classes in self.counts.items():
            each = ", ".join(f"{name} {count}" for name, count in classes.items())
            lines.append(f"{split:12} {sum(classes.values())}: {each}")
        lines.append(f"repeated     {self.repeated} pictures equal another one of their split")
        lines.append(f"in two       {self.leaked} pictures to test or validate by are also trained on")
        lines += [f"skipped      {path}: {reason}" for path, reason in report.skipped.items()]
        return lines

    def to_json(self) -> Table:
        """Return all of it as plain data."""
        return asdict(self)


def check_folder(config: FolderConfig) -> FolderCheck:
    """Prepare a folder of pictures and describe it.

    Args:
        config: The folder and how it is read.

    Returns:
        What was found, and what each split holds.

    Raises:
        DataError: if the folder cannot be trained on, see `FolderConfig.load`.
    """
    splits = config.load()
    report = prepare_folder(Path(config.path).expanduser(), config).report
    present = {name: split for name, split in splits._asdict().items() if split is not None}
    hashes = {name: image_hashes(split) for name, split in present.items()}
    return FolderCheck(
        report,
        {name: _counts(split) for name, split in present.items()},
        repeated=sum(len(split) - len(hashes[name]) for name, split in present.items()),
        leaked=sum(len(found & hashes["train"]) for name, found in hashes.items() if name != "train"),
    )


def _counts(data: Dataset) -> dict[str, int]:
    """Return class -> number of images."""
    return dict(zip(data.names, torch.bincount(data.labels, minlength=data.classes).tolist(), strict=True))
