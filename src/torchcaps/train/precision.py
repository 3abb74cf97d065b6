"""Whether a device multiplies bfloat16 matrices, asked before a training that would need it."""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from torchcaps.errors import RecipeError

__all__ = ["check_precision", "cpu_multiplies_bfloat16"]

_PRODUCT = "import torch; torch.nn.Linear(160, 512).bfloat16()(torch.ones(32, 160).bfloat16())"


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse to train in bfloat16 on a device that does not have it.

    Args:
        precision: "float32", which every device has, or "bfloat16".
        device: Where training is to run.

    Raises:
        RecipeError: The device does not multiply bfloat16 matrices.
    """
    if precision == "float32":
        return
    has = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bfloat16()
    if not has:
        raise RecipeError(
            f"train.precision = 'bfloat16' does not work on this {device.type}, whose products of bfloat16 fail; "
            "use 'float32'"
        )


@functools.lru_cache(maxsize=1)
def cpu_multiplies_bfloat16() -> bool:
    """Return whether torch's bfloat16 matrix product works on this CPU.

    It is tried in a process of its own: some virtual machines announce AMX and end a process that uses it.
    """
    return subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False).returncode == 0
