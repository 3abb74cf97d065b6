"""Checkpoints: one safetensors file that is either whole and unchanged, or refused.

The file's metadata holds two texts: `torchcaps`, the JSON document {"format": 1, "meta": ...}, and `sha256`, the digest
of the whole file with the digest's own 64 places blanked. The digest is checked before anything is parsed, so no
changed byte goes unseen and no hostile header reaches a parser. Any safetensors reader opens the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from torchcaps.errors import CheckpointError
from torchcaps.train.files import write_atomically

__all__ = ["Checkpoint", "dumps", "load", "loads", "save"]

FORMAT = 1
_BLANK = b"0" * 64
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors, and what else is to be remembered: `meta`, of JSON values (inf and nan too)."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; at any moment, kill -9 included, `path` is the whole old file or the whole new one.

    Raises CheckpointError for what a checkpoint cannot hold, TrainingError for what the disk refuses.
    """
    write_atomically(path, [dumps(checkpoint)])


def load(path: Path) -> Checkpoint:
    """Read a checkpoint back, exactly; CheckpointError if the file is missing, foreign, damaged or cut short."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"cannot read checkpoint {str(path)!r}: {reason}") from None
    return loads(data, str(path))


def dumps(checkpoint: Checkpoint) -> bytes:
    """The bytes of a checkpoint."""
    document = _document(checkpoint.meta)
    tensors = {name: _alone(name, tensor) for name, tensor in checkpoint.tensors.items()}
    try:
        data = safetensors.torch.save(tensors, {"sha256": _BLANK.decode(), "torchcaps": document})
    except (SafetensorError, ValueError, KeyError, UnicodeError) as error:
        raise CheckpointError(f"a checkpoint cannot hold this: {' '.join(str(error).split())}") from None
    place = _digest_place(data, "checkpoint")
    return data[: place[0]] + hashlib.sha256(data).hexdigest().encode() + data[place[1] :]


def loads(data: bytes, name: str) -> Checkpoint:
    """A checkpoint from its bytes; `name` is what an error calls them."""
    start, end = _digest_place(data, name)
    digest = hashlib.sha256(data[:start])
    digest.update(_BLANK)
    digest.update(memoryview(data)[end:])
    if digest.hexdigest().encode() != data[start:end]:
        raise CheckpointError(f"checkpoint {name!r} is damaged or cut short: its digest does not fit; use another copy")
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        document = json.loads(header["__metadata__"]["torchcaps"])
        written, meta = document["format"], document["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{name!r} is a safetensors file, but not a checkpoint of torchcaps") from None
    if written != FORMAT or not isinstance(meta, dict):
        raise CheckpointError(f"checkpoint {name!r} has format {written}; this release reads format {FORMAT}")
    return Checkpoint(tensors, meta)


def _digest_place(data: bytes, name: str) -> tuple[int, int]:
    """Where in the file the 64 digits of its digest stand: inside the header's metadata, or nowhere."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise CheckpointError(f"{name!r} is not a checkpoint, or it is cut short: {len(data)} bytes")
    found = _DIGEST.search(data, 8, 8 + length)
    if not found:
        raise CheckpointError(f"{name!r} is not a checkpoint of torchcaps: it has no digest")
    return found.span(1)


def _alone(name: str, tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in rows, sharing its memory with nobody."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"checkpoint entry {name!r} is a {type(tensor).__name__}; a tensor is wanted")
    return tensor.detach().cpu().contiguous().clone()


def _document(meta: dict[str, Any]) -> str:
    """The JSON text of `meta`, refused if reading it back would give something else."""
    try:
        _check_json(meta, "meta")
        return json.dumps({"format": FORMAT, "meta": meta})
    except (RecursionError, UnicodeError):
        raise CheckpointError("checkpoint meta contains itself, nests too deep or is not Unicode") from None


def _check_json(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; JSON wants text: use pack_state")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for n, item in enumerate(value):
            _check_json(item, f"{where}[{n}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise CheckpointError(f"{where} is a {type(value).__name__}; JSON wants text, numbers, lists and dicts")
