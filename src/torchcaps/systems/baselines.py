"""The adapter of the networks without capsules that the others are compared with."""

from __future__ import annotations

from torchcaps.systems.base import System

__all__ = ["BaselineSystem"]


class BaselineSystem(System):
    """Convolutional classifiers, and the autoencoder that products of experts are built on."""

    name = "baseline"
    title = "networks without capsules"
    models = ("cnn", "convnet", "autoencoder")
