"""Checkpoints come back bit for bit, states come back with their types, and a failed save harms nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop, lr_scheduler

from torchcaps.errors import CheckpointError, TrainingError
from torchcaps.train import checkpoint as module
from torchcaps.train.checkpoint import Checkpoint, load, loads, save
from torchcaps.train.state_packing import pack_state, unpack_state


def raw(tensor: Tensor) -> bytes:
    """The elements one by one, as bytes: what "bit for bit" means, without the code under test."""
    width = tensor.element_size()
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    values = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(as_int).tolist()
    return b"".join((value % (1 << 8 * width)).to_bytes(width, "little") for value in values)


def assert_same_tensor(came: Tensor, wanted: Tensor) -> None:
    assert (came.dtype, came.shape) == (wanted.dtype, wanted.shape)
    assert raw(came) == raw(wanted)


def assert_same_state(came: Any, wanted: Any) -> None:
    """Equality that looks at types, order of keys and bits."""
    if isinstance(wanted, Tensor):
        assert_same_tensor(came, wanted)
        return
    assert type(came) is type(wanted)
    if isinstance(wanted, dict):
        assert [(type(key), key) for key in came] == [(type(key), key) for key in wanted]
        for key in wanted:
            assert_same_state(came[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(came) == len(wanted)
        for a, b in zip(came, wanted, strict=True):
            assert_same_state(a, b)
    else:
        assert repr(came) == repr(wanted)  # nan equals itself here, and 0.0 is not -0.0


def one_line(error: pytest.ExceptionInfo[ValueError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def small() -> Checkpoint:
    return Checkpoint({"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}, {"epoch": 1})


# ------------------------------------------------------------------------------------------- round trips

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Random bits in every dtype, so that nan payloads, infinities and -0.0 all occur; 0 to 3 axes of 0 to 4."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte % 2 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    return tensor.T if draw(st.booleans()) and tensor.ndim == 2 else tensor


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, any_tensor(), max_size=4), st.dictionaries(st.text(max_size=4), JSON, max_size=3))
def test_round_trip_is_exact(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    chunks = module._encode(Checkpoint(tensors, meta))
    came = loads(b"".join(chunks), "memory")
    assert came.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_tensor(came.tensors[name], tensor)
    assert_same_state(came.meta, meta)


def test_special_values_views_and_shared_storage(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    negated = torch.view_as_complex(torch.randn(1, 2)).conj().imag  # a view with a lazy minus sign
    assert negated.is_neg() and negated.is_contiguous()
    tensors = {
        "nan payload": torch.tensor([0x7FC01234, -0x400001], dtype=torch.int32).view(torch.float32),
        "minus zero": torch.tensor(-0.0, dtype=torch.float64),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "one element, stride 6": base[::2, :1][:1],
        "expanded": torch.arange(3).expand(5, 3),
        "shared": base,
        "row of shared": base[1],
        "zero size": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "negated": negated,
        "parameter": nn.Parameter(torch.ones(2)),
        "bool": torch.tensor([True, False, True]),
    }
    wanted = {name: raw(tensor.resolve_neg()) for name, tensor in tensors.items()}
    save(tmp_path / "a.safetensors", Checkpoint(tensors, {}))
    came = load(tmp_path / "a.safetensors").tensors
    assert {name: raw(tensor) for name, tensor in came.items()} == wanted
    assert {name: tensor.shape for name, tensor in came.items()} == {n: t.shape for n, t in tensors.items()}
    assert math.copysign(1.0, came["minus zero"].item()) == -1.0
    came["shared"].zero_()
    assert raw(came["row of shared"]) == wanted["row of shared"]  # memory of its own
    assert not any(tensor.requires_grad for tensor in came.values())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in came.values())  # aligned as torch's own memory is


def test_any_safetensors_reader_opens_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.tensor([True]), "x": torch.randn(3, 5), "h": torch.ones(3).bfloat16()}
    tensors |= {"z": torch.empty(0, 2), "d": torch.tensor(2.0, dtype=torch.float64), "ü\n": torch.arange(3)}
    save(path, Checkpoint(tensors, {"epoch": 7, "best": -math.inf}))
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()
    for name in tensors:
        assert_same_tensor(theirs[name], tensors[name])
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    for (
        name,
        tensor,
    ) in tensors.items():  # each lies at a multiple of its width, for readers that map the file
        assert (8 + n + header[name]["data_offsets"][0]) % tensor.element_size() == 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["torchcaps"]) == {"format": 1, "meta": {"epoch": 7, "best": -math.inf}}


def test_digest_is_that_of_all_other_bytes_and_files_are_reproducible(tmp_path: Path) -> None:
    save(tmp_path / "a", small())
    save(tmp_path / "b", small())
    data = (tmp_path / "a").read_bytes()
    assert data == (tmp_path / "b").read_bytes()
    place = data.index(b'"sha256":"') + len(b'"sha256":"')
    digest = data[place : place + 64]
    assert digest.decode() == hashlib.sha256(data[:place] + data[place + 64 :]).hexdigest()


def test_save_replaces_an_earlier_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 60 + ".safetensors")
    save(path, small())
    save(path, Checkpoint({}, {"epoch": 2}))
    came = load(path)
    assert (came.tensors, came.meta) == ({}, {"epoch": 2})
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"a": {"b": [0, len]}}, "'meta.a.b.1'"),
        ({"a": (1, 2)}, "tuple"),
        ({"a": {0: 1}}, "key 0 in 'meta.a'"),
        ({"a": torch.ones(1)}, "Tensor"),
        ({"a": np.float64(1.0)}, "float64"),
        ({"a\n": {1, 2}}, "set"),
        ({"a": 10**5000}, "JSON"),
        ({"a": "x" * (1 << 24)}, "bytes"),
        ([], "list"),
    ],
)
def test_meta_that_would_not_come_back_is_refused(tmp_path: Path, meta: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        save(tmp_path / "a", Checkpoint({}, meta))
    one_line(error, words)
    assert list(tmp_path.iterdir()) == []


def test_meta_that_contains_itself_is_refused(tmp_path: Path) -> None:
    meta: dict[str, Any] = {}
    meta["again"] = [meta]
    with pytest.raises(CheckpointError, match="nests deeper than 100"):
        save(tmp_path / "a", Checkpoint({}, meta))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("__metadata__", torch.ones(1)),
        ("\ud800", torch.ones(1)),
        (3, torch.ones(1)),
        ("a", 3.0),
        ("a", torch.ones(2, dtype=torch.complex64)),
        ("a", torch.eye(2).to_sparse()),
        ("a", torch.ones(2, device="meta")),
        ("a", torch.empty(0, 1 << 31, 1 << 31, dtype=torch.bool)),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(tmp_path: Path, name: Any, tensor: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        save(tmp_path / "a", Checkpoint({name: tensor}, {}))
    one_line(error, repr(name))
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- what cannot be read


def refusal(path: Path) -> pytest.ExceptionInfo[ValueError]:
    with pytest.raises(CheckpointError) as error:
        load(path)
    one_line(error, repr(str(path)))
    return error


def test_load_tells_truncated_foreign_newer_and_damaged_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, small())
    data = path.read_bytes()
    for cut in (0, 5, 8, 20, 100, len(data) - 1):
        path.write_bytes(data[:cut])
        one_line(refusal(path), "truncated")
    for damaged in (
        data[:-1] + b"\xff",
        data + b"\0",
        data.replace(b'"epoch', b'"epocH'),
        data[:7] + b"\1" + data[8:],
    ):
        path.write_bytes(damaged)
        one_line(refusal(path), "damaged")
    path.write_bytes(data.replace(rb"\"format\":1", rb"\"format\":2"))
    one_line(refusal(path), "format 2", "newer", "update torchcaps")
    save_file({"w": torch.ones(2)}, path, metadata={"torchcaps": '{"format": 12}'})
    one_line(refusal(path), "format 12", "newer")
    for metadata in (None, {"format": "pt"}):
        save_file({"w": torch.ones(2)}, path, metadata=metadata)
        one_line(refusal(path), "not a checkpoint of torchcaps", "another program's")
    for foreign in (
        b"PK\3\4" + bytes(100),
        b"\x89PNG\r\n\x1a\n" * 9,
        b"hello world, this is text",
        bytes(64),
    ):
        path.write_bytes(foreign)
        one_line(refusal(path), "not a checkpoint of torchcaps", "not a safetensors file")


def test_load_of_what_is_not_a_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_line(refusal(tmp_path), "folder")
    one_line(refusal(tmp_path / "absent"), "No such file")
    one_line(refusal(tmp_path / "line\nfeed"), "No such file")
    one_line(refusal(tmp_path / "nul\0"), "null")
    os.mkfifo(tmp_path / "pipe")
    one_line(refusal(tmp_path / "pipe"), "regular")
    save(tmp_path / "a", small())
    one_line(refusal(tmp_path / "a" / "b"), "Not a directory")

    def deny(*args: Any, **settings: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    one_line(refusal(tmp_path / "a"), "Permission denied")


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    save(path, Checkpoint({"w": torch.zeros(100_000)}, {}))  # more than the reader's buffer holds
    parse = module._parse_header

    def shrink_then_parse(text: bytes, name: str) -> dict[str, Any]:
        os.truncate(path, 100)
        return parse(text, name)

    monkeypatch.setattr(module, "_parse_header", shrink_then_parse)
    one_line(refusal(path), "truncated", "shorter")


def test_a_sparse_terabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, small())
    os.truncate(path, 1 << 40)
    one_line(refusal(path), "damaged", "bytes follow its end")
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    one_line(refusal(path), "not a checkpoint")


# --------------------------------------------------------------------------------- saves that must fail


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A full disk, near enough: the kernel refuses to let any file of this process grow beyond `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_only_the_old_file(path: Path, old: bytes) -> None:
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("limit", [0, 1, 8, 200, 5000, 79_999])
def test_a_write_that_the_kernel_cuts_short_leaves_the_old_file(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.safetensors"
    save(path, small())
    old = path.read_bytes()
    big = Checkpoint({"w": torch.zeros(10_000), "v": torch.ones(10_000)}, {})
    with file_size_limit(limit), pytest.raises(TrainingError) as error:
        save(path, big)
    one_line(error, "File too large", repr(str(path)), "untouched")
    assert_only_the_old_file(path, old)
    save(path, big)
    assert load(path).tensors["v"].sum() == 10_000


@pytest.mark.parametrize("owner, name", [(os, "fsync"), (os, "replace"), (Path, "open")])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int
) -> None:
    path = tmp_path / "a.safetensors"
    save(path, small())
    old = path.read_bytes()

    def fail(*args: Any, **settings: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(TrainingError) as error:
            save(path, Checkpoint({}, {"epoch": 2}))
    one_line(error, os.strerror(code), "untouched", "free space")
    assert_only_the_old_file(path, old)


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save(path, small())
    old = path.read_bytes()

    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(path, Checkpoint({}, {"epoch": 2}))
    assert_only_the_old_file(path, old)


def test_the_file_is_synced_before_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "a", []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def noted_replace(source: Any, target: Any) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save(path, small())
    assert calls == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_synced_does_not_undo_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def only_files(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", only_files)
    save(tmp_path / "a", small())
    assert len(calls) == 2
    assert load(tmp_path / "a").meta == {"epoch": 1}


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path / "a", small())
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path in ("folder", "absent/b", "a/b", "x" * 300, "nul\0", "."):
        with pytest.raises(TrainingError) as error:
            save(tmp_path / path, small())
        one_line(error, "cannot write", "a folder that can be written")
    assert sorted(tmp_path.rglob("*")) == before


# -------------------------------------------------------------------------------------------- kill -9


def dead_process() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_our_stale_files_are_swept(tmp_path: Path) -> None:
    dead, mine = dead_process(), f"{os.getpid()}-{threading.get_native_id()}"
    stale = [f".torchcaps-{dead}-{dead}.tmp", f".torchcaps-{mine}.tmp"]
    kept = [f".torchcaps-{os.getppid()}-1.tmp", f".torchcaps-{os.getpid()}-0.tmp", ".torchcaps-x-1.tmp"]
    kept += [
        f"torchcaps-{dead}-{dead}.tmp",
        f".torchcaps-{dead}-{dead}.tmp.bak",
        "notes.tmp",
        ".torchcaps-1-1.tmp",
    ]
    for name in stale + kept:
        (tmp_path / name).write_bytes(b"half a file")
    save(tmp_path / "a", small())
    assert {path.name for path in tmp_path.iterdir()} == {"a", *kept}


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torchcaps.train import checkpoint as module
from torchcaps.train.checkpoint import Checkpoint, load, save

torch.set_num_threads(1)
path = Path(sys.argv[1])

def step(n):
    save(path, Checkpoint({"w": torch.full((100_000,), float(n))}, {"n": n}))

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
    checkpoint = load(path)
    assert torch.equal(checkpoint.tensors["w"], torch.full((100_000,), float(checkpoint.meta["n"])))
    return checkpoint.meta["n"]

def in_a_loop(tell):
    for n in range(1, 1_000_000):
        step(n)
        tell()

def before_the_name(tell):
    os.replace = lambda source, target: (tell(), time.sleep(60))
    step(-1)

step(0)
assert min(killed_child(in_a_loop) for _ in range(8)) >= 1
assert killed_child(before_the_name) >= 1
print(len(list(path.parent.iterdir())))
step(5)
print(len(list(path.parent.iterdir())), load(path).meta["n"])
"""


def test_after_kill_9_the_file_is_whole_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLS), str(tmp_path / "a.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    left, after = done.stdout.splitlines()
    assert int(left) >= 2  # the last child died with its temporary file written and not yet named
    assert after == "1 5"


# --------------------------------------------------------------------------------------------- states


def through_a_file(state: Any, path: Path) -> Any:
    tensors, skeleton = pack_state(state, "state")
    save(path, Checkpoint(tensors, {"skeleton": skeleton}))
    checkpoint = load(path)
    return unpack_state(checkpoint.meta["skeleton"], checkpoint.tensors)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: RMSprop([{"params": [p], "lr": 0.01} for p in model.parameters()], centered=True),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
}


def run(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> None:
    for n in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(n))
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_training_resumed_from_a_file_is_training_never_stopped(tmp_path: Path, method: str, schedule: str) -> None:
    def fresh() -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS[method](model)
        return model, optimizer, SCHEDULERS[schedule](optimizer)

    straight = fresh()
    run(*straight, range(4))
    state = [part.state_dict() for part in straight]
    came = through_a_file(state, tmp_path / "a")
    assert_same_state(came, state)
    resumed = fresh()
    for part, saved in zip(resumed, came, strict=True):
        part.load_state_dict(saved)
    run(*straight, range(4, 9))
    run(*resumed, range(4, 9))
    assert_same_state([part.state_dict() for part in resumed], [part.state_dict() for part in straight])


KEYS = st.integers() | st.text(max_size=3) | st.sampled_from(["$tensor", "$tuple", "$dict", "0", "a.b", "a"])
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | any_tensor(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(STATES, st.sampled_from(["", "optimizer", "a"]))
def test_unpack_inverts_pack(state: Any, prefix: str) -> None:
    tensors, skeleton = pack_state(state, prefix)
    assert all(name.startswith(prefix) for name in tensors)
    assert_same_state(unpack_state(json.loads(json.dumps(skeleton)), tensors), state)


def test_names_are_paths_and_stay_apart_when_they_read_the_same() -> None:
    state = {"a": {0: torch.zeros(1), "0": torch.ones(1)}, "a.0": torch.full((1,), 2.0)}
    tensors, skeleton = pack_state(state, "p")
    assert {name: tensor.item() for name, tensor in tensors.items()} == {
        "p.a.0": 0,
        "p.a.0~": 1,
        "p.a.0~~": 2,
    }
    assert_same_state(unpack_state(skeleton, tensors), state)


def test_a_parameter_is_packed_without_its_graph() -> None:
    tensors, _ = pack_state([nn.Parameter(torch.ones(2))], "p")
    assert not tensors["p.0"].requires_grad


@pytest.mark.parametrize(
    "value", [len, object(), {1}, 1j, b"bytes", np.float64(1), torch.Size([1]), torch.float32, range(3)]
)
def test_what_cannot_be_packed_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        pack_state({"groups": [0, {"bad": value}]}, "optimizer")
    one_line(error, "'optimizer.groups.1.bad'", type(value).__name__)


@pytest.mark.parametrize("key", [True, None, 1.5, (1, 2)])
def test_a_key_that_cannot_be_packed_is_named(key: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        pack_state({"groups": {key: 1}}, "optimizer")
    one_line(error, "'optimizer.groups'", repr(key))


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        pack_state(state, "p")
    with pytest.raises(CheckpointError, match="too deep"):
        unpack_state(state, {})


def test_a_missing_tensor_is_named() -> None:
    tensors, skeleton = pack_state({"m": torch.ones(1), "v": torch.ones(1)}, "adam")
    del tensors["adam.v"]
    with pytest.raises(CheckpointError, match=r"'adam\.v' of the state is missing"):
        unpack_state(skeleton, tensors)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": 3},
        {"$tensor": ["w"]},
        {"$tensor": "w", "more": 1},
        {"$tuple": {"0": 1}},
        {"$tuple": None},
        {"$dict": {"a": 1}},
        {"$dict": [["a"]]},
        {"$dict": [["a", 1, 2]]},
        {"$dict": [[None, 1]]},
        {"$dict": [[["a"], 1]]},
        {"$dict": [[True, 1]]},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$counter": 3},
        {"$eval": "1 + 1"},
        {"a": [{"$": 1}]},
        {0: 1},
        (1, 2),
        len,
        [torch.ones(1)],
    ],
)
def test_a_malformed_skeleton_is_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        unpack_state(skeleton, {"w": torch.ones(1)})
    one_line(error, "skeleton of a state")


def test_a_counter_comes_back_as_one() -> None:
    tensors, skeleton = pack_state(Counter({3: 2, "x": 1}), "p")
    assert tensors == {}
    assert_same_state(unpack_state(skeleton, {}), Counter({3: 2, "x": 1}))
