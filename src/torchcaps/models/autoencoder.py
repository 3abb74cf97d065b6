"""The convolutional autoencoder under the capsules (Hauser 2019, section 4.1).

    encode   g = λ(w1 * x + b1),    h = λ(w2 * g + b2), the second convolution with a stride
    decode   g̃ = λ(w2ᵀ * h + e1),   x̃ = sigmoid(w1ᵀ * g̃ + e0)

λ is the leaky ReLU, every filter K x K. The transposed filters are the same tensors, so both paths train them. In
training, dropout falls on g and on h. The paper names no biases; without them tied filters cannot paint a black
background.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv_transpose2d, dropout, leaky_relu

from torchcaps.config import NonNegativeFloat, Share, Size, check
from torchcaps.errors import DataError, ShapeError
from torchcaps.layers import Convolution
from torchcaps.math.grid import Grid
from torchcaps.models.base import Model, check_images, check_spec
from torchcaps.models.chunking import in_chunks
from torchcaps.types import Batch, ImageSpec

__all__ = ["Autoencoder", "AutoencoderConfig"]

_DARK = -2.0
"""e0 at the start: sigmoid(-2) = .12, since most pixels of a drawing are background."""


@dataclass(frozen=True)
class AutoencoderConfig:
    """Sizes of the two convolutions; the defaults make 28x28 images 6x6x128 features, the 576 x 8 of Hauser 2019.

    Attributes:
        channels: Of the two convolutions.
        kernel: Side of both.
        stride: Step of the second.
        slope: Of the leaky ReLU below 0.
        dropout: Share of g and h that is dropped in training.
        biases: Whether there are biases; the paper names none.
    """

    channels: tuple[Size, Size] = (128, 128)
    kernel: Size = 9
    stride: Size = 2
    slope: NonNegativeFloat = 0.2
    dropout: Share = 0.1
    biases: bool = True

    def __post_init__(self) -> None:
        check(self)

    def build(self, spec: ImageSpec) -> Autoencoder:
        return Autoencoder(self, spec)


class Autoencoder(Model):
    """Images [b c h w] in [0, 1] -> features [b C2 h' w'] -> images, with tied filters.

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    fewest = 1
    """The least number of training images, as models that are built on the features may need one for each capsule."""

    def __init__(self, config: AutoencoderConfig, spec: ImageSpec) -> None:
        super().__init__()
        # Two windows of side K, one on the other, cover 2K - 1 pixels
        check_spec(spec, smallest=2 * config.kernel - 1)
        self.config = config
        self.spec = spec
        # Grids of both convolutions, and the rows that the second one's stride leaves out
        C1, C2 = config.channels
        middle = Grid.of_image(spec.height, spec.width).window(config.kernel, 1).out
        places = middle.window(config.kernel, config.stride).out
        self._grid = places.height, places.width
        self._unreached = _unreached_rows(middle.height, config), _unreached_rows(middle.width, config)
        # Filters, tied between encoder and decoder, and biases
        self.conv1 = nn.Conv2d(spec.channels, C1, config.kernel, bias=config.biases)
        self.conv2 = Convolution(C1, C2, config.kernel, config.stride, bias=config.biases)
        self.e1 = nn.Parameter(torch.zeros(C1)) if config.biases else None
        self.e0 = nn.Parameter(torch.full((spec.channels,), _DARK)) if config.biases else None
        # The second layer sums K² C1 inputs: this deviation preserves the scale of g
        _initialize(self.conv1, std=0.05)
        _initialize(self.conv2, std=(config.kernel**2 * C1) ** -0.5)

    @property
    def grid(self) -> tuple[int, int]:
        """(h', w'), the places of the features."""
        return self._grid

    def prepare(self, images: Tensor) -> None:
        """Refuse, before hours of training, images [n c h w] that nothing can be learned from.

        Raises:
            DataError: If there are too few images, or all are the same.
        """
        if len(images) < self.fewest:
            raise DataError(f"{len(images)} training images for {self.fewest} capsules; at least one each is wanted")
        if bool((images == images[:1]).all()):
            raise DataError(f"all {len(images)} training images are the same; nothing can be learned from them")

    @in_chunks
    def encode(self, images: Tensor) -> Tensor:
        """Compute the features h [b C2 h' w'] of images [b c h w]; in training with dropout on the first layer."""
        check_images(images, self.spec)
        _check_pixels(images)
        g = self._dropped(self._leaky(self.conv1(images)))  # [b C1 h-K+1 w-K+1]
        return self._leaky(self.conv2(g))  # [b C2 h' w']

    def logits(self, features: Tensor) -> Tensor:
        """Decode features [b C2 h' w'] to images [b c h w] before their sigmoid; in training with dropout."""
        self._check_features(features)
        h = self._dropped(features)
        w1 = self.conv1.weight
        w2 = self.conv2.weight
        g = conv_transpose2d(h, w2, self.e1, self.config.stride, output_padding=self._unreached)  # [b C1 h-K+1 w-K+1]
        return conv_transpose2d(self._leaky(g), w1, self.e0)  # [b c h w]

    def decode(self, features: Tensor) -> Tensor:
        """Decode features [b C2 h' w'] to images [b c h w] in [0, 1]."""
        return self.logits(features).sigmoid()

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [b c h w] and decode them again, to images [b c h w] in [0, 1]."""
        return self.decode(self.encode(images))

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Binary cross-entropy of the pixels, from logits, and the squared error; both are means over pixels."""
        # From logits: a saturated sigmoid would lose the gradient
        logits = self.logits(self.encode(batch.images))
        loss = binary_cross_entropy_with_logits(logits, batch.images)
        return {"loss": loss, "mse": (logits.detach().sigmoid() - batch.images).square().mean()}

    def _leaky(self, x: Tensor) -> Tensor:
        return leaky_relu(x, self.config.slope)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout, self.training)

    def _check_features(self, features: Tensor) -> None:
        wanted = self.config.channels[1], *self.grid  # [C2 h' w']
        if features.ndim != 4 or tuple(features.shape[1:]) != wanted or not features.is_floating_point():
            c, h, w = wanted
            raise ShapeError(
                f"features are {features.dtype} {list(features.shape)}; floating point [b {c} {h} {w}] is wanted,"
                " as `encode` gives"
            )


def _unreached_rows(side: int, config: AutoencoderConfig) -> int:
    """Rows that the last stride does not reach; the transposed convolution must add them to give the size back."""
    return (side - config.kernel) % config.stride


def _initialize(conv: nn.Conv2d, std: float) -> None:
    """Draw w ~ N(0, std²), and set b = 0."""
    nn.init.normal_(conv.weight, std=std)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def _check_pixels(images: Tensor) -> None:
    """Pixels in [0, 1], since a sigmoid draws them; not asked inside `torch.compile`, where no value is known."""
    if torch.compiler.is_compiling():
        return
    low, high = (float(x) for x in images.detach().aminmax())
    if high > 1:
        raise DataError(f"images run from {low:.8g} to {high:.8g}; [0, 1] is wanted: divide bytes by 255")
    if low < 0:
        raise DataError(f"images run from {low:.8g} to {high:.8g}; [0, 1] is wanted: undo the standardization")
