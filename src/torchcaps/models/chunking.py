"""Any number of samples in bounded memory: a method marked `@in_chunks` goes through them a chunk at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchcaps.errors import TorchcapsError
from torchcaps.kernels.threads import kernels_enabled, split_range
from torchcaps.types import Capsules
from torchcaps.utils.distributed import row_shares, sharing_rows

__all__ = ["BUDGET", "in_chunks", "is_chunked"]

BUDGET = 2**26
"""Bytes of the largest tensor of a chunk; with all others that exist beside it, a chunk takes about 256 MB or less."""

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R", Tensor, Capsules)


def in_chunks(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorate a model's method so that it takes any number of samples, in bounded memory.

    Samples are the first axis of all tensors and `Capsules` among the arguments and in the result; other arguments are
    handed on as they are. A chunk is as large as it can be while no tensor made on the way takes more than `BUDGET`
    bytes. All samples go at once if they fit, in training, where gradients are wanted, and inside `torch.compile`.

    Args:
        method: A method of a module that returns a tensor or `Capsules`.

    Returns:
        A method with the same arguments and, but for rounding, the same results.
    """

    @wraps(method)
    def chunked(model: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Training and traced graphs take the batch whole: a loss or batch statistics may depend on all of it
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return method(model, *args, **kwargs)

        def call(given: _Arguments) -> R:
            return method(model, *given.positional, **given.named)  # type: ignore[arg-type]

        # Several processes that evaluate together take a share each, and exchange the results
        given = _Arguments(args, kwargs)
        shares = row_shares(given.samples())
        if shares is None:
            return _by_chunks(model, method, call, given)
        with sharing_rows(False):
            own = _by_chunks(model, method, call, given.rows(*shares.own))
        return _map(shares.gather, own)

    _CHUNKED.add(chunked)
    return chunked


def _by_chunks(model: nn.Module, method: Hashable, call: Callable[[_Arguments], R], given: _Arguments) -> R:
    """Call a method once if all samples fit into a chunk, else chunk by chunk."""
    n = given.samples()
    chunk = _chunk_size(model, method, call, given) if n > 1 else 1
    if n <= chunk:
        return call(given)
    # Chunks of about equal size: a last one of few samples would waste a call
    return _concatenate([call(given.rows(start, stop)) for start, stop in split_range(n, -(-n // chunk))])


_CHUNKED: WeakSet[Callable[..., object]] = WeakSet()


def is_chunked(method: Callable[..., object]) -> bool:
    """Return whether a method, taken from its class, is marked `@in_chunks`."""
    return method in _CHUNKED


class _Arguments(NamedTuple):
    """The arguments of one call, by position and by name."""

    positional: tuple[object, ...]
    named: Mapping[str, object]

    def tensors(self) -> list[Tensor]:
        """All tensors, those of `Capsules` included."""
        return _tensors((*self.positional, *self.named.values()))

    def samples(self) -> int:
        """How many samples there are; 0 if tensors differ in that, which is an error that the method will find."""
        counts = {x.shape[0] if x.ndim else 0 for x in self.tensors()}
        return counts.pop() if len(counts) == 1 else 0

    def rows(self, start: int, stop: int) -> _Arguments:
        """The same arguments with samples start ... stop - 1 alone."""
        positional = tuple(_rows(value, start, stop) for value in self.positional)
        return _Arguments(positional, {name: _rows(value, start, stop) for name, value in self.named.items()})


def _rows(value: object, start: int, stop: int) -> object:
    """Samples start ... stop - 1 of a tensor or of capsules; anything else as it is."""
    if isinstance(value, Capsules):
        return Capsules(value.pose[start:stop], value.activation[start:stop])
    return value[start:stop] if isinstance(value, Tensor) else value


def _tensors(values: Iterable[object]) -> list[Tensor]:
    # `Capsules` is a tuple of two tensors; other tuples are not looked into
    flat = [x for value in values for x in (value if isinstance(value, Capsules) else (value,))]
    return [x for x in flat if isinstance(x, Tensor)]


def _map(function: Callable[[Tensor], Tensor], result: R) -> R:
    """Apply a function to a tensor, or to both tensors of capsules."""
    if isinstance(result, Capsules):
        return Capsules(function(result.pose), function(result.activation))
    return function(result)


def _concatenate(results: Sequence[R]) -> R:
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat([x for x in results if isinstance(x, Tensor)])
    capsules = [x for x in results if isinstance(x, Capsules)]
    return Capsules(torch.cat([x.pose for x in capsules]), torch.cat([x.activation for x in capsules]))


_CHUNK_SIZES: WeakKeyDictionary[nn.Module, dict[tuple[Hashable, ...], int]] = WeakKeyDictionary()


def _chunk_size(model: nn.Module, method: Hashable, call: Callable[[_Arguments], object], given: _Arguments) -> int:
    """Return how many samples a chunk has; measured once for a model, a method and a shape of samples.

    One sample is passed, then two. Tensors that two samples make and one does not have a row for each sample: half of
    the largest is what a sample takes.
    """
    known = _CHUNK_SIZES.setdefault(model, {})
    # All that the memory of one sample depends on
    key = (method, BUDGET, kernels_enabled(), *((x.dtype, x.shape[1:]) for x in given.tensors()))
    if key not in known:
        try:
            one = _allocated(call, given.rows(0, 1))
            two = _allocated(call, given.rows(0, 2))
        except TorchcapsError:
            return given.samples()  # all at once, so that the error speaks of what came
        # Tensors of both calls, such as weights, cancel in the difference
        known[key] = max(1, 2 * BUDGET // max(1, *(two - one)))
    return known[key]


def _allocated(call: Callable[[_Arguments], object], given: _Arguments) -> Counter[int]:
    """Count the tensors that a call makes, by their size in bytes."""
    counts = _CountAllocations()
    with counts:
        call(given)
    return counts.sizes


class _CountAllocations(TorchFunctionMode):
    """Inside, counts the tensors that torch's functions return, by their size in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self.sizes.update(x.nbytes for x in _tensors(made if isinstance(made, tuple | list) else [made]))
        return made
