"""Checkpoints come back bit for bit, or are refused in one line."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from support.tensor_equality import any_tensor, assert_same_state, assert_same_tensor, one_line, raw
from support.tiny_recipe import tiny
from torchcaps.errors import CheckpointError, TrainingError
from torchcaps.train import load_run, train
from torchcaps.train.checkpoint import Checkpoint, CheckpointMeta, load, read_tensors, save, write_tensors

SMALL = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}


# ------------------------------------------------------------------------------------------- round trips

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, any_tensor(), max_size=4), st.dictionaries(st.text(max_size=4), JSON, max_size=3))
def test_round_trip_is_exact(tmp_path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    write_tensors(tmp_path / "a", tensors, {"meta": meta})
    came = read_tensors(tmp_path / "a")
    assert came.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_tensor(came.tensors[name], tensor)
    assert_same_state(came.document["meta"], meta)


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
    write_tensors(tmp_path / "a", tensors, {})
    came = read_tensors(tmp_path / "a").tensors
    assert {name: raw(tensor) for name, tensor in came.items()} == wanted
    assert {name: tensor.shape for name, tensor in came.items()} == {n: t.shape for n, t in tensors.items()}
    assert math.copysign(1.0, came["minus zero"].item()) == -1.0
    came["shared"].zero_()
    assert raw(came["row of shared"]) == wanted["row of shared"]  # memory of its own
    assert not any(tensor.requires_grad for tensor in came.values())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in came.values())  # aligned as torch's own memory is


def test_any_safetensors_reader_opens_the_file_and_finds_one_entry_of_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.tensor([True]), "x": torch.randn(3, 5), "ü\n": torch.arange(3)}
    write_tensors(path, tensors, {"best": -math.inf})
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()
    for name in tensors:
        assert_same_tensor(theirs[name], tensors[name])
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"torchcaps"}
    assert json.loads(json.loads(metadata["torchcaps"])["document"]) == {"format": 2, "best": -math.inf}


def test_files_are_reproducible_and_the_order_of_tensors_does_not_matter(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", SMALL, {"n": 1})
    write_tensors(tmp_path / "b", dict(reversed(SMALL.items())), {"n": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    # Another version of the library may store them in another order: the same digest holds.
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(dict(reversed(header.items())), separators=(",", ":")).ljust(length)
    (tmp_path / "c").write_bytes(data[:8] + text.encode() + data[8 + length :])
    assert (tmp_path / "c").read_bytes() != data
    assert_same_state(dict(sorted(read_tensors(tmp_path / "c").tensors.items())), dict(sorted(SMALL.items())))


def test_the_record_of_a_run_comes_back(tmp_path: Path) -> None:
    meta = CheckpointMeta(tiny(), (1, 16, 16, 10), "all", 7, 2, 1.5, finished=True, threads=3)
    save(tmp_path / "a", Checkpoint(SMALL, meta, {"model": {}}))
    came = load(tmp_path / "a")
    assert came.meta == meta and came.state == {"model": {}} and came.meta.is_complete
    assert came.meta.image_spec.classes == 10


# ------------------------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize(
    ("tensors", "document", "word"),
    [
        ({"__metadata__": torch.ones(1)}, {}, ""),
        ({"\ud800": torch.ones(1)}, {}, ""),
        ({"a": 3.0}, {}, ""),
        ({"a": torch.eye(2).to_sparse()}, {}, ""),
        ({"a": torch.ones(2, device="meta")}, {}, ""),
        *(({}, {"a": value}, "JSON") for value in (len, torch.ones(1), {1, 2})),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, tensors: Any, document: Any, word: str) -> None:
    with pytest.raises(CheckpointError) as error:
        write_tensors(tmp_path / "a", tensors, document)
    one_line(error, word)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- what cannot be read


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_tensors(path)
    one_line(error, repr(str(path)), *words)


def test_load_tells_broken_foreign_newer_and_damaged_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, SMALL, {"epoch": 1})
    data = path.read_bytes()
    texts = [b"PK\3\4" + bytes(100), b"\x89PNG\r\n\x1a\n" * 9, b"hello world, this is text", bytes(64)]
    broken = [data[:cut] for cut in (0, 5, 8, 20, 100, len(data) - 1)] + texts
    cases = [(content, ["no whole safetensors file"]) for content in broken]
    cases += [(content, ["damaged", "sha256"]) for content in (data[:-1] + b"\xff", data.replace(b"epoch", b"epocH"))]
    newer = data.replace(b'format\\\\\\":2', b'format\\\\\\":3')
    cases += [(newer, ["format 3", "newer", "update torchcaps"])]
    for metadata in (None, {"format": "pt"}):
        cases += [(to_bytes({"w": torch.ones(2)}, metadata), ["not a checkpoint of torchcaps", "another program's"])]
    for content, words in cases:
        path.write_bytes(content)
        refused(path, *words)
    for content in (data, b""):  # a sparse terabyte is not read
        path.write_bytes(content)
        os.truncate(path, 1 << 40)
        refused(path, "no whole safetensors file")


def test_load_of_what_is_not_a_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_tensors(tmp_path / "a", SMALL, {})
    cases = {".": "folder", "absent": "No such file", "line\nfeed": "No such file", "nul\0": "null"}
    for name, word in (cases | {"pipe": "regular", "a/b": "Not a directory"}).items():
        refused(tmp_path / name, word)

    def deny(*args: object, **settings: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    refused(tmp_path / "a", "Permission denied")


def old_layout(path: Path) -> None:
    """A file as torchcaps 0.1 wrote it: two entries of metadata, and the keys `optimiser` and `check_every`."""
    meta = {"recipe": {"optimiser": {"name": "Adam"}, "train": {"check_every": 3}}, "spec": [1, 16, 16, 10], "step": 1}
    document = json.dumps({"format": 1, "meta": meta})
    save_file({"state.model.w": torch.ones(2)}, path, metadata={"sha256": "0" * 64, "torchcaps": document})


def test_a_run_and_an_exported_model_of_version_0_1_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    old_layout(folder / "checkpoint.safetensors")
    old_layout(tmp_path / "model.safetensors")
    for path in (folder, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError) as error:
            load_run(path)
        one_line(error, "was written by torchcaps 0.1; train again, or read it with that version")
    (folder / "recipe.json").write_text(json.dumps({"name": "tiny", "optimiser": {"name": "Adam"}}))
    with pytest.raises(TrainingError) as refused:
        train(tiny(), folder, resume=True, quiet=True)
    one_line(refused, "optimizer")
