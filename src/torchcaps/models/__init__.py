"""Models wire layers. `MODELS` maps the name in a recipe's [model] table to the configuration that builds one."""

from __future__ import annotations

from torchcaps.models.autoencoder import Autoencoder, AutoencoderConfig
from torchcaps.models.base import Model, ModelConfig, check_images
from torchcaps.models.baselines import CNN, CNNConfig, ConvNetConfig
from torchcaps.models.capsnet import CapsNet, CapsNetConfig, CapsNetOutput, SmallCapsNetConfig
from torchcaps.models.efficient_capsnet import EfficientCapsNet, EfficientCapsNetConfig
from torchcaps.models.matrix import (
    MatrixCaps,
    MatrixConfig,
    MatrixInit,
    MatrixOutput,
    SmallMatrixConfig,
    TinyMatrixConfig,
)
from torchcaps.models.poe import PoE, PoEConfig
from torchcaps.models.sparse import SmallSparseConfig, SparseCaps, SparseConfig, SparseOutput
from torchcaps.models.sparse_matrix import SparseMatrixCaps, SparseMatrixConfig

__all__ = [
    "CNN",
    "MODELS",
    "Autoencoder",
    "AutoencoderConfig",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "CapsNetOutput",
    "ConvNetConfig",
    "EfficientCapsNet",
    "EfficientCapsNetConfig",
    "MatrixCaps",
    "MatrixConfig",
    "MatrixInit",
    "MatrixOutput",
    "Model",
    "ModelConfig",
    "PoE",
    "PoEConfig",
    "SmallCapsNetConfig",
    "SmallMatrixConfig",
    "SmallSparseConfig",
    "SparseCaps",
    "SparseConfig",
    "SparseMatrixCaps",
    "SparseMatrixConfig",
    "SparseOutput",
    "TinyMatrixConfig",
    "check_images",
]

MODELS: dict[str, type] = {
    "autoencoder": AutoencoderConfig,
    "capsnet": CapsNetConfig,
    "capsnet-small": SmallCapsNetConfig,
    "cnn": CNNConfig,
    "convnet": ConvNetConfig,
    "efficient-capsnet": EfficientCapsNetConfig,
    "matrix": MatrixConfig,
    "matrix-small": SmallMatrixConfig,
    "matrix-tiny": TinyMatrixConfig,
    "poe": PoEConfig,
    "sparse": SparseConfig,
    "sparse-matrix": SparseMatrixConfig,
    "sparse-small": SmallSparseConfig,
}
