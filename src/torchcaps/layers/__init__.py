"""Layers: parameters plus one call. Every capsule layer returns `(Capsules, RoutingInfo)`."""

from torchcaps.layers.batch_norm import CapsuleNorm, TypeNorm
from torchcaps.layers.capsules import ClassCapsules, ConvCapsules, DenseCapsules, SharedCapsules
from torchcaps.layers.convolution import Convolution
from torchcaps.layers.decoders import ConvDecoder, DenseDecoder, FrameDecoder, select
from torchcaps.layers.primary import PrimaryCapsules
from torchcaps.layers.rank_mask import SparseMask

__all__ = [
    "CapsuleNorm",
    "ClassCapsules",
    "ConvCapsules",
    "ConvDecoder",
    "Convolution",
    "DenseCapsules",
    "DenseDecoder",
    "FrameDecoder",
    "PrimaryCapsules",
    "SharedCapsules",
    "SparseMask",
    "TypeNorm",
    "select",
]
