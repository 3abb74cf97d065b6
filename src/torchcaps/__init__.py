"""Capsule networks in PyTorch: children cast votes, routing finds agreement, parents switch on.

>>> import torch, torchcaps
>>> children = torchcaps.Capsules(pose=torch.randn(2, 6, 8), activation=torch.rand(2, 6))
>>> parents, info = torchcaps.route(children, torch.randn(6, 3, 16, 8), "em", iterations=2)
>>> list(parents.pose.shape), list(info.coupling.shape)
([2, 3, 16], [1, 2, 6, 3])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcaps.routing import EM, ROUTERS, Dynamic, route
    from torchcaps.train import create, fit, load, load_recipe
    from torchcaps.types import Batch, Capsules, ImageSpec, RoutingInfo

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
    "fit",
    "load",
    "load_recipe",
    "route",
]

_MODULES = {
    "Batch": "torchcaps.types",
    "Capsules": "torchcaps.types",
    "CapsuleClassifier": "torchcaps.estimators",
    "Dynamic": "torchcaps.routing",
    "EM": "torchcaps.routing",
    "ImageSpec": "torchcaps.types",
    "PoECapsules": "torchcaps.estimators",
    "ROUTERS": "torchcaps.routing",
    "RoutingInfo": "torchcaps.types",
    "create": "torchcaps.train.run",
    "fit": "torchcaps.train.own_data",
    "list_models": "torchcaps.zoo.catalog",
    "load": "torchcaps.train.run",
    "load_recipe": "torchcaps.train.recipe",
    "route": "torchcaps.routing",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: torch takes a second, which `torchcaps --help` does not need."""
    if name not in _MODULES:
        raise AttributeError(f"module 'torchcaps' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
