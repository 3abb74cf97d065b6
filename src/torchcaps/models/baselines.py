"""Networks without capsules, to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torchcaps.config import Count, Share
from torchcaps.errors import RecipeError
from torchcaps.losses import cross_entropy_loss
from torchcaps.models.base import Model, check_images, check_spec
from torchcaps.types import Batch, ImageSpec

__all__ = ["CNN", "CNNConfig"]


@dataclass(frozen=True)
class CNNConfig:
    """Convolutions (kernel x kernel, ReLU, 2x2 max pooling) of the given widths, one hidden layer, dropout."""

    widths: tuple[Count, ...] = (32, 64)
    kernel: Count = 5
    hidden: Count = 128
    dropout: Share = 0.5

    def __post_init__(self) -> None:
        if not self.widths:
            raise RecipeError("widths = []; at least one convolution is wanted")

    def build(self, spec: ImageSpec) -> CNN:
        return CNN(self, spec)


class CNN(Model):
    """The usual convolutional classifier: images [b c h w] -> class scores [b j]."""

    def __init__(self, config: CNNConfig, spec: ImageSpec) -> None:
        super().__init__()
        check_spec(spec, smallest=2 ** len(config.widths))
        self.config, self.spec = config, spec
        shrink = 2 ** len(config.widths)
        stages: list[nn.Module] = []
        for below, above in zip([spec.channels, *config.widths], config.widths, strict=False):
            stages += [nn.Conv2d(below, above, config.kernel, padding="same"), nn.ReLU(), nn.MaxPool2d(2)]
        features = (spec.height // shrink) * (spec.width // shrink) * config.widths[-1]
        self.trunk = nn.Sequential(*stages, nn.Flatten())
        self.head = nn.Sequential(
            nn.Linear(features, config.hidden), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.hidden, spec.classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.spec)
        logits: Tensor = self.head(self.trunk(images))
        return logits

    def scores(self, images: Tensor) -> Tensor:
        logits: Tensor = self(images)
        return logits.softmax(-1)

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        logits = self(batch.images)
        right = (logits.argmax(-1) == batch.labels).to(logits.dtype).mean()
        return {"loss": cross_entropy_loss(logits, batch.labels), "accuracy": right}
