"""Products of expert capsules in training: three stages, no bit changed by kill -9, two processes as one."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.processes import Forked, run_group
from torchcaps.config import from_dict, merge, to_dict
from torchcaps.errors import CheckpointError, DataError, TorchcapsError, TrainingError
from torchcaps.models.autoencoder import Autoencoder
from torchcaps.models.poe import PoE
from torchcaps.models.poe.stages import CapsuleStage, DecoderStage
from torchcaps.testing import assert_finite, assert_resumes
from torchcaps.testing import resume as instrument
from torchcaps.train import load, load_run, train
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.checkpoint import save as write_checkpoint
from torchcaps.train.export import export_weights
from torchcaps.train.journal import read_journal
from torchcaps.train.recipe import Recipe, recipe_of
from torchcaps.types import Batch, ImageSpec

STAGES: dict[str, type[Any]] = {"autoencoder": Autoencoder, "capsules": CapsuleStage, "decoder": DecoderStage}
PARTS = ("autoencoder", "energy", "decoder")
MOMENTS = ("autoencoder:4", "capsules:prepare", "capsules:5", "decoder:4", "decoder:finish")
TABLES: dict[str, Any] = {
    "name": "tiny",
    "seed": 1,  # widths of principal axes differ: of equal ones the last digit decides the direction
    "data": {"name": "glyphs", "train": 64, "test": 16, "size": 14},
    "model": {
        "name": "poe", "capsules": 4, "dimension": 3, "child_dimension": 4,
        "autoencoder": {"channels": [4, 8], "kernel": 5},
        "energy": {
            "ramp": 4, "loosen": 6, "particles": 8, "init": 0.005, "bias": 1.0, "bias_start": 2.0, "gain": 20.0,
            "sharpness": 120.0, "boost": 0.002,
        },
        "decoder": {"ridge": 0.1},
    },
    "optimizer": {"name": "Adam", "lr": 0.01},
    "train": {"epochs": 1.0, "batch": 8, "save_every": 3, "log_every": 2},
    "stages": {"capsules": {"optimizer": {"name": "SGD", "lr": 0.05, "options": {"momentum": 0.9}}}},
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "least-squares": {"energy": {"magnitudes": "bernoulli"}, "decoder": {"curvature": 2, "examples": 32}},
    "covered": {"decoder": {"coverage": 0.8, "examples": 32}},
    "gradient": {
        "energy": {
            "chain": "persistent", "magnitudes": "bernoulli", "steps": 2, "gradient": "autograd",
            "routing": {"iterations": 3, "agreement": "cosine", "over": "children"},
        },
        "decoder": {"rule": "gradient"},
    },
}  # fmt: skip


class LostError(Exception):
    """The process is gone, and all that it had in memory."""


def recipe(model: dict[str, Any] | None = None, **over: Any) -> Recipe:
    return recipe_of(merge(merge(TABLES, {"model": model or {}}), over))


def undropped(name: str) -> Recipe:
    return recipe(merge(RUNS[name], {"autoencoder": {"dropout": 0.0}}))


def train_undropped(name: str, folder: Path, autoencoder_of: Path | None) -> None:
    """Train one of RUNS without dropout, with the autoencoder of a run if there is one, in one process of a group."""
    given = {} if autoencoder_of is None else {"autoencoder": load(autoencoder_of).autoencoder}
    train(undropped(name), folder, quiet=True, given=given)


def train_until(moment: str, name: str, folder: Path) -> None:
    """Go on with one of RUNS until kill -9 just before a moment, in a process of its own."""
    stage, what = moment.split(":")
    method = "objective" if what.isdigit() else what
    plain = getattr(STAGES[stage], method)

    def deadly(self: Any, *words: Any) -> Any:
        if not what.isdigit() or words[1] == int(what):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *words)

    setattr(STAGES[stage], method, deadly)
    train(recipe(RUNS[name]), folder / name, resume="auto", quiet=True)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_run(folder).model.state_dict())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of RUNS, with nothing happening to it."""
    folder = tmp_path_factory.mktemp("whole")
    for name, model in RUNS.items():
        train(recipe(model), folder / name, quiet=True)
    return folder


# --- What is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_each_stage_changes_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def lose(self: object, images: object) -> None:
        raise LostError

    seen = []
    for cut in (*STAGES.values(), None):
        with monkeypatch.context() as patch:
            if cut is None:
                assert train(recipe(RUNS[name]), tmp_path, resume="auto", quiet=True).step == 24
            else:
                patch.setattr(cut, "prepare", lose)
                with pytest.raises(LostError):
                    train(recipe(RUNS[name]), tmp_path, resume="auto", quiet=True)
        if cut is not Autoencoder:  # there is no checkpoint before the first stage
            seen.append(state(tmp_path))
    for before, after, part in zip(seen, seen[1:], PARTS[1:], strict=False):
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert {key.split(".")[0] for key in changed} == {part}
    learned = {"energy.W", "energy.bias", "energy.offset", "energy.power", "energy.mask.frequency", "energy.particles"}
    learned -= set() if name == "gradient" else {"energy.particles"}
    assert {key for key in seen[0] if not torch.equal(seen[0][key], seen[1][key])} >= learned


def contrasted(images: torch.Tensor, seed: int) -> torch.Tensor:
    """The loss of one step of the second stage with magnitudes that are drawn, prepared as a run of this seed does."""
    torch.manual_seed(0)
    model = recipe({"energy": {"magnitudes": "bernoulli"}}).model.build(ImageSpec(1, 14, 14, 10)).eval()
    stage = model.stages()["capsules"]
    torch.manual_seed(seed)
    with torch.no_grad():
        stage.prepare(images)
    return stage.objective(Batch(torch.empty(0, 1, 1, 1), torch.zeros(8), torch.arange(8)), 5)["loss"].detach()


def test_the_second_stage_needs_no_pixels_and_draws_by_the_seed_of_the_run() -> None:
    images = torch.randint(256, (8, 1, 14, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert not CapsuleStage.uses_images
    assert torch.equal(contrasted(images, 1), contrasted(images, 1))  # as after a resumption
    assert not torch.equal(contrasted(images, 1), contrasted(images, 2))


def test_capsules_without_images_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One image again and again has one winner."""
    images = np.zeros((64, 14, 14), np.uint8)
    images[:, 3:9, 4:7] = 255
    images[::2, 3:9, 4:7] = 250
    train(recipe(data=own(tmp_path, images)), tmp_path / "run", quiet=True)
    unused = int((load(tmp_path / "run").decoder.weight == 0).sum())
    assert unused
    assert any(f"{unused} of 4 capsules took part in no training image" in said for said in caplog.messages)


def test_weights_that_are_given_away_leave_out_sums_of_training(tmp_path: Path, whole: Path) -> None:
    folder = whole / next(iter(RUNS))
    export_weights(folder, tmp_path / "model.safetensors")
    assert not len(read_checkpoint(tmp_path / "model.safetensors").tensors["state.model.decoder.gram"])
    assert len(read_checkpoint(folder / "checkpoint.safetensors").tensors["state.model.decoder.gram"])
    drawn = [load(path).sample(capsule=1, n=3, seed=0) for path in (folder, tmp_path / "model.safetensors")]
    torch.testing.assert_close(*drawn)


def test_training_teaches(tmp_path: Path) -> None:
    """More of each stage: the drawn and the decoded images come closer to the data than a mean image does."""
    r = recipe(train={"epochs": 12.0}, stages={"capsules": {"train": {"epochs": 12.0}}})
    model = train(r, tmp_path, quiet=True).model.eval()
    assert isinstance(model, PoE)
    images = r.data.load().train.images.float() / 255
    with torch.no_grad():
        drawn, decoded = model.autoencoder(images), model.reconstruct(images)
    plain = (images - images.mean(0)).square().mean()
    assert (drawn - images).square().mean() < 0.8 * plain
    assert (decoded - images).square().mean() < 0.97 * plain
    entries = [e for e in read_journal(tmp_path / "journal.jsonl") if e["stage"] == "capsules"]
    assert all(math.isfinite(e[key]) for e in entries for key in ("loss", "gap", "error"))


# --- Cut off, and together --------------------------------------------------------------------------------------------


def test_kill_9_in_each_stage_changes_no_bit(tmp_path: Path, whole: Path) -> None:
    for name in RUNS:
        for moment in MOMENTS:
            assert Forked(train_until, moment, name, tmp_path).wait() == -signal.SIGKILL, moment
        train(recipe(RUNS[name]), tmp_path / name, resume="auto", quiet=True)
        instrument._assert_same(whole / name, tmp_path / name)
        one, other = (read_journal(folder / name / "journal.jsonl") for folder in (whole, tmp_path))
        assert [e["step"] for e in one if e["step"] % 2 == 0] == [e["step"] for e in other if e["step"] % 2 == 0]
        assert [e["loss"] for e in one if e["step"] % 2 == 0] == [e["loss"] for e in other if e["step"] % 2 == 0]


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_kills_at_random_moments_of_each_stage(tmp_path: Path, name: str) -> None:
    tables = merge(TABLES, {"model": RUNS[name]})
    path = tmp_path / "tiny.toml"
    path.write_text("\n".join(f"{key} = {_toml(value)}" for key, value in tables.items()) + "\n")
    words = [word for stage in STAGES for word in (f"--stages.{stage}.train.epochs", "60")]
    assert assert_resumes(str(path), tmp_path, kills=9, words=words) >= 5


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("name", RUNS)
def test_several_processes_equal_one_in_every_stage(tmp_path: Path, name: str) -> None:
    """To 1e-6. The stages after the first get the same autoencoder: features are kept in half precision, where one that
    differs in its last bit may be rounded the other way, a thousand times as far."""
    train(undropped(name), tmp_path / "one", quiet=True)
    run_group(train_undropped, name, tmp_path / "two", None)
    run_group(train_undropped, name, tmp_path / "given", tmp_path / "one", size=3)  # shares that are not equal
    one, two, given = (state(tmp_path / run) for run in ("one", "two", "given"))
    for part, other in zip(PARTS, (two, given, given), strict=True):
        apart = {key: _farthest(one[key], other[key]) for key in one if key.startswith(part)}
        assert max(apart.values()) <= 1e-6, apart


def _farthest(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


# --- Hard cases -------------------------------------------------------------------------------------------------------


def own(folder: Path, images: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A table [data] with these images for both training and test."""
    labels = np.arange(len(images)) % 2
    np.savez(folder / "own.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    return {"name": "npz", "path": str(folder / "own.npz")}


@pytest.mark.parametrize("rule", ["least squares", "gradient", "paper"])
@pytest.mark.parametrize("mode", ["competition", "offset", "paper"])
def test_images_that_are_black_but_for_one_pixel(tmp_path: Path, mode: str, rule: str) -> None:
    images = np.zeros((16, 14, 14), np.uint8)
    images[3, 0, 0] = 1
    data = own(tmp_path, images)
    tables = merge(TABLES, {"model": {"energy": {"mode": mode}, "decoder": {"rule": rule}}})
    model = train(recipe_of({**tables, "data": data}), tmp_path / "run", quiet=True).model.eval()
    assert isinstance(model, PoE)
    assert_finite(dict(model.state_dict()))
    for entry in read_journal(tmp_path / "run" / "journal.jsonl"):
        assert_finite({key: value for key, value in entry.items() if key != "stage"})
    assert_finite([model.sample(0), model.reconstruct(torch.zeros(1, 1, 14, 14))])


def refused(error: type[TorchcapsError], text: str) -> Any:
    return pytest.raises(error, match=rf"\A[^\n]*{text}[^\n]*\Z")


def test_images_that_are_all_the_same_are_refused(tmp_path: Path) -> None:
    tables = {**TABLES, "data": own(tmp_path, np.full((16, 14, 14), 7, np.uint8))}
    with refused(DataError, "all 16 training images are the same"):
        train(recipe_of(tables), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("n", [3, 1])
def test_fewer_images_than_capsules_are_refused(tmp_path: Path, n: int) -> None:
    loop = {"batch": 1}
    with refused(DataError, f"{n} training images for 4 capsules"):
        train(recipe(data={"train": n}, train=loop, stages={"capsules": {"train": loop}}), tmp_path, quiet=True)


def test_as_many_images_as_capsules_will_do(tmp_path: Path) -> None:
    loop = {"batch": 2, "epochs": 8.0}
    few = recipe(data={"train": 4}, train=loop, stages={"capsules": {"train": loop}})
    model = train(few, tmp_path, quiet=True).model.eval()
    assert isinstance(model, PoE)
    assert_finite([dict(model.state_dict()), *(model.sample(j) for j in range(4))])


def test_another_shape_is_refused_in_one_line(tmp_path: Path, whole: Path) -> None:
    run, same = whole / "least-squares", RUNS["least-squares"]
    with refused(TrainingError, r"model\.capsules = 4, now it is 5"):
        train(recipe({**same, "capsules": 5}), run, resume=True, quiet=True)
    with refused(TrainingError, r"model\.energy\.mode = 'competition', now it is 'offset'"):
        train(recipe(merge(same, {"energy": {"mode": "offset"}})), run, resume=True, quiet=True)
    trained = load_run(run).model
    with refused(TrainingError, "stage 'capsules' does not fit"):
        train(recipe({"dimension": 2}), tmp_path / "a", quiet=True, given={"capsules": trained.stages()["capsules"]})
    with refused(TrainingError, "stage 'autoencoder' does not fit"):
        given = {"autoencoder": trained.stages()["autoencoder"]}
        train(recipe({"autoencoder": {"channels": [4, 4]}}), tmp_path / "a", quiet=True, given=given)
    assert not (tmp_path / "a").exists()
    with refused(DataError, "3 training images for 4 capsules; at least one each is wanted"):
        train(recipe(data={"train": 3}), tmp_path / "a", quiet=True)


@pytest.mark.parametrize("change", [{"capsules": 5}, {"dimension": 2}, {"decoder": {"rule": "gradient"}}])
def test_a_checkpoint_of_another_shape_is_refused_in_one_line(tmp_path: Path, whole: Path, change: Any) -> None:
    checkpoint = read_checkpoint(whole / "least-squares" / "checkpoint.safetensors")
    other = from_dict(Recipe, merge(to_dict(checkpoint.meta.recipe), {"model": change}))
    write_checkpoint(tmp_path / "checkpoint.safetensors", checkpoint.with_recipe(other))
    with refused(CheckpointError, "belongs to another kind of run"):
        load(tmp_path)


def test_a_stage_that_is_given_is_taken_over(tmp_path: Path, whole: Path) -> None:
    trained = load(whole / "least-squares")
    given = {name: trained.stages()[name] for name in ("autoencoder", "capsules")}
    outcome = train(recipe({"decoder": {"rule": "paper"}}), tmp_path, quiet=True, given=given)
    mine, theirs = outcome.model.state_dict(), trained.state_dict()
    for key in mine:
        if not key.startswith("decoder"):
            assert torch.equal(mine[key], theirs[key])
    assert outcome.step == 8 and not torch.equal(mine["decoder.U"], theirs["decoder.U"])
