"""One process or many: `torchrun --nproc-per-node 2 -m torchcaps train RECIPE` needs no other change.

Each process takes its share of every batch, DistributedDataParallel averages the gradients, and so several processes do
what one would do with the same batch. Process 0 decides: it alone reads and writes the folder of the run, the others
get from it what they need, and whatever differs between processes ends all of them with one line. A link that is cut
ends them within `TIMEOUT_VARIABLE` seconds, three times that at the start.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from torchcaps.errors import TorchcapsError, TrainingError

__all__ = [
    "DEFAULT_TIMEOUT",
    "TIMEOUT_VARIABLE",
    "ProcessGroup",
    "mean_over_processes",
    "process_group",
    "restart_count",
    "row_shares",
    "select_device",
    "sharing_rows",
    "weighting_means",
    "world_size",
]

TIMEOUT_VARIABLE = "TORCHCAPS_TIMEOUT"
"""Environment variable: how many seconds a process waits for the others before it gives up."""

DEFAULT_TIMEOUT = 300
"""Seconds, if the variable is not set."""

_CPU = torch.device("cpu")
_PIECE = 1 << 28
"""Bytes that are sent at a time."""

# What the backends call a link that is cut, a process that is gone, or one that does not answer.
_LINK_ERROR = re.compile(r"gloo|nccl|connection|timed out|timeout|socket|broken pipe|tcpstore", re.IGNORECASE)


@dataclass(frozen=True)
class ProcessGroup:
    """Rank, size and device of this process in the distributed group; a group of one without torchrun."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """True in the one process that writes."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module, or one that averages its gradients over the group."""
        if self.size == 1:
            return module
        # Kernels of one channel have strides of two kinds for the same layout in memory, which torch takes for a fault
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        wrapped = DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)
        _wrapped.add(wrapped)
        return wrapped

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a small tensor over the group."""
        return mean_over_processes(values) if self.size > 1 else values

    def broadcast(self, module: nn.Module) -> None:
        """Give every process the parameters and buffers of process 0."""
        if self.size > 1:
            for own in module.state_dict().values():
                # Through a contiguous copy, which the backends want; weights may be stored with channels last
                first = own.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(first, 0)
                own.copy_(first)

    def send(self, data: bytes = b"") -> bytes:
        """Return in every process the bytes that process 0 gives; those of the others are ignored."""
        if self.size == 1:
            return data
        # The length first, so that all have room; then pieces, since backends count in 32 bits
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, 0)
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main and data else torch.empty(0)
        pieces = []
        for start in range(0, int(length), _PIECE):
            size = min(_PIECE, int(length) - start)
            piece = given[start : start + size] if self.is_main else torch.empty(size, dtype=torch.uint8)
            piece = piece.to(self.device)
            dist.broadcast(piece, 0)
            pieces.append(piece.cpu().numpy().tobytes())
        return b"".join(pieces)

    def any(self, flag: bool) -> bool:
        """Return True in every process if the flag is true in any, so that all stop at the same step."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def raise_on_any(self, error: TorchcapsError | None) -> None:
        """Go on only if no process met an error; the one that did raises it, the others say which one and why.

        Raises:
            TorchcapsError: The error of this process.
            TrainingError: Another process met one.
        """
        # Every process must come here, with or without an error, or the others would wait for it
        if not self.any(error is not None):
            return
        reasons = self._gather_lines("" if error is None else str(error))
        if error is not None:
            raise error
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise TrainingError(f"process {rank} could not start: {reasons[rank]}")

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """Run a block in every process; if it raises a TorchcapsError in any of them, all of them end.

        Raises:
            TorchcapsError: The error of this process.
            TrainingError: Another process met one.
        """
        error = None
        try:
            yield
        except TorchcapsError as caught:
            error = caught
        self.raise_on_any(error)

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Refuse to go on if processes disagree.

        Args:
            facts: Name -> value that JSON can hold; the same names and values are wanted in every process.

        Raises:
            TrainingError: A process has another value than process 0; every process raises the same line.
        """
        if self.size == 1:
            return
        first = json.loads(self.send(json.dumps(facts).encode()))
        own = json.loads(json.dumps(facts))
        # The first difference in the order of process 0
        different = [name for name in (*first, *own) if first.get(name) != own.get(name)]
        line = ""
        if different:
            name = different[0]
            line = f"{name} is {own.get(name)!r} in process {self.rank} and {first.get(name)!r} in process 0"
        lines = [text for text in self._gather_lines(line) if text]
        if lines:
            raise TrainingError(f"{lines[0]}; all processes need the same")

    def _gather_lines(self, text: str) -> list[str]:
        """Return the texts of all processes by rank, cut at 400 bytes."""
        own = torch.zeros(400, dtype=torch.uint8)
        data = text.encode()[: len(own)]
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        rows = [torch.zeros_like(own, device=self.device) for _ in range(self.size)]
        if self.size == 1:
            return [text]
        dist.all_gather(rows, own.to(self.device))
        return [bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Join the group that torchrun's environment describes, and leave it at the end; inside of one, give that one.

    Raises:
        TrainingError: The environment is not one that torchrun makes, or the link to another process is cut.
    """
    # Alone: no group to join
    size = _read_variable("WORLD_SIZE", "1")
    if size == 1:
        yield ProcessGroup(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    # One of several: a device each, then the group; torch reads the remaining variables of torchrun itself
    _read_variable("RANK", "")
    device = select_device(_read_variable("LOCAL_RANK", "0"), torch.cuda.device_count())
    if dist.is_initialized():
        yield ProcessGroup(dist.get_rank(), size, device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    patience = _read_variable(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    with _naming_lost_links(patience):
        _join("nccl" if device.type == "cuda" else "gloo", patience)
    try:
        with _naming_lost_links(patience):
            yield ProcessGroup(dist.get_rank(), size, device)
    finally:
        _leave()


_wrapped: WeakSet[DistributedDataParallel] = WeakSet()
"""The modules that were wrapped in the current process group and are still in use."""


def _leave() -> None:
    """End the process group and its threads, even while an error keeps wrapped modules alive.

    The reducer of a wrapped module holds the group. If it were the last to hold it, the group would end when the
    module is deleted: torch then waits for the threads of the group while it holds the lock of the interpreter, and a
    thread that has just lost its link needs that lock to delete what it was sending, so that both wait for ever.
    References from Python are safe, since torch releases the lock before it deletes these.
    """
    for module in list(_wrapped):
        del module.reducer, module.process_group
        module.logger = None
    _wrapped.clear()
    dist.destroy_process_group()


def _join(backend: str, patience: int) -> None:
    """Join the process group, or give up after three times `patience`: to reach process 0, to meet, to connect.

    The store's client waits without limit for an answer of a process 0 that is stopped or behind a link that drops
    everything. Therefore the steps, of which each has its own limit as far as torch keeps one, run in a thread.
    """
    errors: list[BaseException] = []

    def meet() -> None:
        try:
            _meet(backend, patience)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=meet, name="torchcaps-join", daemon=True)
    thread.start()
    thread.join(3 * patience)
    if thread.is_alive():
        raise RuntimeError("timed out waiting for an answer of process 0")
    if errors:
        raise errors[0]


def _meet(backend: str, patience: int) -> None:
    """Find the other processes under a name that no earlier attempt has used, and connect to them.

    After a restart torchrun gives the new processes the store of the old ones, in which their addresses still stand: a
    process that reads one of these would wait for the dead. Therefore process 0 invents a name, and tells it only to
    processes that it has heard of in this attempt.
    """
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
    deadline = time.monotonic() + patience
    name = _lead(store, size, deadline) if rank == 0 else _follow(store, rank, deadline)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"torchcaps/{name}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience),
    )


def _lead(store: Store, size: int, deadline: float) -> str:
    """Invent a name, announce it to those who have called, and wait until each of them has confirmed it."""
    name = uuid.uuid4().hex
    announced: list[str] = []
    while True:
        # A caller may be of an earlier attempt: then another call follows, and is announced in its place
        callers = [_read(store, f"torchcaps/call/{other}") for other in range(1, size)]
        if all(callers) and callers != announced:
            announced = callers
            store.set("torchcaps/announced", " ".join([name, *announced]))
        if announced and all(_read(store, f"torchcaps/{name}/{caller}") for caller in announced):
            store.set(f"torchcaps/{name}/go", "go")
            return name
        _pause(deadline)


def _follow(store: Store, rank: int, deadline: float) -> str:
    """Call process 0 with a word of one's own, and return the name that it has announced to that word."""
    word = uuid.uuid4().hex
    store.set(f"torchcaps/call/{rank}", word)
    while True:
        name, *callers = _read(store, "torchcaps/announced").split() or [""]
        if word in callers:
            store.set(f"torchcaps/{name}/{word}", "here")
            if _read(store, f"torchcaps/{name}/go"):
                return name
        _pause(deadline)


def _read(store: Store, key: str) -> str:
    """Return what stands under a key, "" if nothing does; reading alone would wait for it."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError("timed out waiting for the other processes to start")
    time.sleep(0.02)


def select_device(local_rank: int, gpus: int) -> torch.device:
    """Return the device of a process: each on its own GPU, or all on the CPU where there are none.

    Args:
        local_rank: Number of the process on its machine.
        gpus: Number of GPUs that the process sees. A scheduler such as SLURM may show each process only its own.

    Raises:
        TrainingError: There are fewer GPUs than processes.
    """
    if gpus == 0:
        return _CPU
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if gpus == 1 and shown and "," not in shown:
        return torch.device("cuda", 0)
    if local_rank >= gpus:
        raise TrainingError(f"process {local_rank} of this machine has no GPU, there are {gpus}; start {gpus} here")
    return torch.device("cuda", local_rank)


def restart_count() -> int:
    """Return how often torchrun has restarted the processes after one of them died; 0 without torchrun."""
    return _read_variable("TORCHELASTIC_RESTART_COUNT", "0")


_sharing: ContextVar[bool] = ContextVar("sharing", default=False)


@contextmanager
def sharing_rows(share: bool = True) -> Iterator[None]:
    """Inside, methods of models that are marked `@in_chunks` compute a share of the samples in every process.

    All processes must call the same methods with the same samples in the same order.
    """
    before = _sharing.set(share)
    try:
        yield
    finally:
        _sharing.reset(before)


class RowShares(NamedTuple):
    """Which of a number of samples each process computes: those from `bounds[rank]` to `bounds[rank + 1]`."""

    bounds: tuple[int, ...]
    rank: int

    @property
    def own(self) -> tuple[int, int]:
        """The first sample of this process, and the one after its last."""
        return self.bounds[self.rank], self.bounds[self.rank + 1]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes [n ...] in their order, given those of this one."""
        # As bytes, which every backend sends; padded, since all must send the same number
        counts = [stop - start for start, stop in pairwise(self.bounds)]
        data = (
            rows.contiguous().view(torch.uint8) if rows.ndim > 1 else rows.contiguous().unsqueeze(1).view(torch.uint8)
        )
        padded = data.new_zeros(max(counts), *data.shape[1:])
        padded[: len(data)] = data
        everybody = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everybody, padded)
        whole = torch.cat([part[:count] for part, count in zip(everybody, counts, strict=True)]).view(rows.dtype)
        return whole.reshape(self.bounds[-1], *rows.shape[1:])


def row_shares(n: int) -> RowShares | None:
    """Return which of `n` samples each process computes; None outside of `sharing_rows` and where there are too few."""
    size = world_size()
    if not _sharing.get() or size == 1 or n < size:
        return None
    return RowShares(tuple(n * rank // size for rank in range(size + 1)), dist.get_rank())


@contextmanager
def _naming_lost_links(patience: int) -> Iterator[None]:
    """Turn the backends' errors about lost processes into one line."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", " ".join(str(error).split()))  # without places in their source
        if not _LINK_ERROR.search(text):
            raise
        raise TrainingError(
            f"another process is gone or has not answered for {patience} s ({TIMEOUT_VARIABLE}): {text[:100]}; "
            "go on from the last checkpoint with --resume"
        ) from None


def _read_variable(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise TrainingError(f"the environment says {name}={text!r}; a whole number is wanted: start with torchrun")
    return int(text)


def world_size() -> int:
    """Return the number of processes that train together, 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


_weight: ContextVar[float] = ContextVar("weight", default=1.0)


@contextmanager
def weighting_means(weight: float) -> Iterator[None]:
    """Inside, the values of this process count `weight` times in `mean_over_processes`.

    Args:
        weight: The images of this process, divided by the mean number of images of a process; so the mean of all
            weights is 1, and all of them are 1 where a batch is shared equally.
    """
    before = _weight.set(weight)
    try:
        yield
    finally:
        _weight.reset(before)


def mean_over_processes(x: Tensor) -> Tensor:
    """Return the mean of x over the processes of the group, x itself without one.

    Of means over the images of each process, with `weighting_means`, it is the mean over the images of the batch.
    Gradients pass: what every process's loss owes to x counts in all of them, so that the mean of the gradients of the
    weighted losses is the gradient of the mean loss.
    """
    if world_size() == 1:
        return x
    mean: Tensor = _Mean.apply(x, _weight.get())  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """The mean y = sum_r w_r x_r / n over n processes with weights w_r, and its derivative.

    With losses w_r L_r, whose gradients are averaged, dL/dx_r is w_r times the mean of what arrives at y.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return _mean(x * weight if weight != 1 else x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        mean = _mean(g[0])
        return mean * ctx.weight if ctx.weight != 1 else mean, None


def _mean(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / world_size()
