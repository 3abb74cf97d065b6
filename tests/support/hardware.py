"""What this machine can do."""

from __future__ import annotations

import torch

from support.processes import Forked


def multiplies_bfloat16() -> bool:
    """Return whether torch's bfloat16 matrix product works: some virtual machines announce AMX and do not allow it."""
    return Forked(_multiply_bfloat16).wait() == 0


def _multiply_bfloat16() -> None:
    torch.nn.Linear(160, 512).bfloat16()(torch.ones(32, 160).bfloat16())
