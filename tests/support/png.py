"""What a picture shows, read from its PNG."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy.ndimage import label


def panels(png: bytes, least: int = 1000) -> int:
    """How many images it has: connected regions that are not white and larger than a letter."""
    dark = np.asarray(Image.open(io.BytesIO(png)).convert("L")) < 250
    sizes = np.bincount(label(dark)[0].ravel())[1:]
    return int((sizes >= least).sum())
