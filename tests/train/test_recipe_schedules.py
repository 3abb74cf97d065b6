"""A learning-rate schedule ends where training ends, however many steps that is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from support.tiny_recipe import tiny
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.train import load_recipe, recipe_names, total_steps, train
from torchcaps.train.optimizer import LENGTH_OPTIONS, OPTIMIZERS, SCHEDULES
from torchcaps.train.recipe import OptimizerConfig, ScheduleConfig, StageConfig, stage_names, stage_of

NEEDED = {"OneCycleLR": {"max_lr": 0.1}}


def rates(stage: StageConfig, steps: int) -> list[float]:
    """The learning rate of every step of a stage, and the one after the last; nothing is trained."""
    optimizer = stage.optimizer.build([nn.Parameter(torch.zeros(2, 2))])
    schedule = stage.schedule.build(optimizer, steps)
    assert schedule is not None
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def scheduled(name: str) -> list[StageConfig]:
    """The stages of a recipe whose schedule is as long as their training."""
    recipe = load_recipe(name)
    stages = [stage_of(recipe, stage) for stage in stage_names(recipe.model)]
    return [stage for stage in stages if stage.schedule.depends_on_length]


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", [name for name in recipe_names() if scheduled(name)])
def test_the_schedule_of_a_recipe_ends_where_training_ends(name: str, times: float) -> None:
    """With half and twice its epochs too; of as few images as make a schedule of some 200 steps quick to follow."""
    for stage in scheduled(name):
        settings = replace(stage.train, epochs=times * stage.train.epochs)
        images = settings.batch * max(1, round(200 / stage.train.epochs))
        steps = settings.steps(images)
        found = rates(replace(stage, train=settings), steps)
        assert len(found) == steps + 1
        highest = max(found)
        # Averaged weights need no rate of nearly 0 at the end.
        lowest = 0.01 if settings.ema_decay is None else 0.1
        assert found[steps - 1] < lowest * highest, "the last step has the lowest rate"
        assert found.index(highest) < 0.5 * steps


def test_the_recipes_whose_rate_does_not_depend_on_their_length_are_those_meant() -> None:
    for name in ("sparse-affnist-paper", "matrix-smallnorb-paper"):
        assert not scheduled(name)
    for name in ("capsnet-folder", "capsnet-mnist-small", "poe-quick", "matrix-mnist-small"):
        assert scheduled(name)


@pytest.mark.parametrize("epochs", [0.1, 1.0, 5.0, 40.0])
def test_the_demo_may_be_of_any_length(epochs: float) -> None:
    recipe = load_recipe("poe-quick")
    for name in stage_names(recipe.model):
        stage = stage_of(recipe, name)
        if stage.schedule.name != "constant":
            rates(stage, replace(stage.train, epochs=epochs).steps(12_000))


@pytest.mark.parametrize("name", LENGTH_OPTIONS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 50])
def test_schedules_of_very_few_steps(name: str, steps: int) -> None:
    """10 steps and pct_start = .1 make a rise of no steps, by which torch divides."""
    options = {**NEEDED[name], "pct_start": 1 / steps} if name == "OneCycleLR" else {}
    stage = StageConfig(OptimizerConfig("SGD", 0.1, {"momentum": 0.9}), ScheduleConfig(name, options))
    assert len(rates(stage, steps)) == steps + 1


def test_a_length_that_a_recipe_may_state_is_taken() -> None:
    warmup = ScheduleConfig("LinearLR", {"start_factor": 0.1, "total_iters": 5})
    assert not warmup.depends_on_length
    found = rates(StageConfig(OptimizerConfig("SGD", 1.0), warmup), steps=10)
    assert found[5:] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("key", ["total_steps", "epochs", "steps_per_epoch"])
def test_the_length_of_a_cycle_is_the_loops(key: str) -> None:
    with pytest.raises(RecipeError, match=f"leave {key} out; the number of steps is known to the loop"):
        tiny(schedule={"name": "OneCycleLR", "options": {"max_lr": 0.1, key: 100}})


ONE_CYCLE = {"name": "OneCycleLR", "options": {"max_lr": 0.01}}


def test_a_run_is_not_resumed_with_other_epochs_if_its_schedule_depends_on_them(tmp_path) -> None:
    recipe = tiny(train={"epochs": 1.0}, schedule=ONE_CYCLE)
    train(recipe, tmp_path, quiet=True)
    longer = tiny(train={"epochs": 2.0}, schedule=ONE_CYCLE)
    with pytest.raises(TrainingError, match=r"train\.epochs = 1\.0, now it is 2\.0; its schedule OneCycleLR ends with"):
        train(longer, tmp_path, resume=True, quiet=True)


def test_a_cycle_of_a_whole_training_is_that_of_torch(tmp_path) -> None:
    recipe = tiny(train={"epochs": 2.0, "log_every": 1}, schedule=ONE_CYCLE)
    from torchcaps.train.journal import read_journal

    train(recipe, tmp_path, quiet=True)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total_steps(recipe, 80))
    expected = []
    for _ in range(20):
        optimizer.step()
        schedule.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert [entry["lr"] for entry in read_journal(tmp_path / "journal.jsonl")] == expected


# --- What a recipe may state ------------------------------------------------------------------------------------------


def test_no_step_is_taken_while_a_recipe_is_read(monkeypatch) -> None:
    def step(*_: object, **__: object) -> None:
        raise AssertionError("an optimizer took a step")

    for kind in OPTIMIZERS.values():
        monkeypatch.setattr(kind, "step", step)
    assert all(load_recipe(name).name == name for name in recipe_names())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step_with_its_defaults(name: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    OptimizerConfig(name).build([weight]).step()
    assert bool((weight != 1).all()) and bool(weight.isfinite().all())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_stated(name: str) -> None:
    needed: dict[str, dict[str, object]] = {
        "StepLR": {"step_size": 3}, "MultiStepLR": {"milestones": (3, 5)}, "ExponentialLR": {"gamma": 0.9},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1}, "CosineAnnealingWarmRestarts": {"T_0": 4}, **NEEDED,
    }  # fmt: skip
    schedule = ScheduleConfig(name, needed.get(name, {}))
    found = rates(StageConfig(OptimizerConfig("SGD", 0.1, {"momentum": 0.9}), schedule), steps=12)
    assert len(found) == 13 and all(rate >= 0 for rate in found)


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"optimizer": {"options": {"momentm": 0.9}}}, "Adam has no option 'momentm'"),
        ({"optimizer": {"options": {"lr": 0.9}}}, "has no option 'lr'"),
        ({"optimizer": {"options": {"eps": "small"}}}, "option eps = 'small'; wanted: float"),
        ({"optimizer": {"options": {"eps": True}}}, "option eps = True; wanted: float"),
        ({"optimizer": {"options": {"amsgrad": 1}}}, "option amsgrad = 1; wanted: bool"),
        ({"optimizer": {"options": {"betas": 0.9}}}, "option betas = 0.9; wanted: tuple"),
        ({"optimizer": {"options": {"betas": [0.9, 2.0]}}}, "refuses .*Invalid beta"),
        ({"optimizer": {"options": {"betas": ["a", "b"]}}}, "refuses"),
        ({"optimizer": {"options": {"capturable": True}}}, "has no option 'capturable'"),
        ({"optimizer": {"name": "SparseAdam"}}, "unknown optimizer"),
        ({"schedule": {"name": "StepLR", "options": {"step_size": 2.5}}}, "step_size = 2.5; wanted: int"),
        ({"schedule": {"name": "StepLR", "options": {"step_size": 0}}}, "step_size = 0; wanted: 1 or more"),
        ({"schedule": {"name": "StepLR"}}, "needs the option 'step_size'"),
        ({"schedule": {"name": "OneCycleLR"}}, "needs the option 'max_lr'"),
        ({"schedule": {"name": "OneCycleLR", "options": {"max_lr": 0.1, "pct_start": 2.0}}}, "refuses"),
        ({"schedule": {"name": "OneCycleLR", "options": {"max_lr": 0.1, "anneal_strategy": "cosine"}}}, "refuses"),
        ({"schedule": {"name": "LambdaLR"}}, "unknown schedule"),
        ({"schedule": {"name": "ReduceLROnPlateau"}}, "unknown schedule"),
        ({"schedule": {"name": "constant", "options": {"gamma": 0.9}}}, "leave gamma out"),
    ],
)
def test_options_are_checked_by_signature(over: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text) as caught:
        tiny(**over)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_fused_step_is_the_default_on_a_cpu_and_the_same_but_for_rounding(name):
    found = []
    for options in ({}, {"fused": False}, {"foreach": True}):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 33))
        optimizer = OptimizerConfig(name, 0.01, options).build([weight])
        assert bool(optimizer.defaults["fused"]) is (not options)
        for step in range(3):
            weight.grad = torch.linspace(-1, 2, 33) ** (step + 1)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    assert torch.equal(found[1], found[2])
