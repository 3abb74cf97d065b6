"""Train from Python
=================

Train a recipe from Python, load the run, and read its capsules and its routing.
"""

import tempfile
from pathlib import Path

import torchcaps
from torchcaps.train import train

recipe = torchcaps.load_recipe("capsnet-glyphs", {"data": {"train": 1000, "test": 100}, "train": {"epochs": 2}})

with tempfile.TemporaryDirectory() as folder:
    outcome = train(recipe, Path(folder) / "run", quiet=True)
    print(f"{outcome.step} steps in {outcome.seconds:.1f} s")
    model = torchcaps.load(Path(folder) / "run")

# %%
# The longest capsule is the class. The entropy of the coupling falls as children choose their parents.

test = recipe.data.load().test
out = model(test.model_input(slice(4)), trace=True)
print("labels      ", test.labels[:4].tolist())
print("longest     ", out.classes.activation.argmax(-1).tolist())
print("pose        ", list(out.classes.pose.shape), "= [b j k]")
print("entropy     ", [round(float(e.mean()), 3) for e in out.info.entropy], "nats by iteration")
