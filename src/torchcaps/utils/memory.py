"""Memory of this process: how much there may be, and what happens to what is freed.

A step of a training allocates and frees the same large tensors every time. glibc returns them to the operating system
and asks for them again, and the kernel fills each page with zeros before it hands it out, which can take a fifth of the
time of a step. `keep_freed_memory` makes glibc keep them for the next step instead.
"""

from __future__ import annotations

import ctypes
import os
import sys

from torchcaps.errors import DataError

__all__ = ["check_image_memory", "gigabytes", "keep_freed_memory", "physical_memory"]

_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
"""Options of glibc's mallopt, by their numbers in malloc.h."""
_PAD = 64 * 2**20
"""Bytes by which the heap grows at least."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for what it allocates next.

    It holds until the process ends; memory then stays at its highest use. The command line calls it; a program of your
    own may do so before it trains. Variables of glibc in the environment (MALLOC_..., GLIBC_TUNABLES) are the user's
    choice: with one of them nothing is changed.

    Returns:
        True if it does so from now on; False if the environment chose, or if the C library is not glibc.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or sys.platform != "linux":
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # No mappings of their own for large blocks; nothing at the end of the heap is returned; fewer requests for more
    return all(set_option(option, value) for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD)))


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
