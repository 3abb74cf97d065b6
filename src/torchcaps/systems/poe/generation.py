"""What products of expert capsules draw: pure functions from a model, and images [b c h w] in [0, 1], to images.

Nothing here has randomness of its own: samples are functions of (seed, capsule, number), the rest of the images. Each
function works in evaluation mode, without gradients, and gives the model back in the mode that it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.kernels import contrastive_ops
from torchcaps.models.base import check_images
from torchcaps.models.poe import PoE, pose_sampling
from torchcaps.models.poe.encoder import CapsuleState

__all__ = [
    "HALVES",
    "Domain",
    "Half",
    "Redrawn",
    "Routing",
    "Wins",
    "capsule_samples",
    "completion",
    "contributions",
    "hidden_half",
    "interpolate_codes",
    "interpolation",
    "most_used",
    "pair_samples",
    "redraw",
    "routing",
    "sweeps",
    "winners",
    "wins",
]

Domain = Literal["empirical", "mixture", "gaussian", "complete", "restricted"]
"""Where single capsules are sampled: see `PoE.sample`."""

Half = Literal["left", "right", "top", "bottom"]
HALVES: tuple[Half, ...] = ("left", "right", "top", "bottom")

_CHUNK = 500
"""Images whose features are computed at once."""


@contextmanager
def _at_rest(model: PoE) -> Iterator[None]:
    """No dropout and no gradients inside; the model's mode comes back, also after an error."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def capsule_samples(
    model: PoE, n: int = 4, domain: Domain = "empirical", seed: int = 0, capsules: Sequence[int] | None = None
) -> Tensor:
    """[n j c h w]: n samples (rows) of each capsule alone (columns), as in figure 2 (a)-(d); of all unless named."""
    chosen = range(model.capsules) if capsules is None else capsules
    return torch.stack([model.sample(j, n, domain, seed) for j in chosen], dim=1)


def pair_samples(
    model: PoE, capsules: Sequence[int], n: int = 8, domain: Domain = "empirical", seed: int = 0
) -> dict[tuple[int, int], Tensor]:
    """For every two of the capsules, n images [n c h w] of both together, in the poses that each has alone."""
    return {pair: model.sample(pair, n, domain, seed) for pair in combinations(capsules, 2)}


def interpolation(model: PoE, start: Tensor, end: Tensor, steps: int = 9) -> Tensor:
    """[n c h w]: the straight way from the code of image `start` [c h w] to that of `end`, drawn; ends included.

    The ends are the two reconstructions. If the images belong to different capsules, the way leads through both: one
    capsule's pose shrinks to 0 while the other's grows.
    """
    if steps < 2:
        raise RecipeError(f"steps = {steps}; an interpolation has at least 2, its ends")
    if start.shape != end.shape or start.ndim != 3:
        raise ShapeError(f"images are {list(start.shape)} and {list(end.shape)}; two of [c h w] are wanted")
    with _at_rest(model):
        code = model.encode(torch.stack([start, end])).pose  # [2 j k]
        return interpolate_codes(model, code[0], code[1], steps)


def interpolate_codes(model: PoE, start: Tensor, end: Tensor, steps: int = 9) -> Tensor:
    """Draw the straight way [n c h w] from one code [j k] to another."""
    with _at_rest(model):
        return model.decode(pose_sampling.interpolate_poses(start, end, steps))


def sweeps(model: PoE, capsule: int, steps: int = 9, reach: float = 2.5, principal: bool = False) -> Tensor:
    """[k n c h w]: a capsule's mean pose, drawn with each of its k numbers moved by -reach ... reach deviations."""
    _check_capsule(model, capsule)
    if steps < 1:
        raise RecipeError(f"steps = {steps}; at least 1 is wanted")
    with _at_rest(model):
        moved = pose_sampling.sweep_poses(model.decoder, capsule, steps, reach, principal)  # [k n k]
        pose = moved.new_zeros(model.dimension * steps, model.capsules, model.dimension)  # [(k n) j k]
        pose[:, capsule] = moved.flatten(0, 1)
        images = model.decode(pose)
        return images.view(model.dimension, steps, *images.shape[1:])


def hidden_half(height: int, width: int, half: Half) -> Tensor:
    """[h w] true where pixels are hidden; of an odd side, the middle line belongs to "right" and "bottom"."""
    if half not in HALVES:
        raise RecipeError(f"unknown half '{half}'{suggestion(half, HALVES)}")
    # The right or bottom half; left and top are its complement.
    second = (
        (torch.arange(width) >= width // 2).expand(height, width)
        if half in ("left", "right")
        else (torch.arange(height) >= height // 2).unsqueeze(-1).expand(height, width)
    )
    return second if half in ("right", "bottom") else ~second


def completion(model: PoE, images: Tensor, half: Half = "right", steps: int = 10) -> Tensor:
    """Complete images [b c h w] of which one half is hidden: [t b c h w], where t = 0 is the start and -1 the end.

    The hidden half starts as what the model draws of its mean features: black would be evidence too, of emptiness.
    Then `steps` times: encode, decode, and put the known half back.
    """
    if steps < 1:
        raise RecipeError(f"steps = {steps}; at least 1 is wanted")
    check_images(images, model.spec)
    hidden = hidden_half(model.spec.height, model.spec.width, half).to(images.device)
    with _at_rest(model):
        chain = [torch.where(hidden, model.draw_images(model.energy.offset.unsqueeze(0)), images)]
        # Known pixels are put back in every step, so only the hidden half changes.
        for _ in range(steps):
            chain.append(torch.where(hidden, model.reconstruct(chain[-1]), images))
        return torch.stack(chain)


class Redrawn(NamedTuple):
    """Images drawn again in two ways.

    Attributes:
        images: [b c h w].
        bottleneck: [b c h w] drawn from J K numbers.
        tied: [b c h w] through W in reverse, which leaks the image's coupling.
    """

    images: Tensor
    bottleneck: Tensor
    tied: Tensor


def redraw(model: PoE, images: Tensor, state: CapsuleState | None = None) -> Redrawn:
    """Reconstruct images [b c h w] in both ways; `state` is what the capsules infer from them, if it is known."""
    with _at_rest(model):
        state = model.infer(images) if state is None else state
        frame = model.find_frame(images)
        # Children are centered: the offset brings back their mean.
        tied = model.energy.reconstruct_children(state.hidden, state.coupling) + model.energy.offset
        return Redrawn(images, model.decode(state.hidden, frame), model.draw_images(tied, frame))


def winners(model: PoE, images: Tensor) -> Tensor:
    """[b] the capsule that each image belongs to."""
    with _at_rest(model):
        return torch.cat([model.energy.winners(model.infer(chunk)) for chunk in torch.split(images, _CHUNK)])


class Wins(NamedTuple):
    """`counts` [j] of the images that each capsule wins, and their `means` [j c h w]; 0 where there are none."""

    counts: Tensor
    means: Tensor


def wins(model: PoE, images: Tensor) -> Wins:
    """What each capsule wins of the images, to set beside its samples."""
    won = winners(model, images)  # [b]
    counts = torch.bincount(won, minlength=model.capsules)
    sums = images.new_zeros(model.capsules, *images.shape[1:]).index_add_(0, won, images)  # [j c h w]
    return Wins(counts, sums / counts.clamp_min(1).view(-1, 1, 1, 1))


def most_used(model: PoE, count: int) -> list[int]:
    """The capsules that took part in the most training images, the most used first."""
    order = model.decoder.weight.argsort(descending=True, stable=True)
    return [int(j) for j in order[:count]]


class Routing(NamedTuple):
    """Which capsule wins each image, and where in the features it gets that from.

    winner        [b]        the capsule that the image belongs to
    contribution  [b h' w']  sum over the types of children at a place of |c_ij W_ij x_i . z_j|, j the winner
    coupling      [b h' w']  likewise the sum of c_ij; None where the coupling is uniform and thus says nothing
    """

    winner: Tensor
    contribution: Tensor
    coupling: Tensor | None


def routing(model: PoE, images: Tensor, state: CapsuleState | None = None) -> Routing:
    """Map over the places of the features what routing sent to the winner.

    Args:
        model: The trained model.
        images: [b c h w] in [0, 1].
        state: What the capsules infer from the images, if it is known.
    """
    with _at_rest(model):
        state = model.infer(images) if state is None else state
        winner = model.energy.winners(state)
        contribution = _sum_types(model, contributions(model, state, winner).abs())
        # Uniform coupling is one number, not a tensor.
        if not isinstance(state.coupling, Tensor):
            return Routing(winner, contribution, None)
        return Routing(winner, contribution, _sum_types(model, state.coupling[torch.arange(len(images)), :, winner]))


def contributions(model: PoE, state: CapsuleState, winner: Tensor) -> Tensor:
    """[b i]: c_ij W_ij x_i . z_j, what child i adds to |z_j|² of capsule j = winner [b]; the sum is (z_j - b_j) . z_j.

    Computed as x_i . (c_ij W_ijᵀ z_j), which needs no votes.
    """
    # Only the winner sends something back.
    alone = torch.zeros_like(state.z)  # [b j k]
    rows = torch.arange(len(winner))
    alone[rows, winner] = state.z[rows, winner]
    return (state.x * contrastive_ops.reverse(alone, model.energy.W, state.coupling)).sum(-1)


def _sum_types(model: PoE, values: Tensor) -> Tensor:
    """Numbers of the children [b (h' w' n)], n types at every place -> their sums [b h' w']."""
    return values.reshape(len(values), *model.autoencoder.grid, -1).sum(-1)


def _check_capsule(model: PoE, capsule: int) -> None:
    if not 0 <= capsule < model.capsules:
        raise ShapeError(f"capsule {capsule} is wanted; there are 0 to {model.capsules - 1}")
