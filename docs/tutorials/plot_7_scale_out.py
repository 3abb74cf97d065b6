"""
7. Scale out
============

Long trainings get interrupted, and large ones use several processes. Both must not change the result. This tutorial
kills a run, resumes it, and compares it with a run that was left alone.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import torchcaps
from torchcaps.train import train

place = tempfile.TemporaryDirectory()
folder = Path(place.name)
settings = {
    "data": {"train": 400, "test": 50},
    "model": {"channels": 8, "types": 2, "decoder": [32]},
    "train": {"epochs": 5, "batch": 50, "save_every": 5, "log_every": 1},
}
recipe = torchcaps.load_recipe("capsnet-glyphs", settings)

# %%
# A run that is left alone
# ------------------------

whole = train(recipe, folder / "whole", quiet=True)
print(f"whole: {whole.step} steps, finished: {whole.finished}")

# %%
# A run that is killed
# --------------------
# The same recipe, as a command in a process of its own, killed without warning after a few steps. The steps since the
# last checkpoint are lost, ``train.save_every`` at most. Ctrl-C and SIGTERM lose none: they finish the step and save.

words = [
    f"--{table}.{key.replace('_', '-')}={value}" for table, keys in settings.items() for key, value in keys.items()
]
command = [
    sys.executable,
    "-m",
    "torchcaps",
    "train",
    "capsnet-glyphs",
    "--out",
    str(folder / "cut"),
    "--quiet",
    *words,
]
process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())})
journal = folder / "cut" / "journal.jsonl"
while process.poll() is None and not (journal.exists() and len(journal.read_text().splitlines()) > 12):
    time.sleep(0.01)
process.kill()
process.wait()
lost = len(journal.read_text().splitlines())
print(f"killed after {lost} lines of its journal")

# %%
# Resume
# ------
# The order of images, augmentation and dropout are functions of the seed and the step. So the resumed run ends with
# the same weights, bit for bit. On the command line: ``torchcaps train --resume runs/cut``.

resumed = train(recipe, folder / "cut", resume=True, quiet=True)
one = torchcaps.load(folder / "whole").state_dict()
other = torchcaps.load(folder / "cut").state_dict()
print("same weights, bit for bit:", all(torch.equal(one[name], other[name]) for name in one))

fig, axis = plt.subplots(figsize=(7, 3))
for name, style in (("whole", "-"), ("cut", ":")):
    lines = [json.loads(line) for line in (folder / name / "journal.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "loss" in line]
    axis.plot([row["step"] for row in rows], [row["loss"] for row in rows], style, linewidth=3, label=name)
axis.axvline(lost, color="gray", linewidth=1)
axis.set(xlabel="step", ylabel="loss", title="The run that was killed (dotted) lies on the run that was not")
axis.legend()
fig.tight_layout()

# %%
# Several processes
# -----------------
# ``train.batch`` is the batch of all processes together, so the number of processes does not change the result, up to
# the order of sums::
#
#     torchrun --nproc-per-node 2 -m torchcaps train capsnet-glyphs --out runs/two
#     torchcaps train capsnet-glyphs --out runs/job-7 --resume auto      # for job queues: starts or resumes
#
# Inference needs no care: ``encode`` and ``scores`` work in chunks, so only the result grows with the number of images.

model = torchcaps.load(folder / "whole")
with torch.no_grad():
    print(model.scores(torch.rand(1000, 1, 28, 28)).shape)

# %%
# More: :doc:`several processes or a GPU </how-to/scale>`, :doc:`resume </how-to/resume>`.
