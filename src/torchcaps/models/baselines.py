"""Networks without capsules, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchcaps.config import Share, Size, Sizes
from torchcaps.errors import RecipeError
from torchcaps.losses import cross_entropy_loss, multi_hot
from torchcaps.models.base import Model, check_classes, check_images, check_spec, is_correct
from torchcaps.models.chunking import in_chunks
from torchcaps.types import Batch, ImageSpec

__all__ = ["CNN", "CNNConfig", "ConvNetConfig"]


@dataclass(frozen=True)
class CNNConfig:
    """Convolutions (kernel x kernel, ReLU, max pooling) of the given widths, hidden layers, dropout, classes.

    Attributes:
        widths: Channels of each convolution.
        kernel: Side of the kernels.
        pool: Side of the max pooling after each convolution; 1 for none.
        hidden: Units of each hidden layer.
        dropout: Before the last layer.
        several: Images may show several classes, so that each has a logistic unit of its own instead of a softmax.
    """

    widths: Sizes = (32, 64)
    kernel: Size = 5
    pool: Size = 2
    hidden: Sizes = (128,)
    dropout: Share = 0.5
    several: bool = False

    def __post_init__(self) -> None:
        if not self.widths:
            raise RecipeError("widths = []; at least one convolution is wanted")

    def build(self, spec: ImageSpec) -> CNN:
        return CNN(self, spec)


@dataclass(frozen=True)
class ConvNetConfig(CNNConfig):
    """The network that Sabour 2017 compares with: no pooling, two hidden layers; 35.4 M parameters on 28x28 images."""

    widths: Sizes = (256, 256, 128)
    pool: Size = 1
    hidden: Sizes = (328, 192)


class CNN(Model):
    """The usual convolutional classifier: images [b c h w] -> class scores [b j].

    Args:
        config: Its settings.
        spec: Shape of its images, and the number of classes.
    """

    def __init__(self, config: CNNConfig, spec: ImageSpec) -> None:
        super().__init__()
        # Each pooling divides the sides by `pool`
        shrink = config.pool ** len(config.widths)
        check_spec(spec, smallest=shrink)
        check_classes(spec)
        self.config = config
        self.spec = spec
        self.takes_shares = not config.several
        # Convolutions with pooling
        stages: list[nn.Module] = []
        for below, above in pairwise([spec.channels, *config.widths]):
            stages += [nn.Conv2d(below, above, config.kernel, padding="same"), nn.ReLU(), nn.MaxPool2d(config.pool)]
        features = (spec.height // shrink) * (spec.width // shrink) * config.widths[-1]
        self.trunk = nn.Sequential(*stages, nn.Flatten())
        # Hidden layers and class scores
        sizes = [features, *config.hidden]
        layers = [m for below, above in pairwise(sizes) for m in (nn.Linear(below, above), nn.ReLU())]
        self.head = nn.Sequential(*layers, nn.Dropout(config.dropout), nn.Linear(sizes[-1], spec.classes))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits [b j] of images [b c h w]."""
        check_images(images, self.spec)
        logits: Tensor = self.head(self.trunk(images))  # [b j]
        return logits

    @in_chunks
    def scores(self, images: Tensor) -> Tensor:
        logits: Tensor = self(images)
        return logits.sigmoid() if self.config.several else logits.softmax(-1)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        logits = self(batch.images)
        right = is_correct(logits, batch.labels).to(logits.dtype).mean()
        return {"loss": self._loss(logits, batch.targets), "accuracy": right}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy; of logistic units, the sum of theirs over the classes."""
        if not self.config.several:
            return cross_entropy_loss(logits, labels)
        T = multi_hot(labels, self.spec.classes).to(logits.dtype)  # [b j]
        return binary_cross_entropy_with_logits(logits, T, reduction="none").sum(1).mean()
