"""Layers: parameters plus one call. Every capsule layer returns `(Capsules, RoutingInfo)`."""

from torchcaps.layers.capsules import ClassCapsules, ConvCapsules, DenseCapsules, SharedCapsules
from torchcaps.layers.convolution import Convolution
from torchcaps.layers.decoders import ConvDecoder, DenseDecoder, FrameDecoder, select
from torchcaps.layers.norm import CapsuleNorm, TypeNorm
from torchcaps.layers.primary import PrimaryCapsules
from torchcaps.layers.sparse import SparseMask

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
