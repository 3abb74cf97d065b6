"""Finding files: the right bytes wherever they may lie, wrong ones refused by name, absent ones explained."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from pathlib import Path

import pytest

from support.data_files import put, sha
from torchcaps.data.cache import cache_dir, fetch_set, find, locate, state, verify
from torchcaps.data.manifest import FILES, LICENSES, DataFile, files_of
from torchcaps.errors import DataError

INSIDE = hashlib.shake_256(b"sources").digest(20_000)
PACKED = gzip.compress(INSIDE, mtime=0)
REPACKED = gzip.compress(INSIDE, compresslevel=1, mtime=12345)
LABELS = bytes(range(200))


def file_of(name: str, packed: bytes, inside: bytes = b"", *, set_name: str = "sample", **more: object) -> DataFile:
    unpacked = {"unpacked_size": len(inside), "unpacked_sha256": sha(inside)} if inside else {}
    return DataFile(set_name, name, len(packed), sha(packed), **unpacked, **more)


IMAGES = file_of("images.gz", PACKED, INSIDE)
PLAIN = file_of("labels.bin", LABELS)


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, no TORCHCAPS_DATA, and a set `sample` in the manifest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setitem(FILES, "sample", (IMAGES, PLAIN))
    return tmp_path


# The manifest itself


def test_every_pin_has_the_form_of_one(monkeypatch):
    monkeypatch.delitem(FILES, "sample")
    assert FILES.keys() == LICENSES.keys()
    for file in (file for files in FILES.values() for file in files):
        assert FILES[file.set].count(file) == 1 and file.size > 0
        for pin in (file.sha256, file.unpacked_sha256, file.wheel and file.wheel.sha256):
            assert not pin or re.fullmatch("[0-9a-f]{64}", pin), file.name
        assert file.wheel is None or re.fullmatch(r"\w+==[\d.]+", file.wheel.requirement)
        assert all(url.startswith("https://") and url.endswith("/" + file.name) for url in file.urls)
        is_gzip = file.name.endswith(".gz") and "tar" not in file.name
        assert bool(file.unpacked_sha256) == bool(file.unpacked_size) == is_gzip


def test_unpacked_sizes_follow_from_the_formats():
    """An IDX file is 4 + 4·dimensions bytes and the data; a NORB matrix 8 + 4·max(3, dimensions) and the data."""
    for name in ("mnist", "fashion-mnist"):
        sizes = [file.unpacked_size for file in FILES[name]]
        assert sizes == [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
    dat, cat, info = 8 + 16 + 24_300 * 2 * 96 * 96, 8 + 12 + 24_300 * 4, 8 + 12 + 24_300 * 4 * 4
    assert [file.unpacked_size for file in files_of("smallnorb", "official")] == [dat, cat, info] * 2


# Finding


@pytest.mark.parametrize("base", ["sample", "."], ids=["in the set's folder", "flat"])
@pytest.mark.parametrize(
    ("file", "name", "content"),
    [
        (IMAGES, "images.gz", PACKED),
        (IMAGES, "images.gz", REPACKED),
        (IMAGES, "images", INSIDE),
        (PLAIN, "labels.bin", LABELS),
    ],
)
def test_a_right_file_is_found_in_each_place(places, monkeypatch, base, file, name, content):
    assert find(file) is None
    cached = put(cache_dir() / base / name, content)
    assert find(file) == cached
    named = put(places / "env" / base / name, content)
    monkeypatch.setenv("TORCHCAPS_DATA", str(places / "env"))
    assert find(file) == named
    given = put(places / "given" / base / name, content)
    assert find(file, places / "given") == given


@pytest.mark.parametrize(
    ("file", "name", "content", "match"),
    [
        (IMAGES, "images.gz", PACKED[:-1], "bytes long, not"),
        (IMAGES, "images.gz", PACKED[:100] + b"\0" + PACKED[101:], "has SHA-256 [0-9a-f]{12}, not"),
        (IMAGES, "images.gz", gzip.compress(INSIDE + b"x"), "bytes long"),
        (IMAGES, "images.gz", gzip.compress(INSIDE) + b"trailing", "bytes long"),
        (IMAGES, "images.gz", b"", "is 0 bytes long"),
        (IMAGES, "images", INSIDE[:-1] + b"\0", "has SHA-256"),
        (IMAGES, "images", PACKED, "bytes long"),
        (PLAIN, "labels.bin", bytes(200), "has SHA-256"),
    ],
)
def test_a_wrong_file_is_refused_in_a_named_folder_and_absent_in_the_cache(
    places, monkeypatch, file, name, content, match
):
    wrong = put(cache_dir() / "sample" / name, content)
    assert find(file) is None
    wrong.unlink()
    right = put(cache_dir() / "sample" / file.name, PACKED if file is IMAGES else LABELS)
    assert find(file) == right
    path = put(places / "given" / "sample" / name, content)
    with pytest.raises(DataError, match=match) as by_argument:
        find(file, places / "given")
    monkeypatch.setenv("TORCHCAPS_DATA", str(places / "given"))
    with pytest.raises(DataError, match=match) as by_environment:
        find(file)
    assert str(by_argument.value) == str(by_environment.value)
    assert str(path) in str(by_argument.value) and "\n" not in str(by_argument.value)
    assert path.read_bytes() == content


def test_what_is_no_folder_or_no_file(places, monkeypatch):
    (places / "given" / "sample" / "images.gz").mkdir(parents=True)
    os.mkfifo(places / "given" / "images.gz")
    assert find(IMAGES, places / "given") is None
    with pytest.raises(DataError, match=r"data folder .* is not a folder"):
        find(IMAGES, places / "none")
    monkeypatch.setenv("TORCHCAPS_DATA", str(places / "none"))
    with pytest.raises(DataError, match=r"TORCHCAPS_DATA .* is not a folder"):
        find(IMAGES)


def test_sets_with_the_same_file_names_do_not_hide_each_other(places, monkeypatch):
    """MNIST's files lie flat in a folder: Fashion-MNIST, whose files have the same names, is absent and not wrong."""
    other = file_of("images.gz", gzip.compress(LABELS, mtime=0), LABELS, set_name="other")
    monkeypatch.setitem(FILES, "other", (other,))
    path = put(places / "given" / "images.gz", PACKED)
    assert find(IMAGES, places / "given") == path and find(other, places / "given") is None
    put(places / "given" / "other" / "images.gz", PACKED)  # but in the other set's own folder it is wrong
    with pytest.raises(DataError, match=r"it is not other's images.gz"):
        find(other, places / "given")


def test_a_gzip_bomb_is_not_unpacked(places, monkeypatch):
    bomb = put(places / "images.gz", gzip.compress(b"\0" * 20_000_000))  # small enough to be tried
    read: list[int] = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, n: read.append(n) or real(self, n))
    assert "bytes long" in str(verify(bomb, IMAGES))
    assert 0 < sum(read) <= len(INSIDE) + 1


def test_a_hash_is_computed_once_until_the_file_changes(places, monkeypatch):
    path = put(places / "labels.bin", LABELS)
    calls: list[object] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *rest: calls.append(rest) or real(*rest))
    assert verify(path, PLAIN) is None and verify(path, PLAIN) is None and len(calls) == 1
    put(path, bytes(200))
    os.utime(path, ns=(1, 1))
    assert "SHA-256" in str(verify(path, PLAIN)) and len(calls) == 2


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    for named, found in {"relative/is/ignored": "/somewhere/.cache", "/else": "/else"}.items():
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert cache_dir() == Path(found, "torchcaps")


# Locating


def test_locate_gives_all_paths_by_published_name(places):
    unpacked, plain = put(places / "d" / "images", INSIDE), put(cache_dir() / "sample" / "labels.bin", LABELS)
    assert locate("sample", places / "d") == {"images.gz": unpacked, "labels.bin": plain}
    assert state("sample", places / "d") == [(IMAGES, unpacked), (PLAIN, plain)]
    assert state("sample") == [(IMAGES, None), (PLAIN, plain)]


def test_files_that_the_named_folder_lacks_are_read_from_elsewhere_with_a_notice(places, caplog):
    put(places / "d" / "images", INSIDE)
    put(cache_dir() / "sample" / "labels.bin", LABELS)
    locate("sample", places / "d")
    where = f"'{places / 'd'}' does not hold sample: labels.bin is read from {cache_dir() / 'sample'}"
    assert caplog.messages == [where]
    put(places / "d" / "labels.bin", LABELS)
    locate("sample", places / "d")
    assert caplog.messages == [where]


def test_what_is_missing_or_unknown_is_explained_in_one_line():
    with pytest.raises(DataError) as caught:
        locate("mnist")
    text = str(caught.value)
    assert "train-images-idx3-ubyte.gz (SHA-256 440fcabf73cc) and 3 more" in text and "\n" not in text
    assert "torchcaps data fetch mnist" in text and str(cache_dir() / "mnist") in text and "--data-dir" in text
    with pytest.raises(DataError, match=r"images\.gz .* missing; put it in") as caught:
        locate("sample")
    assert "data fetch" not in str(caught.value)  # nobody has it
    with pytest.raises(DataError, match="unknown data set 'mnst'; did you mean 'mnist'"):
        locate("mnst")
    with pytest.raises(DataError, match="unknown variant 'oficial'; did you mean 'official'"):
        fetch_set("smallnorb", variant="oficial")


def test_one_whole_variant_is_enough_and_the_nearest_one_is_explained(places, monkeypatch):
    contents = {f"{variant}{n}.bin": LABELS + f"{variant}{n}".encode() for variant in ("full", "small") for n in (0, 1)}
    contents["full2.bin"] = LABELS
    files = [file_of(name, content, variant=name.rstrip(".bin012")) for name, content in sorted(contents.items())]
    monkeypatch.setitem(FILES, "sample", tuple(files))
    with pytest.raises(DataError, match=r"full0.bin .* and 2 more"):
        locate("sample", places)
    put(places / "small1.bin", contents["small1.bin"])
    with pytest.raises(DataError, match=r"small0.bin \(SHA-256 \w+\) missing"):
        locate("sample", places)
    put(places / "small0.bin", contents["small0.bin"])
    assert list(locate("sample", places)) == ["small0.bin", "small1.bin"]
    for n in range(3):
        put(places / f"full{n}.bin", contents[f"full{n}.bin"])
    assert list(locate("sample", places)) == ["full0.bin", "full1.bin", "full2.bin"]


def test_a_wrong_packed_file_in_the_cache_does_not_hide_the_right_unpacked_one():
    put(cache_dir() / "sample" / "images.gz", PACKED[:-1])
    unpacked = put(cache_dir() / "sample" / "images", INSIDE)
    assert find(IMAGES) == unpacked
