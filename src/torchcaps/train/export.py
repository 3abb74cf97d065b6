"""A model as a file to give away: its weights alone, or ONNX, which is written only if onnxruntime computes what torch
does:

input    images      [b c h w] in [0, 1], any number of them
outputs  scores      [b j]      of classifiers
         pose        [b j k]    of models with capsules: the class capsules, or those of an encoder
         activation  [b j]      likewise
         features    [b C h w]  of an autoencoder, and `reconstruction` [b c h w]
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
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

ONNX = ".onnx"
WEIGHTS = ".safetensors"
"""The endings of files that take the graph and the weights alone."""

CLASS_NAMES = "class_names"
"""The key of the ONNX file's metadata that holds a JSON list of the names of the classes."""

TRACED = 2
VERIFIED = 5
"""Images that the graph is traced with and, another number, compared on."""


def outputs(model: Model, images: Tensor) -> dict[str, Tensor]:
    """What the file gives for images, by name, in one pass; a capsule's activation is its class's score."""
    # Classifiers without capsules, such as the CNN.
    encode = getattr(model, "encode", None)
    if encode is None:
        return {"scores": model.scores(images)}
    code = encode(images)
    # Capsules: scores are their activations.
    if isinstance(code, Capsules):
        scores = {"scores": code.activation} if model.is_classifier else {}
        return scores | code._asdict()
    # Autoencoders.
    return {"features": code, "reconstruction": _decoded(model, code)}


def export_onnx(model: Model, path: Path, *, names: Sequence[str] = (), force: bool = False) -> float:
    """Write a model as ONNX.

    Args:
        model: The model to trace.
        path: The file to write, which ends in .onnx.
        names: Names of the classes, which go into the file's metadata.
        force: Replace a file that is there.

    Returns:
        The largest difference from torch, on random images.

    Raises:
        TrainingError: The difference is more than TOLERANCE, or the model cannot be traced; no file is written.
        RecipeError: The file cannot be written, or a package is missing.
    """
    check_target(path, force=force)
    # Traced in evaluation mode: dropout and batch statistics have no place in a file for inference.
    was = model.training
    model.eval()
    try:
        data, worst = _converted(model, names)
    finally:
        model.train(was)
    write_atomically(path, [data])
    return worst


def _with_names(data: bytes, names: Sequence[str]) -> bytes:
    """Add the names of the classes to the metadata of an ONNX file."""
    if not names:
        return data
    import onnx

    graph = onnx.load_from_string(data)
    onnx.helper.set_model_props(graph, {CLASS_NAMES: json.dumps(list(names))})
    named: bytes = graph.SerializeToString()
    return named


@torch.no_grad()
def export_weights(
    folder: Path,
    path: Path,
    *,
    half: bool = False,
    examples: int = 0,
    names: Sequence[str] = (),
    force: bool = False,
) -> float:
    """Write the weights of a run alone, which load as a run does but cannot be resumed.

    Args:
        folder: The folder of the run.
        path: The file to write, which ends in .safetensors.
        half: Store weights in half precision.
        examples: How many test images of each class go along.
        names: Names of the classes; without them, those of the recipe's data, where it is.
        force: Replace a file that is there.

    Returns:
        The largest change of an output of the model by the rounding, on random images.
    """
    check_target(path, force=force)
    # Take the weights, and the examples if any.
    checkpoint = find_checkpoint(folder)
    run = run_of(checkpoint)
    images_and_labels = _examples(run.recipe.data, examples) if examples else None
    sums = run.model.training_sums
    small = strip_to_weights(checkpoint, half=half, examples=images_and_labels, names=names, sums=sums)
    # Load them as a user would, and compare with the run on random images.
    given = build_model(run.recipe, run.model.spec).eval()
    load_weights(given, small)
    images = torch.rand(VERIFIED, *run.model.spec[:3], generator=torch.Generator().manual_seed(0))
    expected = outputs(run.model, images)
    found = outputs(given, images)
    # Written last: a file that does not load is never left behind.
    save(path, small)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _examples(data: DataConfig, each: int) -> tuple[Tensor, Tensor]:
    """Bytes [n c h w] and labels [n]: the first so many test images of every class, in their order."""
    test = data.load().test
    if test.labels.ndim != 1:
        raise RecipeError("images that show several classes cannot go along as examples; leave --examples out")
    rows = torch.cat([(test.labels == j).nonzero().flatten()[:each] for j in range(test.classes)]).sort().values  # [n]
    return test.cropped[rows].clone(), test.labels[rows].clone()


def check_target(path: Path, *, force: bool = False) -> None:
    """Say before any work that the packages are missing or the file cannot be written."""
    # The ending decides what is written, so it comes first.
    if path.suffix not in (ONNX, WEIGHTS):
        raise RecipeError(f"'{path}' ends in neither {ONNX} nor {WEIGHTS}; name the file model{ONNX} or model{WEIGHTS}")
    wanted = () if path.suffix == WEIGHTS else ("onnx", "onnxscript", "onnxruntime")
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise RecipeError(f"export needs {' and '.join(missing)}: pip install 'torchcaps[onnx]'")
    if path.is_dir() or not path.parent.is_dir():
        raise RecipeError(f"cannot write '{path}': give a file in a folder that exists, as in model.onnx")
    if path.exists() and not force:
        raise RecipeError(f"'{path}' is there already; add --force to replace it, or choose another name")


@torch.no_grad()
def _converted(model: Model, names: Sequence[str]) -> tuple[bytes, float]:
    """The file and how far it is from torch. Operators of our own cannot be exported, hence the plain path."""
    # Random images rather than test images, so that no data is needed.
    images = torch.rand(VERIFIED, *model.spec[:3], generator=torch.Generator().manual_seed(0))
    with kernel_mode("plain"):
        expected = outputs(model, images)  # before tracing, since tables that are made once would be made of no values
        if model.is_classifier:
            expected["scores"] = model.scores(images)
        # Two long steps, as items of a list so that the progress bar can count them.
        for stage in progress(["trace", "compare"], "exporting"):
            if stage == "trace":
                data = _with_names(_traced(model, images[:TRACED], list(expected)), names)
            else:
                worst = _difference(data, images, expected)
    # Negated, so that NaN is refused, too.
    if not worst <= TOLERANCE:
        raise TrainingError(
            f"onnxruntime differs from torch by {worst:.2g}, more than {TOLERANCE:g}; no file is written: "
            "a network that has diverged, or capsules that tie, may do that"
        )
    return data, worst


# The exporter wants a module whose forward pass returns the outputs.
class _Named(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return outputs(self.model, images)


def _traced(model: Model, images: Tensor, names: list[str]) -> bytes:
    """The model as bytes of an ONNX file, the number of images left open."""
    # The number of images is the one axis left open; `_sort` translates an operator that the exporter lacks.
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

    # One thread and errors only: a comparison needs no speed, and its warnings are not for users.
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
    # Both channels: the exporter logs, and the packages below it warn.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _decoded(model: Any, features: Tensor) -> Tensor:
    images: Tensor = model.decode(features)
    return images
