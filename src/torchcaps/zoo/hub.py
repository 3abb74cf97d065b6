"""Models in the form that model hubs use: a folder of safetensors, configuration and card, and the network beside it.

    model.safetensors   weights, the recipe and the image shape; this file alone is enough to load the model
    config.json         the same facts for people and other programs
    README.md           the model card

The network is reached through `huggingface_hub` alone, the extra `hub`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType

from torchcaps.config import to_dict
from torchcaps.errors import CheckpointError, RecipeError
from torchcaps.models import Model
from torchcaps.systems import model_name
from torchcaps.train.checkpoint import Checkpoint, CheckpointMeta, save
from torchcaps.train.recipe import Recipe, stage_names
from torchcaps.train.run import GIVEN_AWAY, load, shipped_models
from torchcaps.train.state_packing import pack_state
from torchcaps.train.weights_export import strip_to_weights
from torchcaps.utils.files import make_folder, write_atomically
from torchcaps.zoo.card import CARD, README

__all__ = ["load_pretrained", "push_to_hub", "save_pretrained"]

FILES = (GIVEN_AWAY, CARD, README)
"""What is downloaded of a repository; nothing else in it is looked at."""


def save_pretrained(model: Model, folder: Path | str) -> Path:
    """Write a model as a folder that `load_pretrained`, and every command that takes a run, can load.

    Args:
        model: A model that was built by a recipe: of `torchcaps.create`, `fit` or `load`.
        folder: Where to write; it is made if it does not exist.

    Returns:
        The folder.

    Raises:
        RecipeError: The model was not built by a recipe, so that nobody could build it again.
    """
    recipe = model.recipe
    if not isinstance(recipe, Recipe):
        kind = type(model).__name__
        raise RecipeError(f"this {kind} was built without a recipe; make it with torchcaps.create, fit or load")
    # The weights, with what it takes to build the network again
    tensors, skeleton = pack_state({"model": dict(model.state_dict())}, "state")
    stage = stage_names(recipe.model)[-1]
    meta = CheckpointMeta(recipe, model.spec, stage, step=0, finished=True)
    target = make_folder(Path(folder))
    save(target / GIVEN_AWAY, strip_to_weights(Checkpoint(tensors, meta, skeleton)))
    # The same for people
    facts = {
        "library_name": "torchcaps",
        "model": model_name(recipe.model),
        "recipe": recipe.name,
        "image": list(model.spec),
        "parameters": sum(p.numel() for p in model.parameters()),
        "config": to_dict(recipe)["model"],
    }
    write_atomically(target / CARD, [(json.dumps(facts, indent=2) + "\n").encode()])
    write_atomically(target / README, [_readme(target.resolve().name, facts).encode()])
    return target


def load_pretrained(name: Path | str) -> Model:
    """Load a model by name or folder, or from a model hub.

    Args:
        name: The name of a shipped model, a folder on this machine, or a repository of the hub, as in "user/name".

    Returns:
        The model, in evaluation mode. Files are read as data; nothing of them is executed.

    Raises:
        CheckpointError: There is no such model, or its file is not whole.
        RecipeError: It is a repository of the hub, and `huggingface_hub` is not installed.
    """
    is_repository = isinstance(name, str) and name.count("/") == 1 and not Path(name).exists()
    if not is_repository or str(name) in shipped_models():
        return load(name)
    hub = _hub()
    try:
        folder = hub.snapshot_download(str(name), allow_patterns=list(FILES))
    except (OSError, ValueError) as error:  # what the library raises for names and for the network
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"'{name}' is no folder here and cannot be had from the hub: {reason}") from None
    return load(Path(folder))


def push_to_hub(model: Model, repository: str) -> str:
    """Upload a model to a model hub, with the credentials that `huggingface_hub` finds.

    Args:
        model: A model that was built by a recipe.
        repository: As in "user/name"; it is made if it does not exist.

    Returns:
        The address of the commit.

    Raises:
        RecipeError: `huggingface_hub` is not installed, or the model was not built by a recipe.
    """
    hub = _hub()
    with tempfile.TemporaryDirectory(prefix="torchcaps-") as folder:
        target = save_pretrained(model, Path(folder) / repository.rpartition("/")[2])
        api = hub.HfApi()
        api.create_repo(repository, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(target)))


def _readme(name: str, facts: dict[str, object]) -> str:
    """Write a short card: what the folder holds, and how to load it."""
    return (
        "---\nlibrary_name: torchcaps\n---\n"
        f"# {name}\n\nA `{facts['model']}` of [torchcaps](https://github.com/torchcaps/torchcaps), recipe "
        f"`{facts['recipe']}`, {facts['parameters']:,} parameters.\n\n"
        "```python\nimport torchcaps\n\n"
        f'model = torchcaps.load("{name}")\n```\n'
    )


def _hub() -> ModuleType:
    """Import the hub's library, which is an extra."""
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise RecipeError('model hubs need huggingface_hub: pip install "torchcaps[hub]"') from None
    module: ModuleType = huggingface_hub
    return module
