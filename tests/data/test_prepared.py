"""Prepared images: made once, found again, whole or absent, shared by content, and removed on demand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.cli import main
from torchcaps.data import prepared
from torchcaps.data.prepared import ImageWriter, Made, clean, prepare
from torchcaps.errors import DataError
from torchcaps.utils.mapped import is_mapped

PIXELS = np.arange(24, dtype=np.uint8).reshape(3, 1, 2, 4)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prepared, "cache_dir", lambda: tmp_path)
    return tmp_path / "prepared"


class Maker:
    """Writes three images and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, writer: ImageWriter) -> Made:
        self.calls += 1
        writer.append(PIXELS[0])
        writer.append(PIXELS[1:])
        return Made({"labels": [0, 1, 1]}, {"skipped": self.calls})


def test_images_are_made_once_and_mapped_from_then_on(root):
    maker = Maker()
    first = prepare({"a": 1}, maker)
    again = prepare({"a": 1}, maker)
    assert maker.calls == 1 and is_mapped(first.images) and is_mapped(again.images)
    for found in (first, again):
        assert torch.equal(found.images, torch.from_numpy(PIXELS)) and found.record == {"labels": [0, 1, 1]}
        assert found.digest == first.digest and found.report == {"skipped": 1}


def test_the_same_images_under_another_name_are_stored_once(root):
    maker = Maker()
    first = prepare(1, maker)
    other = prepare(2, maker)
    assert maker.calls == 2 and first.digest == other.digest and other.report == {"skipped": 2}
    assert [path.name for path in (root / "content").iterdir()] == [first.digest]


@pytest.mark.parametrize("harm", ["cut", "gone", "record", "source", "elsewhere"])
def test_what_is_not_whole_is_made_again(root, harm):
    maker = Maker()
    content = root / "content" / prepare(1, maker).digest
    [source] = (root / "sources").iterdir()
    if harm == "cut":
        (content / "images.bin").write_bytes(PIXELS.tobytes()[:-1])
    elif harm == "gone":
        (content / "images.bin").unlink()
    elif harm == "record":
        (content / "record.json").write_text("[" * 100_000)
    elif harm == "source":
        source.write_text(json.dumps({"content": 3}))
    else:
        source.write_text(json.dumps({"content": "../../x", "report": {}}))
    found = prepare(1, maker)
    assert maker.calls == 2 and torch.equal(found.images, torch.from_numpy(PIXELS))
    assert torch.equal(prepare(1, maker).images, found.images) and maker.calls == 2


def test_an_error_leaves_nothing_and_what_a_killed_process_left_is_removed(root):
    def broken(writer: ImageWriter) -> Made:
        writer.append(PIXELS)
        raise DataError("no picture")

    (root / "content" / ".writing-old").mkdir(parents=True)
    with pytest.raises(DataError, match="no picture"):
        prepare(1, broken)
    assert list((root / "content").iterdir()) == [] and list((root / "sources").iterdir()) == []


def test_without_a_cache_images_stay_in_memory_up_to_a_bound(root, caplog, monkeypatch):
    root.parent.joinpath("prepared").write_text("a file")
    found = prepare(1, Maker())
    assert torch.equal(found.images, torch.from_numpy(PIXELS)) and not is_mapped(found.images)
    assert "cannot be written" in caplog.messages[0] and "images stay in memory" in caplog.messages[0]
    monkeypatch.setattr(prepared, "MOST", 10)
    with pytest.raises(DataError, match="more than 10 bytes and the cache cannot be written"):
        prepare(1, Maker())


def test_clean_removes_everything_and_says_how_much(root, capsys):
    found = prepare(1, Maker())
    assert main(["data", "clean"]) == 0
    assert "removed 1 prepared sets" in capsys.readouterr().out and not root.exists()
    assert torch.equal(found.images, torch.from_numpy(PIXELS)), "who uses them keeps them"
    assert clean() == (0, 0)
