"""A model as a file to give away: its weights alone, or ONNX, which is written only if onnxruntime computes what torch
does:

input    images      [b c h w] in [0, 1], any number of them
outputs  scores      [b j]      of classifiers
         pose        [b j k]    of models with capsules: the class capsules, or those of an encoder
         activation  [b j]      likewise
         features    [b C h w]  of an autoencoder, and `reconstruction` [b c h w]
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.data import DataConfig
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.kernels.threads import kernel_mode
from torchcaps.models import Model
from torchcaps.train.checkpoint import save
from torchcaps.train.run import find_checkpoint, run_of
from torchcaps.train.train_state import build_model, load_weights
from torchcaps.train.weights_export import strip_to_weights
from torchcaps.types import Capsules
from torchcaps.utils.files import write_atomically
from torchcaps.utils.progress import progress

__all__ = ["TOLERANCE", "WEIGHTS", "check_target", "export_onnx", "export_weights", "outputs"]

TOLERANCE = 1e-4
"""Largest difference between a number that torch computes and the same of onnxruntime."""

WEIGHTS = ".safetensors"
"""The ending of a file that takes the weights alone."""

TRACED = 2
VERIFIED = 5
"""Images that the graph is traced with and, another number, compared on."""


def outputs(model: Model, images: Tensor) -> dict[str, Tensor]:
    """What the file gives for images, by name, in one pass; a capsule's activation is its class's score."""
    encode = getattr(model, "encode", None)
    if encode is None:
        return {"scores": model.scores(images)}
    code = encode(images)
    if isinstance(code, Capsules):
        scores = {"scores": code.activation} if _classifies(model) else {}
        return scores | code._asdict()
    return {"features": code, "reconstruction": _decoded(model, code)}


def export_onnx(model: Model, path: Path, *, force: bool = False) -> float:
    """Write a model as ONNX; returns the largest difference from torch, on random images.

    TrainingError, and no file, if that is more than TOLERANCE or the model cannot be traced.
    """
    check_target(path, force=force)
    was = model.training
    model.eval()
    try:
        data, worst = _converted(model)
    finally:
        model.train(was)
    write_atomically(path, [data])
    return worst


@torch.no_grad()
def export_weights(folder: Path, path: Path, *, half: bool = False, examples: int = 0, force: bool = False) -> float:
    """Write the weights of a run alone, with so many test images of each class; returns how far its outputs moved."""
    check_target(path, force=force)
    checkpoint = find_checkpoint(folder)
    run = run_of(checkpoint)
    small = strip_to_weights(checkpoint, half=half, examples=_examples(run.recipe.data, examples) if examples else None)
    given = build_model(run.recipe, run.model.spec).eval()
    load_weights(given, small)
    images = torch.rand(VERIFIED, *run.model.spec[:3], generator=torch.Generator().manual_seed(0))
    expected = outputs(run.model, images)
    found = outputs(given, images)
    save(path, small)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _examples(data: DataConfig, each: int) -> tuple[Tensor, Tensor]:
    """Bytes [n c h w] and labels [n]: the first so many test images of every class, in their order."""
    test = data.load().test
    if test.labels.ndim != 1:
        raise RecipeError("images that show several classes cannot go along as examples; leave --examples out")
    rows = torch.cat([(test.labels == j).nonzero().flatten()[:each] for j in range(test.classes)]).sort().values
    return test.cropped[rows].clone(), test.labels[rows].clone()


def check_target(path: Path, *, force: bool = False) -> None:
    """Say before any work that the packages are missing or the file cannot be written."""
    wanted = () if path.suffix == WEIGHTS else ("onnx", "onnxscript", "onnxruntime")
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise RecipeError(f"export needs {' and '.join(missing)}: pip install 'torchcaps[onnx]'")
    if path.is_dir() or not path.parent.is_dir():
        raise RecipeError(f"cannot write '{path}': give a file in a folder that exists, as in model.onnx")
    if path.exists() and not force:
        raise RecipeError(f"'{path}' is there already; add --force to replace it, or choose another name")


@torch.no_grad()
def _converted(model: Model) -> tuple[bytes, float]:
    """The file and how far it is from torch. Operators of our own cannot be exported, hence the plain path."""
    images = torch.rand(VERIFIED, *model.spec[:3], generator=torch.Generator().manual_seed(0))
    with kernel_mode("plain"):
        expected = outputs(model, images)  # before tracing, since tables that are made once would be made of no values
        if _classifies(model):
            expected["scores"] = model.scores(images)
        for stage in progress(["trace", "compare"], "exporting"):
            if stage == "trace":
                data = _traced(model, images[:TRACED], list(expected))
            else:
                worst = _difference(data, images, expected)
    if not worst <= TOLERANCE:
        raise TrainingError(
            f"onnxruntime differs from torch by {worst:.2g}, more than {TOLERANCE:g}; no file is written: "
            "a network that has diverged, or capsules that tie, may do that"
        )
    return data, worst


class _Named(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return outputs(self.model, images)


def _traced(model: Model, images: Tensor, names: list[str]) -> bytes:
    """The model as bytes of an ONNX file, the number of images left open."""
    with _quiet():
        try:
            program = torch.onnx.export(
                _Named(model).eval(),
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=names,
                dynamic_shapes={"images": {0: "batch"}},
                custom_translation_table={torch.ops.aten.sort.stable: _sort},
            )
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise TrainingError(f"{type(model).__name__} cannot be traced for ONNX: {reason}") from error
    assert program is not None, "the exporter returns a program unless it raises"
    data: bytes = program.model_proto.SerializeToString()
    return data


def _difference(data: bytes, images: Tensor, expected: dict[str, Tensor]) -> float:
    """The largest difference of any output; NaN or infinite where either has such a number."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found = session.run(list(expected), {"images": images.numpy()})
    gaps = [(torch.from_numpy(x) - y).abs().max() for x, y in zip(found, expected.values(), strict=True)]
    return float(torch.stack(gaps).max())


def _sort(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort for ONNX, whose TopK puts the lower index first where values are equal; the exporter has none."""
    import onnxscript

    op: Any = onnxscript.opset18
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))  # [1]
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that nobody asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _classifies(model: Model) -> bool:
    return type(model).scores is not Model.scores


def _decoded(model: Any, features: Tensor) -> Tensor:
    images: Tensor = model.decode(features)
    return images
