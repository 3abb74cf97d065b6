"""The adapter of CapsNet."""

from __future__ import annotations

from torchcaps.systems.base import System
from torchcaps.systems.capsnet.explorer import CapsNetView

__all__ = ["CapsNetSystem"]


class CapsNetSystem(System):
    """Class capsules by dynamic routing, trained with labels by the margin loss."""

    name = "capsnet"
    title = "CapsNets"
    paper = "Sabour, Frosst and Hinton 2017, Dynamic Routing Between Capsules"
    models = ("capsnet", "capsnet-small")
    explorer_view = CapsNetView
