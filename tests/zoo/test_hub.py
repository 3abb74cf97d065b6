"""Models as folders in the form of model hubs; the network is played by a stand-in for the hub's library."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchcaps
from support.tiny_recipe import tiny
from torchcaps.errors import CheckpointError, RecipeError
from torchcaps.models import CapsNet, MatrixCaps, Model
from torchcaps.models.capsnet import CapsNetConfig
from torchcaps.types import ImageSpec

SPEC = ImageSpec(1, 16, 16, 10)


def made() -> Model:
    return torchcaps.create(tiny(), SPEC).eval()


def equal(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_saved_folder_loads_as_the_model_it_was(tmp_path):
    model = made()
    assert model.save_pretrained(tmp_path / "mine") == tmp_path / "mine"
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    again = CapsNet.from_pretrained(tmp_path / "mine")
    assert equal(model, again) and not again.training
    assert equal(model, torchcaps.load(tmp_path / "mine"))
    facts = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert (facts["model"], facts["image"]) == ("capsnet", list(SPEC))
    assert 'torchcaps.load("mine")' in (tmp_path / "mine" / "README.md").read_text()
    again.save_pretrained(tmp_path / "again")
    assert equal(model, Model.from_pretrained(tmp_path / "again"))


def test_shipped_models_have_names_and_a_class():
    assert isinstance(CapsNet.from_pretrained("capsnet-digits"), CapsNet)
    with pytest.raises(CheckpointError, match="'capsnet-digits' is a CapsNet, not a MatrixCaps"):
        MatrixCaps.from_pretrained("capsnet-digits")


def test_what_nobody_could_build_again_is_refused(tmp_path):
    model = CapsNetConfig(channels=4, kernel=5, types=2, primary_kernel=5, decoder=(8,)).build(SPEC)
    with pytest.raises(RecipeError, match="built without a recipe"):
        model.save_pretrained(tmp_path)


def test_without_the_library_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RecipeError, match=r"torchcaps\[hub\]"):
        Model.from_pretrained("somebody/something")
    with pytest.raises(RecipeError, match=r"torchcaps\[hub\]"):
        made().push_to_hub("somebody/something")


class StandIn(ModuleType):
    """The three calls of `huggingface_hub` that are made, over a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder

    def snapshot_download(self, name: str, allow_patterns: list[str]) -> str:
        if not (self.folder / name).is_dir():
            raise OSError(f"no repository\n{name}")
        assert allow_patterns == ["model.safetensors", "config.json", "README.md"]
        return str(self.folder / name)

    def HfApi(self) -> StandIn:
        return self

    def create_repo(self, name: str, exist_ok: bool) -> None:
        (self.folder / name).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, repo_id: str, folder_path: str) -> str:
        for path in Path(folder_path).iterdir():
            (self.folder / repo_id / path.name).write_bytes(path.read_bytes())
        return f"hub://{repo_id}"


def test_the_library_has_the_calls_that_the_stand_in_plays():
    hub = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    inspect.signature(hub.snapshot_download).bind("somebody/something", allow_patterns=["model.safetensors"])
    inspect.signature(hub.HfApi.create_repo).bind(None, "somebody/something", exist_ok=True)
    inspect.signature(hub.HfApi.upload_folder).bind(None, repo_id="somebody/something", folder_path=".")


def test_a_model_that_ships_is_saved_loaded_and_named_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = torchcaps.load("matrix-smallnorb")
    shipped.save_pretrained("mine")
    for name in ("mine", tmp_path / "mine"):
        assert equal(shipped, MatrixCaps.from_pretrained(name))
    # A folder of the form "user/name" is no repository
    shipped.save_pretrained("somebody/mine")
    assert equal(shipped, Model.from_pretrained("somebody/mine"))


def test_a_model_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", StandIn(tmp_path))
    model = made()
    assert model.push_to_hub("somebody/capsules") == "hub://somebody/capsules"
    assert equal(model, Model.from_pretrained("somebody/capsules"))
    with pytest.raises(CheckpointError, match="cannot be had from the hub: no repository nobody/nothing"):
        Model.from_pretrained("nobody/nothing")
