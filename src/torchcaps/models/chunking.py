"""Any number of samples in bounded memory: a model's methods go through them in tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchcaps.errors import TorchcapsError
from torchcaps.kernels.threads import parts, switched_on
from torchcaps.types import Capsules

__all__ = ["BUDGET", "in_chunks"]

BUDGET = 2**26
"""Bytes that the largest tensor of a tile may take; with what else lives beside it, a tile stays below 256 MB or so."""


def in_chunks(method: Callable[..., Any]) -> Callable[..., Any]:
    """A model's method of samples that also takes very many: it goes through them in tiles and joins what comes out.

    Samples are the first axis of tensors and `Capsules`, in and out. A tile has so many that no tensor made on the way
    takes more than BUDGET bytes. Not tiled is what fits, and what is trained, differentiated or compiled.
    """

    @wraps(method)
    def tiled(model: nn.Module, *given: Any, **named: Any) -> Any:
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return method(model, *given, **named)

        def call(values: Sequence[Any]) -> Any:
            return method(model, *values[: len(given)], **dict(zip(named, values[len(given) :], strict=True)))

        values = (*given, *named.values())
        n = _samples(values)
        tile = _chunk_size(model, method, call, values) if n > 1 else 1
        if n <= tile:
            return call(values)
        return _concatenate([call(_slice(values, *piece)) for piece in parts(n, -(-n // tile))])

    return tiled


_CHUNK_SIZES: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def _chunk_size(model: nn.Module, method: Any, call: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> int:
    """Samples a tile, found once for a model, a method and a kind of sample, by watching one and two of them pass.

    Tensors that two samples make and one does not are made of samples: half of the largest is what a sample takes.
    """
    known = _CHUNK_SIZES.setdefault(model, {})
    key = (method, BUDGET, switched_on(), *((x.dtype, x.shape[1:]) for x in _tensors(values)))
    if key not in known:
        try:
            one, two = (_allocated(call, _slice(values, 0, n)) for n in (1, 2))
        except TorchcapsError:
            return _samples(values)  # all at once, so that the error speaks of what came
        known[key] = max(1, 2 * BUDGET // max(1, *(two - one)))
    return known[key]


def _allocated(call: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Counter[int]:
    """How many tensors of each size in bytes a call makes."""
    watch = _CountAllocations()
    with watch:
        call(values)
    return watch.sizes


class _CountAllocations(TorchFunctionMode):
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


def _slice(values: Sequence[Any], start: int, stop: int) -> list[Any]:
    """Samples start ... stop - 1 of each value; what holds no samples stays as it is."""
    return [
        Capsules(*_slice(x, start, stop)) if isinstance(x, Capsules) else x[start:stop] if isinstance(x, Tensor) else x
        for x in values
    ]


def _concatenate(results: Sequence[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.cat(list(results))
    return Capsules(*(torch.cat(tensors) for tensors in zip(*results, strict=True)))
