"""Trained models that ship with the package, each with its card: recipe, result, and where it comes from.

>>> from torchcaps.zoo import list_models
>>> "capsnet-digits" in list_models("capsnet*")
True

A model is a folder: `model.safetensors` (weights, recipe and some test images), `config.json` (the card as data),
`result.json` (what `torchcaps evaluate` measured) and `README.md` (the card as text). Loading reads data only.
"""

from __future__ import annotations

from torchcaps.zoo.build import BuildSettings, build_model_folder
from torchcaps.zoo.card import ModelCard, Origin, read_card
from torchcaps.zoo.catalog import list_models, model_card
from torchcaps.zoo.spot_check import spot_check

__all__ = [
    "BuildSettings",
    "ModelCard",
    "Origin",
    "build_model_folder",
    "list_models",
    "model_card",
    "read_card",
    "spot_check",
]
