"""The adapter of products of expert capsules."""

from __future__ import annotations

from torchcaps.systems.base import System
from torchcaps.systems.poe.explorer import PoEView

__all__ = ["PoESystem"]


class PoESystem(System):
    """Capsules that learn without labels, as the factors of a product of experts over features."""

    name = "poe"
    title = "products of expert capsules"
    paper = "Hauser 2019, Training Products of Expert Capsules with Mixing by Dynamic Routing"
    models = ("poe",)
    explorer_view = PoEView
