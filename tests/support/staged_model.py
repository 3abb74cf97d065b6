"""The smallest model trained in stages, as a recipe, as a file, and on the command line of a process of its own.

    code     a convolution, dropout and a decoder, by gradients: redraw the image
    head     a classifier on the code of images, which it keeps from `prepare`, by gradients
    moments  the mean code, gathered into buffers without gradients; `finish` turns it into the offset

`mishaps` maps (stage, step | "prepare" | "finish") to what is to happen there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.cli import main
from torchcaps.config import Count, Share, merge
from torchcaps.models import MODELS
from torchcaps.models.base import Model
from torchcaps.train.recipe import Recipe, recipe_of
from torchcaps.types import Batch, ImageSpec
from torchcaps.utils.distributed import mean_over_processes

STAGES = ("code", "head", "moments")
events: list[tuple[str, int | str]] = []
mishaps: dict[tuple[str, int | str], Callable[[], object]] = {}


def event(stage: str, what: int | str) -> None:
    """Called by every stage before it does anything."""
    events.append((stage, what))
    mishaps.get((stage, what), lambda: None)()


@dataclass(frozen=True)
class StagedConfig:
    """A small model in three stages."""

    STAGES: ClassVar[tuple[str, ...]] = STAGES
    width: Count = 6
    dropout: Share = 0.25

    def build(self, spec: ImageSpec) -> Staged:
        return Staged(self, spec)


class Code(Model):
    def __init__(self, width: int, dropout: float, spec: ImageSpec) -> None:
        super().__init__()
        self.conv = nn.Conv2d(spec.channels, 4, 6, stride=5)
        self.inner = nn.Linear(4 * 3 * 3, width)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(width, spec.channels * spec.height * spec.width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images).relu().flatten(1)
        code: Tensor = self.inner(x)
        return code

    def prepare(self, images: Tensor) -> None:
        event("code", "prepare")

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        event("code", step)
        redrawn = self.decoder(self.dropout(self(batch.images)))
        return {"loss": F.mse_loss(redrawn, batch.images.flatten(1))}

    def finish(self) -> None:
        event("code", "finish")


class Head(Model):
    def __init__(self, code: Code, width: int, classes: int) -> None:
        super().__init__()
        self.others = (code,)  # in a tuple, and so no part of this stage
        self.out = nn.Linear(width, classes)
        self.kept = torch.empty(0)

    def prepare(self, images: Tensor) -> None:
        event("head", "prepare")
        assert images.dtype == torch.uint8 and not torch.is_grad_enabled() and not self.training
        self.kept = self.others[0](images.float() / 255)  # [n w]

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        event("head", step)
        logits = self.out(self.kept[batch.indices])
        return {"loss": F.cross_entropy(logits, batch.labels), "outside": torch.tensor(float(self.others[0].training))}

    def finish(self) -> None:
        event("head", "finish")


class Moments(Model):
    by_gradient = False
    total: Tensor
    count: Tensor

    def __init__(self, code: Code, width: int) -> None:
        super().__init__()
        self.others = (code,)
        self.offset = nn.Parameter(torch.zeros(width))
        self.register_buffer("total", torch.zeros(width))
        self.register_buffer("count", torch.zeros(()))

    def prepare(self, images: Tensor) -> None:
        event("moments", "prepare")

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        event("moments", step)
        x = self.others[0](batch.images)  # [b w]
        self.total += mean_over_processes(x.mean(0))
        self.count += 1
        return {"loss": (x - self.offset).square().mean()}

    def finish(self) -> None:
        event("moments", "finish")
        self.offset.copy_(self.total / self.count)


class Staged(Model):
    def __init__(self, config: StagedConfig, spec: ImageSpec) -> None:
        super().__init__()
        self.spec = spec
        self.code = Code(config.width, config.dropout, spec)
        self.head = Head(self.code, config.width, spec.classes)
        self.moments = Moments(self.code, config.width)

    def stages(self) -> dict[str, Model]:
        return {"code": self.code, "head": self.head, "moments": self.moments}


TABLES: dict[str, Any] = {
    "name": "staged",
    "seed": 3,
    "data": {"name": "glyphs", "train": 80, "test": 40, "size": 16},
    "model": {"name": "staged"},
    "optimizer": {"name": "Adam", "lr": 0.01},
    "schedule": {"name": "ExponentialLR", "options": {"gamma": 0.99}},
    "train": {"epochs": 1.2, "batch": 8, "max_shift": 2, "clip": 1.0, "save_every": 4, "log_every": 2},
    "stages": {
        "head": {
            "optimizer": {"name": "SGD", "lr": 0.1, "options": {"momentum": 0.9}},
            "schedule": {"name": "constant"},
            "train": {"epochs": 2.0, "batch": 16, "max_shift": 0},
        },
        "moments": {"train": {"epochs": 1.0}},
    },
}
STEPS = {"code": 12, "head": 10, "moments": 10}


def staged(**over: Any) -> Recipe:
    """The recipe, with tables changed: staged(stages={"head": {"train": {"epochs": 1.0}}})."""
    return recipe_of(merge(TABLES, over))


def staged_toml(folder: Path) -> Path:
    """The recipe as a file, for the command line."""
    path = folder / "staged.toml"
    path.write_text("\n".join(f"{key} = {_toml(value)}" for key, value in TABLES.items()) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _finish_apart(self: Code) -> None:
    """A part that is no longer the same in all processes, as running means of parts of batches are not."""
    for p in self.parameters():
        p += 1


def command(*words: str) -> int:
    """Run the command line of torchcaps, which knows this model, in a process of its own."""
    MODELS["staged"] = StagedConfig
    if os.environ.get("RANK") == "1":
        Code.finish = _finish_apart
    return main(list(words))


def killed_command(moment: str, *words: str) -> int:
    """Run the command line until kill -9 at a moment, such as "code:3" or "head:finish", in a process of its own."""
    stage, what = moment.split(":")
    mishaps[stage, int(what) if what.isdigit() else what] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return command(*words)
