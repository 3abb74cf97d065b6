"""One process or many: `torchrun --nproc-per-node 2 -m torchcaps train RECIPE` needs no other change.

Each process takes its part of every batch, DistributedDataParallel averages the gradients, and so many processes do
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
from torchcaps.utils.distributed import mean_over_processes

__all__ = ["ProcessGroup", "process_group"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among its like: `rank` of `size`, computing on `device`."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """True in the one process that writes."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module itself, or one that averages its gradients over the team."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the team of a small tensor."""
        return mean_over_processes(values) if self.size > 1 else values

    def broadcast(self, module: nn.Module) -> None:
        """Give every process the parameters and buffers of process 0."""
        if self.size > 1:
            for own in module.state_dict().values():
                first = own.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(first, 0)
                own.copy_(first)

    def any(self, flag: bool) -> bool:
        """True everywhere if it is true anywhere, so that all stop at the same step."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def raise_on_any(self, error: TorchcapsError | None) -> None:
        """Go on only if no process met an error; the one that did raises it, the others say so."""
        failed = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise TrainingError("another process could not start; its own line says why")

    def check_batch(self, batch: int) -> None:
        if batch % self.size:
            raise TrainingError(f"a batch of {batch} cannot be shared by {self.size} processes; use a multiple")


def _environment(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise TrainingError(f"the environment says {name}={text!r}; a whole number is wanted: start with torchrun")
    return int(text)


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """The team that torchrun's environment describes; alone without one."""
    size = _environment("WORLD_SIZE", "1")
    cuda = torch.cuda.is_available()
    if size == 1:
        yield ProcessGroup(device=torch.device("cuda" if cuda else "cpu"))
        return
    _environment("RANK", "")
    local = _environment("LOCAL_RANK", "0")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()
