"""Losses: pure functions from class activations, or from a reconstruction, to one scalar.

    margin_loss           Sabour et al. 2017, eq. (4)
    spread_loss           Hinton et al. 2018, eq. (3), with `spread_margin` as its schedule
    cross_entropy_loss    the control of Hinton et al. 2018, table 1
    reconstruction_loss   the decoder's part: squared error or binary cross-entropy

Every loss is a sum over classes or pixels and a mean over the batch. float16 and bfloat16 are read as
float32, as torch's autocast does for its own losses. Value and gradient are finite wherever an activation is
exactly 0 or 1. Shapes are always checked; so are values, except inside `torch.compile`, where none is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError, suggestion

__all__ = [
    "LOSSES",
    "cross_entropy_loss",
    "margin_loss",
    "multi_hot",
    "reconstruction_loss",
    "spread_loss",
    "spread_margin",
]

_RULES = ("linear", "sigmoid")

_SHARES_TOLERANCE = 1e-3
"""How far the sum of an image's shares may be from 1, by rounding."""


def margin_loss(
    activation: Tensor,
    labels: Tensor,
    *,
    present: float = 0.9,
    absent: float = 0.1,
    absent_weight: float = 0.5,
) -> Tensor:
    """Compute the margin loss, eq. (4) of Sabour et al. 2017.

        L = sum_j T_j max(0, m+ - |v_j|)² + λ (1 - T_j) max(0, |v_j| - m-)²

    Args:
        activation: Lengths |v_j| [b j].
        labels: Class numbers [b], or T [b j] itself where an image may show several classes.
        present: m+.
        absent: m-.
        absent_weight: λ.

    Returns:
        A scalar, the mean over the batch.

    Raises:
        ShapeError: If shapes or types do not fit, or a label is no class.
    """
    v = _activation(activation)
    T = _targets(v, labels)  # [b j]
    # Present classes should be longer than m+, absent ones shorter than m-
    on = (present - v).clamp_min(0).square()  # [b j]
    off = (v - absent).clamp_min(0).square()  # [b j]
    return (T * on + absent_weight * (1 - T) * off).sum(1).mean()


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Return T with 1 for each class that an image shows, 0 for the others.

    Args:
        labels: Class numbers [b], or [b m] of images that show m things.
        classes: j.

    Returns:
        [b j].
    """
    T = torch.zeros(len(labels), classes, device=labels.device)
    return T.scatter(1, labels.view(len(labels), -1).long(), 1.0)


def spread_loss(activation: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Compute the spread loss, eq. (3) of Hinton et al. 2018, where t is the true class.

        L = sum_{i != t} max(0, m - (a_t - a_i))²

    Args:
        activation: a [b j].
        labels: Class numbers [b], or shares T [b j] of the classes: the loss is then sum_t T_t L_t.
        margin: m, which grows during training, see `spread_margin`.

    Returns:
        A scalar, the mean over the batch.

    Raises:
        ShapeError: If shapes or types do not fit, or a label is no class.
    """
    a = _activation(activation)
    # Shares: every class in turn is the true one
    if labels.ndim == 2:
        T = _shares(a, labels)  # [b t]
        between = (margin - (a[:, :, None] - a[:, None, :])).clamp_min(0).square()  # [b t i]
        others = 1 - torch.eye(a.shape[1], dtype=a.dtype, device=a.device)  # [t i]
        return (T * (between * others).sum(2)).sum(1).mean()
    # Class numbers
    t = _class_numbers(a, labels)[:, None]  # [b 1]
    a_t = a.gather(1, t)  # [b 1]
    L = (margin - (a_t - a)).clamp_min(0).square()  # [b j]
    # The true class itself is not compared with: its term would be m²
    return L.scatter(1, t, 0.0).sum(1).mean()


def spread_margin(
    step: int, *, start: float = 0.2, end: float | None = None, ramp: int = 50_000, rule: str = "linear"
) -> float:
    """Return the margin of `spread_loss` at a training step, m = start + (end - start) u(step / ramp).

    Args:
        step: From 0.
        start: The margin at first.
        end: The margin at last; None for the rule's own.
        ramp: Steps that s = 1 stands for.
        rule: "linear": u(s) = min(1, s), end .9, the paper's text, which leaves the length of the ramp open.
            "sigmoid": u(s) = sigmoid(min(10, s - 4)), end .99, the rule of the authors' released code,
            .2 + .79 sigmoid(min(10, step / 50,000 - 4)).

    Raises:
        RecipeError: If the rule is unknown, or `step` or `ramp` make no sense.
    """
    if rule not in _RULES:
        raise RecipeError(f"unknown margin rule '{rule}'{suggestion(rule, _RULES)}")
    if step < 0 or ramp < 1:
        raise RecipeError(f"step {step} and ramp {ramp} give no margin: step counts from 0, ramp from 1")
    # u in [0, 1], and the margin at which the rule's own ramp ends
    if rule == "linear":
        u = min(1.0, step / ramp)
        own_end = 0.9
    else:
        u = 1 / (1 + math.exp(-min(10.0, step / ramp - 4)))
        own_end = 0.99
    return (1 - u) * start + u * (own_end if end is None else end)


def cross_entropy_loss(activation: Tensor, labels: Tensor, *, from_probabilities: bool = False) -> Tensor:
    """Compute the cross-entropy L = -log p_t with p = softmax(a), the activations read as logits.

    Activations in [0, 1] cannot make that softmax sharp, and so L never falls below log(1 + (J - 1) / e).

    Args:
        activation: a [b j].
        labels: Class numbers t [b], or shares T [b j] of the classes: L = -sum_t T_t log p_t.
        from_probabilities: Read activations as shares instead: p_j = (a_j + ε) / sum_k (a_k + ε), see `_epsilon`. All
            zeros then cost log J, one zero at t about -log ε, and a negative activation counts as 0.

    Returns:
        A scalar, the mean over the batch.

    Raises:
        ShapeError: If shapes or types do not fit, or a label is no class.
    """
    a = _activation(activation)
    t = _class_numbers(a, labels) if labels.ndim == 1 else _shares(a, labels)
    if not from_probabilities:
        return F.cross_entropy(a, t)
    # ε in every share, so that no logarithm is infinite
    share = a.clamp_min(0) + _epsilon(activation.dtype)  # [b j]
    log_p = share.log() - share.sum(1, keepdim=True).log()  # [b j]
    return F.nll_loss(log_p, t) if t.ndim == 1 else -(t * log_p).sum(1).mean()


def reconstruction_loss(reconstruction: Tensor, images: Tensor, kind: str = "squared") -> Tensor:
    """Compute the loss of a reconstruction: the sum over pixels, and the mean over the batch.

    Args:
        reconstruction: x̂ [b c h w].
        images: x [b c h w].
        kind: "squared": (x̂ - x)². "bce": -x log p - (1 - x) log(1 - p), where p = ε + (1 - 2ε) x̂ keeps away from 0
            and 1, see `_epsilon`; both tensors must lie in [0, 1].

    Returns:
        A scalar.

    Raises:
        ShapeError: If the tensors are not of one shape [b c h w] and floating point.
        DataError: If "bce" gets pixels outside [0, 1].
        RecipeError: If `kind` is unknown.
    """
    # Check the kind, the shapes and the types
    if kind not in _PIXEL_LOSSES:
        raise RecipeError(f"unknown reconstruction loss '{kind}'{suggestion(kind, _PIXEL_LOSSES)}")
    if reconstruction.shape != images.shape or images.ndim != 4 or not images.numel():
        raise ShapeError(
            f"reconstruction {list(reconstruction.shape)} and images {list(images.shape)} do not pair up:"
            " both must be the same [b c h w], with no empty axis"
        )
    if not (reconstruction.is_floating_point() and images.is_floating_point()):
        raise ShapeError(
            f"reconstruction is {reconstruction.dtype} and images are {images.dtype}, wanted floating point:"
            " scale the pixels to [0, 1]"
        )
    # Sum over pixels, mean over images
    return _PIXEL_LOSSES[kind](reconstruction, images).flatten(1).sum(1).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "margin": margin_loss,
    "spread": spread_loss,
    "cross-entropy": cross_entropy_loss,
}
"""The classification losses by name: all take (activation [b j], labels [b] or [b j]), "spread" also its margin."""


def _squared(reconstruction: Tensor, images: Tensor) -> Tensor:
    """(x̂ - x)² of each pixel."""
    return (_at_least_float32(reconstruction) - images).square()


def _bce(reconstruction: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy of each pixel."""
    for name, x in (("reconstruction", reconstruction), ("images", images)):
        if _any((x < 0) | (x > 1)):
            low, high = x.aminmax()
            raise DataError(f"{name} in [{low:.3g}, {high:.3g}], but 'bce' wants [0, 1]: rescale or use 'squared'")
    # ε is that of the incoming type: half precision rounds to exactly 0 and 1 much earlier
    eps = _epsilon(reconstruction.dtype)
    p = eps + (1 - 2 * eps) * _at_least_float32(reconstruction)
    # log1p(-p) has more digits than log(1 - p) where p is small
    return -images * p.log() - (1 - images) * (-p).log1p()


_PIXEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"squared": _squared, "bce": _bce}


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _epsilon(dtype: torch.dtype) -> float:
    """The ε that keeps a logarithm finite: the machine epsilon; 3e-5 for float16, whose range must hold 1 / ε."""
    machine = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return max(machine, 2 / torch.finfo(dtype).max)


def _any(wrong: Tensor) -> bool:
    """Whether a value is wrong; never so inside `torch.compile`, where asking would break the graph."""
    return not torch.compiler.is_compiling() and bool(wrong.any())


def _activation(activation: Tensor) -> Tensor:
    """The activations [b j], checked, at least in float32."""
    if activation.ndim != 2 or 0 in activation.shape or not activation.is_floating_point():
        raise ShapeError(
            f"activation is {activation.dtype} {list(activation.shape)}, wanted floating point [b j]"
            " with no empty axis: pass the activation of the class capsules, not their pose"
        )
    return _at_least_float32(activation)


def _class_numbers(activation: Tensor, labels: Tensor) -> Tensor:
    """The labels [b], checked against activation [b j], as int64."""
    b, j = activation.shape
    if labels.shape != (b,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ShapeError(
            f"labels are {labels.dtype} {list(labels.shape)}, wanted integers [{b}]"
            f" for activation [{b}, {j}]: pass one class number for each image"
        )
    t = labels.long()
    if _any((t < 0) | (t >= j)):
        raise ShapeError(
            f"labels run from {int(t.min())} to {int(t.max())}, but the activation has {j} classes:"
            f" number the labels 0 to {j - 1} or give the model more classes"
        )
    return t


def _targets(activation: Tensor, labels: Tensor) -> Tensor:
    """T [b j]: 1 where class j is in the image, from class numbers [b] or from T itself."""
    # Class numbers
    if labels.ndim == 1:
        return multi_hot(_class_numbers(activation, labels), activation.shape[1]).to(activation.dtype)  # [b j]
    # T itself, which may also be a share in [0, 1]
    if labels.shape != activation.shape:
        raise ShapeError(
            f"labels are {list(labels.shape)} for activation {list(activation.shape)}:"
            " pass class numbers [b], or zeros and ones [b j]"
        )
    T = labels.to(activation.dtype)
    if _any((T < 0) | (T > 1)):
        raise ShapeError(
            f"labels [b j] run from {float(T.min()):g} to {float(T.max()):g}, wanted 0 to 1:"
            " write 1 for each class that the image shows"
        )
    return T


def _shares(activation: Tensor, labels: Tensor) -> Tensor:
    """T [b j], checked: the shares of an image's classes, whose sum is 1."""
    T = _targets(activation, labels)
    if _any((T.sum(1) - 1).abs() > _SHARES_TOLERANCE):
        raise ShapeError(
            f"labels [b j] have sums from {float(T.sum(1).min()):g} to {float(T.sum(1).max()):g}, wanted 1:"
            " pass one class number for each image, or shares of its classes"
        )
    return T
