"""Checks on the validation images: they disturb nothing, and training stops at the first that finds enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import staged_model
from support.easy_images import easy
from support.staged_model import StagedConfig, events, staged
from support.tiny_recipe import tiny
from torchcaps.data import Dataset
from torchcaps.errors import RecipeError
from torchcaps.models import CNN, MODELS, Model
from torchcaps.testing import resume as instrument
from torchcaps.train import load_run, train
from torchcaps.train.journal import read_journal
from torchcaps.train.recipe import TrainConfig
from torchcaps.train.validation import validation_accuracy


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return easy(tmp_path_factory.mktemp("data"))


@pytest.fixture
def recipe(data):
    """A recipe of 40 steps, of a network with dropout, whose noise a check must not disturb."""

    def changed(**settings):
        more = {"epochs": 4.0, "max_shift": 0, "save_every": 4, **settings}
        return tiny(data=data, model={"name": "cnn", "widths": [4], "hidden": [8]}, train=more)

    return changed


def curve(folder) -> dict[int, float]:
    entries = read_journal(folder / "journal.jsonl")
    return {e["step"]: e["validation_accuracy"] for e in entries if "validation_accuracy" in e}


def first(checks: dict[int, float], enough: float) -> int:
    return next(step for step, found in checks.items() if found >= enough)


def test_checks_are_written_down_and_change_no_bit(tmp_path, recipe):
    train(recipe(), tmp_path / "plain", quiet=True)
    train(recipe(validate_every=3), tmp_path / "checked", quiet=True)
    instrument._assert_same(tmp_path / "plain", tmp_path / "checked")
    checks = curve(tmp_path / "checked")
    assert list(checks) == list(range(3, 40, 3)) and len({*checks.values()}) > 2
    assert not curve(tmp_path / "plain") and not load_run(tmp_path / "checked").stopped_early


def test_training_stops_at_the_first_check_that_finds_enough(tmp_path, recipe):
    train(recipe(validate_every=3), tmp_path / "whole", quiet=True)
    wanted = first(curve(tmp_path / "whole"), 0.9)
    assert 3 < wanted < 39
    outcome = train(recipe(validate_every=3, stop_at=0.9), tmp_path / "run", quiet=True)
    assert outcome.finished and outcome.step == wanted and not outcome.model.training
    assert list(curve(tmp_path / "run").items()) == list(curve(tmp_path / "whole").items())[: wanted // 3]
    assert load_run(tmp_path / "run").stopped_early and load_run(tmp_path / "run").step == wanted
    train(recipe(epochs=wanted / 10), tmp_path / "as long", quiet=True)  # these very steps, and no check
    instrument._assert_same(tmp_path / "as long", tmp_path / "run")


def test_the_accuracy_is_that_of_the_weights_that_are_kept(tmp_path, recipe):
    settings = recipe(validate_every=3, stop_at=0.9)
    train(settings, tmp_path, quiet=True)
    held_out = settings.data.load().validation
    with torch.no_grad():
        scores = load_run(tmp_path).model.scores(held_out.images.float() / 255)
    right = sum(int(row.argmax()) == int(label) for row, label in zip(scores, held_out.labels, strict=True))
    assert [*curve(tmp_path).values()][-1] == right / len(held_out)


def test_a_run_that_has_stopped_resumes_to_itself(tmp_path, recipe):
    settings = recipe(validate_every=3, stop_at=0.9)
    train(settings, tmp_path, quiet=True)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    for epochs in (4.0, 8.0):  # what was reached stays reached
        assert train(recipe(validate_every=3, stop_at=0.9, epochs=epochs), tmp_path, resume="auto", quiet=True).finished
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


class LostError(Exception):
    """The process is gone, and all that it had in memory."""


@pytest.mark.parametrize(("moment", "call"), [("objective", 6), ("scores", 2), ("finish", 1)])
def test_a_run_lost_anywhere_stops_at_the_same_step(tmp_path, recipe, monkeypatch, moment, call):
    """Between two checks, in one, and between the one that finds enough and the save, where `finish` lies."""
    settings = recipe(validate_every=3, stop_at=0.9)
    train(settings, tmp_path / "whole", quiet=True)
    real, seen = getattr(CNN, moment), []

    def lost(self, *given):
        seen.append(moment)
        if len(seen) == call:
            raise LostError
        return real(self, *given)

    monkeypatch.setattr(CNN, moment, lost)
    with pytest.raises(LostError):
        train(settings, tmp_path / "cut", quiet=True)
    assert train(settings, tmp_path / "cut", resume=True, quiet=True).finished
    instrument._assert_same(tmp_path / "whole", tmp_path / "cut")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole") and load_run(tmp_path / "cut").stopped_early


def test_epochs_that_run_out_first_end_the_run_and_more_of_them_may_reach_it(tmp_path, recipe):
    short = recipe(validate_every=3, stop_at=0.9, epochs=0.5)
    outcome = train(short, tmp_path / "run", quiet=True)
    assert outcome.finished and outcome.step == 5
    assert not load_run(tmp_path / "run").stopped_early
    train(recipe(validate_every=3, stop_at=0.9), tmp_path / "run", resume=True, quiet=True)
    train(recipe(validate_every=3, stop_at=0.9), tmp_path / "whole", quiet=True)
    instrument._assert_same(tmp_path / "whole", tmp_path / "run")
    assert load_run(tmp_path / "run").stopped_early


def test_another_accuracy_is_another_run(tmp_path, recipe):
    train(recipe(stop_at=0.9, epochs=0.5), tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"train\.stop_at = 0\.9, now it is 0\.8"):
        train(recipe(stop_at=0.8, epochs=0.5), tmp_path, resume=True, quiet=True)


def test_checks_are_every_200_steps_where_nothing_else_is_said():
    assert [step for step in range(1, 601) if TrainConfig(stop_at=0.0).validates_at(step)] == [200, 400, 600]
    assert [step for step in range(1, 21) if TrainConfig(validate_every=7).validates_at(step)] == [7, 14]
    assert not any(TrainConfig().validates_at(step) for step in range(1, 601))


@pytest.mark.parametrize("settings", [{"stop_at": 0.9}, {"validate_every": 3}])
def test_without_validation_images_nothing_starts(tmp_path, data, settings):
    with pytest.raises(RecipeError, match=r"set data\.validation") as caught:
        train(tiny(data={**data, "validation": 0}, train=settings), tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_what_is_no_classifier_has_no_accuracy_to_stop_at(tmp_path, data):
    other = {"name": "autoencoder", "channels": [4, 4], "kernel": 3}
    with pytest.raises(RecipeError, match="are for classifiers, and Autoencoder is none"):
        train(tiny(data=data, model=other, train={"stop_at": 0.9}), tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_the_lines_tell_the_accuracy(tmp_path, recipe, capsys):
    outcome = train(recipe(validate_every=3, stop_at=0.9), tmp_path)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"tiny: step {outcome.step}/40, loss ")
    assert f"validation {[*curve(tmp_path).values()][-1]:.2%}" in line and line.endswith("images/s, 0 s left")


def test_a_stage_that_stops_is_finished_and_the_next_begins(tmp_path, data, monkeypatch):
    monkeypatch.setitem(MODELS, "staged", StagedConfig)
    monkeypatch.setattr(
        staged_model.Staged, "scores", lambda self, images: self.head.out(self.code(images)), raising=False
    )
    events.clear()
    outcome = train(staged(data=data, stages={"code": {"train": {"stop_at": 0.0, "validate_every": 5}}}), tmp_path)
    assert [what for stage, what in events if stage == "code"] == ["prepare", 0, 1, 2, 3, 4, "finish"]
    assert outcome.finished and outcome.step == 5 + 10 + 10
    assert list(curve(tmp_path)) == [5] and not load_run(tmp_path).stopped_early  # the last stage ended with its epochs


class Sure(Model):
    """Knows the first label of each image from its first pixel, and takes class 0 for the other."""

    def scores(self, images: Tensor) -> Tensor:
        scores = torch.zeros(len(images), 5)
        scores[:, 0] = 0.5
        return scores.scatter(1, (images[:, 0, 0, :1] * 255).round().long(), 1.0)


def test_of_two_labels_both_must_be_right():
    labels = torch.arange(600)[:, None] % torch.tensor([[4, 2]]) + 1  # 1 ... 4 and 1 or 2
    labels[::3, 1] = 0
    images = labels[:, :1, None, None].to(torch.uint8).expand(-1, 1, 2, 2)
    data = Dataset(images, labels, classes=5)
    assert validation_accuracy(Sure().eval(), data, torch.device("cpu")) == pytest.approx(1 / 3)
    single = Dataset(images, labels[:, 0], classes=5)
    assert validation_accuracy(Sure().eval(), single, torch.device("cpu")) == 1
