"""Compare training steps with those of named public PyTorch code, on a CPU.

python -m benchmarks.public_code --capsnet CLONE --matrix CLONE [--seconds 20] [--json benchmarks/public-code.json]

CLONE is a clone of the repository at the commit that `PUBLIC` names; its code is not part of this repository. Both
networks were written for GPUs: `cuda` is a no-op here, and nothing else is changed. Theirs and ours take turns in one
process, on random images of the same number and with capsules at as many positions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import one_hot

from benchmarks.cases import case_of
from benchmarks.machine import describe_machine, this_machine
from benchmarks.timing import best_times, busy
from torchcaps.errors import DataError
from torchcaps.losses import spread_loss
from torchcaps.models import MODELS
from torchcaps.systems.report import text_table
from torchcaps.train.train_state import flushed_denormals
from torchcaps.utils.files import write_atomically

__all__ = ["PUBLIC", "Comparison", "PublicCode", "cells_of", "compare_with", "main", "on_a_cpu"]


@dataclass(frozen=True)
class PublicCode:
    """A network of a public repository.

    network     what it is
    repository  owner and name on GitHub
    commit      that was measured
    file        with its network, in a clone
    case        ours, as `benchmarks.cases` names it
    batch       images of a step
    """

    network: str
    repository: str
    commit: str
    file: str
    case: str
    batch: int


PUBLIC = {
    "capsnet": PublicCode(
        "CapsNet of the paper, 28x28", "XifengGuo/CapsNet-Pytorch", "8a5a357", "capsulenet.py", "capsnet-28", 128
    ),
    "matrix": PublicCode(
        "matrix capsules, smaller network of the paper",
        "yl-1993/Matrix-Capsules-EM-PyTorch",
        "f7d2a38",
        "model/capsules.py",
        "em-64-8-16-16",
        32,
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of one image in a training step: public code's and ours."""

    network: str
    repository: str
    commit: str
    batch: int
    public_ms: float
    our_ms: float


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Let code that asks for a GPU compute on the CPU."""
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(torch.cuda, "FloatTensor", torch.FloatTensor),
    ):
        yield


def load_file(clone: Path, file: str) -> ModuleType:
    """Import one file of a clone, which may import the files beside it, and torchvision, of which it needs nothing."""
    path = clone / file
    if not path.is_file():
        raise DataError(f"'{path}' is not there: a clone of the public repository is wanted")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    stand_in = "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None
    if stand_in:
        sys.modules["torchvision"] = mock.MagicMock()
    try:
        with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
            found.loader.exec_module(module)
    finally:
        if stand_in:
            del sys.modules["torchvision"]
    return module


def capsnet_step(module: Any, batch: int) -> Callable[[], object]:
    """Return a training step of the public CapsNet, with its own loss and Adam."""
    network = module.CapsuleNet(input_size=[1, 28, 28], classes=10, routings=3)
    images = torch.rand(batch, 1, 28, 28)
    labels = one_hot(torch.arange(batch) % 10, 10).float()

    def loss() -> torch.Tensor:
        lengths, decoded = network(images, labels)
        found: torch.Tensor = module.caps_loss(labels, lengths, images, decoded, 0.0005 * 784)
        return found

    return _step(network, loss)


def matrix_step(module: Any, batch: int) -> Callable[[], object]:
    """Return a training step of the public matrix capsules. 28x28 padded pixels make our 14x14, 6x6, 4x4 positions."""
    iterations = MODELS["matrix"]().routing.iterations
    network = module.CapsNet(A=64, B=8, C=16, D=16, E=5, iters=iterations)
    images = torch.rand(batch, 1, 28, 28)
    labels = torch.arange(batch) % 5
    return _step(network, lambda: spread_loss(network(images), labels, 0.2))


STEPS: dict[str, Callable[[Any, int], Callable[[], object]]] = {"capsnet": capsnet_step, "matrix": matrix_step}


def _step(network: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.Adam(network.parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()

    return step


def compare_with(name: str, clone: Path, seconds: float) -> Comparison:
    """Measure a step of public code and ours in turn.

    Args:
        name: Of `PUBLIC`.
        clone: Folder of the public repository.
        seconds: For each side.

    Returns:
        The best time of each, in milliseconds an image.
    """
    public = PUBLIC[name]
    torch.manual_seed(0)
    module = load_file(clone, public.file)
    ours = case_of(public.case).ours(public.batch).step
    ours()  # compiles, or finds what was compiled
    with on_a_cpu():
        theirs = STEPS[name](module, public.batch)
        best = best_times({"theirs": theirs, "ours": ours}, seconds)
    ms = {side: 1000 * taken / public.batch for side, taken in best.items()}
    return Comparison(public.network, public.repository, public.commit, public.batch, ms["theirs"], ms["ours"])


def cells_of(rows: Sequence[Comparison]) -> list[list[str]]:
    """Return a table: public code's time over ours is how many times faster ours is."""
    head = ["one training step", "public code", "batch", "ms an image, theirs", "ours", "times faster"]
    return [
        head,
        *(
            [
                row.network,
                f"{row.repository} {row.commit}",
                str(row.batch),
                f"{row.public_ms:.3g}",
                f"{row.our_ms:.3g}",
                f"{row.public_ms / row.our_ms:.1f}",
            ]
            for row in rows
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure against the clones that are named, print the table and write it.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        The exit code; 2 if a clone lacks its file.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, public in PUBLIC.items():
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE", help=f"{public.repository} at {public.commit}")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each side of a row")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args(arguments)
    clones = {name: getattr(given, name) for name in PUBLIC if getattr(given, name) is not None}
    if not clones:
        parser.error("name a clone: --capsnet CLONE or --matrix CLONE")
    if busy():
        print(f"benchmarks: {busy()}", file=sys.stderr)
    try:
        with flushed_denormals():
            rows = [compare_with(name, clone, given.seconds) for name, clone in clones.items()]
    except DataError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    machine = this_machine()
    print(text_table(cells_of(rows)))
    print(describe_machine(machine))
    if given.json:
        found = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
        write_atomically(given.json, [(json.dumps(found, indent=1) + "\n").encode()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
