"""Running statistics of batch normalization, measured anew for weights that no training step has produced.

The mean of the weights of several steps or runs has activations of its own. Running statistics that were gathered on
the way belong to the weights of the way, so one pass over training images replaces them (Izmailov 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torchcaps.data import BatchPosition, Dataset, epoch_order, make_batch
from torchcaps.layers import PerTypeBatchNorm
from torchcaps.models import Model
from torchcaps.train.recipe import TrainConfig
from torchcaps.types import Batch
from torchcaps.utils.distributed import ProcessGroup

__all__ = ["has_running_statistics", "measure_running_statistics", "training_batches"]


def has_running_statistics(model: Model) -> bool:
    """Return True if the model has a layer of batch normalization."""
    return any(isinstance(module, PerTypeBatchNorm) for module in model.modules())


def training_batches(
    data: Dataset,
    settings: TrainConfig,
    seed: int,
    *,
    epoch: int = 0,
    count: int | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[Batch]:
    """Prepare the batches of one epoch as training does, but without mixup: a test sees none of it.

    Args:
        data: The training set.
        settings: The size of a batch, over all processes, and the largest shift.
        seed: Seed of order and augmentation.
        epoch: Number of the epoch.
        count: The number of batches, from the first; None for all of the epoch.
        group: The processes that share each batch; a group of one by default.

    Yields:
        One batch after the other, or this process's share of it.
    """
    group = group or ProcessGroup()
    order = epoch_order(seed, epoch, len(data))
    per_epoch = len(data) // settings.batch
    for number in range(per_epoch if count is None else min(count, per_epoch)):
        yield make_batch(
            data,
            order,
            BatchPosition(epoch, number),
            settings.batch,
            seed=seed,
            max_shift=settings.max_shift,
            rows=settings.share(group.rank, group.size).rows,
        )


@torch.no_grad()
def measure_running_statistics(model: Model, batches: Iterable[Batch]) -> None:
    """Replace the running statistics of a model by the mean of those of some batches; its weights stay.

    Args:
        model: The model, which is left in evaluation mode.
        batches: Training batches of equal size on the model's device.
    """
    norms = [module for module in model.modules() if isinstance(module, PerTypeBatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.train()
    try:
        for n, batch in enumerate(batches):
            # The n-th batch counts as much as each before it, so that the result is the plain mean.
            for norm in norms:
                norm.momentum = 1 / (n + 1)
            model.objective(batch, 0)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
