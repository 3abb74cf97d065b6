"""Sizes that nothing holds, nested text, endless numbers and pipes: each is one error of ours, at once."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from support.cli import talk
from support.small_models import SMALL, SPEC, built
from support.tiny_recipe import TINY, edit_document, tiny
from torchcaps.config import from_dict, merge, to_dict
from torchcaps.config.schema import Length, Range, hints_of, split_marks
from torchcaps.data import DATASETS
from torchcaps.errors import CheckpointError, RecipeError, TorchcapsError, TrainingError
from torchcaps.evaluate.results import read_result
from torchcaps.models import MODELS
from torchcaps.routing import ROUTERS
from torchcaps.train.checkpoint import save
from torchcaps.train.journal import read_journal
from torchcaps.train.model_sizes import model_outline, refusing_lack_of_memory
from torchcaps.train.recipe import Recipe, load_recipe
from torchcaps.train.run import load_run, recipe_in
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec

run, refused = talk("train")


# ------------------------------------------------------------------------------------------ sizes in checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 30 kB."""
    path = tmp_path_factory.mktemp("sizes") / "whole.safetensors"
    save(path, build_training(tiny(), ImageSpec(1, 16, 16, 10), images=80).checkpoint(tiny()))
    return path


CLAIMS: list[dict[str, Any]] = [
    {"channels": 60_000},
    {"types": 60_000, "type_dimension": 60_000},
    {"dimension": 65_536},
    {"decoder": [40_000, 40_000]},
    {"decoder": [8] * 64},
    {"kernel": 12, "primary_kernel": 1},
    {"channels": 10**9},
    {"channels": 2**63},
    {"channels": 10**400},
    {"decoder": [1] * 100_000},
    {"routing": {"name": "dynamic", "iterations": 10**6}},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: "-".join(claim))
def test_a_checkpoint_allocates_nothing_that_its_recipe_claims(whole: Path, tmp_path: Path, claim) -> None:
    """Before, a file of 340 kB took 6.8 GB and half a minute."""
    path = tmp_path / "forged.safetensors"
    edit_document(whole, path, {"recipe": merge(to_dict(tiny()), {"model": claim})})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as error:
        load_run(path)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_checkpoint_for_images_of_other_sizes_allocates_no_coordinates(tmp_path: Path) -> None:
    """Weights of matrix capsules do not depend on the size of the images; their coordinates do."""
    recipe = from_dict(Recipe, merge(TINY, {"model": {"name": "matrix-tiny"}}))
    path = tmp_path / "whole.safetensors"
    save(path, build_training(recipe, ImageSpec(1, 16, 16, 10), images=80).checkpoint(recipe))
    load_run(path)
    edit_document(path, path, {"spec": [1, 65_535, 65_535, 10]})
    with pytest.raises(CheckpointError, match="contradicts itself"):
        load_run(path)


@pytest.mark.parametrize("name", SMALL)
def test_an_outline_has_the_tensors_of_the_model(name: str) -> None:
    outline = model_outline(Recipe(model=SMALL[name]), SPEC)
    model = built(SMALL[name])
    assert all(x.is_meta for x in (*outline.parameters(), *outline.buffers()))
    assert {k: v.shape for k, v in outline.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert [k for k, _ in outline.named_buffers()] == [k for k, _ in model.named_buffers()]


# ------------------------------------------------------------------------------------------ sizes in recipes


def unbounded(hint: object, path: str) -> list[str]:
    """The whole numbers and the lists of numbers in an annotation that have no upper bound."""
    base, marks = split_marks(hint)
    if base is int:
        bounded = any(isinstance(m, Range) and (m.high or m.limit) is not None for m in marks)
        return [] if bounded else [path]
    args = get_args(base)
    if args[-1:] == (...,) and split_marks(args[0])[0] is int and not any(isinstance(m, Length) for m in marks):
        return [f"{path}[]"]
    return [found for arg in args if arg is not ... for found in unbounded(arg, path)]


def test_every_size_has_an_upper_bound() -> None:
    kinds = [*MODELS.values(), *DATASETS.values(), *(router.settings for router in ROUTERS.values()), Recipe]
    kinds += [type(Recipe().train)]  # options of optimizers and schedules are torch's, which checks them
    kinds += [type(getattr(MODELS["poe"](), name)) for name in ("autoencoder", "energy", "decoder")]
    found = [x for kind in kinds for key, hint in hints_of(kind).items() for x in unbounded(hint, f"{kind}.{key}")]
    assert not found


HUGE = [10**9 + 1, 2**63, 10**400]
KEYS = ["model.channels", "model.decoder", "model.routing.iterations", "train.batch", "train.save_every"]
KEYS += ["train.epochs", "data.train", "data.drawn", "seed"]


@pytest.mark.parametrize("key", KEYS)
def test_numbers_beyond_all_bounds_are_refused_by_their_key(capsys, tmp_path: Path, key: str) -> None:
    for number in HUGE if key not in ("seed", "data.drawn") else [10**400]:
        text = f"[{number}]" if key == "model.decoder" else number
        line = refused(capsys, "capsnet-glyphs", "--out", tmp_path / "a", f"--{key}", text)
        assert key in line and any(word in line for word in ("beyond", "from", "finite")), line


def test_models_and_images_beyond_memory_are_refused_before_they_are_made(capsys, tmp_path: Path) -> None:
    words = ["capsnet-glyphs", "--out", tmp_path / "a", "--data.train", 8, "--data.test", 1, "--train.batch", 8]
    line = refused(capsys, *words, "--model.channels", 65_536, "--model.types", 65_536)
    assert "GB" in line and "primary" in line
    assert "GB" in refused(capsys, *words, "--data.train", 10**9)
    assert not (tmp_path / "a").exists()


def test_an_allocation_that_fails_is_one_line_about_the_batch() -> None:
    with (
        pytest.raises(TrainingError, match=r"memory ran out .*lower train\.batch") as caught,
        refusing_lack_of_memory(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    # How much was asked for, in the place of the allocator's own text
    assert f"{1 << 60} bytes" in str(caught.value) and "alloc_cpu" not in str(caught.value)
    with pytest.raises(RuntimeError, match="other"), refusing_lack_of_memory():
        raise RuntimeError("other")


# ------------------------------------------------------------------------------------------ text and files


DEEP = "[" * 200_000
DIGITS = "9" * 900_000


@pytest.mark.parametrize("text", [DEEP, '{"seed": ' + DIGITS + "}", "[]", "1", '{"seed": 1e999}', "\ud800x"])
def test_a_recipe_json_that_is_none_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.json").write_text(text, errors="surrogatepass")
    with pytest.raises(TrainingError) as error:
        recipe_in(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_journal_ends_at_the_first_line_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for text in (DEEP, '{"step": ' + DIGITS + "}"):
        path.write_text('{"step": 1}\n' + text + '\n{"step": 2}\n')
        assert read_journal(path) == [{"step": 1}]


def test_a_seed_of_many_digits_is_one_error(capsys, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"seed = {DIGITS}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert "\n" not in str(error.value)
    assert "seed" in refused(capsys, "capsnet-glyphs", "--seed", "9" * 100_000)


def test_results_that_nest_too_deeply_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(DEEP)
    with pytest.raises(TorchcapsError, match="nests too deeply"):
        read_result(tmp_path / "a.json")


def test_pipes_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    for name in ("base.toml", "recipe.json", "journal.jsonl"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "own.toml").write_text('base = "base.toml"\n')
    with pytest.raises(RecipeError, match="not a regular file"):
        load_recipe(str(tmp_path / "own.toml"))
    with pytest.raises(TrainingError, match="not a regular file"):
        recipe_in(tmp_path)
    with pytest.raises(TrainingError, match="not a regular file"):
        read_journal(tmp_path / "journal.jsonl")


def test_json_of_ordinary_runs_is_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(to_dict(tiny())))
    assert recipe_in(tmp_path) == tiny()
