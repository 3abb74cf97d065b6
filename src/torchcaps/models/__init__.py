"""Models wire layers. `MODELS` maps the name in a recipe's [model] table to the configuration that builds one."""

from __future__ import annotations

from torchcaps.models.base import Model, ModelConfig, check_images
from torchcaps.models.baselines import CNN, CNNConfig
from torchcaps.models.capsnet import CapsNet, CapsNetConfig, CapsNetOutput

__all__ = [
    "CNN",
    "MODELS",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "CapsNetOutput",
    "Model",
    "ModelConfig",
    "check_images",
]

MODELS: dict[str, type] = {
    "capsnet": CapsNetConfig,
    "cnn": CNNConfig,
}
