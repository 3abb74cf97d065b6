"""Readers of data files: numpy arrays out, `DataError` for anything wrong, no memory that the file does not back."""

from __future__ import annotations

from torchcaps.data.readers.arrays import read_npz
from torchcaps.data.readers.cifar import Cifar10, read_cifar_archive
from torchcaps.data.readers.idx import read_idx
from torchcaps.data.readers.norb import read_norb
from torchcaps.data.readers.pictures import list_pictures, read_picture
from torchcaps.data.readers.safe_io import MOST

__all__ = [
    "MOST",
    "Cifar10",
    "list_pictures",
    "read_cifar_archive",
    "read_idx",
    "read_norb",
    "read_npz",
    "read_picture",
]
