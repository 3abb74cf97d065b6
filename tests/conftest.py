"""What all tests share: one thread a worker (two workers run side by side) and `import support`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
