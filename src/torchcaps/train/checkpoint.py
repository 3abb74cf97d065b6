"""Checkpoints: one safetensors file that is either whole and unchanged, or refused.

    8 bytes   n, the length of the header, little endian
    n bytes   JSON, padded with spaces to a multiple of 8: {"__metadata__": {"sha256": S, "torchcaps": D},
              name: {"dtype", "shape", "data_offsets"}, ...}
    the rest  the tensors' bytes in the order of the header, without gaps, widest dtype first

D is the JSON text {"format": 1, "meta": ...}. S stands at a fixed place and is the sha256 of every other byte
of the file, so that no byte can change unseen. Any safetensors reader opens the file; ours also asks for the
order above. Nothing is unpickled or executed, and no length that a header claims is allocated before it has
been compared with the size of the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.errors import CheckpointError
from torchcaps.train.state_packing import is_plain
from torchcaps.utils.files import write_atomically

__all__ = ["Checkpoint", "load", "loads", "save"]

FORMAT = 1
START = b'{"__metadata__":{"sha256":"'  # how a header begins; the 64 digits of S follow
LONGEST_HEADER = 1 << 24
DEEPEST_META = 100

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors, and what else is to be remembered: `meta`, of JSON values (inf and nan too)."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


# ---------------------------------------------------------------------------------------------- writing


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint`; at any moment, kill -9 included, `path` is the whole old file or the whole new one.

    Raises CheckpointError for what a checkpoint cannot hold, TrainingError for what the disk refuses.
    """
    write_atomically(path, _encode(checkpoint))


def _encode(checkpoint: Checkpoint) -> list[bytes]:
    """The chunks of the file: one for the head, one for each tensor."""
    for name, tensor in checkpoint.tensors.items():
        _check_tensor(name, tensor)
    tensors = dict(sorted(checkpoint.tensors.items(), key=lambda item: -item[1].element_size()))
    bodies = [_bytes_of(tensor) for tensor in tensors.values()]
    text = _header(tensors, _document(checkpoint.meta))
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"names and meta take {len(text)} bytes, wanted at most {LONGEST_HEADER}: keep records elsewhere"
        )
    length = len(text).to_bytes(8, "little")
    tail = text[len(START) + 64 :]
    digest = _digest([length, START, tail, *bodies]).encode("ascii")
    return [length + START + digest + tail, *bodies]


def _header(tensors: dict[str, Tensor], document: str) -> bytes:
    """The JSON of the header, with zeros where the digest will stand."""
    header: dict[str, Any] = {"__metadata__": {"sha256": "0" * 64, "torchcaps": document}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end = end + tensor.numel() * tensor.element_size()
        dtype = DTYPE_NAMES[tensor.dtype]
        shape = list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    return text + b" " * (-len(text) % 8)


def _digest(chunks: Iterable[bytes | bytearray]) -> str:
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return sha256.hexdigest()


def _check_tensor(name: object, tensor: object) -> None:
    if not isinstance(name, str) or name == "__metadata__" or not _is_utf8(name):
        raise CheckpointError(f"tensor name {name!r} cannot be stored: wanted text other than '__metadata__'")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name!r} is of type {type(tensor).__name__}, wanted a tensor: put it into meta")
    dense = tensor.layout == torch.strided and not tensor.is_meta and _is_shape(list(tensor.shape))
    if tensor.dtype not in DTYPE_NAMES or not dense:
        came = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointError(f"tensor {name!r} is {came}; wanted a dense one of {wanted}: convert it before saving")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes_of(tensor: Tensor) -> bytes:
    """The elements in row-major order, bit for bit (no arithmetic touches a nan or a -0.0).

    Cloned, since `contiguous` keeps the stride of an axis of one element, and such a view has no bytes.
    """
    rows = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return rows.view(-1).view(torch.uint8).numpy().tobytes()


def _document(meta: object) -> str:
    """The JSON text D; NaN and Infinity stand for the floats that JSON lacks, as in Python's json."""
    if type(meta) is not dict:
        raise CheckpointError(f"meta is of type {type(meta).__name__}, wanted a dict")
    _check_json(meta, "meta", 0)
    try:
        return json.dumps({"format": FORMAT, "meta": meta}, separators=(",", ":"))
    except ValueError as error:  # an int of thousands of digits
        raise CheckpointError(f"meta cannot be written as JSON ({error}): store smaller numbers") from error


def _check_json(value: object, where: str, depth: int) -> None:
    """Refuse what would not come back from JSON as it was: tuples, int keys, objects of any other class."""
    if depth > DEEPEST_META:
        raise CheckpointError(f"meta nests deeper than {DEEPEST_META} at {where[:80]!r}: flatten it")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise CheckpointError(f"key {key!r} in {where!r} is not a str: change it, or use pack_state")
            _check_json(item, f"{where}.{key}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}.{index}", depth + 1)
    elif not is_plain(value):
        raise CheckpointError(
            f"{where!r} is of type {type(value).__name__}; wanted dict, list, str, int, float, bool or None: "
            "convert it, or use pack_state"
        )


# ---------------------------------------------------------------------------------------------- reading


class _Entry(NamedTuple):
    """What the header says about one tensor; `size` in bytes."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    size: int


def load(path: Path) -> Checkpoint:
    """The checkpoint in `path`, on the CPU; CheckpointError if it is not there, not ours or not whole."""
    name = repr(str(path))
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise CheckpointError(f"{name} is {kind}; wanted a checkpoint: give the path of the file")
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, name)
    except CheckpointError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it does not fit in memory"
        raise CheckpointError(f"cannot read checkpoint {name}: {reason}; check the path") from error


def loads(data: bytes, name: str) -> Checkpoint:
    """As `load`, from the bytes of a file; `name` is what the errors call it."""
    return _read(io.BytesIO(data), len(data), repr(name))


def _read(source: io.BufferedIOBase, size: int, name: str) -> Checkpoint:
    text = _read_header(source, size, name)
    header = _parse_header(text, name)
    meta = _parse_meta(header.pop("__metadata__", None), name)
    entries = list(_entries(header, name))
    _check_size(sum(entry.size for entry in entries), size - 8 - len(text), name)
    bodies = [_exactly(source, entry.size, name) for entry in entries]
    head = text[: len(START)]
    digest = text[len(START) : len(START) + 64]
    tail = text[len(START) + 64 :]
    if digest != _digest([len(text).to_bytes(8, "little"), head, tail, *bodies]).encode("ascii"):
        raise _damaged(name, "its bytes do not match its sha256")
    return Checkpoint({e.name: _tensor(e, body) for e, body in zip(entries, bodies, strict=True)}, meta)


def _read_header(source: io.BufferedIOBase, size: int, name: str) -> bytes:
    if size < 8:
        raise _truncated(name, f"it has {size} bytes")
    length = int.from_bytes(_exactly(source, 8, name), "little")
    if length <= min(size - 8, LONGEST_HEADER):
        return bytes(_exactly(source, length, name))
    if not START.startswith(source.read(len(START))):
        raise _foreign(name, "it is not a safetensors file with a header that we wrote")
    if length > LONGEST_HEADER:
        raise _damaged(name, f"its header claims {length} bytes, more than the {LONGEST_HEADER} we write")
    raise _truncated(name, f"its header claims {length} bytes, and {size - 8} are there")


def _parse_header(text: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        header = None
    if type(header) is dict:
        return header
    if b'"torchcaps"' in text or text.startswith(START):
        raise _damaged(name, "its header is not JSON")
    raise _foreign(name, "it is not a safetensors file")


def _parse_meta(metadata: object, name: str) -> dict[str, Any]:
    """`meta` out of the text D. The format comes first, since a newer one may differ in all the rest."""
    if type(metadata) is not dict or type(metadata.get("torchcaps")) is not str:
        raise _foreign(name, "it is a safetensors file without our metadata, perhaps another program's")
    try:
        document = json.loads(metadata["torchcaps"])
    except (ValueError, RecursionError):
        document = None
    if type(document) is not dict or type(document.get("format")) is not int:
        raise _damaged(name, "its metadata is not ours")
    if document["format"] > FORMAT:
        raise CheckpointError(
            f"{name} has format {document['format']}, newer than the {FORMAT} that this torchcaps reads: "
            "update torchcaps"
        )
    if document["format"] != FORMAT or type(document.get("meta")) is not dict:
        raise _damaged(name, "its metadata is not ours")
    meta: dict[str, Any] = document["meta"]
    return meta


def _entries(header: dict[str, Any], name: str) -> Iterator[_Entry]:
    """What each tensor claims, after checking that it adds up: shape x width = bytes, one after the other."""
    end = 0
    for key, record in header.items():
        if type(record) is not dict or record.keys() != {"dtype", "shape", "data_offsets"}:
            raise _damaged(name, f"its record of tensor {key[:80]!r} is malformed")
        dtype = DTYPES.get(record["dtype"]) if type(record["dtype"]) is str else None
        shape = record["shape"]
        if dtype is None or not _is_shape(shape):
            raise _damaged(name, f"its record of tensor {key[:80]!r} is malformed")
        begin = end
        end = end + math.prod(shape) * dtype.itemsize
        if record["data_offsets"] != [begin, end]:
            raise _damaged(name, f"tensor {key[:80]!r} does not lie where its shape says")
        yield _Entry(key, dtype, shape, end - begin)


def _is_shape(value: object) -> bool:
    """A list of integers >= 0 that torch can hold: their product, zeros left out, is below 2^60."""
    if type(value) is not list or len(value) > 64 or not all(type(n) is int and n >= 0 for n in value):
        return False
    return math.prod(n or 1 for n in value) < 1 << 60


def _check_size(claimed: int, there: int, name: str) -> None:
    if there < claimed:
        raise _truncated(name, f"its tensors take {claimed} bytes, and {there} are there")
    if there > claimed:
        raise _damaged(name, f"{there - claimed} bytes follow its end")


def _exactly(source: io.BufferedIOBase, size: int, name: str) -> bytearray:
    """`size` bytes, which the caller has compared with the size of the file."""
    buffer = bytearray(size)
    if source.readinto(buffer) != size:
        raise _truncated(name, "it became shorter while it was read")
    return buffer


def _tensor(entry: _Entry, body: bytearray) -> Tensor:
    if not body:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(body, dtype=entry.dtype).reshape(entry.shape).clone()


def _truncated(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} is truncated: {why}; use another checkpoint or train again")


def _damaged(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} is damaged: {why}; use another checkpoint or train again")


def _foreign(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} is not a checkpoint of torchcaps: {why}; give a file that torchcaps saved")
