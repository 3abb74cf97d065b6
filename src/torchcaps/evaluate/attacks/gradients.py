"""Attacks along the gradient: pure functions from images [b c h w] in [0, 1] to images as near as epsilon to them.

    x <- clip(x + s epsilon sign(dL / dx))        clip: into [x_0 - epsilon, x_0 + epsilon] and [0, 1]

FGSM is one step with s = 1, BIM several shorter ones, PGD the same from a random start. A targeted attack lowers the
loss of the class that is given instead of raising that of the label.

The loss L is any function of images and labels, one number an image. The default is cross-entropy on `logits_of` a
model, for capsules as for others, and not what capsules are trained by: the margin and the spread loss are exactly flat
wherever an image is told apart by the margin, so that no gradient would be left to attack along. Hinton (2018,
section 6) attacks along "the loss"; `training_loss` is that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.models import Model
from torchcaps.types import Batch
from torchcaps.utils.random import uniform

__all__ = [
    "Logits",
    "Loss",
    "ball",
    "bim",
    "cross_entropy",
    "fgsm",
    "gradient",
    "logits_of",
    "pgd",
    "random_start",
    "row_numbers",
    "step_along",
    "training_loss",
]

Logits = Callable[[Tensor], Tensor]
"""Images [b c h w] -> [b j], the largest of which is the class."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Images [b c h w] and classes [b] -> [b]."""

_LATE = 10**9
"""A step at which whatever grows in training, as the margin of the spread loss, has grown."""


def logits_of(model: Model) -> Logits:
    """Return the logits of a classifier: its output, or of capsules log(a + ε), whose softmax is a_j / sum_k a_k.

    ε keeps the logarithm finite. It is the root of the smallest float, much below the ε of training: a capsule that is
    all but off must still feel which way is on, or no attack could be targeted at it.
    """
    # Without capsules the output is logits; the SVM on codes has no forward pass, only scores.
    if not hasattr(model, "encode") and type(model).forward is not nn.Module.forward:
        return model

    def logits(images: Tensor) -> Tensor:
        a = model.scores(images)  # [b j]
        return (a.clamp_min(0) + math.sqrt(torch.finfo(a.dtype).tiny)).log()

    return logits


def cross_entropy(logits: Logits) -> Loss:
    """Return the loss L = -log softmax(logits)_t."""

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(images), labels, reduction="none")

    return loss


def training_loss(model: Model) -> Loss:
    """Return the loss that a model is trained by, as at the end of training; every image gets the batch's mean."""

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        # A mean over the batch will do: attacks use the sign of the gradient, not its size.
        batch = Batch(images, labels, torch.arange(len(images), device=images.device))
        return model.objective(batch, _LATE)["loss"].expand(len(images))

    return loss


def gradient(loss: Loss, images: Tensor, labels: Tensor) -> Tensor:  # [b c h w]
    """Compute dL / dx; zero where it is not a number, or where the loss does not depend on the image.

    Only images are differentiated: what parameters hold in `.grad` stays, and nothing is differentiated twice.
    """
    x = images.detach().requires_grad_()
    # The caller may have turned gradients off.
    with torch.enable_grad():
        total = loss(x, labels).sum()
    # A loss that does not depend on its input has nothing to differentiate.
    if not total.requires_grad:
        return torch.zeros_like(images)
    (g,) = torch.autograd.grad(total, x, allow_unused=True)
    return torch.zeros_like(images) if g is None else g.nan_to_num()


def fgsm(loss: Loss, images: Tensor, labels: Tensor, epsilon: float, *, targeted: bool = False) -> Tensor:
    """Take one step of epsilon in every pixel, along the gradient's sign; `labels` [b] are targets if `targeted`."""
    return step_along(images, gradient(loss, images, labels), epsilon, targeted=targeted)


def step_along(images: Tensor, direction: Tensor, epsilon: float, *, targeted: bool = False) -> Tensor:
    """Take the step of `fgsm` along a known gradient, which is the same for every epsilon."""
    low, high = ball(images, epsilon)
    return (images + _signed(epsilon, targeted) * direction.sign()).clamp(low, high)


def bim(
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    steps: int = 10,
    stride: float = 0.2,
    targeted: bool = False,
    start: Tensor | None = None,
) -> Tensor:
    """Take `steps` steps of stride · epsilon, each clipped, from the images or from `start` (foolbox's defaults)."""
    low, high = ball(images, epsilon)
    x = (images if start is None else start).clamp(low, high)
    # With epsilon 0 no pixel may change: skip the steps.
    for _ in range(steps if epsilon > 0 else 0):
        x = (x + _signed(stride * epsilon, targeted) * gradient(loss, x, labels).sign()).clamp(low, high)
    return x


def pgd(
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    *,
    steps: int = 40,
    stride: float = 1 / 30,
    seed: int = 0,
    rows: Tensor | None = None,
    targeted: bool = False,
) -> Tensor:
    """Run BIM from `random_start`, in more and shorter steps (foolbox's defaults)."""
    start = random_start(images, epsilon, seed, rows)
    return bim(loss, images, labels, epsilon, steps=steps, stride=stride, targeted=targeted, start=start)


def random_start(images: Tensor, epsilon: float, seed: int, rows: Tensor | None = None) -> Tensor:
    """Move every pixel uniformly within epsilon, by random numbers that are functions of (seed, row).

    `rows` [b] number the images in their set; 0, 1, ... if not given.
    """
    low, high = ball(images, epsilon)
    u = uniform(seed, row_numbers(images, rows), count=images.shape[1:].numel()).to(images)  # [b (c h w)]
    return (images + epsilon * (2 * u.view(images.shape) - 1)).clamp(low, high)


def ball(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest value that each pixel may take, rounded inwards: no difference exceeds epsilon.

    Every attack comes through here, so this is where what is attacked is checked.
    """
    if not 0 <= epsilon <= 1:
        raise RecipeError(f"epsilon = {epsilon}; 0 to 1 is wanted, as pixels are in [0, 1]")
    if images.ndim != 4 or not images.is_floating_point():
        raise ShapeError(f"images are {images.dtype} {list(images.shape)}; floats [b c h w] in [0, 1] are wanted")
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise DataError("images hold values outside [0, 1] or NaN; attack the pixels, not the model's input")
    # Where rounding to the type of the images went too far, take the next number inwards.
    x = images.double()
    low = (x - epsilon).to(images)
    high = (x + epsilon).to(images)
    low = torch.where(x - low.double() > epsilon, torch.nextafter(low, images), low)
    high = torch.where(high.double() - x > epsilon, torch.nextafter(high, images), high)
    return low.clamp_min(0), high.clamp_max(1)


def row_numbers(images: Tensor, rows: Tensor | None) -> Tensor:  # [b]
    """Return the indices of the images in their set; 0, 1, ... if not given."""
    if rows is None:
        return torch.arange(len(images), device=images.device)
    if rows.shape != images.shape[:1]:
        raise ShapeError(f"rows are {list(rows.shape)} for {len(images)} images; one number each is wanted")
    return rows.to(images.device)


def _signed(step: float, targeted: bool) -> float:
    return -step if targeted else step
