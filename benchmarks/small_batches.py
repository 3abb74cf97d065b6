"""Whole training steps of small batches: what a second thread is worth, and ours against a compiled plain CapsNet.

python -m benchmarks.small_batches [--seconds 10] [--json benchmarks/small-batches.json]

The plain CapsNet is `benchmarks.reference.PlainCapsNet`: torch's layers and stored votes under `torch.compile`, with
torch's fused Adam. `torch.compile` needs a C++ compiler. Both sides of a row take turns in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.cases import case_of
from benchmarks.reference import PlainCapsNet
from benchmarks.table_command import table_parser, warn_if_busy, write_table
from benchmarks.timing import best_times, threads
from torchcaps.train.train_state import flushed_denormals

HEAD = ["step of", "batch", "ms", "compared with", "ms", "ratio"]
EM_BATCHES = (1, 8, 32)
CAPSNET_BATCHES = (32, 128)


def on_threads(count: int, step: Callable[[], object]) -> Callable[[], object]:
    """The same step on so many threads."""

    def run() -> object:
        with threads(count):
            return step()

    return run


def thread_row(batch: int, seconds: float) -> list[str]:
    """Measure EM routing in a whole network, 64/8/16/16, on two threads and on one.

    Args:
        batch: Images of a step.
        seconds: For each side.

    Returns:
        A row of the table; its ratio is two threads over one.
    """
    step = case_of("em-64-8-16-16").ours(batch).step
    step()  # compiles, or finds what was compiled
    best = best_times({"one": on_threads(1, step), "two": on_threads(2, step)}, seconds)
    return _row("matrix capsules, 2 threads", batch, best["two"], "1 thread", best["one"])


def compiled_row(batch: int, seconds: float) -> list[str]:
    """Measure CapsNet of the paper's size on 28x28 images against a compiled plain one.

    Args:
        batch: Images of a step.
        seconds: For each side.

    Returns:
        A row of the table; its ratio is ours over the compiled one.
    """
    ours = case_of("capsnet-28").ours(batch).step
    plain = compiled_step(PlainCapsNet(), batch)
    for step in (ours, plain):
        step()  # compiles
    best = best_times({"ours": ours, "plain": plain}, seconds)
    return _row("CapsNet, 2 threads", batch, best["ours"], "plain, torch.compile, fused Adam", best["plain"])


def compiled_step(network: PlainCapsNet, batch: int) -> Callable[[], object]:
    """Return a training step of a plain CapsNet under `torch.compile` with fused Adam, on random digits."""
    for parameter in network.parameters():
        if parameter.ndim == 4:  # a convolution's weights
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    loss_of = torch.compile(network)
    images = torch.rand(batch, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch) % 10

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_of(images, labels))
        optimizer.step()

    return step


def _row(what: str, batch: int, seconds: float, against: str, other: float) -> list[str]:
    return [what, str(batch), f"{1000 * seconds:.1f}", against, f"{1000 * other:.1f}", f"{seconds / other:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the whole table, print it and write it.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code.
    """
    parser = table_parser(__doc__, 10.0, "for each side of a row")
    given = parser.parse_args(arguments)
    warn_if_busy()
    with flushed_denormals():
        table = [HEAD, *(thread_row(batch, given.seconds) for batch in EM_BATCHES)]
        with threads(2):
            table += [compiled_row(batch, given.seconds) for batch in CAPSNET_BATCHES]
    write_table(table, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
