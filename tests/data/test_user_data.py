"""Users' own pictures and arrays, and what is said where they are missing or of another kind."""

from __future__ import annotations

import json
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


def test_held_out_pictures_and_arrays_are_of_all_classes_though_files_are_sorted(folder, tmp_path):
    np.savez(tmp_path / "sorted.npz", images=np.zeros((20, 4, 4), np.uint8), labels=np.repeat([0, 1], 10))
    for config in (FolderConfig(str(folder), validation=8), NpzConfig(str(tmp_path / "sorted.npz"), validation=8)):
        splits = config.load()
        assert splits.validation is not None
        assert torch.bincount(splits.validation.labels).tolist() == [4, 4]
        assert torch.bincount(splits.train.labels).tolist() == [4, 4]
    with pytest.raises(DataError, match="15 validation images leave none of the class"):
        FolderConfig(str(folder), validation=15).load()
    (tmp_path / "sorted.npz").unlink()


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
    (folder / "dog" / "1.tif").write_bytes(picture(values(7, 9), format="TIFF"))
    text = refused(capsys, tmp_path / "run", "--data.path", str(folder), "--data.strict")
    assert "dog/1.tif': is damaged or of another format" in text
    assert "PNG, JPEG, GIF, WebP and BMP pictures are read, so convert or remove it" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data.size", "0"], "data.size = 0 must be at least 1 or none"),
        (["--data.size", "[8, 0]"], "data.size[1] = 0 must be at least 1"),
        (["--data.size", "large"], "data.size = 'large' is not a whole number or a list of 2 whole numbers"),
        (["--data.size", "100000"], "data.size = 100000 is beyond 65536, the most that is allowed; lower it"),
        (["--data.size", "65536"], "images of 65536x65536 have more than 67,108,864 pixels; lower data.size"),
        (["--path", "pictures"], "unknown key 'path'; did you mean 'data.path'?"),
        (["--epochs", "3"], "unknown key 'epochs'; did you mean 'train.epochs'?"),
        (["pictures"], "does not know 'pictures'; a setting has a key, such as --data.path pictures"),
    ],
)
def test_mistakes_of_newcomers_are_named_with_what_to_write(folder, tmp_path, capsys, words, text):
    assert text in refused(capsys, tmp_path / "run", "--data.path", str(folder), *words)
    assert not (tmp_path / "run").exists()


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


def test_the_check_of_a_folder_says_what_is_in_it(folder, capsys):
    (folder / "cat" / "broken.png").write_text("hello")
    assert main(["data", "check", "--data.path", str(folder), "--data.size", "6"]) == 0
    out, err = capsys.readouterr()
    assert "21: 20 PNG, 1 that cannot be read" in out and "1x6x6 (channels x height x width), 20 resized" in out
    assert "train        16: cat 8, dog 8" in out and "skipped      cat/broken.png" in out
    assert "torchcaps: 1 of 21 files cannot be read" in err
    assert f"next: torchcaps train capsnet-folder --data.path {folder}\n" in err
    assert main(["data", "check", "--data-dir", str(folder), "--json", "folder"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["counts"]["test"] == {"cat": 2, "dog": 2}
    assert f"next: torchcaps train capsnet-folder --data.path {folder}\n" in err
    for words, text in (
        (["--data.strict"], "broken.png': is damaged or of another format"),
        (["--data.sizes", "3"], "unknown key 'sizes'; did you mean 'size'"),
        (["--train.batch", "3"], "does not know '--train'"),
        (["--data.fit", "stretch"], "is not one of crop, letterbox, random-crop"),
    ):
        assert main(["data", "check", "--data.path", str(folder), *words]) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1


IMAGES = np.zeros((6, 4, 4), np.uint8)
LABELS = np.arange(6) % 2


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"images": IMAGES.astype(np.uint16)}, "'images' is uint16; bytes from 0 to 255"),
        ({"images": IMAGES.astype(np.float32)}, "'images' is float32"),
        ({"images": IMAGES.astype(complex)}, "'images' is complex128"),
        ({"images": IMAGES.astype("U1")}, "'images' is <U1"),
        ({"images": IMAGES[:0]}, "holds no images"),
        ({"images": IMAGES[0]}, r"has shape \[4, 4\]; \[n c h w\]"),
        ({"images": IMAGES[:, None, None]}, r"has shape \[6, 1, 1, 4, 4\]"),
        ({"labels": LABELS.astype("U1")}, "'labels' is <U1; class numbers"),
        ({"labels": LABELS.astype(complex)}, "'labels' is complex128"),
        ({"labels": LABELS + 0.5}, "holds fractions, NaN or infinity"),
        ({"labels": np.where(LABELS, np.nan, 0.0)}, "holds fractions, NaN or infinity"),
        ({"labels": np.where(LABELS, np.inf, 0.0)}, "holds fractions, NaN or infinity"),
        ({"labels": LABELS[:, None]}, r"has shape \[6, 1\]; \[6\], one for each image"),
        ({"labels": LABELS[:5]}, r"has shape \[5\]"),
        ({"labels": LABELS - 1}, "runs from -1 to 0"),
        ({"labels": np.where(LABELS, 2_000_000, 0)}, "runs from 0 to 2000000; class numbers 0 to 9999"),
        ({"labels": np.where(LABELS, 2.0**63, 0)}, "runs from 0.0 to 9.2"),
        ({"labels": np.where(LABELS, 2**64 - 1, 0).astype(np.uint64)}, "runs from 0 to 18446744073709551615"),
        ({"test_images": IMAGES}, "'test_images' without 'test_labels'"),
        ({"test_images": IMAGES[:, :2], "test_labels": LABELS}, "one shape is wanted"),
        ({"test_images": IMAGES[:0], "test_labels": LABELS[:0]}, "'test_images' has shape"),
        ({"test_images": IMAGES, "test_labels": LABELS + 0.5}, "'test_labels' holds fractions"),
    ],
)
def test_arrays_that_are_not_what_their_names_say_are_refused_in_one_line(arrays, text, tmp_path):
    np.savez(tmp_path / "mine.npz", **{"images": IMAGES, "labels": LABELS, **arrays})
    with pytest.raises(DataError, match=text) as caught:
        NpzConfig(str(tmp_path / "mine.npz")).load()
    assert "\n" not in str(caught.value) and "mine.npz" in str(caught.value)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "?", ">i4"])
def test_class_numbers_may_be_of_any_type_that_holds_them(dtype, tmp_path):
    np.savez(tmp_path / "mine.npz", images=IMAGES, labels=LABELS.astype(dtype))
    train, test, _ = NpzConfig(str(tmp_path / "mine.npz")).load()
    assert (
        train.labels.dtype == torch.int64
        and sorted([*train.labels.tolist(), *test.labels.tolist()]) == [0] * 3 + [1] * 3
    )
