"""Mapped tensors: the values of the file, rows as copies, pages given back, scratch files without a name."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from torchcaps.utils import mapped
from torchcaps.utils.mapped import is_mapped, map_file, release, scratch, take

STATM = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def values(tmp_path):
    wanted = torch.arange(60, dtype=torch.uint8).view(20, 3)
    (tmp_path / "x.bin").write_bytes(wanted.numpy().tobytes())
    return tmp_path / "x.bin", wanted


def test_rows_are_copies_of_the_file_s(values):
    path, wanted = values
    found = map_file(path, (20, 3))
    assert is_mapped(found) and is_mapped(found[4:7]) and not is_mapped(wanted) and torch.equal(found, wanted)
    for rows in (torch.tensor([3, 1, 3]), slice(2, 9)):
        taken = take(found, rows)
        assert torch.equal(taken, wanted[rows]) and not is_mapped(taken)
        assert torch.equal(take(wanted, rows), wanted[rows])
    assert take(wanted, slice(2, 9)).data_ptr() == wanted[2].data_ptr(), "of memory, a range is a view"


def test_writing_never_reaches_the_file(values):
    path, wanted = values
    found = map_file(path, (20, 3))
    found[0] = 77
    assert path.read_bytes() == wanted.numpy().tobytes()


def test_a_file_of_another_size_is_refused(values):
    with pytest.raises(ValueError, match="has 60 bytes; 63 are wanted"):
        map_file(values[0], (21, 3))


def test_mappings_end_with_their_tensors(values):
    before = len(mapped._MAPPINGS)
    view = map_file(values[0], (20, 3))[2:4]
    gc.collect()
    assert len(mapped._MAPPINGS) == before + 1 and int(view[0, 0]) == 6
    del view
    gc.collect()
    assert len(mapped._MAPPINGS) == before


def test_a_scratch_tensor_leaves_no_file_and_keeps_what_was_written(tmp_path):
    found = scratch(tmp_path / "deep" / "er", (4, 5), torch.float16)
    found[1:3] = 2
    release(found)
    assert float(found.sum()) == 20 and is_mapped(found) and list((tmp_path / "deep" / "er").iterdir()) == []
    with pytest.raises(OSError, match=r"large|space"):
        scratch(tmp_path, (1 << 55,), torch.uint8)


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say how large a process is")
def test_going_through_a_file_does_not_make_the_process_larger(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "RELEASE", 1 << 22)
    size = 1 << 26
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(size)
    found = map_file(tmp_path / "x.bin", (1 << 10, 1 << 16))
    before = resident()
    for start in range(0, 1 << 10, 16):
        take(found, torch.arange(start, start + 16))
        assert resident() - before < size // 4
    found.sum()
    assert resident() - before > size // 2, "without `take`, all of it stays"
    release(found)
    assert resident() - before < size // 4
