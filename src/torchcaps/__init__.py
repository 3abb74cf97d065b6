"""Capsule networks in PyTorch: children cast votes, routing finds agreement, parents switch on.

>>> import torch, torchcaps
>>> children = torchcaps.Capsules(pose=torch.randn(2, 6, 8), activation=torch.rand(2, 6))
>>> parents, info = torchcaps.route(children, torch.randn(6, 3, 16, 8), "em", iterations=2)
>>> list(parents.pose.shape), list(info.coupling.shape)
([2, 3, 16], [1, 2, 6, 3])
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch comes: see kernels/threads.py

from torchcaps.routing import EM, ROUTERS, Dynamic, route
from torchcaps.types import Batch, Capsules, ImageSpec, RoutingInfo

if TYPE_CHECKING:
    from torchcaps.train import create, load, load_recipe

__version__ = "0.2.0"

__all__ = [
    "EM",
    "ROUTERS",
    "Batch",
    "Capsules",
    "Dynamic",
    "ImageSpec",
    "RoutingInfo",
    "__version__",
    "create",
    "load",
    "load_recipe",
    "route",
]

_LATER = {
    "CapsuleClassifier": ("torchcaps.estimators", "CapsuleClassifier"),
    "PoECapsules": ("torchcaps.estimators", "PoECapsules"),
    "create": ("torchcaps.train.run", "create"),
    "load": ("torchcaps.train.run", "load"),
    "load_recipe": ("torchcaps.train.recipe", "load_recipe"),
}


def __getattr__(name: str) -> Any:
    """Training and what needs scikit-learn are imported only when asked for, so that `import torchcaps` stays light."""
    if name not in _LATER:
        raise AttributeError(f"module 'torchcaps' has no attribute '{name}'")
    module, attribute = _LATER[name]
    return getattr(import_module(module), attribute)
