"""Pictures of a CapsNet at work, drawn with matplotlib (the `plot` extra), as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import RecipeError
from torchcaps.models.capsnet import CapsNet, CapsNetOutput
from torchcaps.types import Capsules

__all__ = [
    "coupling_maps",
    "image_grid",
    "learning_curve",
    "perturbations",
    "reconstructions",
    "require_matplotlib",
]


def image_grid(rows: Sequence[tuple[str, Tensor]], scale: float = 0.55) -> bytes:
    """Rows of images, each (title, [n h w] grey or [n h w 3]), in one picture; sizes are in inches."""
    plt = _pyplot()
    columns = max(len(images) for _, images in rows)
    margin = 0.3 + 0.07 * max(len(line) for title, _ in rows for line in title.splitlines())
    size = (scale * columns + margin, scale * len(rows) + 0.1)
    figure, axes = plt.subplots(len(rows), columns, squeeze=False, figsize=size)
    for (title, images), line in zip(rows, axes, strict=True):
        for ax in line:
            ax.set_axis_off()
        for ax, image in zip(line, images, strict=False):
            ax.imshow(image.cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.2, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=margin / size[0], right=1, top=1, bottom=0, wspace=0.05, hspace=0.05)
    return _png(figure)


def learning_curve(curves: Sequence[tuple[str, Sequence[dict[str, Any]]]], key: str = "accuracy") -> bytes:
    """Journals (name, entries) as lines over the steps."""
    plt = _pyplot()
    figure, ax = plt.subplots(figsize=(6, 2.6))
    for name, entries in curves:
        kept = [entry for entry in entries if key in entry]
        ax.plot([entry["step"] for entry in kept], [entry[key] for entry in kept], label=name, linewidth=1)
    ax.set_xlabel("step")
    ax.set_ylabel(f"training {key}")
    ax.legend(frameon=False)
    figure.tight_layout()
    return _png(figure)


def reconstructions(model: CapsNet, data: Dataset, count: int = 12) -> bytes:
    """Test images, and what the decoder draws from the longest capsule alone."""
    return image_grid(_redrawn(model, data, count))


def perturbations(model: CapsNet, data: Dataset, reach: float = 0.25, count: int = 11) -> bytes:
    """Each dimension of one image's winning capsule, moved from -reach to reach."""
    strips = _strips(model, data, reach, count)
    return image_grid([(f"dimension {n + 1}", strip) for n, strip in enumerate(strips)], scale=0.45)


def coupling_maps(model: CapsNet, data: Dataset, count: int = 6) -> bytes:
    """Where in the image the winning capsule gets its children from, iteration by iteration."""
    images = data.images[:count].float() / 255
    return image_grid([("image", images.mean(1)), *_maps(model, data, count)], scale=0.8)


@torch.inference_mode()
def _redrawn(model: CapsNet, data: Dataset, count: int) -> list[tuple[str, Tensor]]:
    images = data.images[:count].float() / 255
    out: CapsNetOutput = model(images)
    return [("image", images.mean(1)), ("redrawn", model.reconstruct(out.classes).mean(1))]


@torch.inference_mode()
def _strips(model: CapsNet, data: Dataset, reach: float, count: int) -> Tensor:
    """[k n h w] the first image redrawn with each dimension of its longest capsule moved in n steps."""
    out: CapsNetOutput = model(data.images[:1].float() / 255)
    pose, on = out.classes
    k, which = pose.shape[-1], int(on.argmax())
    moved = pose.repeat(k * count, 1, 1)  # [(k n) j k]
    rows = torch.arange(k * count)
    moved[rows, which, rows // count] += torch.linspace(-reach, reach, count).repeat(k)
    drawn = model.reconstruct(Capsules(moved, on.repeat(k * count, 1)), torch.full((k * count,), which))
    return drawn.mean(1).view(k, count, *drawn.shape[2:])


@torch.inference_mode()
def _maps(model: CapsNet, data: Dataset, count: int) -> list[tuple[str, Tensor]]:
    """Coupling times activation of the children of each image's longest capsule, summed over types, as maps."""
    out: CapsNetOutput = model(data.images[:count].float() / 255, trace=True)
    b, h, w, i, _ = out.primary.pose.shape
    winner = out.classes.activation.argmax(-1)  # [b]
    coupling = out.info.coupling.transpose(0, 1)  # [b t (h w i) j]
    mine = coupling[torch.arange(b), :, :, winner].view(b, -1, h * w, i)  # [b t (h w) i]
    maps = (mine * out.primary.activation.reshape(b, 1, h * w, i)).sum(-1)  # [b t (h w)]
    maps = maps / maps.amax((1, 2), keepdim=True).clamp_min(1e-12)
    return [(f"iteration {t + 1}", maps[:, t].view(b, h, w)) for t in range(maps.shape[1])]


def require_matplotlib() -> None:
    """Say at once, rather than after an hour of training, that pictures cannot be drawn."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RecipeError("pictures need matplotlib: pip install 'torchcaps[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    _pyplot().close(figure)
    return buffer.getvalue()
