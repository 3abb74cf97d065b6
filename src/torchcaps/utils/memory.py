"""How much memory this machine has, to refuse what it cannot hold before the operating system ends the process."""

from __future__ import annotations

import os

from torchcaps.errors import DataError

__all__ = ["check_image_memory", "gigabytes", "physical_memory"]


def physical_memory() -> int:
    """Return the bytes of memory of this machine; no bound where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


def gigabytes(count: int) -> str:
    """Write a number of bytes for an error line: `6.8 GB`."""
    return f"{count / 1e9:.2g} GB"


def check_image_memory(count: int, pixels: int) -> None:
    """Refuse to make more images than memory holds.

    Args:
        count: Number of images.
        pixels: Bytes of each.

    Raises:
        DataError: They need more than the memory of this machine.
    """
    if count * pixels > physical_memory():
        raise DataError(
            f"{count} images of {pixels} bytes need {gigabytes(count * pixels)}, and there are "
            f"{gigabytes(physical_memory())}; lower data.train, data.test or data.size"
        )
