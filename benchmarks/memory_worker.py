"""The process that measures the memory of one case: python -m benchmarks.memory_worker CASE --what plain

A module of its own, since what is run by `-m` must not have been imported by its package. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from benchmarks.memory import probe
from benchmarks.timing import threads
from torchcaps.errors import TorchcapsError
from torchcaps.train.train_state import flushed_denormals

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the peaks of a case; exit code 2 and one line if its name or its sizes are wrong."""
    parser = argparse.ArgumentParser(description="Peak memory of a case, in MB over import.")
    parser.add_argument("case")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--what", choices=("fast", "plain"), default="fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args(arguments)
    try:
        with flushed_denormals(), threads(given.threads):
            found = probe(given.case, given.batch, given.what)
    except TorchcapsError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
