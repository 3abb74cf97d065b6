"""What training and evaluation ask of a model and of its stages, and the one check of its images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchcaps.errors import DataError, ShapeError, TorchcapsError
from torchcaps.kernels.threads import parts, switched_on
from torchcaps.types import Batch, Capsules, ImageSpec

__all__ = ["BUDGET", "Model", "ModelConfig", "check_images", "check_spec", "in_tiles", "mean_over_team"]

BUDGET = 2**26
"""Bytes that the largest tensor of a tile may take; with what else lives beside it, a tile stays below 256 MB or so."""


class Model(nn.Module):
    """A network that can say what it wants: `objective(batch, step)["loss"]` is the scalar that training lowers.

    The other entries of that dictionary are means over the batch worth a line in the journal.

    A model may be trained in `stages()`, one after the other. A stage is a Model itself: its `parameters()` are the
    ones that it trains, and they and all else that it learns belong to the whole model, whose state is what a
    checkpoint holds. The rest stands still, in evaluation mode. A stage goes through

        prepare(images), objective(batch, 0), objective(batch, 1), ..., finish()

    and, if the run was cut off at step s, through prepare(images), objective(batch, s), ..., finish() again.

    `encode`, `scores` and `reconstruct`, where a model has them, take any number of images: in evaluation mode and
    without gradients they go through them `in_tiles`, in bounded memory.
    """

    spec: ImageSpec
    by_gradient: bool = True
    """If False, `objective` itself learns, by gathering sums into buffers: it is called without gradients, and there
    is no optimiser. Each process sees its own part of the batch: gather `mean_over_team`."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ("encode", "scores", "reconstruct"):
            if name in vars(cls):
                setattr(cls, name, in_tiles(vars(cls)[name]))

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        raise TypeError(f"{type(self).__name__} states no objective to train by")

    def scores(self, images: Tensor) -> Tensor:
        """[b j] one number a class, larger = more likely; only classifiers have it."""
        raise TypeError(f"{type(self).__name__} is not a classifier")

    def stages(self) -> dict[str, Model]:
        """Name -> stage in the order of training; the names are those of `STAGES` of the model's configuration."""
        return {"all": self}

    def prepare(self, images: Tensor) -> None:
        """Before a stage's first step, and before the next one after a resumption: all training images [n c h w].

        They are bytes, and `batch.indices` counts in them, so that a stage may keep what parts that stand still make
        of them (as a plain attribute: a buffer would travel between processes at every step). Called in evaluation
        mode, without gradients, with the same random numbers each time.
        """

    def finish(self) -> None:
        """After a stage's last step, before it is saved: in evaluation mode, without gradients, safe to repeat.

        What it changes it must change in place (`copy_`), so that memory is laid out as after a resumption.
        """


def in_tiles(method: Callable[..., Any]) -> Callable[..., Any]:
    """A model's method of samples that also takes very many: it goes through them in tiles and joins what comes out.

    Samples are the first axis of tensors and `Capsules`, in and out. A tile has so many that no tensor made on the way
    takes more than BUDGET bytes. Not tiled is what fits, and what is trained, differentiated or compiled.
    """

    @wraps(method)
    def tiled(model: Model, *given: Any, **named: Any) -> Any:
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return method(model, *given, **named)

        def call(values: Sequence[Any]) -> Any:
            return method(model, *values[: len(given)], **dict(zip(named, values[len(given) :], strict=True)))

        values = (*given, *named.values())
        n = _samples(values)
        tile = _tile(model, method, call, values) if n > 1 else 1
        if n <= tile:
            return call(values)
        return _joined([call(_part(values, *piece)) for piece in parts(n, -(-n // tile))])

    return tiled


_TILES: WeakKeyDictionary[Model, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def _tile(model: Model, method: Any, call: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> int:
    """Samples a tile, found once for a model, a method and a kind of sample, by watching one and two of them pass.

    Tensors that two samples make and one does not are made of samples: half of the largest is what a sample takes.
    """
    known = _TILES.setdefault(model, {})
    key = (method, BUDGET, switched_on(), *((x.dtype, x.shape[1:]) for x in _tensors(values)))
    if key not in known:
        try:
            one, two = (_made(call, _part(values, 0, n)) for n in (1, 2))
        except TorchcapsError:
            return _samples(values)  # all at once, so that the error speaks of what came
        known[key] = max(1, 2 * BUDGET // max(1, *(two - one)))
    return known[key]


def _made(call: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Counter[int]:
    """How many tensors of each size in bytes a call makes."""
    watch = _Watch()
    with watch:
        call(values)
    return watch.sizes


class _Watch(TorchFunctionMode):
    """Counts what torch's functions return inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.sizes.update(x.nbytes for x in _tensors(made if isinstance(made, tuple | list) else [made]))
        return made


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    flat = [y for x in values for y in (x if isinstance(x, Capsules) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]


def _samples(values: Sequence[Any]) -> int:
    """How many samples there are; 0 where tensors differ in that, which is an error that the method will find."""
    counts = {x.shape[0] if x.ndim else 0 for x in _tensors(values)}
    return counts.pop() if len(counts) == 1 else 0


def _part(values: Sequence[Any], start: int, stop: int) -> list[Any]:
    """Samples start ... stop - 1 of each value; what holds no samples stays as it is."""
    return [
        Capsules(*_part(x, start, stop)) if isinstance(x, Capsules) else x[start:stop] if isinstance(x, Tensor) else x
        for x in values
    ]


def _joined(results: Sequence[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.cat(list(results))
    return Capsules(*(torch.cat(tensors) for tensors in zip(*results, strict=True)))


class ModelConfig(Protocol):
    """A frozen dataclass of a network's sizes and losses, which builds it for images of a given shape.

    If the network is trained in stages, `STAGES: ClassVar[tuple[str, ...]]` names them in their order.
    """

    def build(self, spec: ImageSpec) -> Model: ...


def mean_over_team(x: Tensor) -> Tensor:
    """The mean of x over the processes of a team, x itself without one; no gradient passes through.

    Of equal parts of a batch, the mean of the parts' means is the mean of the batch.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_spec(spec: ImageSpec, smallest: int) -> None:
    """Refuse, when a model is built, images that it cannot be built for; `smallest` is the side it needs."""
    for name, count in spec._asdict().items():
        if count < 1:
            raise ShapeError(f"{name} = {count}; at least 1 is wanted")
    if min(spec.height, spec.width) < smallest:
        raise ShapeError(
            f"images of {spec.height}x{spec.width} are too small for this network: it needs {smallest}x{smallest} "
            "or more; use larger images, smaller kernels or fewer layers"
        )


def check_images(images: Tensor, spec: ImageSpec) -> None:
    """Images [b c h w] of the model's size with finite values, or one line that says what came instead."""
    wanted = f"[b {spec.channels} {spec.height} {spec.width}]"
    if images.ndim != 4 or tuple(images.shape[1:]) != tuple(spec[:3]):
        raise ShapeError(f"images have shape {list(images.shape)}; this model wants {wanted}")
    if images.shape[0] == 0:
        raise ShapeError(f"an empty batch: images have shape {list(images.shape)}; at least one is wanted")
    if not images.dtype.is_floating_point:
        raise ShapeError(f"images are {images.dtype}; floating numbers in [0, 1] are wanted (divide bytes by 255)")
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(images).all()):
        raise DataError("images hold NaN or infinite values; finite numbers in [0, 1] are wanted")
