"""Pictures of every size and kind: what a file becomes, what a folder becomes, and what is skipped or refused."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from support.data_files import picture, png_chunk, put, values
from torchcaps.data import FolderConfig
from torchcaps.data.fitting import PictureFormat, fill, letterbox, read_fitted
from torchcaps.data.folder_check import check_folder
from torchcaps.data.readers.pictures import class_folders, list_pictures, read_header, read_picture
from torchcaps.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")


def save(path: Path, *frames: np.ndarray, format: str = "PNG", **options: object) -> Path:
    """A picture or, of several arrays, one that moves."""
    if len(frames) > 1:
        options |= {"save_all": True, "append_images": [Image.fromarray(frame) for frame in frames[1:]]}
    return put(path, picture(frames[0], format=format, **options))


def refused(read: object, path: Path, *words: str) -> None:
    """Refused with one line that names the file and the reason."""
    with pytest.raises(DataError) as error:
        read(path)  # type: ignore[operator]
    text = str(error.value)
    assert "\n" not in text and repr(path.name)[1:-1] in text
    for word in words:
        assert word in text, text


# One file


def test_gray_color_and_depth(tmp_path):
    gray = values(4, 7)
    color = values(4, 7, 3)
    deep = gray.astype(np.uint16) * 257
    for array, wanted in [
        (gray, gray[None]),
        (deep, gray[None]),
        (gray > 127, np.where(gray > 127, 255, 0).astype(np.uint8)[None]),
        (color, color.transpose(2, 0, 1)),
    ]:
        np.testing.assert_array_equal(read_picture(save(tmp_path / "a.png", array)), wanted, strict=True)
    np.testing.assert_array_equal(read_picture(tmp_path / "a.png", 1).shape, (1, 4, 7))
    np.testing.assert_array_equal(read_picture(save(tmp_path / "b.png", gray), 3), [gray] * 3, strict=True)
    # Scaled and rounded, not cut: 300 of 65535 is 1.17 of 255.
    shades = np.array([[0, 128, 129, 300, 65535]], np.uint16)
    assert read_picture(save(tmp_path / "c.png", shades)).tolist() == [[[0, 0, 1, 1, 255]]]
    assert read_header(tmp_path / "c.png").is_deep


@pytest.mark.parametrize("channels", [1, 3])
def test_transparency_shows_the_background(channels, tmp_path):
    color = np.full((2, 3, 4), (90, 90, 90, 255), np.uint8)
    color[0, :, 3] = 0
    color[1, 0, 3] = 51  # a fifth
    path = save(tmp_path / "a.png", color)
    for background, fifth in ((255, 222), (0, 18)):
        rows = read_picture(path, channels, background=background)[-1]
        assert rows.tolist() == [[background] * 3, [fifth, 90, 90]]
    with Image.open(path) as image:
        image.convert("LA").save(tmp_path / "b.png")
        image.convert("P").save(tmp_path / "c.png", transparency=0)
    assert read_picture(tmp_path / "b.png").tolist() == [[[255] * 3, [222, 90, 90]]]
    assert read_header(tmp_path / "b.png").has_alpha and read_header(tmp_path / "c.png").has_alpha


@pytest.mark.parametrize("turn", range(1, 9))
def test_the_orientation_tag_is_applied(turn, tmp_path):
    from PIL import ImageOps

    tag = Image.Exif()
    tag[0x0112] = turn
    for kind in ("PNG", "WEBP"):
        path = save(
            tmp_path / "a", values(4, 6, 3), format=kind, exif=tag, **({"lossless": True} if kind == "WEBP" else {})
        )
        with Image.open(path) as image:
            wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(read_picture(path), wanted)
        header = read_header(path)
        assert (header.height, header.width) == wanted.shape[1:] and header.is_turned == (turn != 1)


def test_a_tag_that_says_nothing_turns_nothing(tmp_path):
    tag = Image.Exif()
    tag[0x0112] = 77
    path = save(tmp_path / "a.png", values(4, 6), exif=tag)
    np.testing.assert_array_equal(read_picture(path), values(4, 6)[None])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO", "BMP"])
def test_of_several_pictures_the_first_is_read(kind, tmp_path):
    blocks = np.kron(values(4, 4, high=4) * 60, np.ones((8, 8), np.uint8))  # few colors, which a palette can hold
    frames = [np.stack([blocks // (i + 1)] * 3, -1) for i in range(1 if kind == "BMP" else 3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    path = save(tmp_path / "1", *frames, format=kind, **options)
    read = read_picture(path).astype(int)
    assert read.shape == (3, 32, 32) and np.abs(read - blocks).max() <= (8 if kind == "MPO" else 0)
    assert read_header(path).format == {"MPO": "JPEG"}.get(kind, kind)


def test_the_ending_does_not_count_and_jpeg_may_have_four_inks(tmp_path):
    smooth = np.add.outer(np.arange(16), 4 * np.arange(24)).astype(np.uint8)
    path = save(tmp_path / "1.png", smooth, format="JPEG", quality=95)
    assert np.abs(read_picture(path).astype(int) - smooth).max() <= 4
    Image.fromarray(smooth).convert("CMYK").save(tmp_path / "2.jpg", quality=95)
    assert np.abs(read_picture(tmp_path / "2.jpg").astype(int) - smooth).max() <= 6


def test_large_pictures_come_reduced_where_less_is_enough(tmp_path):
    path = save(tmp_path / "a.png", np.full((80, 60), 7, np.uint8))
    assert read_picture(path, least=(10, 10)).shape == (1, 27, 20) and read_picture(path, least=(80, 60)).shape[1] == 80
    photo = save(tmp_path / "a.jpg", np.full((800, 600, 3), 7, np.uint8), format="JPEG")
    assert read_picture(photo, least=(40, 30)).shape[1:] in [(100, 75), (200, 150)]


def png(width: int, height: int, rows: bytes) -> bytes:
    """A picture of one bit a pixel, or a bomb that says that it is one."""
    start = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def test_files_that_are_no_pictures_are_refused(tmp_path):
    path = put(tmp_path / "1.png", png(9, 2, b"\0\xff\x80\0\0\0"))
    assert read_picture(path).tolist() == [[[255] * 9, [0] * 9]]
    good = picture(values(2, 9), format="PNG")
    cases = [("is damaged", data) for data in (b"", b"hello", good[:40], b"\xff\xd8\xff", b"GIF89a" + bytes(40))]
    cases += [("PNG, JPEG, GIF, WebP and BMP pictures are read", picture(values(6, 5), format="TIFF"))]
    for width, height in [(8193, 8192), (20_000, 20_000), ((1 << 31) - 1,) * 2, (1 << 17, 1), (8000, 8000)]:
        cases.append(("1.png': ", png(width, height, bytes(1 << 10))))
    for text, data in cases:
        refused(read_picture, put(path, data), text)
    os.mkfifo(tmp_path / "pipe")
    refused(read_header, tmp_path / "pipe", "not a regular file")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((1 << 28) + 1)
    refused(read_header, tmp_path / "large.png", "at most 268,435,456 are read")


# One size


def test_fill_covers_the_size_and_cuts_the_center():
    wide = torch.arange(8, dtype=torch.uint8).repeat(2, 1)[None] * 10  # [1 2 8]
    assert fill(wide, 2, 2).tolist() == [[[30, 40]] * 2]
    assert fill(wide, 1, 2).tolist() == [[[25, 45]]]
    tall = fill(wide.transpose(1, 2), 4, 4)
    assert tall.shape == (1, 4, 4) and int(tall.min()) >= 30 and int(tall.max()) <= 40
    assert fill(wide, 2, 8) is wide


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (7, 3), (16, 16), (50, 20)])
@pytest.mark.parametrize("bring", [fill, letterbox])
def test_an_even_picture_stays_even_at_any_size(bring, size):
    even = torch.full((1, *size), 77, dtype=torch.uint8)
    assert torch.equal(bring(even, 16, 16), torch.full((1, 16, 16), 77, dtype=torch.uint8))
    whole = torch.randint(0, 256, (1, 16, 16)).to(torch.uint8)
    assert torch.equal(bring(whole, 16, 16), whole)


def test_letterbox_is_the_mean_of_areas_in_proportion_with_the_border_s_median_around():
    source = torch.randint(0, 256, (3, 12, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    small = letterbox(source, 8, 8)  # a third of it: 4x8, in the middle
    assert small.shape == (3, 8, 8) and small.dtype == torch.uint8
    for c in range(3):
        border = [int(source[c, y, x]) for y in (0, 11) for x in range(24)]
        border += [int(source[c, y, x]) for x in (0, 23) for y in range(12)]
        filled = sorted(border)[(len(border) - 1) // 2]
        for y in range(8):
            for x in range(8):
                area = source[c, 3 * (y - 2) : 3 * (y - 1), 3 * x : 3 * x + 3].double()
                assert int(small[c, y, x]) == (round(float(area.mean())) if 2 <= y < 6 else filled)


# Folders


def test_classes_and_files_are_sorted_and_hidden_ones_do_not_count(tmp_path):
    places = ["dog/2.png", "cat/b.png", "Zebra/x.PNG", "dog/10.png", "cat/a.png"]
    for place in places:
        save(tmp_path / place, values(6, 5))
    for place in ("readme.txt", "cat/.hidden", ".git/config"):
        put(tmp_path / place, b"hello")
    names, files = list_pictures(tmp_path)
    assert names == ("Zebra", "cat", "dog") == tuple(class_folders(tmp_path))
    assert [(f.label, str(f.path.relative_to(tmp_path))) for f in files] == [
        (names.index(place.split("/")[0]), place) for place in sorted(places)
    ]


def test_folders_without_pictures_are_refused(tmp_path, monkeypatch):
    refused(list_pictures, tmp_path / "absent", "there is no such folder", "cat/1.png")
    refused(list_pictures, put(tmp_path / "file", b""), "is not a folder", "cat/1.png")
    save(tmp_path / "flat/1.png", values(6, 5))
    refused(list_pictures, tmp_path / "flat", "has no class folder", "cat/1.png")
    save(tmp_path / "set/a/1.png", values(6, 5))
    inner = tmp_path / "set/b"
    inner.mkdir()
    refused(list_pictures, inner, "has no class folder")
    with pytest.raises(DataError, match="/b': is an empty class folder"):
        list_pictures(inner.parent)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'torchcaps\[images\]'"):
        list_pictures(tmp_path)


@pytest.mark.parametrize(("link", "inner", "outer"), [("a/2.png", "a/1.png", "b/1.png"), ("c", "a", "b")])
def test_links_out_of_the_folder_are_refused(link, inner, outer, tmp_path):
    for place in ("in/a/1.png", "out/b/1.png"):
        save(tmp_path / place, values(6, 5))
    path = tmp_path / "in" / link
    path.symlink_to(tmp_path / "in" / inner)
    assert len(list_pictures(tmp_path / "in").files) == 2  # links within are followed
    path.unlink()
    path.symlink_to(tmp_path / "out" / outer)
    with pytest.raises(DataError, match="link out of the folder"):
        list_pictures(tmp_path / "in")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two classes of five photographs of all sizes and kinds, and three files that cannot be read."""
    tag = Image.Exif()
    tag[0x0112] = 6
    for label, name in enumerate(("cat", "dog")):
        tone = 60 + 120 * label
        place = tmp_path / "photos" / name
        save(place / "a.jpg", np.full((30, 90, 3), tone, np.uint8), format="JPEG", exif=tag)
        save(place / "b.png", np.full((40, 40), tone, np.uint8))
        save(place / "c.webp", np.full((20, 30, 3), tone, np.uint8), format="WEBP", lossless=True)
        save(place / "d.bmp", np.full((50, 41, 3), tone, np.uint8), format="BMP")
        save(place / "e.gif", np.full((200, 300), tone, np.uint8), format="GIF")
    put(tmp_path / "photos/cat/notes.txt", b"hello")
    put(tmp_path / "photos/dog/cut.jpg", picture(values(60, 60), format="JPEG")[:-900])
    (tmp_path / "photos/dog/nested").mkdir()
    return tmp_path / "photos"


def test_a_folder_of_mixed_photographs_loads_and_says_what_it_did(mixed, caplog):
    splits = FolderConfig(str(mixed)).load()
    # Heights 90 40 20 50 200, widths 30 40 30 41 300: the median is 50x40.
    assert splits.train.spec == (3, 50, 40, 2) and (len(splits.train), len(splits.test)) == (8, 2)
    for data in (splits.train, splits.test):
        assert float((data.pixels().mean((1, 2, 3)) * 255 - (60 + 120 * data.labels)).abs().max()) < 4
    sizes, skipped = caplog.messages
    assert "20x30 to 200x300, median 50x40" in sizes and "become 50x40" in sizes and "--data.size" in sizes
    assert "3 of 13 files cannot be read and are skipped: cat/notes.txt (is damaged or of another format" in skipped
    assert "dog/nested (is a folder" in skipped and "dog/cut.jpg (is damaged" in skipped and "--data.strict" in skipped


def test_a_strict_folder_refuses_what_cannot_be_read_also_once_it_is_prepared(mixed):
    for _ in range(2):
        with pytest.raises(DataError, match=r"notes\.txt': is damaged or of another format.*data\.strict is set"):
            FolderConfig(str(mixed), strict=True).load()
        FolderConfig(str(mixed)).load()


def test_sizes_fits_and_colors_are_as_asked_for(mixed, caplog):
    assert FolderConfig(str(mixed), size=16).load().train.spec == (3, 16, 16, 2)
    assert FolderConfig(str(mixed), size=(12, 20), color="gray").load().train.spec == (1, 12, 20, 2)
    assert not any("--data.size" in text for text in caplog.messages)
    boxed = FolderConfig(str(mixed), size=16, fit="letterbox").load()
    assert boxed.train.spec == (3, 16, 16, 2)
    random = FolderConfig(str(mixed), size=16, fit="random-crop").load().train
    assert random.spec == (3, 16, 16, 2) and random.images.shape[2:] == (18, 18)
    with pytest.raises(DataError, match=r"set data\.size to one number"):
        FolderConfig(str(mixed), size=(12, 20), fit="random-crop").load()


def test_large_pictures_get_a_default_size_that_can_be_trained(tmp_path):
    for n in range(2):
        save(tmp_path / f"a/{n}.png", np.full((320, 160), n, np.uint8))
    assert FolderConfig(str(tmp_path)).load().train.spec == (1, 64, 32, 1)


def test_the_median_that_is_named_is_the_one_that_the_size_comes_from(tmp_path, caplog):
    for place, side in {"cat/1": 20, "cat/2": 40, "dog/1": 40, "dog/2": 40}.items():
        save(tmp_path / f"{place}.png", np.full((side, side), 9, np.uint8))
    # Damage behind the headers is found when the size is chosen already: of 20 20 20 40 40 40
    for n in range(2):
        put(tmp_path / f"dog/cut{n}.jpg", picture(values(20, 20), format="JPEG")[:-200])
    assert FolderConfig(str(tmp_path)).load().train.spec == (1, 20, 20, 2)
    assert "median 20x20 (height x width) become 20x20" in caplog.messages[0]


def test_a_split_of_the_user_s_own_is_kept(tmp_path):
    tones = {"train/cat/1": 10, "train/dog/1": 20, "train/dog/2": 30, "test/cat/1": 40, "validation/dog/1": 50}
    for place, tone in tones.items():
        save(tmp_path / f"{place}.png", np.full((8, 8), tone, np.uint8))
    splits = FolderConfig(str(tmp_path)).load()
    assert splits.validation is not None
    found = [sorted(split.images[:, 0, 0, 0].tolist()) for split in (splits.train, splits.test, splits.validation)]
    assert found == [[10, 20, 30], [40], [50]] and splits.test.labels.tolist() == [0]
    assert splits.train.names == ("cat", "dog") == tuple(class_folders(tmp_path))
    with pytest.raises(DataError, match=r"leave data\.validation at 0"):
        FolderConfig(str(tmp_path), validation=1).load()
    save(tmp_path / "test/cow/1.png", np.full((8, 8), 1, np.uint8))
    with pytest.raises(DataError, match="train': has no class folder 'cow'"):
        FolderConfig(str(tmp_path)).load()


def test_classes_may_be_called_train_and_test(tmp_path):
    for name in ("train", "test"):
        for n in range(2):
            save(tmp_path / f"{name}/{n}.png", np.full((8, 8), n, np.uint8))
    assert FolderConfig(str(tmp_path)).load().train.names == ("test", "train")


def test_a_class_without_a_readable_picture_is_refused(tmp_path):
    for n in range(3):
        save(tmp_path / f"a/{n}.png", np.full((8, 8), n, np.uint8))
        put(tmp_path / f"b/{n}.png", b"hello")
    with pytest.raises(DataError, match="no picture of the class 'b' can be read"):
        FolderConfig(str(tmp_path)).load()
    cut = picture(values(64, 64), format="PNG")[:900]
    for n in range(3):
        put(tmp_path / f"b/{n}.png", cut)
    with pytest.raises(DataError, match="class 'b' to train on can be read"):
        FolderConfig(str(tmp_path)).load()


def test_the_check_counts_kinds_classes_and_repeated_pictures(mixed):
    put(mixed / "dog/twin.png", (mixed / "dog/b.png").read_bytes())
    put(mixed / "dog/third.png", (mixed / "dog/b.png").read_bytes())
    found = check_folder(FolderConfig(str(mixed), size=8))
    assert found.report.formats == {"PNG": 4, "JPEG": 2, "WEBP": 2, "BMP": 2, "GIF": 2}
    assert (found.report.turned, found.report.gray, found.report.resized) == (2, 4, 12)
    assert sum(found.counts["train"].values()) + sum(found.counts["test"].values()) == 12
    assert found.repeated + found.leaked >= 1
    text = "\n".join(found.lines())
    assert "15: 4 PNG, 2 BMP, 2 GIF, 2 JPEG" in text and "skipped      dog/cut.jpg: is damaged" in text
    assert found.to_json()["report"]["skipped"].keys() == {"cat/notes.txt", "dog/cut.jpg", "dog/nested"}


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path):
    path = save(tmp_path / "a.png", values(9, 7, 3))
    for fit in ("crop", "letterbox"):
        fitted = read_fitted(path, PictureFormat(3, 9, 7, fit))
        np.testing.assert_array_equal(fitted.numpy(), values(9, 7, 3).transpose(2, 0, 1), strict=True)
