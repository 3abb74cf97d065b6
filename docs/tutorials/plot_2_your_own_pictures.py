"""
2. Train on your own pictures
=============================

A folder for each class, PNG or JPEG inside, is all that the library needs. This tutorial draws three kinds of shapes
into such folders, trains a CapsNet on them, and asks it about new ones.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw

import torchcaps
from torchcaps.evaluate import classification
from torchcaps.train import train

# %%
# A folder of pictures
# --------------------
# Use your own instead: pictures of any size, gray or color.

place = tempfile.TemporaryDirectory()
folder = Path(place.name)
numbers = np.random.default_rng(0)


def draw(kind: str) -> Image.Image:
    """Draw one shape somewhere in a picture of 28x28 pixels."""
    picture = Image.new("L", (28, 28))
    x, y = numbers.uniform(9, 19, 2)
    r = numbers.uniform(4, 8)
    pen = ImageDraw.Draw(picture)
    if kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=255, width=2)
    else:
        pen.regular_polygon((x, y, r), {"triangle": 3, "square": 4}[kind], int(numbers.integers(90)), outline=255)
    return picture


for kind in ("circle", "square", "triangle"):
    (folder / "pictures" / kind).mkdir(parents=True)
    for number in range(60):
        draw(kind).save(folder / "pictures" / kind / f"{number}.png")

# %%
# A recipe, changed
# -----------------
# ``capsnet-folder`` is the recipe for your own pictures. A recipe is a table of settings, and every key can be
# changed: here the network is made small, so that this page builds quickly. On the command line the same is
# ``torchcaps train capsnet-folder --data.path pictures --model.channels 12 --out runs/shapes``.

recipe = torchcaps.load_recipe(
    "capsnet-folder",
    {
        "data": {"path": str(folder / "pictures"), "test": 0.25},
        "model": {"channels": 12, "types": 4, "decoder": [64]},
        "train": {"epochs": 9, "batch": 16, "max_shift": 0},
    },
)
outcome = train(recipe, folder / "run", quiet=True)
print(f"{outcome.step} steps in {outcome.seconds:.0f} s")

# %%
# How good is it?
# ---------------
# A quarter of the pictures was held out. ``torchcaps evaluate runs/shapes`` prints this, and compares the network with
# controls.

model = torchcaps.load(folder / "run")
test = recipe.data.load().test
print({name: round(value, 3) for name, value in classification(model, test).items()})

# %%
# Three new shapes
# ----------------
# The length of a class capsule says how present the class is. Below each picture is what the network decodes from the
# longest capsule: after so little training, a blur at the right place.

fresh = torch.stack([torch.from_numpy(np.array(draw(kind))) for kind in test.names])[:, None] / 255  # [b 1 28 28]
with torch.no_grad():
    classes = model.encode(fresh)
    decoded = model.reconstruct(classes)
fig, axes = plt.subplots(2, 3, figsize=(6, 4.4))
for column, length in enumerate(classes.activation):
    axes[0, column].imshow(fresh[column, 0], cmap="gray")
    axes[1, column].imshow(decoded[column, 0], cmap="gray")
    axes[0, column].set_title("\n".join(f"{n} {v:.2f}" for n, v in zip(test.names, length.tolist(), strict=True)))
for axis in axes.flat:
    axis.axis("off")
fig.tight_layout()

# %%
# Next: :doc:`look inside routing <plot_3_look_inside_routing>`. More on sizes, color and npz files is in
# :doc:`data </how-to/data>`.
