"""From where on a kernel is faster than the plain path, with the kernel always taken and never taken.

python -m benchmarks.crossover [--threads 1] [--json benchmarks/crossover.json]
python -m benchmarks.crossover --what convolutions [--threads 1] [--json benchmarks/convolutions.json]
python -m benchmarks.crossover --what bfloat16 [--threads 1] [--json benchmarks/bfloat16.json]

votes           small layers of both routers, forward and backward: what `routing.dispatch.WORTH` rests on
convolutions    by way of spectra and torch's, forward and backward: what `kernels.fourier.FFT_COST` rests on; "taken"
                is what `kernels.fourier.is_faster` says
bfloat16        by columns and torch's, both in bfloat16, forward and backward, and torch's in float32 beside: what the
                sizes in `kernels.columns` rest on; "taken" is what `kernels.columns.is_faster` says
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from benchmarks.cases import case_of
from benchmarks.timing import best_times, busy, threads
from torchcaps.kernels import columns
from torchcaps.kernels.fourier import fourier_conv2d, is_faster
from torchcaps.kernels.threads import kernel_mode
from torchcaps.routing import dispatch
from torchcaps.systems.report import text_table
from torchcaps.train.train_state import flushed_denormals
from torchcaps.utils.files import write_atomically
from torchcaps.utils.progress import progress

LAYERS = [
    *((f"dynamic-{i}x8-4x16", 4 * i) for i in (4, 16, 64, 256)),
    *((f"em-{i}x4", 4 * i) for i in (4, 16, 64, 256)),
]
"""Names of cases, and the votes of one sample."""
BATCHES = (1, 4, 16, 64)


def rows(layers: Sequence[tuple[str, int]], batches: Sequence[int], seconds: float) -> list[list[str]]:
    """A line a layer and batch, in the order of the votes."""
    found = []
    for name, votes in progress(layers, "measuring"):
        for batch in batches:
            case = case_of(name)
            tasks = {"ours": case.ours(batch).step, "plain": case.plain(batch).step}
            tasks["ours"]()  # compiles
            best = best_times(tasks, seconds)
            found.append((votes * batch, name, batch, 1000 * best["ours"], 1000 * best["plain"]))
    head = ["layer", "batch", "votes", "ours ms", "plain ms", "plain / ours"]
    body = [[n, str(b), f"{v:,}", f"{o:.2f}", f"{p:.2f}", f"{p / o:.1f}"] for v, n, b, o, p in sorted(found)]
    return [head, *body]


class Convolution(NamedTuple):
    """Channels below and above, taps and stride, on images of a side."""

    c: int
    o: int
    taps: int
    stride: int
    side: int

    def __str__(self) -> str:
        """
        >>> str(Convolution(256, 256, 9, 2, 20))
        '256 to 256, 9x9 by 2, 20x20'
        """
        return f"{self.c} to {self.o}, {self.taps}x{self.taps} by {self.stride}, {self.side}x{self.side}"

    def tensors(self, batch: int) -> tuple[Tensor, Tensor]:
        """Images and kernels in the layout that training has them in."""
        shapes = (batch, self.c, self.side, self.side), (self.o, self.c, self.taps, self.taps)
        x, w = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes)
        return x.requires_grad_(), w.requires_grad_()


CONVOLUTIONS = [
    Convolution(256, 256, 9, 2, 20),
    Convolution(256, 256, 9, 2, 32),
    Convolution(64, 128, 5, 1, 10),
    Convolution(128, 256, 5, 1, 8),
]
SAMPLES = (8, 16, 32, 64, 128)
BFLOAT16_SAMPLES = (16, 128)


Way = Callable[[Tensor, Tensor, int], Tensor]


def torch_conv2d(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """torch's own, in the precision of the images."""
    return conv2d(x, w, stride=stride)


WAYS: dict[str, Way] = {"ours": fourier_conv2d, "torch": torch_conv2d}
BFLOAT16_WAYS: dict[str, Way] = {
    "ours": columns.column_conv2d,
    "torch": torch_conv2d,
    "float32": lambda x, w, stride: conv2d(x.float(), w.float(), stride=stride),
}
BFLOAT16_CONVOLUTIONS = [
    Convolution(256, 256, 9, 2, 20),
    Convolution(64, 256, 9, 1, 10),
    Convolution(64, 256, 9, 1, 16),
    Convolution(256, 256, 9, 2, 32),
    Convolution(64, 128, 7, 1, 10),
    Convolution(64, 128, 5, 1, 10),
]


def step_of(convolve: Way, x: Tensor, w: Tensor, stride: int) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward, to images and kernels."""
    slopes = torch.randn_like(convolve(x, w, stride).detach())
    return lambda: torch.autograd.grad(convolve(x, w, stride), (x, w), slopes)


def convolution_rows(convolutions: Sequence[Convolution], batches: Sequence[int], seconds: float) -> list[list[str]]:
    """A line a convolution and batch."""
    found = [["convolution", "batch", "ours ms", "torch ms", "torch / ours", "taken"]]
    for conv in progress(convolutions, "measuring"):
        for batch in batches:
            (x, w) = conv.tensors(batch)
            s = conv.stride
            tasks = {name: step_of(way, x, w, s) for name, way in WAYS.items()}
            tasks["ours"]()  # compiles
            best = best_times(tasks, seconds)
            times = [f"{1000 * best[way]:.2f}" for way in WAYS]
            ratio = f"{best['torch'] / best['ours']:.1f}"
            taken = "yes" if is_faster(x, w, s) else "no"
            found.append([str(conv), str(batch), *times, ratio, taken])
    return found


def bfloat16_rows(convolutions: Sequence[Convolution], batches: Sequence[int], seconds: float) -> list[list[str]]:
    """A line a convolution and batch, images and kernels in bfloat16."""
    found = [["convolution", "batch", "ours ms", "torch ms", "float32 ms", "torch / ours", "float32 / ours", "taken"]]
    for conv in progress(convolutions, "measuring"):
        for batch in batches:
            (x, w) = (part.detach().bfloat16().requires_grad_() for part in conv.tensors(batch))
            s = conv.stride
            best = best_times({name: step_of(way, x, w, s) for name, way in BFLOAT16_WAYS.items()}, seconds)
            times = [f"{1000 * best[name]:.2f}" for name in BFLOAT16_WAYS]
            ratios = [f"{best[name] / best['ours']:.1f}" for name in ("torch", "float32")]
            found.append([str(conv), str(batch), *times, *ratios, "yes" if columns.is_faster(x, w, s) else "no"])
    return found


def votes(seconds: float) -> list[list[str]]:
    """The table of both routers, whose kernels are taken at any size meanwhile."""
    taken_from = dispatch.WORTH
    dispatch.WORTH = 0
    try:
        return rows(LAYERS, BATCHES, seconds)
    finally:
        dispatch.WORTH = taken_from


def convolutions(seconds: float) -> list[list[str]]:
    with kernel_mode("fast"):
        return convolution_rows(CONVOLUTIONS, SAMPLES, seconds)


def bfloat16(seconds: float) -> list[list[str]]:
    with kernel_mode("fast"):
        return bfloat16_rows(BFLOAT16_CONVOLUTIONS, BFLOAT16_SAMPLES, seconds)


TABLES = {"votes": votes, "convolutions": convolutions, "bfloat16": bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*TABLES], default="votes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each of the two ways")
    parser.add_argument("--json", type=Path, help="file to write the table into")
    given = parser.parse_args(arguments)
    if busy():
        print(f"crossover: {busy()}", file=sys.stderr)
    with flushed_denormals(), threads(given.threads):
        found = TABLES[given.what](given.seconds)
    print(text_table(found))
    if given.json:
        write_atomically(given.json, [(json.dumps(found, indent=1) + "\n").encode()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
