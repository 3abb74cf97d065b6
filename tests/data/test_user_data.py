"""Users' own pictures and arrays, and what is said where they are missing or of another kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.data_files import picture, values
from torchcaps.cli import main
from torchcaps.data import FolderConfig, NpzConfig, check_splits
from torchcaps.errors import DataError

pytest.importorskip("PIL", reason="the images extra is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of ten gray pictures, 9x7."""
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for n in range(10):
            pixels = np.full((7, 9), 20 * n + label, np.uint8)
            (tmp_path / name / f"{n}.png").write_bytes(picture(pixels, format="PNG"))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> str:
    """The one line with which training on a folder ends."""
    assert main(["train", "capsnet-folder", "--out", str(out), *words]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "Traceback" not in text
    return text


def test_pictures_are_divided_class_by_class(folder):
    splits = FolderConfig(str(folder), test=0.3).load()
    assert (len(splits.train), len(splits.test)) == (14, 6)
    assert splits.train.names == ("cat", "dog") and splits.train.spec == (1, 7, 9, 2)
    assert torch.bincount(splits.test.labels).tolist() == [3, 3]
    assert "no image in two splits" in check_splits(splits)
    again = FolderConfig(str(folder), test=0.3).load()
    assert torch.equal(again.test.images, splits.test.images)
    other = FolderConfig(str(folder), test=0.3, drawn=1).load()
    assert not torch.equal(other.test.images, splits.test.images)


def test_a_forgotten_path_is_asked_for_with_an_example(tmp_path, capsys):
    text = refused(capsys, tmp_path / "run")
    assert "data.path is not set" in text and "--data.path pictures" in text and "pictures/cat/1.png" in text
    with pytest.raises(DataError, match=r"--data\.path digits\.npz"):
        NpzConfig().load()


def test_folders_of_another_form_are_refused_by_name(folder, tmp_path, capsys):
    def said(path: Path) -> str:
        return refused(capsys, tmp_path / "run", "--data.path", str(path))

    assert "none': there is no such folder" in said(tmp_path / "none")
    assert "has no class folder; one folder a class is wanted, such as cat/1.png" in said(folder / "cat")
    assert "is not a folder" in said(folder / "cat" / "1.png")
    (folder / "dog" / "1.bmp").write_bytes(picture(values(7, 9), format="BMP"))
    text = said(folder)
    assert "dog/1.bmp': is damaged or of another format" in text
    assert "PNG, JPEG, GIF and WebP pictures are read, so convert or remove it" in text


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_gif_and_webp_are_pictures(folder, kind):
    (folder / "dog" / "1.png").write_bytes(picture(values(7, 9), format=kind))
    assert FolderConfig(str(folder)).load().train.spec == (3, 7, 9, 2)


def test_arrays(tmp_path):
    path = tmp_path / "mine.npz"
    images = np.arange(20 * 5 * 6).reshape(20, 5, 6).astype(np.uint8)
    np.savez(path, images=images, labels=np.arange(20) % 4)
    splits = NpzConfig(str(path), test=0.2).load()
    assert splits.train.spec == (1, 5, 6, 4) and (len(splits.train), len(splits.test)) == (16, 4)
    np.savez(path, images=images, labels=np.arange(20) % 4, test_images=images[:3], test_labels=np.array([0, 1, 2]))
    assert len(NpzConfig(str(path)).load().test) == 3
    np.savez(path, pictures=images)
    with pytest.raises(DataError, match="no array 'images'"):
        NpzConfig(str(path)).load()
    np.savez(path, images=images[:2], labels=np.array([0, 1]))
    with pytest.raises(DataError, match="one image"):
        NpzConfig(str(path)).load()
    with pytest.raises(DataError, match=r"none\.npz': there is no such file"):
        NpzConfig(str(tmp_path / "none.npz")).load()
