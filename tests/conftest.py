"""What all tests share: one thread a worker (two workers run side by side), `import support`, `import benchmarks`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
