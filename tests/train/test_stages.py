"""Training in stages: each trains its own part, and no cut, wherever it falls, changes a bit."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from support import staged_model
from support.processes import Forked, run_group
from support.staged_model import STAGES, STEPS, StagedConfig, events, mishaps, staged, staged_toml
from support.tiny_recipe import edit_document
from torchcaps.cli import main
from torchcaps.errors import CheckpointError, RecipeError, TrainingError
from torchcaps.models import MODELS
from torchcaps.testing import assert_resumes
from torchcaps.testing import resume as instrument
from torchcaps.train import load_run, total_steps, train
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.journal import read_journal
from torchcaps.train.recipe import StageConfig, load_recipe, stage_of, with_all_stages
from torchcaps.train.run import recipe_in
from torchcaps.train.train_state import build_model, shrink_batches, stage_seed
from torchcaps.utils.distributed import ProcessGroup, mean_over_processes
from torchcaps.utils.random import permutation, seed_of


class LostError(Exception):
    """The process is gone, and all that it had in memory."""


def lose() -> None:
    raise LostError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def toy_model(monkeypatch):
    monkeypatch.setitem(MODELS, "staged", StagedConfig)
    events.clear()
    mishaps.clear()
    yield
    mishaps.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    MODELS["staged"] = StagedConfig
    folder = tmp_path_factory.mktemp("whole")
    train(staged(), folder, quiet=True)
    del MODELS["staged"]
    return folder


def state(folder) -> dict[str, torch.Tensor]:
    return dict(load_run(folder).model.state_dict())


def part(folder, stage: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state(folder).items() if name.startswith(stage)}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_same_run(one, other) -> None:
    """Tensors, position and optimizer; and the journals tell of the same steps, each once."""
    instrument._assert_same(one, other)
    entries = [{e["step"]: e for e in read_journal(f / "journal.jsonl")} for f in (one, other)]
    steps = [e["step"] for e in read_journal(other / "journal.jsonl")]
    assert steps == sorted(set(steps))
    assert entries[0].keys() <= entries[1].keys()
    for step, entry in entries[0].items():
        told = entries[1][step]
        assert (entry["stage"], entry["loss"]) == (told["stage"], told["loss"])


def lost_at(recipe, folder, *where, resume: bool = False) -> None:
    mishaps[where] = lose
    with pytest.raises(LostError):
        train(recipe, folder, resume=resume, quiet=True)
    del mishaps[where]


# ------------------------------------------------------------------------------------- what is trained


def test_each_stage_trains_its_own_part_and_the_rest_stands_still(tmp_path):
    recipe = staged()
    fresh = dict(build_model(recipe, recipe.data.load().train.spec).state_dict())
    seen = [fresh]
    for stage in ("head", "moments"):
        lost_at(recipe, tmp_path, stage, "prepare", resume=stage != "head")
        seen.append(state(tmp_path))  # the checkpoint at the end of the stage before
    outcome = train(recipe, tmp_path, resume=True, quiet=True)
    seen.append(dict(outcome.model.state_dict()))
    for number, moved in enumerate(STAGES):
        before, after = seen[number], seen[number + 1]
        for name, value in before.items():
            if name.startswith(moved):
                assert not torch.equal(value, after[name]), name
            else:
                assert torch.equal(value, after[name]), name
    assert outcome.finished and outcome.step == sum(STEPS.values()) == total_steps(recipe, 80)


def test_the_order_of_calls_and_what_is_at_rest(tmp_path):
    train(staged(), tmp_path, quiet=True)
    wanted = [(stage, what) for stage in STAGES for what in ("prepare", *range(STEPS[stage]), "finish")]
    assert events == wanted
    entries = [e for e in read_journal(tmp_path / "journal.jsonl") if e["stage"] == "head"]
    assert [e["outside"] for e in entries] == [0.0] * 5  # the frozen part is in evaluation mode


def test_the_later_stages_are_those_of_loops_written_out(whole):
    """Order, seed, optimizer and gathered mean of the second and third stage, from their own functions."""
    recipe = staged()
    data = recipe.data.load().train
    model = build_model(recipe, data.spec).eval()
    model.code.load_state_dict(load_run(whole).model.code.state_dict())
    with torch.no_grad():
        codes = model.code(data.images.float() / 255)
    out = model.head.out
    speed = [torch.zeros_like(p) for p in out.parameters()]
    for step in range(10):
        index = permutation(seed_of(3, 2, 1), step // 5, 80)[step % 5 * 16 :][:16]
        loss = F.cross_entropy(out(codes[index]), data.labels[index])
        slopes = torch.autograd.grad(loss, list(out.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in slopes))
        for p, v, g in zip(out.parameters(), speed, slopes, strict=True):
            v.mul_(0.9).add_(g * min(1.0, 1.0 / (float(norm) + 1e-6)))
            p.data -= 0.1 * v
    trained = load_run(whole).model
    torch.testing.assert_close(trained.head.out.weight, out.weight, rtol=1e-5, atol=1e-6)
    train_codes = trained.moments.total / 10  # shifted by up to 2 pixels, so near the mean and not equal to it
    torch.testing.assert_close(trained.moments.offset.detach(), train_codes)
    assert float(trained.moments.count) == 10


def test_the_gathered_mean_is_the_mean_over_an_epoch(tmp_path):
    train(staged(stages={"moments": {"train": {"max_shift": 0}}}), tmp_path, quiet=True)
    model = load_run(tmp_path).model
    with torch.no_grad():
        codes = model.code(staged().data.load().train.images.float() / 255)
    torch.testing.assert_close(model.moments.offset.detach(), codes.mean(0))


def test_a_stage_without_gradients_moves_no_parameter_and_has_no_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_model.Moments, "finish", lambda self: None)
    outcome = train(staged(), tmp_path, quiet=True)
    assert not outcome.model.moments.offset.any()
    assert outcome.model.moments.offset.grad is None
    assert outcome.model.moments.total.any() and not outcome.model.moments.total.requires_grad
    checkpoint = read_checkpoint(tmp_path / "checkpoint.safetensors")
    assert checkpoint.state["optimizer"] is None and checkpoint.meta.stage == "moments"
    assert all(("lr" in e) == (e["stage"] != "moments") for e in read_journal(tmp_path / "journal.jsonl"))


def test_the_first_stage_keeps_the_seed_of_the_recipe_and_the_others_have_their_own():
    seeds = [stage_seed(3, number) for number in range(3)]
    assert seeds[0] == 3 and len(set(seeds)) == 3
    assert seeds == [stage_seed(3, number) for number in range(3)]
    assert stage_seed(4, 1) != seeds[1]


def test_the_mean_over_a_team_of_one():
    x = torch.tensor([1.0, 2.0])
    assert mean_over_processes(x) is x
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(mean_over_processes(x), x)
        ProcessGroup(size=2).broadcast(model := torch.nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last))
    finally:
        torch.distributed.destroy_process_group()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------- cuts


def test_a_run_lost_at_every_kind_of_moment_ends_the_same(tmp_path, whole):
    for stage in STAGES:
        for what in ("prepare", 0, 3, 4, STEPS[stage] - 1, "finish"):
            lost_at(staged(), tmp_path, stage, what, resume="auto")
    outcome = train(staged(), tmp_path, resume=True, quiet=True)
    assert outcome.finished and outcome.step == 32
    assert_same_run(whole, tmp_path)


def test_prepare_is_called_again_after_a_resumption_with_the_same_random_numbers(tmp_path):
    drawn = []
    mishaps["head", "prepare"] = lambda: drawn.append(float(torch.rand(())))
    lost_at(staged(), tmp_path, "head", 6)
    train(staged(), tmp_path, resume=True, quiet=True)
    assert len(drawn) == 2 and drawn[0] == drawn[1]
    assert events.count(("code", "prepare")) == 1  # a stage that is over is not gone through again


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_any_stage_saves_and_goes_on_as_if_nothing_had_been(tmp_path, whole, stage):
    mishaps[stage, 4] = interrupt
    recipe = staged(train={"save_every": 1000}, stages={s: {"train": {"save_every": 1000}} for s in STAGES})
    outcome = train(recipe, tmp_path, quiet=True)
    before = sum(STEPS[s] for s in STAGES[: STAGES.index(stage)])
    assert not outcome.finished and outcome.step == before + 5 == load_run(tmp_path).step
    mishaps.clear()
    assert train(staged(), tmp_path, resume=True, quiet=True).finished
    assert_same_run(whole, tmp_path)


def test_ctrl_c_between_stages_stops_there(tmp_path, whole):
    mishaps["code", "finish"] = interrupt
    outcome = train(staged(), tmp_path, quiet=True)
    assert not outcome.finished and outcome.step == 12
    assert ("head", "prepare") not in events
    mishaps.clear()
    train(staged(), tmp_path, resume=True, quiet=True)
    assert events.count(("code", "finish")) == 1
    assert_same_run(whole, tmp_path)


def test_kill_9_in_each_stage_changes_no_bit(tmp_path, whole):
    """At the start, in the middle and at the end of stages, of which the first alone has no checkpoint at its start."""
    words = ["train", str(staged_toml(tmp_path)), "--out", str(tmp_path / "run"), "--quiet", "--resume", "auto"]
    for moment in ("code:prepare", "code:6", "code:finish", "head:6", "head:finish", "moments:7", "moments:finish"):
        assert Forked(staged_model.killed_command, moment, *words).wait() == -signal.SIGKILL, moment
    Forked(staged_model.command, *words).finish()
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.long
def test_kills_at_random_moments_of_each_stage(tmp_path, monkeypatch):
    def start(recipe, out, words):
        return Forked(staged_model.command, "train", recipe, "--out", str(out), "--quiet", *words)

    monkeypatch.setattr(instrument, "_start", start)
    longer = [w for s in STAGES for w in (f"--stages.{s}.train.epochs", "40")]
    assert assert_resumes(str(staged_toml(tmp_path)), tmp_path, kills=9, words=longer) >= 5


def test_the_instrument_knows_where_the_stages_lie(whole):
    spans = instrument._spans(read_journal(whole / "journal.jsonl"))
    assert [span.before for span in spans] == [0, 12, 22]
    assert sum(span.seconds for span in spans) == pytest.approx(
        read_journal(whole / "journal.jsonl")[-1]["seconds"], abs=1e-9
    )
    plain = instrument._spans([{"step": 2, "seconds": 1.0}, {"step": 4, "seconds": 3.0}])
    assert plain == [(0, 3.0)]


def test_two_processes_equal_one_in_every_stage(tmp_path):
    """In the second process the first stage ends otherwise (`staged_model.command`); the next starts from process 0."""
    words = ["train", str(staged_toml(tmp_path)), "--quiet", "--model.dropout", "0"]
    run_group(staged_model.command, *words, "--out", str(tmp_path / "two"))
    train(load_recipe(words[1], {"model": {"dropout": 0}}), tmp_path / "one", quiet=True)
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    for stage in STAGES:
        assert max(float((one[k] - two[k]).abs().max()) for k in one if k.startswith(stage)) <= 1e-6
    assert load_run(tmp_path / "two").step == 32
    steps = [[e["step"] for e in read_journal(tmp_path / n / "journal.jsonl")] for n in ("one", "two")]
    assert steps[0] == steps[1]


# ------------------------------------------------------------------------------------- what may change


def test_more_epochs_are_free_in_the_stage_that_runs_and_past_stages_stay_past(tmp_path):
    longer = staged(train={"epochs": 9.0}, stages={"head": {"train": {"epochs": 3.0}}})
    train(longer, tmp_path / "whole", given={"code": build_model(longer, staged().data.load().train.spec).code})
    given = {"code": build_model(longer, staged().data.load().train.spec).code}
    mishaps["head", 6] = lose
    with pytest.raises(LostError):
        train(staged(), tmp_path / "cut", quiet=True, given=given)
    mishaps.clear()
    outcome = train(longer, tmp_path / "cut", resume=True, quiet=True)
    assert outcome.finished and outcome.step == 15 + 10
    assert same(part(tmp_path / "whole", "head"), part(tmp_path / "cut", "head"))


def test_the_last_stage_goes_on_after_its_end_and_finishes_again(tmp_path, whole):
    shorter = staged(stages={"moments": {"train": {"epochs": 0.5}}})
    assert train(shorter, tmp_path, quiet=True).step == 27
    assert train(shorter, tmp_path, resume=True, quiet=True).step == 27
    assert events.count(("moments", "prepare")) == 1  # there was nothing to do
    assert train(staged(), tmp_path, resume=True, quiet=True).step == 32
    assert events.count(("moments", "finish")) == 2
    instrument._assert_same(whole, tmp_path)


def test_the_recipe_keeps_the_epochs_of_what_is_over(tmp_path, caplog):
    """Of a finished run: earlier stages for good, the last one unless it gets more; file and checkpoint agree."""
    train(staged(), tmp_path, quiet=True)
    asked = staged(stages={"code": {"train": {"epochs": 7.0}}, "moments": {"train": {"epochs": 0.5}}})
    assert train(asked, tmp_path, resume=True, quiet=True).step == 32
    assert any("stage 'code' is over" in said and "7 are not trained" in said for said in caplog.messages)
    kept = {name: stage_of(recipe_in(tmp_path), name).train.epochs for name in STAGES}
    assert kept == {name: stage_of(staged(), name).train.epochs for name in STAGES}
    assert {name: stage_of(load_run(tmp_path).recipe, name).train.epochs for name in STAGES} == kept
    # More epochs of the last stage are said and trained
    caplog.clear()
    train(staged(stages={"moments": {"train": {"epochs": 3.0}}}), tmp_path, resume=True, quiet=True)
    assert any("it goes on to 3" in said for said in caplog.messages)
    assert stage_of(load_run(tmp_path).recipe, "moments").train.epochs == 3


def test_fewer_epochs_end_the_stage_properly(tmp_path):
    lost_at(staged(), tmp_path, "moments", 9)
    outcome = train(staged(stages={"moments": {"train": {"epochs": 0.5}}}), tmp_path, resume=True, quiet=True)
    assert outcome.finished and outcome.step == 30
    model = load_run(tmp_path).model
    assert torch.equal(model.moments.offset, model.moments.total / 8)


def test_other_settings_of_a_stage_may_not_change(tmp_path):
    train(staged(), tmp_path, quiet=True)
    with pytest.raises(TrainingError, match=r"stages\.head\.optimizer\.lr = 0\.1, now it is 0\.5"):
        train(staged(stages={"head": {"optimizer": {"lr": 0.5}}}), tmp_path, resume=True, quiet=True)
    own = staged(stages={"code": {"train": {"epochs": 5.0, "log_every": 1, "save_every": 3}}})  # its first own table
    assert train(own, tmp_path, resume=True, quiet=True).finished
    with pytest.raises(TrainingError, match=r"stages\.code\.train\.batch"):
        train(staged(stages={"code": {"train": {"batch": 4}}}), tmp_path, resume=True, quiet=True)


# ------------------------------------------------------------------------------------- given


def test_a_given_stage_is_taken_over_and_not_trained(tmp_path, whole):
    other = load_run(whole).model
    recipe = staged(seed=4)
    outcome = train(recipe, tmp_path, quiet=True, given={"code": other.code})
    assert outcome.finished and outcome.step == 20
    assert {stage for stage, _ in events} == {"head", "moments"}
    assert same(part(tmp_path, "code"), part(whole, "code"))
    assert not same(part(tmp_path, "head"), part(whole, "head"))


@pytest.mark.parametrize("again", [True, False])
def test_a_run_with_a_given_stage_resumes(tmp_path, whole, again):
    given = {"code": load_run(whole).model.code}
    train(staged(seed=4), tmp_path / "whole", quiet=True, given=given)
    for what in ("prepare", 6):  # before the head's first checkpoint, and after it
        mishaps["head", what] = lose
        with pytest.raises(LostError):
            train(staged(seed=4), tmp_path / "cut", resume="auto", quiet=True, given=given)
        mishaps.clear()
    train(staged(seed=4), tmp_path / "cut", resume="auto", quiet=True, given=given if again else {})
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert ("code", 0) not in events


def test_a_later_stage_may_be_given(tmp_path, whole):
    given = {"head": load_run(whole).model.head, "moments": load_run(whole).model.moments}
    lost_at(staged(seed=4), tmp_path, "code", 6)
    outcome = train(staged(seed=4), tmp_path, resume=True, quiet=True, given=given)
    assert outcome.finished and outcome.step == 12
    assert same(part(tmp_path, "head"), part(whole, "head"))
    assert same(part(tmp_path, "moments"), part(whole, "moments"))


def test_what_is_given_wrongly_is_refused_before_anything_is_written(tmp_path, whole):
    with pytest.raises(RecipeError, match="did you mean 'moments'"):
        train(staged(), tmp_path / "a", given={"moment": torch.nn.Linear(1, 1)})
    with pytest.raises(TrainingError, match="stage 'head' does not fit") as caught:
        train(staged(model={"width": 5}), tmp_path / "a", given={"head": load_run(whole).model.head})
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- recipes and bad input


def test_a_stage_takes_what_it_does_not_say_from_the_recipe():
    recipe = staged()
    assert stage_of(recipe, "code") == StageConfig(recipe.optimizer, recipe.schedule, recipe.train)
    head = stage_of(recipe, "head")
    assert (head.train.batch, head.train.epochs, head.train.clip, head.train.save_every) == (16, 2.0, 1.0, 4)
    assert (head.optimizer.name, head.optimizer.lr, head.schedule.name) == ("SGD", 0.1, "constant")
    moments = stage_of(recipe, "moments")
    assert (moments.optimizer, moments.schedule) == (recipe.optimizer, recipe.schedule)
    assert moments.train == replace(recipe.train, epochs=1.0)
    assert [*with_all_stages(recipe).stages] == [*STAGES] and with_all_stages(
        with_all_stages(recipe)
    ) == with_all_stages(recipe)


def test_another_optimizer_does_not_inherit_the_options_of_the_first():
    over = {"optimizer": {"options": {"betas": [0.5, 0.6]}}, "stages": {"code": {"optimizer": {"lr": 0.5}}}}
    recipe = staged(**over)
    assert recipe.stages["code"].optimizer.options == {"betas": (0.5, 0.6)}
    assert recipe.stages["head"].optimizer.options == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"haed": {}}, "no stage 'haed'; did you mean 'head'"),
        ({"all": {}}, "known: code, head, moments"),
        ({"head": 3}, "stages.head = 3 is not a table"),
        ({"head": {"optimizer": 3}}, r"stages\.head\.optimizer = 3 is not a table"),
        ({"head": {"train": {"bach": 3}}}, r"stages\.head\.train\.bach'; did you mean 'batch'"),
        ({"head": {"optimizer": {"name": "Adm"}}}, "did you mean 'Adam'"),
    ],
)
def test_slips_in_stages_are_refused_in_one_line(stages, text):
    with pytest.raises(RecipeError, match=text) as caught:
        staged(stages=stages)
    assert "\n" not in str(caught.value)


def test_a_table_of_stages_that_is_none_is_refused():
    with pytest.raises(RecipeError, match="stages = 3 is not a table"):
        staged(stages=3)


def test_a_model_of_one_stage_may_name_it_all():
    from support.tiny_recipe import tiny

    recipe = tiny(stages={"all": {"train": {"epochs": 3.0}}})
    assert total_steps(recipe, 80) == 1  # from_dict fills nothing in: batch 128 of 80 images
    with pytest.raises(RecipeError, match="no stage 'code'; known: all"):
        tiny(stages={"code": {}})


def test_a_batch_of_any_stage_shrinks_to_the_set(caplog):
    recipe = shrink_batches(staged(stages={"moments": {"train": {"batch": 81}}}), 80)
    assert recipe.stages["moments"].train.batch == 80
    assert caplog.messages == ["stages.moments.train.batch = 81 is more than the 80 training images; 80 is used"]
    caplog.clear()
    shrink_batches(staged(train={"batch": 99}, stages={"moments": {"train": {"batch": 81}}}), 80)
    line = "train.batch = 99, stages.moments.train.batch = 81 are more than the 80 training images; 80 is used"
    assert caplog.messages == [line]


def test_a_batch_is_refused_in_any_stage_before_anything_is_written(tmp_path, monkeypatch):
    class OneOfFour(ProcessGroup):
        """A process whose fellows say what it says."""

        def mean(self, values):
            return values

        def send(self, data=b""):
            return data

        def _gather_lines(self, text):
            return [text] * 4

    @contextmanager
    def four():
        yield OneOfFour(size=4)

    monkeypatch.setattr("torchcaps.train.loop.process_group", four)
    with pytest.raises(RecipeError, match="batch of 3 images is too small for 4 processes"):
        train(staged(stages={"head": {"train": {"batch": 3}}}), tmp_path / "a", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_in_a_later_stage(tmp_path, monkeypatch):
    real = staged_model.Head.objective

    def broken(self, batch, step):
        terms = real(self, batch, step)
        return {**terms, "loss": terms["loss"] * float("nan")} if step >= 5 else terms

    monkeypatch.setattr(staged_model.Head, "objective", broken)
    with pytest.raises(TrainingError, match=r"loss is nan at step 18 \(stage 'head'\)"):
        train(staged(), tmp_path, quiet=True)
    assert load_run(tmp_path).step == 16


def test_weights_that_finish_made_infinite_are_never_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_model.Moments, "finish", lambda self: self.offset.fill_(float("inf")))
    with pytest.raises(TrainingError, match=r"weights are not finite at step 32 \(stage 'moments'\)"):
        train(staged(), tmp_path, quiet=True)
    assert load_run(tmp_path).step == 30


def test_a_model_whose_stages_are_not_those_of_its_configuration_is_a_mistake_in_it(monkeypatch):
    monkeypatch.setattr(staged_model.Staged, "stages", lambda self: {"code": self.code})
    with pytest.raises(TypeError, match="STAGES"):
        build_model(staged(), staged().data.load().train.spec)


@pytest.mark.parametrize(
    "change",
    [{"stage": "haed"}, {"stage": ["head"]}, {"steps_before": 99}, {"steps_before": -1}, {"steps_before": "x"}],
)
def test_nonsense_about_stages_in_a_checkpoint_is_refused(tmp_path, whole, change):
    edit_document(whole / "checkpoint.safetensors", tmp_path / "checkpoint.safetensors", change)
    with pytest.raises(CheckpointError):
        load_run(tmp_path)


def test_a_stage_is_not_gone_on_with_from_the_state_of_another(tmp_path):
    train(staged(), tmp_path, quiet=True)
    path = tmp_path / "checkpoint.safetensors"
    edit_document(path, path, {"stage": "code"})
    with pytest.raises(CheckpointError, match="belongs to another kind of run"):
        train(staged(), tmp_path, resume=True, quiet=True)


def test_a_checkpoint_of_an_unknown_recipe_is_refused(tmp_path):
    train(staged(), tmp_path, quiet=True)
    path = tmp_path / "checkpoint.safetensors"
    edit_document(path, path, {"recipe": {"model": {"name": "later"}}})
    with pytest.raises(CheckpointError, match="no recipe known here"):
        train(staged(), tmp_path, resume=True, quiet=True)


# ------------------------------------------------------------------------------------- what a person sees


def test_the_journal_counts_on_and_names_the_stage(whole):
    entries = read_journal(whole / "journal.jsonl")
    assert [(e["step"], e["stage"]) for e in entries] == [
        (step, "code" if step <= 12 else "head" if step <= 22 else "moments") for step in range(2, 33, 2)
    ]
    seconds = [e["seconds"] for e in entries]
    assert seconds == sorted(seconds) and load_run(whole).seconds >= seconds[-1]


def test_every_stage_has_a_bar_of_its_own(tmp_path, capsys):
    train(staged(), tmp_path)
    steps = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    last = dict(step.rsplit(" ", 1) for step in steps)  # a slow machine shows steps before the last, too
    assert last == {"staged: code: step": "12/12", "staged: head: step": "10/10", "staged: moments: step": "10/10"}


def test_tensorboard_keeps_stages_apart(tmp_path):
    pytest.importorskip("tensorboard", reason="the track extra is not installed")
    train(staged(), tmp_path, quiet=True, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [e.step for e in board.Scalars("head/loss")] == [14, 16, 18, 20, 22]


def test_stages_on_the_command_line(tmp_path, capsys):
    recipe, out = str(staged_toml(tmp_path)), str(tmp_path / "run")
    assert main(["train", recipe, "--out", out, "--quiet", "--stages.code.train.epochs", "0.5"]) == 0
    assert "25 steps" in capsys.readouterr().out
    assert load_run(out).recipe.stages["code"].train.batch == 8  # as the recipe says, not as the class does
    assert main(["train", recipe, "--out", out, "--stages.haed.train.epochs", "2"]) == 2
    assert "did you mean 'head'" in capsys.readouterr().err
    assert main(["list", recipe]) == 0
    shown = capsys.readouterr().out
    assert "--stages.code.train.epochs" in shown and "--stages.head.optimizer.options.momentum" in shown


def test_a_model_of_one_stage_says_nothing_of_stages(tmp_path, capsys):
    from support.tiny_recipe import tiny, tiny_toml

    train(tiny(train={"epochs": 0.5}), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()  # one alone unless the machine is slow
    assert lines[-1].startswith("tiny: step 5/5") and all(line.startswith("tiny: step ") for line in lines)
    assert all("stage" not in e for e in read_journal(tmp_path / "run" / "journal.jsonl"))
    assert main(["list", str(tiny_toml(tmp_path))]) == 0
    assert "--stages" not in capsys.readouterr().out
