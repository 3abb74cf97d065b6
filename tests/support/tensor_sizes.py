"""For tests of kernels: the largest tensor that anything made, and fewer combinations of settings."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Largest", "pairwise"]


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(made) if isinstance(t, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return made


def pairwise(choices: list[Any]) -> list[Any]:
    """Of all combinations of settings with two values each, half: any two settings still meet in all four ways."""
    return [choice for n, choice in enumerate(choices) if n.bit_count() % 2 == 0]
