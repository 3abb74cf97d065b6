"""From capsules back to images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchcaps.errors import RecipeError, ShapeError, nearest
from torchcaps.layers.capsules import positive

__all__ = ["ConvDecoder", "DenseDecoder", "select"]

_OUTPUTS: dict[str, type[nn.Module]] = {"logistic": nn.Sigmoid, "linear": nn.Identity}


def select(pose: Tensor, chosen: Tensor) -> Tensor:
    """Keep one capsule per sample and zero the others: pose [b j k], chosen [b] -> [b j k]."""
    _check_chosen(chosen, pose.shape[0], pose.shape[1])
    mask = torch.nn.functional.one_hot(chosen.long(), pose.shape[1]).to(pose.dtype)  # [b j]
    return pose * mask.unsqueeze(-1)


def _check_chosen(chosen: Tensor, b: int, j: int) -> None:
    if chosen.shape != (b,) or chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise ShapeError(
            f"chosen is {chosen.dtype} {list(chosen.shape)}; one integer for each of {b} samples is wanted"
        )
    if not torch.compiler.is_compiling() and bool(((chosen < 0) | (chosen >= j)).any()):
        raise ShapeError(f"chosen runs from {int(chosen.min())} to {int(chosen.max())}; 0 to {j - 1} is wanted")


def _check_pose(pose: Tensor, capsules: int, dimension: int) -> None:
    if pose.ndim != 3 or tuple(pose.shape[1:]) != (capsules, dimension):
        raise ShapeError(f"pose has shape {list(pose.shape)}; [b {capsules} {dimension}] is wanted")


class DenseDecoder(nn.Module):
    """Poses [b j k] -> images [b c h w] by fully connected layers (Sabour 2017: 512, 1024, pixels).

    Pixels are in [0, 1], or any numbers with output="linear", which standardised images need.
    """

    def __init__(
        self, capsules: int, dimension: int, image: tuple[int, int, int], hidden: Sequence[int] = (512, 1024), *,
        output: str = "logistic",
    ) -> None:  # fmt: skip
        super().__init__()
        if output not in _OUTPUTS:
            raise RecipeError(f"unknown output '{output}'{nearest(output, _OUTPUTS)}")
        positive(capsules=capsules, dimension=dimension, channels=image[0], height=image[1], width=image[2])
        positive(hidden=min(hidden, default=1))
        self.capsules, self.dimension, self.image = capsules, dimension, image
        sizes = [capsules * dimension, *hidden]
        steps = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*steps, nn.Linear(sizes[-1], image[0] * image[1] * image[2]), _OUTPUTS[output]())

    def forward(self, pose: Tensor) -> Tensor:
        _check_pose(pose, self.capsules, self.dimension)
        images: Tensor = self.net(pose.flatten(1)).unflatten(1, self.image)  # [b c h w]
        return images


class ConvDecoder(nn.Module):
    """Poses [b j k] -> images [b c h w] in [0, 1]: a linear map to a small map, then transposed convolutions.

    Each of the `len(widths)` stages doubles the size; the first map is as small as that allows and the result is cut to
    the image, so every image size fits.
    """

    def __init__(
        self, capsules: int, dimension: int, image: tuple[int, int, int], widths: Sequence[int] = (64, 32)
    ) -> None:
        super().__init__()
        positive(capsules=capsules, dimension=dimension, channels=image[0], height=image[1], width=image[2])
        positive(stages=len(widths), width=min(widths, default=1))
        self.capsules, self.dimension, self.image = capsules, dimension, image
        factor = 2 ** len(widths)
        self.start = (widths[0], -(-image[1] // factor), -(-image[2] // factor))
        self.lift = nn.Linear(capsules * dimension, self.start[0] * self.start[1] * self.start[2])
        stages: list[nn.Module] = []
        for below, above in zip(widths, [*widths[1:], image[0]], strict=True):
            stages += [nn.ReLU(), nn.ConvTranspose2d(below, above, 4, stride=2, padding=1)]
        self.net = nn.Sequential(*stages, nn.Sigmoid())

    def forward(self, pose: Tensor) -> Tensor:
        _check_pose(pose, self.capsules, self.dimension)
        images: Tensor = self.net(self.lift(pose.flatten(1)).unflatten(1, self.start))  # [b c h' w'], h' >= h
        return images[..., : self.image[1], : self.image[2]]
