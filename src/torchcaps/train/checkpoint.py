"""Checkpoints: one safetensors file that is either whole and unchanged, or refused.

The safetensors library writes and reads the file, so any program that knows the format opens it. One metadata entry,
`torchcaps`, holds a JSON text {"sha256": digest, "document": ...}. The digest is over the document and, in the order of
their names, over name, dtype, shape and bytes of every tensor: it does not depend on the order in which the library
stores them. Nothing is unpickled or executed, and nothing is read before the library has compared the sizes that the
header states with the size of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from torchcaps.config import NonNegativeFloat, NonNegativeInt, Range, from_dict, to_dict
from torchcaps.errors import CheckpointError, RecipeError
from torchcaps.train.recipe import Recipe, stage_names
from torchcaps.types import ImageSpec
from torchcaps.utils.files import write_atomically

__all__ = [
    "Checkpoint",
    "CheckpointMeta",
    "DataFingerprints",
    "TensorFile",
    "decode",
    "encode",
    "load",
    "read_tensors",
    "save",
    "write_tensors",
]

# Version of the document; a file with any other number is refused.
FORMAT = 2
ENTRY = "torchcaps"
"""The one key of the file's metadata."""

# A damaged header must not make `build_model` allocate without bound.
_Size = Annotated[int, Range(1, (1 << 16) - 1)]


class DataFingerprints(NamedTuple):
    """What names the images of a run (`Dataset.fingerprint`); None where there are none or nobody knows.

    Attributes:
        train: Of the images that it is trained on.
        validation: Of those by which it may stop.
        test: Of those by which it is judged in the end.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint says about its run.

    Attributes:
        recipe: What is trained.
        spec: Channels, height, width and classes of the images.
        stage: The stage of the model that was being trained.
        step: The number of steps so far, of all stages.
        steps_before: The number of steps of the stages before this one.
        seconds: How long training has taken so far.
        finished: True if the stage came to its end.
        stopped_early: True if it ended because the validation accuracy reached `train.stop_at`.
        threads: The number of threads that trained it, if known.
        weights_only: True if the file holds the model alone, without what training needs to go on.
        class_names: Names of the classes, in files that are given away.
        data_fingerprint: Names the training images (`Dataset.fingerprint`); None in files of earlier versions and of
            runs whose data a loader gave.
        validation_fingerprint: Names the validation images, if there are any; None in files of earlier versions.
        test_fingerprint: Names the test images that are looked at in the end, likewise.
    """

    recipe: Recipe
    spec: tuple[_Size, _Size, _Size, _Size]
    stage: str
    step: NonNegativeInt
    steps_before: NonNegativeInt = 0
    seconds: NonNegativeFloat = 0.0
    finished: bool = False
    stopped_early: bool = False
    threads: NonNegativeInt | None = None
    weights_only: bool = False
    class_names: tuple[str, ...] = ()
    data_fingerprint: str | None = None
    validation_fingerprint: str | None = None
    test_fingerprint: str | None = None

    def __post_init__(self) -> None:
        # A file may claim anything: refuse what contradicts itself.
        if self.stage not in stage_names(self.recipe.model):
            raise RecipeError(f"the model has no stage '{self.stage}'")
        if self.steps_before > self.step:
            raise RecipeError(f"step {self.step} is said to come after {self.steps_before} others")

    @property
    def image_spec(self) -> ImageSpec:
        """Shape of the images and number of classes."""
        return ImageSpec(*self.spec)

    @property
    def fingerprints(self) -> DataFingerprints:
        """What names the data of the run."""
        return DataFingerprints(self.data_fingerprint, self.validation_fingerprint, self.test_fingerprint)

    @property
    def is_complete(self) -> bool:
        """True if the last stage came to its end."""
        return self.finished and self.stage == stage_names(self.recipe.model)[-1]


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors, the record of their run, and the skeleton of the state that they belong to (`pack_state`)."""

    tensors: dict[str, Tensor]
    meta: CheckpointMeta
    state: object

    def with_recipe(self, recipe: Recipe) -> Checkpoint:
        """Return the same checkpoint under another recipe."""
        return replace(self, meta=replace(self.meta, recipe=recipe))


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; at any moment, kill -9 included, `path` is the whole old file or the whole new one.

    Raises:
        CheckpointError: A tensor cannot be stored.
        TrainingError: The disk refuses.
    """
    write_atomically(path, [encode(checkpoint)])


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of the file that `save` writes.

    Raises:
        CheckpointError: A tensor cannot be stored.
    """
    return _encode_tensors(checkpoint.tensors, {"meta": to_dict(checkpoint.meta), "state": checkpoint.state})


def load(path: Path) -> Checkpoint:
    """Read a checkpoint to the CPU.

    Raises:
        CheckpointError: There is no file, it is not a checkpoint, or any of its bytes has changed.
    """
    return _checkpoint(read_tensors(path), path)


def decode(data: bytes) -> Checkpoint:
    """Return the checkpoint that another process encoded; its digest is checked as that of a file.

    Raises:
        CheckpointError: It did not come as it was sent.
    """
    origin = Path("the checkpoint of process 0")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _checkpoint(_decode_tensors(data, header["__metadata__"], origin), origin)
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(origin)!r} did not come whole: {_line(error)}; start again") from error


def _checkpoint(content: TensorFile, path: Path) -> Checkpoint:
    tensors, document = content
    try:
        meta = from_dict(CheckpointMeta, _mapping(document.get("meta")))
    except RecipeError as error:
        raise CheckpointError(f"{str(path)!r} is of no recipe known here: {_line(error)}") from None
    return Checkpoint(tensors, meta, document.get("state"))


# ----------------------------------------------------------------------------------------- the file format


class TensorFile(NamedTuple):
    """The content of a file: named tensors and a JSON document."""

    tensors: dict[str, Tensor]
    document: dict[str, object]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, object]) -> None:
    """Write tensors and a JSON document (inf and nan are allowed) as one safetensors file, atomically."""
    write_atomically(path, [_encode_tensors(tensors, document)])


def _encode_tensors(tensors: Mapping[str, Tensor], document: Mapping[str, object]) -> bytes:
    """Return the bytes of a safetensors file with a document and a digest of ours."""
    if "__metadata__" in tensors:
        raise CheckpointError("a tensor cannot be called '__metadata__': safetensors keeps that name")
    try:
        # Cloned, because the library refuses views and tensors that share memory.
        rows = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        # Metadata of safetensors are text, so the document goes into them as JSON inside of JSON.
        text = _compact({"format": FORMAT, **document})
        entry = _compact({"sha256": _digest(rows, text), "document": text})
        return safetensors.torch.save(rows, {ENTRY: entry})
    except (SafetensorError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot store this checkpoint: {_line(error)}; wanted dense tensors and JSON") from error


def read_tensors(path: Path) -> TensorFile:
    """Read what `write_tensors` wrote.

    Raises:
        CheckpointError: There is no such file, it is not one of ours, or any of its bytes has changed.
    """
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise CheckpointError(f"{str(path)!r} is {kind}; wanted a checkpoint: give the path of the file")
        # Opening compares every size in the header with that of the file, before anything is allocated.
        with path.open("rb") as file, safetensors.safe_open(path, framework="pt") as checked:
            metadata = checked.metadata() or {}
            _document(metadata, path)  # refuses other programs' files before they are read
            data = file.read()
        return _decode_tensors(data, metadata, path)
    except CheckpointError:
        raise
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or _line(error) or "it does not fit in memory"
        raise CheckpointError(f"cannot read checkpoint {str(path)!r}: {reason}; check the path") from error
    except (SafetensorError, RuntimeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{str(path)!r} is no whole safetensors file: {_line(error)}; use another one") from error


def _decode_tensors(data: bytes, metadata: Mapping[str, str], path: Path) -> TensorFile:
    """Return the content of a file's bytes, if they are those that its digest was made of."""
    # The entry is made again from what was read; equal text means equal bytes.
    document = _document(metadata, path)
    stored = safetensors.torch.load(data)
    text = _compact(document)
    entry = _compact({"sha256": _digest(stored, text), "document": text})
    if metadata[ENTRY] != entry or not _is_canonical(data):
        raise CheckpointError(f"{str(path)!r} is damaged: its bytes do not match its sha256; use another one")
    # Cloned into memory that is aligned as torch's own, so that a resumed run computes with the same bits.
    return TensorFile({name: tensor.clone() for name, tensor in stored.items()}, document)


def _document(metadata: Mapping[str, str], path: Path) -> dict[str, object]:
    """Parse our document; the format comes first, since another one may differ in all the rest."""
    # Whose file is it?
    if metadata.keys() == {"sha256", ENTRY}:
        raise CheckpointError(f"{str(path)!r} was written by torchcaps 0.1; train again, or read it with that version")
    if metadata.keys() != {ENTRY}:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint of torchcaps, perhaps another program's; give ours")
    # Which format?
    try:
        document = json.loads(json.loads(metadata[ENTRY])["document"])
        number = document["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(f"{str(path)!r} is damaged: its metadata is not JSON of ours; use another one") from None
    if type(number) is int and number > FORMAT:
        raise CheckpointError(f"{str(path)!r} has format {number}, newer than {FORMAT}; update torchcaps to read it")
    if type(document) is not dict or number != FORMAT:
        raise CheckpointError(f"{str(path)!r} is damaged: its metadata is not ours; use another one or train again")
    return document


def _digest(tensors: Mapping[str, Tensor], document: str) -> str:
    """Compute the sha256 of a document and of the contiguous tensors in the order of their names."""
    sha256 = hashlib.sha256(document.encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(_compact([name, str(tensor.dtype), list(tensor.shape)]).encode())
        # As bytes, since numpy has no bfloat16.
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _is_canonical(data: bytes) -> bool:
    """True if the header is spelled as the library spells it: the digest is of what it says, not of its spaces."""
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
    text = json.dumps(json.loads(header), separators=(",", ":"), ensure_ascii=False)
    return header == text + " " * (-len(text.encode()) % 8)


def _compact(value: object) -> str:
    """Return the JSON text of a value on one line; NaN and Infinity stand for the floats that JSON lacks."""
    return json.dumps(value, separators=(",", ":"))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
