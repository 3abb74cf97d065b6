"""
4. Generate with experts
========================

Products of expert capsules learn without labels. The capsules compete for each image, and each learns to draw the
images that it wins. Here they learn the 8x8 digits of scikit-learn in some seconds.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import normalized_mutual_info_score

from torchcaps import PoECapsules

# %%
# Learn without labels
# --------------------
# ``y`` is only used afterwards. The code of an image is [j k]: 12 capsules of 8 numbers, all 0 but those of the winner.

X, y = load_digits(return_X_y=True)
capsules = PoECapsules(n_capsules=12, pose_dim=8, epochs=30, random_state=0).fit(X)
codes = capsules.transform(X).reshape(len(X), 12, 8)
print("codes", codes.shape, "of which one capsule in each row is not 0:", (np.abs(codes).sum(2) > 0).sum(1).mean())

# %%
# NMI, normalized mutual information, says how much the winning capsule tells about the class: 0 is nothing, 1 is all.

print(f"NMI of winner and class {normalized_mutual_info_score(y, capsules.labels_):.2f}")

# %%
# What does each capsule draw?
# ----------------------------
# Decode the mean code of the images that a capsule won (top), and new codes near those: a stored code plus noise.

numbers = np.random.default_rng(0)
fig, axes = plt.subplots(6, 12, figsize=(9, 4.8))
for j in range(12):
    won = codes[capsules.labels_ == j, j]  # [n k]
    drawn = [won.mean(0)] if len(won) else [np.zeros(8)]
    for _ in range(5):
        stored = won[numbers.integers(len(won))] if len(won) else np.zeros(8)
        drawn.append(stored + 0.5 * won.std(0) * numbers.standard_normal(8) if len(won) else stored)
    sample = np.zeros((6, 12, 8))
    sample[:, j] = drawn
    for axis, image in zip(axes[:, j], capsules.inverse_transform(sample.reshape(6, -1)), strict=True):
        axis.imshow(image.reshape(8, 8), cmap="gray", vmin=0, vmax=16)
        axis.axis("off")
fig.suptitle("Each column is one capsule: its mean, and five samples")
fig.tight_layout()

# %%
# One capsule, moved
# ------------------
# Single numbers of a pose mean little, because training may rotate the space of a capsule. Its principal axes do:
# each row moves along one of them, by two standard deviations either way.

j = int(np.bincount(capsules.labels_).argmax())
won = codes[capsules.labels_ == j, j]
_, scale, axes_of_pose = np.linalg.svd(won - won.mean(0), full_matrices=False)
fig, axes = plt.subplots(3, 7, figsize=(7, 3.2))
for row in range(3):
    sample = np.zeros((7, 12, 8))
    step = scale[row] / np.sqrt(len(won))
    sample[:, j] = won.mean(0) + np.linspace(-2, 2, 7)[:, None] * step * axes_of_pose[row]
    for axis, image in zip(axes[row], capsules.inverse_transform(sample.reshape(7, -1)), strict=True):
        axis.imshow(image.reshape(8, 8), cmap="gray", vmin=0, vmax=16)
        axis.axis("off")
fig.tight_layout()

# %%
# Next: ``torchcaps demo`` does this with MNIST images and measures the samples beside controls; :doc:`its page
# </systems/poe>` has the numbers. Or :doc:`write a router <plot_5_write_a_router>`.
