"""Every registered model, small enough to be built, traced and compiled in a test, for images of one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchcaps.models import (
    AutoencoderConfig,
    CapsNetConfig,
    CNNConfig,
    ConvNetConfig,
    EfficientCapsNetConfig,
    MatrixConfig,
    Model,
    PoEConfig,
    SmallCapsNetConfig,
    SmallMatrixConfig,
    SmallSparseConfig,
    SparseConfig,
    SparseMatrixConfig,
    TinyMatrixConfig,
)
from torchcaps.routing import EM, Dynamic
from torchcaps.types import ImageSpec

SPEC = ImageSpec(1, 12, 12, 3)

_POE = PoEConfig(
    capsules=4, dimension=4, child_dimension=4, autoencoder=AutoencoderConfig(channels=(8, 8), kernel=3)
)  # fmt: skip
_CAPSULES: dict[str, Any] = {
    "channels": 4, "kernel": 3, "types": 2, "type_dimension": 4, "primary_kernel": 3, "dimension": 4,
    "routing": Dynamic(iterations=2), "decoder": (8,),
}  # fmt: skip
_MATRIX: dict[str, Any] = {
    "sizes": (4, 2, 2, 2), "kernel": 3, "capsule_strides": (1, 1), "routing": EM(iterations=2),
}  # fmt: skip

SMALL: dict[str, Any] = {
    "autoencoder": AutoencoderConfig(channels=(4, 4), kernel=3),
    "capsnet": CapsNetConfig(**_CAPSULES),
    "capsnet-small": SmallCapsNetConfig(**_CAPSULES, shared=True),
    "cnn": CNNConfig(widths=(4,), kernel=3, hidden=(8,)),
    "convnet": ConvNetConfig(widths=(4, 4), kernel=3, hidden=(8, 6)),
    "efficient-capsnet": EfficientCapsNetConfig(
        channels=(4, 8), kernels=(3, 3), strides=(1, 2), type_dimension=4, dimension=4, decoder=(8,)
    ),
    "matrix": MatrixConfig(**_MATRIX),
    "matrix-small": SmallMatrixConfig(**_MATRIX, norm=True),
    "matrix-tiny": TinyMatrixConfig(),
    "poe": _POE,
    "sparse": SparseConfig(**_CAPSULES, capsules=4),
    "sparse-matrix": SparseMatrixConfig(**_MATRIX, capsules=4, decoder=(8,)),
    "sparse-small": SmallSparseConfig(**_CAPSULES, stride=1, capsules=4, shared=True),
}
"""A configuration for each name in MODELS; a test holds that none is forgotten."""

DISTINCT = [name for name in SMALL if name not in ("convnet", "matrix-tiny")]
"""The models that differ in more than their sizes, for tests that take seconds each."""

ROUTED = replace(_POE, energy=replace(_POE.energy, routing=Dynamic(2, "cosine", "children")))
"""Products of expert capsules whose coupling is routed."""


def built(config: Any) -> Model:
    """The same weights every time, in evaluation mode."""
    torch.manual_seed(0)
    model: Model = config.build(SPEC)
    return model.eval()


def images(n: int) -> torch.Tensor:
    return torch.rand(n, *SPEC[:3], generator=torch.Generator().manual_seed(n))
