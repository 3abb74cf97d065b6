"""Previews of data sets: sheets with some images of each class."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.evaluate.figures import image_grid, pixels

__all__ = ["preview_grid"]


def preview_grid(data: Dataset, columns: int = 10) -> bytes:
    """A PNG with a row of images for each class; stereo pairs side by side at named viewpoints."""
    # smallNORB is sorted by viewpoint, everything else by class alone.
    if {"azimuth", "elevation"} <= data.factors.keys() and data.spec.channels == 2:
        return image_grid(_viewpoints(data), scale=0.7)
    rows = [(data.name_of(j), pixels(data.pixels(_of_class(data, j)[:columns]))) for j in range(data.classes)]
    # A class without images has no row.
    return image_grid([(name, images) for name, images in rows if len(images)])


def _of_class(data: Dataset, label: int) -> Tensor:
    is_class = data.labels == label
    return (is_class if is_class.ndim == 1 else is_class.any(-1)).nonzero().flatten()


def _viewpoints(data: Dataset) -> list[tuple[str, Tensor]]:
    """For each class, left and right eye from three azimuths at two elevations; elevation n is 30 + 5 n degrees."""
    rows = []
    for label in range(data.classes):
        for elevation in (0, 6):
            # The data count azimuth in tens of degrees.
            pairs = [_pair(data, label, elevation, azimuth) for azimuth in (0, 6, 12)]
            title = f"{data.name_of(label)} from {30 + 5 * elevation}°\nazimuth 0, 60, 120°"
            rows.append((title, torch.cat(pairs)))
    return rows


def _pair(data: Dataset, label: int, elevation: int, azimuth: int) -> Tensor:
    """[2 h w] both eyes of the first image with this viewpoint."""
    wanted = (data.labels == label) & (data.factors["elevation"] == elevation) & (data.factors["azimuth"] == azimuth)
    return data.pixels(wanted.nonzero().flatten()[:1]).flatten(0, 1)
