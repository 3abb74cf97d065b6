"""
3. Look inside routing
======================

``trace=True`` makes every capsule layer record its routing. This tutorial reads the record of a CapsNet that was
trained on MNIST and ships with the package, and then moves the numbers of a pose.
"""

import matplotlib.pyplot as plt
import torch

from torchcaps.train import load_run

# %%
# A trained network
# -----------------
# The file has ten test images of each class beside the weights.

run = load_run("capsnet-digits")
model = run.model
images = run.extra["examples.images"] / 255  # [b 1 28 28]
labels = run.extra["examples.labels"]
chosen = torch.tensor([int((labels == digit).nonzero()[0]) for digit in (2, 5, 8)])
images, labels = images[chosen], labels[chosen]

with torch.no_grad():
    out = model(images, trace=True)
print("labels     ", labels.tolist())
print("longest    ", out.classes.activation.argmax(1).tolist())
print("coupling   ", list(out.info.coupling.shape), "= [t b i j]")

# %%
# Which parents do children choose?
# ---------------------------------
# The entropy of a child's coupling is log 10 = 2.3 while it is undecided, and 0 when one parent has it all. Agreement
# is the mean product of a parent and the votes for it. Both change with the iterations of routing.

entropy = out.info.entropy.mean(2)  # [t b]
agreement = torch.stack([one.gather(1, labels[:, None])[:, 0] for one in out.info.agreement])  # [t b]
fig, axes = plt.subplots(1, 2, figsize=(8, 3))
for number, label in enumerate(labels.tolist()):
    axes[0].plot(range(1, len(entropy) + 1), entropy[:, number], "o-", label=f"a {label}")
    axes[1].plot(range(1, len(entropy) + 1), agreement[:, number], "o-")
axes[0].set(title="entropy of the coupling (nats)", xlabel="iteration")
axes[1].set(title="agreement of the right class", xlabel="iteration")
axes[0].legend()
fig.tight_layout()

# %%
# Where do the votes come from?
# -----------------------------
# Coupling times activation of the children, summed over the types at each position: the parts of the image that the
# winning class receives, in the first and in the last iteration.

grid = model.primary.grid
share = out.info.coupling * out.primary.activation.flatten(1)[None, :, :, None]  # [t b i j]
maps = share.unflatten(2, (grid.height, grid.width, -1)).sum(4)  # [t b h w j]
fig, axes = plt.subplots(3, 3, figsize=(6, 6))
for row, label in enumerate(labels.tolist()):
    axes[row, 0].imshow(images[row, 0], cmap="gray")
    for column, iteration in ((1, 0), (2, -1)):
        axes[row, column].imshow(maps[iteration, row, :, :, label], vmin=0, vmax=maps[:, row, :, :, label].max())
    for axis in axes[row]:
        axis.axis("off")
axes[0, 0].set_title("image")
axes[0, 1].set_title("first iteration")
axes[0, 2].set_title("last iteration")
fig.tight_layout()

# %%
# What does a pose encode?
# ------------------------
# Move one number of the winner's pose and decode. Each row is one of the first five numbers of the pose of the 2.

pose = out.classes.pose[:1]  # [1 j k]
steps = torch.linspace(-0.25, 0.25, 9)
fig, axes = plt.subplots(5, 9, figsize=(9, 5))
for row in range(5):
    moved = pose.repeat(len(steps), 1, 1)
    moved[:, labels[0], row] += steps
    with torch.no_grad():
        drawn = model.reconstruct(out.classes._replace(pose=moved), labels[:1].expand(len(steps)))
    for axis, image in zip(axes[row], drawn, strict=True):
        axis.imshow(image[0], cmap="gray")
        axis.axis("off")
fig.tight_layout()

# %%
# The :doc:`explorer </how-to/explore>` shows all of this in a browser, for your own drawings: ``torchcaps explore``.
# Next: :doc:`generate with experts <plot_4_generate_with_experts>`.
