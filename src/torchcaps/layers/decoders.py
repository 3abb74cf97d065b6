"""Decoders: from the poses of capsules back to images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from torchcaps.errors import RecipeError, ShapeError, suggestion
from torchcaps.layers.capsules import check_positive
from torchcaps.math.squash import norm

__all__ = ["DenseDecoder", "FrameDecoder", "PrototypeDecoder", "draw_each", "mask_all_but"]

_OUTPUTS: dict[str, type[nn.Module]] = {"logistic": nn.Sigmoid, "linear": nn.Identity}
_FRAME_STD = 0.05
"""Of frames at the start: standard deviation of F, by which they differ from the one in the middle."""
_BACKGROUND = -4.0
"""Logit of a pixel without ink at the start."""
_SHIFT_GAIN = 3.0
"""How much more a number shifts a frame than it turns or stretches it."""
_PICTURE_STD = 0.01
"""Standard deviation of the pictures of prototypes at the start."""
_PICTURE_GAIN = 10.0
"""Ink of a prototype whose number is 1: a step of the optimizer changes a picture more than a weight."""


def mask_all_but(pose: Tensor, chosen: Tensor) -> Tensor:
    """Zero the poses of all capsules but one per sample.

    Args:
        pose: [b j k].
        chosen: [b] integers from 0 to j - 1.

    Returns:
        [b j k].

    Raises:
        ShapeError: If `chosen` is not one integer in range for each sample.
    """
    _check_chosen(chosen, pose.shape[0], pose.shape[1])
    mask = torch.nn.functional.one_hot(chosen.long(), pose.shape[1]).to(pose.dtype)  # [b j]
    return pose * mask.unsqueeze(-1)


def _check_chosen(chosen: Tensor, b: int, j: int) -> None:
    """One integer from 0 to j - 1 for each of b samples."""
    # bool is refused too: as a number it would choose class 0 or 1
    if chosen.shape != (b,) or chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise ShapeError(
            f"chosen is {chosen.dtype} {list(chosen.shape)}; one integer for each of {b} samples is wanted"
        )
    if not torch.compiler.is_compiling() and bool(((chosen < 0) | (chosen >= j)).any()):
        raise ShapeError(f"chosen runs from {int(chosen.min())} to {int(chosen.max())}; 0 to {j - 1} is wanted")


def _check_pose(pose: Tensor, capsules: int, dimension: int) -> None:
    """[b j k] of the decoder's sizes."""
    if pose.ndim != 3 or tuple(pose.shape[1:]) != (capsules, dimension):
        raise ShapeError(f"pose has shape {list(pose.shape)}; [b {capsules} {dimension}] is wanted")


class DenseDecoder(nn.Module):
    """Poses [b j k] -> images [b c h w] by fully connected layers (Sabour 2017: 512, 1024, pixels).

    Args:
        capsules: j.
        dimension: k, the numbers of a pose.
        image: (c, h, w).
        hidden: Units of the hidden layers.
        output: "logistic" for pixels in [0, 1], or "linear" for any numbers, which standardized images need.

    Raises:
        ShapeError: If a size is below 1.
        RecipeError: If `output` is unknown.
    """

    def __init__(
        self,
        capsules: int,
        dimension: int,
        image: tuple[int, int, int],
        hidden: Sequence[int] = (512, 1024),
        *,
        output: str = "logistic",
    ) -> None:
        super().__init__()
        if output not in _OUTPUTS:
            raise RecipeError(f"unknown output '{output}'{suggestion(output, _OUTPUTS)}")
        check_positive(capsules=capsules, dimension=dimension, channels=image[0], height=image[1], width=image[2])
        check_positive(hidden=min(hidden, default=1))
        self.capsules = capsules
        self.dimension = dimension
        self.image = image
        # ReLU behind every layer but the last, whose output is `output`
        sizes = [capsules * dimension, *hidden]
        steps = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*steps, nn.Linear(sizes[-1], image[0] * image[1] * image[2]), _OUTPUTS[output]())

    def forward(self, pose: Tensor) -> Tensor:
        """Draw images [b c h w] from poses [b j k]."""
        _check_pose(pose, self.capsules, self.dimension)
        images: Tensor = self.net(pose.flatten(1)).unflatten(1, self.image)  # [b c h w]
        return images


class _FramedPictures(nn.Module):
    """Base of decoders that draw a picture for each capsule into a frame that its pose decides.

        n = v / |v|      (A t) = start + gain (F n + f), the frame      T the picture, of which the subclass decides
        image at x = sigmoid(bias + sum_j |v_j| T_j(A_j x + t_j))

    The length of a capsule is how much ink it has; one of length 0 draws nothing. F and f are each capsule's own.
    Points x of the image, and of pictures of `side` pixels, run from -1 to 1; pictures are read bilinearly, and as no
    ink outside. Frames start near that in which a pixel of the picture is one of the image, in the middle; shifts have
    the larger gain.

    Args:
        capsules: j.
        dimension: k, the numbers of a pose.
        image: (c, h, w).
        side: Pixels of a picture along each axis.

    Raises:
        ShapeError: If a size is below 1.
    """

    bias: nn.Parameter
    start: Tensor
    gain: Tensor

    def __init__(self, capsules: int, dimension: int, image: tuple[int, int, int], side: int) -> None:
        super().__init__()
        check_positive(capsules=capsules, dimension=dimension, channels=image[0], height=image[1], width=image[2])
        check_positive(side=side)
        self.capsules = capsules
        self.dimension = dimension
        self.image = image
        self.side = side

    def _build_frames(self) -> None:
        """Make F and f, and what is the same for all frames."""
        self.F = nn.Parameter(torch.randn(self.capsules, self.dimension, 6) * _FRAME_STD)
        self.f = nn.Parameter(torch.zeros(self.capsules, 6))
        # Affine frames [A t] in row order; an image pixel is a picture pixel at the start
        middle = torch.tensor([self.image[2] / self.side, 0, 0, 0, self.image[1] / self.side, 0])  # x before y
        self.register_buffer("start", middle, persistent=False)
        self.register_buffer("gain", torch.tensor([1.0, 1.0, _SHIFT_GAIN, 1.0, 1.0, _SHIFT_GAIN]), persistent=False)

    @abstractmethod
    def _inner(self, direction: Tensor) -> Tensor:
        """What pictures are drawn from [b j h], of the directions of poses [b j k]."""

    @abstractmethod
    def _pictures(self, inner: Tensor) -> Tensor:
        """Pictures [b n (c s s)] drawn from `inner` [b n h]."""

    def _frames(self, direction: Tensor) -> Tensor:
        """Affine frames [b j 6] of the directions of poses [b j k]."""
        return (torch.einsum("bjk,jkf->bjf", direction, self.F) + self.f) * self.gain + self.start

    def forward(self, pose: Tensor) -> Tensor:
        """Draw images [b c h w] from poses [b j k]."""
        _check_pose(pose, self.capsules, self.dimension)
        # affine_grid refuses an empty batch
        if not pose.shape[0]:
            return pose.new_zeros(0, *self.image)
        # How much ink each capsule has, what its picture is drawn from, and its frame
        on = pose.detach().ne(0).any(-1, keepdim=True)  # [b j 1]
        length = norm(pose, keepdim=True)
        direction = pose / length
        # Ink is exactly 0 for capsules that are off, so that these have no gradient
        inputs = (length * on, self._inner(direction), self._frames(direction))
        ink, inner, frame = _select_active(on.squeeze(-1), inputs)  # [b n 1], [b n h], [b n 6]
        # The pictures, read at the points of the image through their frames, and added up as ink
        pictures = self._pictures(inner).reshape(-1, self.image[0], self.side, self.side)  # [(b n) c s s]
        size = [pictures.shape[0], *self.image]
        grid = affine_grid(frame.reshape(-1, 2, 3), size, align_corners=False)  # [(b n) h w 2]
        drawn = grid_sample(pictures, grid, align_corners=False).view(*ink.shape[:2], *self.image)
        return torch.sigmoid(self.bias + (drawn * ink[..., None, None]).sum(1))


class FrameDecoder(_FramedPictures):
    """Poses [b j k] -> images [b c h w] in [0, 1]: each capsule draws a picture of its own, into a frame of its own.

        n = v / |v|      T = net(E n + e), the picture      (A t) = start + gain (F n + f), the frame
        image at x = sigmoid(bias + sum_j |v_j| T_j(A_j x + t_j))

    The length of a capsule is how much ink it has, its direction says what it draws and where: one of length 0 draws
    nothing. E, e, F and f are each capsule's own, the layers of the net behind them are shared. Points x of the image,
    and of pictures of `side` pixels, run from -1 to 1; pictures are read bilinearly, and as no ink outside. Frames
    start near that in which a pixel of the picture is one of the image, in the middle; shifts have the larger gain.

    Args:
        capsules: j.
        dimension: k, the numbers of a pose.
        image: (c, h, w).
        hidden: Units of the hidden layers, one or more; E maps to the first.
        side: Pixels of a picture along each axis.

    Raises:
        ShapeError: If a size is below 1, or there is no hidden layer.
    """

    def __init__(
        self,
        capsules: int,
        dimension: int,
        image: tuple[int, int, int],
        hidden: Sequence[int] = (128, 256),
        *,
        side: int = 28,
    ) -> None:
        super().__init__(capsules, dimension, image, side)
        check_positive(layers=len(hidden), hidden=min(hidden, default=1))
        # Each capsule's own first layer: E and e for the picture, F and f for the frame
        self.E = nn.Parameter(torch.randn(capsules, dimension, hidden[0]) / dimension**0.5)
        self.e = nn.Parameter(torch.zeros(capsules, hidden[0]))
        self._build_frames()
        # The layers that all capsules share
        steps = [m for a, b in pairwise(hidden) for m in (nn.ReLU(), nn.Linear(a, b))]
        last = nn.Linear(hidden[-1], image[0] * side * side)
        nn.init.normal_(last.weight, std=0.5 / hidden[-1] ** 0.5)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(*steps, nn.ReLU(), last)
        self.bias = nn.Parameter(torch.tensor(_BACKGROUND))

    def _inner(self, direction: Tensor) -> Tensor:
        return torch.einsum("bjk,jkh->bjh", direction, self.E) + self.e

    def _pictures(self, inner: Tensor) -> Tensor:
        pictures: Tensor = self.net(inner)
        return pictures


class PrototypeDecoder(_FramedPictures):
    """Poses [b j k] -> images [b c h w] in [0, 1]: each capsule has one picture, and its pose decides the frame alone.

        image at x = sigmoid(bias + sum_j |v_j| gain T_j(A_j x + t_j))

    with the frames (A_j t_j) of `FrameDecoder` and T_j a parameter, as the prototypes of deformable clustering
    (Monnier 2020). Frames may be held back while the pictures form: see `allow`.

    Args:
        capsules: j.
        dimension: k, the numbers of a pose.
        image: (c, h, w).
        side: Pixels of a picture along each axis.

    Raises:
        ShapeError: If a size is below 1.
    """

    allowed: Tensor

    def __init__(self, capsules: int, dimension: int, image: tuple[int, int, int], *, side: int = 28) -> None:
        super().__init__(capsules, dimension, image, side)
        self.T = nn.Parameter(torch.randn(capsules, image[0] * side * side) * _PICTURE_STD)
        self._build_frames()
        self.bias = nn.Parameter(torch.tensor(_BACKGROUND))
        self.register_buffer("allowed", torch.ones(6))

    def allow(self, *, shift: bool, affine: bool) -> None:
        """Say which numbers of a frame the pose may change, from now on; the others stay as at the start.

        Args:
            shift: t.
            affine: A.
        """
        numbers = [float(affine), float(affine), float(shift)]
        self.allowed.copy_(self.allowed.new_tensor(numbers * 2))

    @torch.no_grad()
    def copy_capsule(self, j: int, source: int, noise: Tensor) -> None:
        """Give capsule j the picture of another, with noise [c s s] in units of its deviation, and its frames."""
        picture = self.T[source]
        self.T[j] = picture + picture.std() * noise.flatten()
        self.F[j] = self.F[source]
        self.f[j] = self.f[source]

    def _inner(self, direction: Tensor) -> Tensor:
        return (_PICTURE_GAIN * self.T).expand(direction.shape[0], -1, -1)

    def _pictures(self, inner: Tensor) -> Tensor:
        return inner

    def _frames(self, direction: Tensor) -> Tensor:
        change = (torch.einsum("bjk,jkf->bjf", direction, self.F) + self.f) * self.gain
        return change * self.allowed + self.start


def draw_each(decoder: Callable[[Tensor], Tensor], pose: Tensor) -> Tensor:
    """Draw every capsule of every image alone.

    Args:
        decoder: Poses [b j k] -> images [b c h w].
        pose: [b j k].

    Returns:
        [b j c h w].
    """
    b, j, k = pose.shape
    alone = torch.diag_embed(pose.transpose(1, 2)).permute(0, 2, 3, 1)  # [b j j k], 0 but where both j are the same
    images = decoder(alone.reshape(b * j, j, k))
    return images.view(b, j, *images.shape[1:])


def _select_active(on: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Select from tensors [b j m] the capsules that are on [b j], the same number n in every sample: [b n m] each."""
    # All of them: n depends on values, which a compiled graph does not have
    if torch.compiler.is_compiling() or bool(on.all()):
        return list(inputs)
    # The most that any sample has; others are filled up by capsules that are off, whose ink is 0
    n = max(int(on.sum(1).max()), 1)
    which = on.to(torch.uint8).topk(n, -1).indices.unsqueeze(-1)  # [b n 1]
    return [x.gather(1, which.expand(-1, -1, x.shape[-1])) for x in inputs]
