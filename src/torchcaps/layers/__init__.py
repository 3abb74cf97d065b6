"""Layers: parameters plus one call. Every capsule layer returns `(Capsules, RoutingInfo)`."""

from torchcaps.layers.batch_norm import CapsuleBatchNorm, PerTypeBatchNorm
from torchcaps.layers.capsules import ClassCapsules, ConvCapsules, DenseCapsules, SharedCapsules
from torchcaps.layers.convolution import Convolution
from torchcaps.layers.decoders import DenseDecoder, FrameDecoder, PrototypeDecoder, draw_each, mask_all_but
from torchcaps.layers.primary import PrimaryCapsules
from torchcaps.layers.rank_mask import SparseMask

__all__ = [
    "CapsuleBatchNorm",
    "ClassCapsules",
    "ConvCapsules",
    "Convolution",
    "DenseCapsules",
    "DenseDecoder",
    "FrameDecoder",
    "PerTypeBatchNorm",
    "PrimaryCapsules",
    "PrototypeDecoder",
    "SharedCapsules",
    "SparseMask",
    "draw_each",
    "mask_all_but",
]
