"""Sparse unsupervised capsules with EM routing: what Rawlinson 2018 leaves to others, and no paper has.

image -> matrix capsules (Hinton 2018), whose last layer has L latent capsules (mu, a) in the place of classes
      -> mask m by the rank of their support, v' = m a mu -> decoder that must redraw the standardized image
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from torchcaps.config import NonNegativeFloat, PositiveFloat, Size
from torchcaps.layers import DenseDecoder
from torchcaps.math.pose import MATRIX
from torchcaps.models.base import check_spec
from torchcaps.models.matrix import MatrixCaps, MatrixConfig, MatrixInit, MatrixOutput
from torchcaps.models.sparse import SparseConfigBase, SparseModel, SparseOutput, assigned, build_mask
from torchcaps.routing import RouterChoice
from torchcaps.types import ImageSpec

__all__ = ["SparseMatrixCaps", "SparseMatrixConfig"]


def _init() -> MatrixInit:
    """Open switches, and poses that do not shrink from layer to layer: the decoder sees a mu from the first step on."""
    return MatrixInit(capsules=0.6, classes=1.0, switch=(0.5, 0.0), switch_classes=(0.5, 0.0))


@dataclass(frozen=True)
class SparseMatrixConfig(SparseConfigBase):
    """Sparse capsules with EM routing, small enough for two cores. Competition is as in `SparseConfig`.

    sizes ... init   those of `MatrixConfig`; what it says of classes holds for the latent capsules
    reconstruction   weight of the sum of squared errors; 1/2048 would be their mean over 32x32 stereo pairs
    """

    reconstruction: PositiveFloat = 0.0005
    sizes: tuple[Size, Size, Size, Size] = (32, 8, 8, 8)
    kernel: Size = 5
    stride: Size = 2
    capsule_kernel: Size = 3
    capsule_strides: tuple[Size, Size] = (2, 1)
    routing: RouterChoice = field(default_factory=lambda: MatrixConfig().routing)
    class_cooling: PositiveFloat = 4.0
    coordinates: NonNegativeFloat = 0.01
    init: MatrixInit = field(default_factory=_init)

    @property
    def matrix(self) -> MatrixConfig:
        """The network below the mask."""
        return MatrixConfig(
            sizes=self.sizes,
            kernel=self.kernel,
            stride=self.stride,
            capsule_kernel=self.capsule_kernel,
            capsule_strides=self.capsule_strides,
            routing=self.routing,
            class_cooling=self.class_cooling,
            coordinates=self.coordinates,
            init=self.init,
        )

    def build(self, spec: ImageSpec) -> SparseMatrixCaps:
        return SparseMatrixCaps(self, spec)


class SparseMatrixCaps(SparseModel):
    """Images [b c h w] -> latent matrix capsules, few of which stay on; labels are never looked at.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def __init__(self, config: SparseMatrixConfig, spec: ImageSpec) -> None:
        super().__init__()
        check_spec(spec, smallest=config.matrix.smallest)
        self.config: SparseMatrixConfig = config
        self.spec = spec
        # L latent capsules stand where a classifier has its classes
        self.matrix = MatrixCaps(config.matrix, spec._replace(classes=config.capsules))
        self.mask = build_mask(config)
        # Linear, since standardized pixels are not in [0, 1]
        self.decoder = DenseDecoder(config.capsules, MATRIX**2, spec[:3], config.decoder, output="linear")

    def forward(self, images: Tensor, *, trace: bool = False) -> SparseOutput:
        """Compute the capsules of images [b c h w] and their mask; with `trace`, the record has every iteration."""
        out: MatrixOutput = self.matrix(images, trace=trace)
        below = out.below[-1]
        info = out.infos[-1]
        held = assigned(info.coupling[-1], below.flat().activation, self.config.routing)  # R_ij a_i [b (h w i) j]
        return self.compete(out.classes, held, below, info, images)
