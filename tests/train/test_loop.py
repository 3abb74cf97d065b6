from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.easy_images import easy
from support.hardware import multiplies_bfloat16
from support.tiny_recipe import edit_document, tiny
from torchcaps.data import make_batch
from torchcaps.data.augment import SampleKey, shift
from torchcaps.errors import CheckpointError, DataError, RecipeError, ShapeError, TrainingError
from torchcaps.kernels.compilation import announce
from torchcaps.models.capsnet import CapsNet
from torchcaps.train import load_recipe, load_run, total_steps, train
from torchcaps.train.batches import DatasetSource
from torchcaps.train.journal import read_journal
from torchcaps.train.loop import TrainingData
from torchcaps.train.run import recipe_in
from torchcaps.train.train_state import build_model, flushed_denormals, shrink_batches
from torchcaps.types import Batch
from torchcaps.utils.random import permutation


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(load_run(folder).model.state_dict())


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_training_lowers_the_loss_and_leaves_a_whole_run(tmp_path):
    outcome = train(tiny(train={"epochs": 12.0}), tmp_path / "run", quiet=True)
    assert outcome.finished and outcome.step == 120
    entries = read_journal(tmp_path / "run" / "journal.jsonl")
    assert [e["step"] for e in entries] == list(range(2, 121, 2))
    assert entries[-1]["loss"] < 0.8 * entries[0]["loss"]
    assert {"loss", "margin", "reconstruction", "accuracy", "lr", "epoch", "seconds"} <= entries[0].keys()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoint.safetensors", "journal.jsonl", "recipe.json",
    ]  # fmt: skip
    loaded = load_run(tmp_path / "run")
    assert same(dict(loaded.model.state_dict()), dict(outcome.model.state_dict()))
    assert loaded.step == 120 and not loaded.model.training


def test_training_says_when_loops_are_compiled(tmp_path, capsys, monkeypatch):
    objective = CapsNet.objective

    def compiles(self, *args, **more):
        announce()
        return objective(self, *args, **more)

    monkeypatch.setattr(CapsNet, "objective", compiles)
    train(tiny(train={"epochs": 0.2}), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "compiling" in line] == ["tiny: compiling loops, once on this machine"]
    # Nobody is told any more when training is over
    announce()
    assert "compiling" not in capsys.readouterr().err


def test_two_runs_of_one_recipe_are_the_same_and_another_seed_is_not(tmp_path):
    for name, recipe in {"a": tiny(), "b": tiny(), "c": tiny(seed=4)}.items():
        train(recipe, tmp_path / name, quiet=True)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "RMSprop", "foreach Adam"])
@pytest.mark.parametrize("model", ["capsnet", "cnn"])
def test_stopping_and_resuming_changes_no_bit(tmp_path, optimizer, model):
    over = {"optimizer": {"name": optimizer.removeprefix("foreach "), "lr": 0.01}}
    if optimizer.startswith("foreach"):  # else fused
        over["optimizer"]["options"] = {"foreach": True}
    if optimizer == "SGD":
        over["optimizer"]["options"] = {"momentum": 0.9, "weight_decay": 1e-4}
    if model == "cnn":  # has dropout, whose noise must resume too
        over["model"] = {"name": "cnn", "widths": [4], "hidden": [8]}
    train(tiny(**over, train={"epochs": 2.0}), tmp_path / "whole", quiet=True)
    for epochs in (0.3, 1.1, 1.2, 2.0):  # more epochs is a free change: the run goes on
        train(tiny(**over, train={"epochs": epochs}), tmp_path / "parts", resume="auto", quiet=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    steps = [[e["step"] for e in read_journal(tmp_path / n / "journal.jsonl")] for n in ("whole", "parts")]
    assert set(steps[0]) <= set(steps[1]) and steps[1] == sorted(set(steps[1]))


def test_resuming_forgets_journal_lines_after_the_checkpoint(tmp_path):
    train(tiny(train={"epochs": 1.0}), tmp_path, quiet=True)
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text() + json.dumps({"step": 11, "loss": 1.0}) + '\n{"step": 12, "lo')
    train(tiny(train={"epochs": 2.0}), tmp_path, resume=True, quiet=True)
    steps = [e["step"] for e in read_journal(journal)]
    assert steps == sorted(set(steps)) and 11 not in steps and steps[-1] == 20


def test_a_finished_run_resumes_to_itself(tmp_path):
    train(tiny(), tmp_path, quiet=True)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    outcome = train(tiny(), tmp_path, resume=True, quiet=True)
    assert outcome.finished and (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_ctrl_c_saves_and_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    slow = CapsNet.objective
    monkeypatch.setattr(CapsNet, "objective", lambda *a: (time.sleep(0.02), slow(*a))[1])
    recipe = tiny(train={"epochs": 5.0, "save_every": 1000})
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    outcome = train(recipe, tmp_path / "cut", quiet=True)
    assert not outcome.finished and 0 < outcome.step < 50
    assert load_run(tmp_path / "cut").step == outcome.step
    train(recipe, tmp_path / "cut", resume=True, quiet=True)
    train(recipe, tmp_path / "whole", quiet=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_a_run_may_start_from_the_weights_of_another(tmp_path, monkeypatch):
    """Its weights before the first step are the other's; that one's steps and seconds count; cut off, it resumes."""
    train(tiny(), tmp_path / "first", quiet=True)
    first = load_run(tmp_path / "first")
    further = replace(tiny(), start=str(tmp_path / "first"), seed=7)
    seen = []
    objective = CapsNet.objective

    def look(self, batch, step):
        seen.append((step, {name: value.clone() for name, value in self.state_dict().items()}))
        return objective(self, batch, step)

    monkeypatch.setattr(CapsNet, "objective", look)
    outcome = train(further, tmp_path / "second", quiet=True)
    assert seen[0][0] == 0 and same(seen[0][1], first.model.state_dict())
    assert outcome.step == 2 * first.step and outcome.seconds > first.seconds
    assert len(seen) == first.step and not same(weights(tmp_path / "second"), weights(tmp_path / "first"))
    again = train(further, tmp_path / "second", resume=True, quiet=True)
    assert again.step == outcome.step and len(seen) == first.step


def test_a_start_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    train(tiny(), tmp_path / "first", quiet=True)
    first = str(tmp_path / "first")
    differences = {
        "model.types = 2 and model.decoder = [8], this run 3 and [8, 8];": {"model": {"decoder": [8, 8], "types": 3}},
        "images of 1x16x16 in 10 classes, this run images of 1x20x20 in 10 classes;": {"data": {"size": 20}},
        "model.name = capsnet, this run cnn;": {"model": {"name": "cnn"}},
    }
    for difference, change in differences.items():
        recipe = tiny(**change, start=first)
        wanted = f"the run to start from does not fit: '{first}' has {difference} take those settings, or start from"
        with pytest.raises(TrainingError, match=re.escape(wanted)):
            train(recipe, tmp_path / "second", quiet=True)
    with pytest.raises(CheckpointError, match="nowhere"):
        train(replace(tiny(), start=str(tmp_path / "nowhere")), tmp_path / "second", quiet=True)
    assert not (tmp_path / "second").exists()


def test_a_run_is_never_overwritten(tmp_path):
    train(tiny(), tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="--resume"):
        train(tiny(), tmp_path / "run", quiet=True)
    with pytest.raises(TrainingError, match=r"optimizer.lr = 0.01, now it is 0.5"):
        train(tiny(optimizer={"lr": 0.5}), tmp_path / "run", resume=True, quiet=True)
    assert (tmp_path / "run" / "checkpoint.safetensors").read_bytes() == before


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    for name, seed in {"a": 0, "b": 1}.items():
        train(tiny(seed=seed), tmp_path / name, quiet=True)
    (tmp_path / "b" / "checkpoint.safetensors").rename(tmp_path / "a" / "checkpoint.safetensors")
    with pytest.raises(TrainingError, match="seed = 1, now it is 0"):
        train(tiny(seed=0), tmp_path / "a", resume=True, quiet=True)


def test_what_a_killed_start_leaves_behind_is_no_obstacle(tmp_path):
    (tmp_path / ".torchcaps-123456-7.tmp").write_bytes(b"half")
    (tmp_path / "journal.jsonl").touch()
    assert train(tiny(), tmp_path, resume="auto", quiet=True).finished


def test_somebody_s_own_recipe_json_is_kept(tmp_path):
    (tmp_path / "recipe.json").write_text('{"cake": "eggs"}')
    with pytest.raises(TrainingError, match=r"recipe\.json"):
        train(tiny(), tmp_path, quiet=True)
    assert (tmp_path / "recipe.json").read_text() == '{"cake": "eggs"}'


def test_the_first_steps_are_those_of_a_loop_written_out(tmp_path):
    """Order, shift, schedule and clipping, one by one, from their own functions."""
    changes = {"train": {"epochs": 2.0, "batch": 40, "log_every": 1}, "schedule": {"options": {"gamma": 0.5}}}
    recipe = tiny(**changes)
    trained = train(recipe, tmp_path, quiet=True)
    data = recipe.data.load().train
    model = build_model(recipe, data.spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, (epoch, first) in enumerate([(0, 0), (0, 40), (1, 0), (1, 40)]):
        index = permutation(3, epoch, 80)[first : first + 40]
        images = shift(data.images[index].float() / 255, 2, SampleKey(3, epoch, index))
        loss = model.objective(Batch(images, data.labels[index], index), step)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5**step
        optimizer.step()
    assert trained.step == 4
    for a, b in zip(model.parameters(), trained.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    rates = [e["lr"] for e in read_journal(tmp_path / "journal.jsonl")]
    assert rates == pytest.approx([0.005, 0.0025, 0.00125, 0.000625])


def test_foreign_folders_and_files_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for resume in (False, True):
        with pytest.raises(TrainingError, match="holds no run"):
            train(tiny(), tmp_path / "mine", resume=resume, quiet=True)
    with pytest.raises(TrainingError, match="is a file"):
        train(tiny(), tmp_path / "mine" / "thesis.txt", quiet=True)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path):
    train(tiny(), tmp_path, quiet=True)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="checkpoint"):
        train(tiny(train={"epochs": 3.0}), tmp_path, resume=True, quiet=True)
    assert path.exists()


def test_a_loss_that_is_not_finite_ends_training_before_it_is_saved(tmp_path, monkeypatch):
    recipe = tiny(train={"epochs": 1.0, "save_every": 2, "log_every": 1})
    real = CapsNet.objective

    def broken(self, batch, step):
        terms = real(self, batch, step)
        return {**terms, "loss": terms["loss"] * float("nan")} if step >= 5 else terms

    monkeypatch.setattr(CapsNet, "objective", broken)
    with pytest.raises(TrainingError, match="loss is nan at step 6"):
        train(recipe, tmp_path, quiet=True)
    assert load_run(tmp_path).step == 4
    assert all(torch.isfinite(v).all() for v in weights(tmp_path).values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """The loss of the step is finite, its gradient is not."""
    real = CapsNet.objective

    def steep(self, batch, step):
        terms = real(self, batch, step)
        zero = (self.conv.weight.sum() * 0).abs().sqrt()  # value 0, slope nan
        return {**terms, "loss": terms["loss"] + zero} if step == 5 else terms

    monkeypatch.setattr(CapsNet, "objective", steep)
    with pytest.raises(TrainingError, match="weights are not finite at step 6"):
        train(tiny(train={"save_every": 2, "clip": "none"}), tmp_path, quiet=True)
    assert load_run(tmp_path).step == 4
    assert all(torch.isfinite(v).all() for v in weights(tmp_path).values())


def test_moving_averages_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """The weights are finite, a buffer is not: evaluation would see nothing but it."""
    real = CapsNet.objective

    def spoilt(self, batch, step):
        if step == 5:
            self.register_buffer("average", torch.tensor(float("inf")), persistent=False)
        return real(self, batch, step)

    monkeypatch.setattr(CapsNet, "objective", spoilt)
    with pytest.raises(TrainingError, match="not finite at step 6"):
        train(tiny(train={"save_every": 2}), tmp_path, quiet=True)
    assert load_run(tmp_path).step == 4


def test_a_start_that_failed_may_be_tried_again_with_another_recipe(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    assert train(tiny(), tmp_path, quiet=True).finished


def test_a_full_disk_ends_training_with_one_line_and_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    train(tiny(train={"epochs": 1.0}), tmp_path, quiet=True)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="No space left") as caught:
        train(tiny(train={"epochs": 2.0}), tmp_path, resume=True, quiet=True)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_bad_sizes_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ShapeError, match="too small"):
        train(tiny(model={"kernel": 17}), tmp_path / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_larger_than_the_set_shrinks_and_says_so(tmp_path, caplog):
    recipe = tiny(train={"batch": 99, "epochs": 2.0})
    assert train(recipe, tmp_path, quiet=True).step == 2
    assert caplog.messages == ["train.batch = 99 is more than the 80 training images; 80 is used"]
    assert recipe_in(tmp_path).train.batch == 80
    assert train(recipe, tmp_path, resume="auto", quiet=True).finished, "the same recipe goes on"
    assert shrink_batches(recipe, 80, processes=3).train.batch == 80, "on any number of processes"
    with pytest.raises(DataError, match="2 training images are fewer than the 3 processes"):
        shrink_batches(recipe, 2, processes=3)


def test_of_few_images_training_takes_the_least_number_of_steps(tmp_path):
    settings = tiny(train={"epochs": 2.0, "batch": 8, "min_steps": 50}).train
    assert settings.steps(80) == 50 and settings.steps(800) == 200
    assert train(tiny(train={"min_steps": 21}), tmp_path, quiet=True).step == 21
    # Who says how many epochs means them.
    assert (
        load_recipe("capsnet-folder").train.min_steps
        > 0
        == load_recipe("capsnet-folder", {"train": {"epochs": 3}}).train.min_steps
    )
    stages = load_recipe("poe-quick", {"stages": {"capsules": {"train": {"epochs": 1}}}}).stages
    assert stages["capsules"].train.min_steps == 0 < stages["autoencoder"].train.min_steps


def test_a_run_is_resumed_on_its_data_in_another_place(tmp_path):
    data = easy(tmp_path)
    train(tiny(data=data, train={"epochs": 1.0}), tmp_path / "run", quiet=True)
    moved = Path(data["path"]).rename(tmp_path / "moved.npz")
    more = tiny(data={**data, "path": str(moved)}, train={"epochs": 2.0})
    assert train(more, tmp_path / "run", resume=True, quiet=True).step == 20


def test_resuming_on_other_data_is_refused_in_one_line(tmp_path):
    data = easy(tmp_path)
    recipe = tiny(data=data, train={"epochs": 1.0})
    train(recipe, tmp_path / "run", quiet=True)
    more = replace(recipe, train=replace(recipe.train, epochs=2.0))
    with np.load(data["path"]) as arrays:
        content = dict(arrays)
    # One other pixel or label: of those to train on, or to test on.
    refused = {"images": "data", "labels": "data", "test_images": "test images", "test_labels": "test images"}
    for name, what in refused.items():
        changed = content[name].copy()
        changed.flat[0] = 3 - changed.flat[0] // 99
        np.savez(data["path"], **{**content, name: changed})
        with pytest.raises(
            TrainingError, match=rf"was started on other {what} \(fingerprint \w{{12}}, now \w{{12}}\)"
        ) as caught:
            train(more, tmp_path / "run", resume=True, quiet=True)
        assert "\n" not in str(caught.value)
    # A checkpoint of an earlier version names no data, and is accepted.
    path = tmp_path / "run" / "checkpoint.safetensors"
    edit_document(path, path, {"data_fingerprint": "none", "test_fingerprint": "none"})
    assert train(more, tmp_path / "run", resume=True, quiet=True).finished


def test_resuming_with_other_images_to_stop_by_is_refused(tmp_path):
    recipe = tiny(data=easy(tmp_path, validation=20), train={"epochs": 1.0, "validate_every": 5, "stop_at": 1.0})
    splits = recipe.data.load()
    data = TrainingData(DatasetSource(splits.train), splits.validation)
    train(recipe, tmp_path / "run", quiet=True, data=data)
    more = replace(recipe, train=replace(recipe.train, epochs=2.0))
    others = replace(splits.validation, labels=splits.validation.labels.flip(0))
    with pytest.raises(TrainingError, match="was started on other validation images"):
        train(more, tmp_path / "run", resume=True, quiet=True, data=data._replace(validation=others))
    assert train(more, tmp_path / "run", resume=True, quiet=True, data=data).finished


def test_the_test_accuracy_at_the_end_is_that_of_the_model(tmp_path):
    recipe = tiny(data=easy(tmp_path, validation=0), train={"epochs": 3.0})
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert outcome.test is not None and outcome.test.images == 40 and outcome.test.chance == 0.25
    test = recipe.data.load().test
    with torch.no_grad():
        right = outcome.model.eval().scores(test.model_input()).argmax(1) == test.labels
    assert outcome.test.accuracy == pytest.approx(float(right.double().mean()))


def test_batches_come_from_a_thread_and_its_errors_reach_the_loop(tmp_path, monkeypatch):
    seen = []

    def failing(data, order, position, *rest, **more):
        seen.append(threading.current_thread() is threading.main_thread())
        if position.number == 3:
            raise DataError("no such image")
        return make_batch(data, order, position, *rest, **more)

    monkeypatch.setattr("torchcaps.train.batches.make_batch", failing)
    with pytest.raises(DataError, match="no such image"):
        train(tiny(), tmp_path, quiet=True)
    assert not any(seen) and not [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_options_may_be_lists(tmp_path):
    recipe = tiny(
        optimizer={"options": {"betas": [0.8, 0.9]}},
        schedule={"name": "MultiStepLR", "options": {"milestones": [3, 5], "gamma": 0.1}},
    )
    train(recipe, tmp_path, quiet=True)
    assert read_journal(tmp_path / "journal.jsonl")[-1]["lr"] == pytest.approx(1e-4)
    assert train(recipe, tmp_path, resume=True, quiet=True).finished


@pytest.mark.parametrize("state", [{}, [], 3, {"model": {}}, {"model": {"$tensor": "state.model.x"}}])
def test_a_whole_checkpoint_with_a_state_that_is_none_is_refused(tmp_path, state):
    train(tiny(train={"epochs": 0.1}), tmp_path, quiet=True)
    path = tmp_path / "checkpoint.safetensors"
    edit_document(path, path, {}, state=state)
    with pytest.raises(CheckpointError, match=r"another kind of run|is missing"):
        load_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"another kind of run|is missing"):
        train(tiny(), tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize(
    "change",
    [{"spec": ["a", 1, 1, 1]}, {"spec": [1, 1 << 40, 16, 10]}, {"step": float("inf")}, {"step": -7}, {"spam": 1}],
)
def test_a_whole_checkpoint_with_nonsense_inside_is_refused(tmp_path, change):
    train(tiny(train={"epochs": 0.1}), tmp_path, quiet=True)
    path = tmp_path / "checkpoint.safetensors"
    edit_document(path, path, change)
    with pytest.raises(CheckpointError):
        load_run(tmp_path)


def test_bfloat16_trains(tmp_path):
    if not multiplies_bfloat16():
        pytest.skip("torch's bfloat16 product is an illegal instruction here")
    outcome = train(tiny(train={"precision": "bfloat16", "epochs": 1.0}), tmp_path, quiet=True)
    assert outcome.finished
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in outcome.model.parameters())


def test_channels_last_is_for_convolutions_only():
    model = build_model(tiny(), tiny().data.load().train.spec)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.classes.W.is_contiguous()


def test_denormal_numbers_are_flushed_during_training_only(tmp_path):
    small = torch.tensor(1e-310, dtype=torch.float64)
    with flushed_denormals():
        assert float(small * 1) == 0
        with flushed_denormals():
            pass
        assert float(small * 1) == 0
    assert float(small * 1) > 0
    train(tiny(train={"epochs": 0.1}), tmp_path, quiet=True)
    assert float(small * 1) > 0


def test_the_number_of_steps_follows_the_epochs():
    assert total_steps(tiny(train={"epochs": 0.5}), 80) == 5
    assert total_steps(tiny(train={"epochs": 0.0001}), 80) == 1


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the track extra is not installed")
    train(tiny(train={"epochs": 1.0}), tmp_path, quiet=True, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"optimizer": {"name": "Adm"}}, "did you mean 'Adam'"),
        ({"optimizer": {"options": {"momentm": 0.9}}}, "no option 'momentm'"),
        ({"optimizer": {"lr": 0.0}}, "lr"),
        ({"schedule": {"name": "CosineAnealingLR"}}, "did you mean 'CosineAnnealingLR'"),
        ({"schedule": {"name": "StepLR", "options": {}}}, "needs the option 'step_size'"),
        ({"train": {"batch": 0}}, "batch"),
        ({"train": {"bach": 1}}, "did you mean 'batch'"),
        ({"model": {"routing": {"iterations": 0}}}, "iterations"),
        ({"model": {"name": "capsnt"}}, "did you mean 'capsnet'"),
        ({"data": {"name": "glyph"}}, "did you mean 'glyphs'"),
        ({"data": {"size": 4}}, "size"),
        ({"seed": -1}, "seed"),
        ({"name": "../../escaped"}, "it names files"),
        ({"optimizer": {"name": "LBFGS"}}, "unknown optimizer"),
        ({"schedule": {"name": "StepLR", "options": {"step_size": 0}}}, "wanted: 1 or more"),
        ({"model": {"name": "cnn", "widths": []}}, "at least one"),
    ],
)
def test_recipes_with_a_slip_are_refused_in_one_line(over, text):
    with pytest.raises(RecipeError, match=text) as caught:
        tiny(**over)
    assert "\n" not in str(caught.value)
