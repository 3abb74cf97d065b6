"""What this machine can do, found out in a process of its own, since a missing instruction ends the process."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

_PRODUCT = "import torch; torch.nn.Linear(160, 512).bfloat16()(torch.ones(32, 160).bfloat16())"


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Return whether torch's bfloat16 matrix product works: some virtual machines announce AMX and do not allow it."""
    return subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False).returncode == 0
