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

__all__ = ["coupling_maps", "image_grid", "learning_curve", "perturbations", "reconstructions"]


def image_grid(rows: Sequence[tuple[str, Tensor]], scale: float = 0.55) -> bytes:
    """Rows of grey images, each (title, [n h w]), in one picture."""
    plt = _pyplot()
    columns = max(len(images) for _, images in rows)
    figure, axes = plt.subplots(
        len(rows), columns, squeeze=False, figsize=(scale * columns + 1.2, scale * len(rows) + 0.1)
    )
    for (title, images), line in zip(rows, axes, strict=True):
        for ax in line:
            ax.set_axis_off()
        for ax, image in zip(line, images, strict=False):
            ax.imshow(image.cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.2, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=1.1 / (scale * columns + 1.2), right=1, top=1, bottom=0, wspace=0.05, hspace=0.05)
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


@torch.inference_mode()
def reconstructions(model: CapsNet, data: Dataset, count: int = 12) -> bytes:
    """Test images, and what the decoder draws from the longest capsule alone."""
    images = data.images[:count].float() / 255
    out: CapsNetOutput = model(images)
    drawn = model.reconstruct(out.classes)
    return image_grid([("image", images.mean(1)), ("redrawn", drawn.mean(1))])


@torch.inference_mode()
def perturbations(model: CapsNet, data: Dataset, reach: float = 0.25, count: int = 11) -> bytes:
    """Each dimension of one image's winning capsule, moved from -reach to reach."""
    out: CapsNetOutput = model(data.images[:1].float() / 255)
    pose, on = out.classes
    k, which = pose.shape[-1], int(on.argmax())
    steps = torch.linspace(-reach, reach, count)
    moved = pose.repeat(k * count, 1, 1)  # [(k n) j k]
    rows = torch.arange(k * count)
    moved[rows, which, rows // count] += steps.repeat(k)
    drawn = model.reconstruct(Capsules(moved, on.repeat(k * count, 1)), torch.full((k * count,), which))
    strips = drawn.mean(1).view(k, count, *drawn.shape[2:])  # [k n h w]
    return image_grid([(f"dimension {n + 1}", strip) for n, strip in enumerate(strips)], scale=0.45)


@torch.inference_mode()
def coupling_maps(model: CapsNet, data: Dataset, count: int = 4) -> bytes:
    """Where in the image the winning capsule gets its children from, iteration by iteration."""
    images = data.images[:count].float() / 255
    out: CapsNetOutput = model(images, trace=True)
    _, h, w, i, _ = out.primary.pose.shape
    winner = out.classes.activation.argmax(-1)  # [b]
    c = out.info.coupling[:, torch.arange(count), :, winner]  # [b t (h w i)], the indexed axis first
    c = c if c.shape[0] == count else c.transpose(0, 1)
    weight = c.reshape(count, -1, h * w, i) * out.primary.activation.reshape(count, 1, h * w, i)
    maps = weight.mean(-1).view(count, -1, h, w)  # [b t h w]
    maps = maps / maps.amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    rows = [("image", images.mean(1))]
    rows += [(f"iteration {t + 1}", maps[:, t]) for t in range(maps.shape[1])]
    return image_grid(rows, scale=0.8)


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
