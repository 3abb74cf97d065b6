"""A file is the whole old one or the whole new one, whatever the disk, the user or kill -9 does."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.tensor_equality import one_line
from torchcaps.errors import TrainingError
from torchcaps.utils.files import make_folder, write_atomically

OLD = b"old"
BIG = [bytes(40_000), b"x" * 40_000]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "a"
    write_atomically(path, [OLD])
    return path


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A full disk, near enough: the kernel refuses to let any file of this process grow beyond `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["a", "a/b", "a/b/c"])
def test_a_folder_where_a_file_is_gets_an_error_that_names_the_file_and_the_option(path: Path, name: str) -> None:
    folder = path.parent / name
    wanted = re.escape(f"cannot make the folder '{folder}': '{path}' is a file; choose another --results")
    with pytest.raises(TrainingError, match=wanted):
        make_folder(folder, "--results")


def assert_only_the_old_file(path: Path) -> None:
    assert path.read_bytes() == OLD
    assert list(path.parent.iterdir()) == [path]


def test_a_file_replaces_an_earlier_one_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 60)
    write_atomically(path, BIG)
    write_atomically(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", [0, 1, 5000, 79_999])
def test_a_write_that_the_kernel_cuts_short_leaves_the_old_file(path: Path, limit: int) -> None:
    with file_size_limit(limit), pytest.raises(TrainingError) as error:
        write_atomically(path, BIG)
    one_line(error, "File too large", repr(str(path)), "untouched")
    assert_only_the_old_file(path)
    write_atomically(path, BIG)
    assert path.stat().st_size == 80_000


@pytest.mark.parametrize("owner, name", [(os, "fsync"), (os, "replace"), (Path, "open")])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int
) -> None:
    def fail(*args: Any, **settings: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(TrainingError) as error:
            write_atomically(path, BIG)
    one_line(error, os.strerror(code), "untouched", "free space")
    assert_only_the_old_file(path)


def test_an_interrupt_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, BIG)
    assert_only_the_old_file(path)


def test_the_file_is_synced_before_its_name_and_the_folder_after(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def noted_replace(source: Any, target: Any) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomically(path, BIG)
    assert calls == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_synced_does_not_undo_the_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def only_files(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    write_atomically(path, [b"new"])
    assert len(calls) == 2 and path.read_bytes() == b"new"


def test_paths_that_cannot_be_written(path: Path) -> None:
    folder = path.parent
    (folder / "folder").mkdir()
    before = sorted(folder.rglob("*"))
    for name in ("folder", "absent/b", "a/b", "x" * 300, "nul\0", "."):
        with pytest.raises(TrainingError) as error:
            write_atomically(folder / name, BIG)
        one_line(error, "cannot write", "a folder that can be written")
    assert sorted(folder.rglob("*")) == before


def dead_process() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_our_stale_files_are_swept(path: Path) -> None:
    dead = dead_process()
    mine = f"{os.getpid()}-{threading.get_native_id()}"
    stale = [f".torchcaps-{dead}-{dead}.tmp", f".torchcaps-{mine}.tmp"]
    kept = [f".torchcaps-{os.getppid()}-1.tmp", f".torchcaps-{os.getpid()}-0.tmp", ".torchcaps-x-1.tmp"]
    kept += [f"torchcaps-{dead}-{dead}.tmp", f".torchcaps-{dead}-{dead}.tmp.bak", "notes.tmp", ".torchcaps-1-1.tmp"]
    for name in stale + kept:
        (path.parent / name).write_bytes(b"half a file")
    write_atomically(path, BIG)
    assert {found.name for found in path.parent.iterdir()} == {"a", *kept}


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from torchcaps.utils.files import write_atomically

path = Path(sys.argv[1])

def step(n):
    write_atomically(path, [n.to_bytes(4, "little")] * 100_000)

def killed_child(work):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        work(lambda: os.write(tell, b"."))
        os._exit(1)
    os.read(ready, 1)
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    data = path.read_bytes()
    assert data == data[:4] * 100_000
    return int.from_bytes(data[:4], "little")

def in_a_loop(tell):
    for n in range(1, 1_000_000):
        step(n)
        tell()

def before_the_name(tell):
    os.replace = lambda source, target: (tell(), time.sleep(60))
    step(9)

step(0)
assert min(killed_child(in_a_loop) for _ in range(8)) >= 1
assert killed_child(before_the_name) >= 1
print(len(list(path.parent.iterdir())))
step(5)
print(len(list(path.parent.iterdir())), path.read_bytes()[0])
"""


def test_after_kill_9_the_file_is_whole_and_the_next_write_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLS), str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    left, after = done.stdout.splitlines()
    assert int(left) >= 2  # the last child died with its temporary file written and not yet named
    assert after == "1 5"
