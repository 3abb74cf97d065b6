"""One process or many: `torchrun --nproc-per-node 2 -m torchcaps train RECIPE` needs no other change.

Each process takes its share of every batch, DistributedDataParallel averages the gradients, and so several processes do
what one would do with the same batch. Only process 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcaps.errors import TorchcapsError, TrainingError

__all__ = ["ProcessGroup", "mean_over_processes", "process_group", "world_size"]

_CPU = torch.device("cpu")


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
        return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)

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

    def any(self, flag: bool) -> bool:
        """Return True in every process if the flag is true in any, so that all stop at the same step."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def raise_on_any(self, error: TorchcapsError | None) -> None:
        """Go on only if no process met an error; the one that did raises it, the others say so.

        Raises:
            TorchcapsError: The error of this process.
            TrainingError: Another process met one.
        """
        # Every process must come here, with or without an error, or the others would wait forever
        failed = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise TrainingError("another process could not start; its own line says why")

    def check_batch(self, batch: int) -> None:
        """Refuse a batch that cannot be divided into equal shares."""
        if batch % self.size:
            raise TrainingError(f"a batch of {batch} cannot be shared by {self.size} processes; use a multiple")


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Join the group that torchrun's environment describes, and leave it at the end.

    Raises:
        TrainingError: The environment is not one that torchrun makes.
    """
    # Alone: no group to join
    size = _read_variable("WORLD_SIZE", "1")
    cuda = torch.cuda.is_available()
    if size == 1:
        yield ProcessGroup(device=torch.device("cuda" if cuda else "cpu"))
        return
    # One of several: a device each, then the group; torch reads the remaining variables of torchrun itself
    _read_variable("RANK", "")
    local = _read_variable("LOCAL_RANK", "0")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()


def _read_variable(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise TrainingError(f"the environment says {name}={text!r}; a whole number is wanted: start with torchrun")
    return int(text)


def world_size() -> int:
    """Return the number of processes that train together, 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_processes(x: Tensor) -> Tensor:
    """Return the mean of x over the processes of the group, x itself without one.

    Of equal shares of a batch, the mean of the shares' means is the mean of the batch. Gradients pass: what every
    process's loss owes to x counts in all of them, so that their mean is the gradient of the mean loss.
    """
    if world_size() == 1:
        return x
    mean: Tensor = _Mean.apply(x)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """The mean over the group, and its derivative, which is the same mean."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _mean(x)

    @staticmethod
    def backward(ctx: object, *g: Tensor) -> Tensor:
        return _mean(g[0])


def _mean(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / world_size()
