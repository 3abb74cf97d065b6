"""Several processes that share nothing but a link: process 0 decides, all agree or all end, as one would."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from support.easy_images import easy
from support.ranks import Ranks
from support.tiny_recipe import tiny_toml
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.train import load_recipe, load_run, train
from torchcaps.train.recipe import TrainConfig
from torchcaps.utils.distributed import ProcessGroup, restart_count, select_device


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_toml(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, 20 steps."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(load_recipe(str(recipe)), folder, quiet=True)
    return folder


def assert_equal_runs(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    first, second = load_run(one), load_run(two)
    assert first.step == second.step and first.finished and second.finished
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=tolerance)


def test_processes_without_a_shared_folder_resume_from_what_process_0_has(recipe, alone, tmp_path) -> None:
    """Before, each asked its own disk: the second began at step 0, and wrong weights were saved as finished."""
    words = ["train", recipe, "--out", "run", "--quiet", "--train.epochs"]
    assert [one.code for one in Ranks(tmp_path, [[*words, 1]] * 2).wait()] == [0, 0]
    assert load_run(tmp_path / "0" / "run").step == 10
    # By the recipe's name, and by the folder alone, which the second process does not have
    for more in ([*words, 1.5, "--resume", "auto"], ["train", "--resume", "run", "--quiet", "--train.epochs", 2]):
        ended = Ranks(tmp_path, [more] * 2).wait()
        assert [one.code for one in ended] == [0, 0], ended
    assert_equal_runs(alone, tmp_path / "0" / "run")
    assert not (tmp_path / "1" / "run").exists()


def test_processes_start_from_a_run_that_process_0_has(recipe, alone, tmp_path) -> None:
    words = ["train", recipe, "--out", "run", "--quiet", "--train.epochs", 0.5, "--start"]
    ended = Ranks(tmp_path, [[*words, alone], [*words, "nowhere"]]).wait()
    assert [one.code for one in ended] == [0, 0], ended
    train(load_recipe(str(recipe), {"start": str(alone), "train": {"epochs": 0.5}}), tmp_path / "one", quiet=True)
    assert_equal_runs(tmp_path / "one", tmp_path / "0" / "run")


def test_processes_that_disagree_end_at_once_with_one_line(recipe, tmp_path) -> None:
    words = ["train", recipe, "--out", "run", "--quiet"]
    missing = ["--data.name", "npz", "--data.path", "missing.npz"]
    cases = {
        "batch": ([*words], [*words, "--train.batch", 16], "train.batch is 16 in process 1 and 8 in process 0"),
        "data": ([*words, *missing[:3], easy(tmp_path)["path"]], [*words, *missing], "missing.npz"),
        "folder": ([*words[:-2], recipe, "--quiet"], [*words], "choose another --out"),
    }
    for name, (first, second, line) in cases.items():
        begun = time.monotonic()
        ended = Ranks(tmp_path / name, [first, second]).wait()
        assert time.monotonic() - begun < 120
        for one in ended:
            assert one.code == 2 and line in one.text and one.text.count("\n") == 1, (name, ended)
        assert not (tmp_path / name / "0" / "run").exists()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_process_that_is_gone_or_silent_ends_the_others_in_time(recipe, tmp_path, sent) -> None:
    words = ["train", recipe, "--out", "run", "--quiet", "--train.epochs", 1000, "--train.save-every", 2]
    ranks = Ranks(tmp_path, [words] * 2, environment={"TORCHCAPS_TIMEOUT": 6})  # also for the start
    saved = tmp_path / "0" / "run" / "checkpoint.safetensors"
    while not saved.exists() and ranks.processes[0].is_alive():
        time.sleep(0.02)
    begun = time.monotonic()
    os.kill(ranks.processes[1].pid, sent)
    ranks.processes[0].join(60)
    assert time.monotonic() - begun < 40
    ranks.processes[1].kill()
    first, _ = ranks.wait()
    assert first.code == 2 and "--resume" in first.text and first.text.count("torchcaps: ") == 1, first
    assert load_run(tmp_path / "0" / "run").step >= 2


def test_micro_batches_do_the_same_on_any_number_of_processes(tmp_path) -> None:
    """Random numbers included: dropout depends on the number of the micro-batch."""
    path = tmp_path / "own.toml"
    path.write_text(
        f'data = {{ name = "npz", path = "{easy(tmp_path)["path"]}" }}\n'
        'model = { name = "cnn", widths = [4], dropout = 0.5 }\n'
        "train = { epochs = 1.0, batch = 8, micro_batch = 2, clip = 0.1 }\n"
    )
    recipe = load_recipe(str(path))
    train(recipe, tmp_path / "one", quiet=True)
    ended = Ranks(tmp_path, [["train", path, "--out", "run", "--quiet"]] * 2).wait()
    assert [one.code for one in ended] == [0, 0], ended
    assert_equal_runs(tmp_path / "one", tmp_path / "0" / "run")


def test_micro_batches_change_no_gradient(recipe, tmp_path) -> None:
    overrides = {"train": {"epochs": 0.5, "batch": 8, "clip": "none"}}
    train(load_recipe(str(recipe), overrides), tmp_path / "whole", quiet=True)
    overrides["train"]["micro_batch"] = 4
    train(load_recipe(str(recipe), overrides), tmp_path / "parts", quiet=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_evaluation_is_shared_and_says_the_same(alone, tmp_path, capsys) -> None:
    from torchcaps.cli import main

    words = ["evaluate", alone, "--json"]
    main([str(word) for word in words])
    single = json.loads(capsys.readouterr().out)
    first, second = Ranks(tmp_path, [[*words, "--results", "results"]] * 2).wait()
    assert first.code == second.code == 0, (first, second)
    assert second.text == "" and not (tmp_path / "1" / "results").exists()
    found, _ = json.JSONDecoder().raw_decode(first.text)  # what to do next follows
    assert found["metrics"].keys() == single["metrics"].keys()
    for name, values in single["metrics"].items():
        assert found["metrics"][name] == pytest.approx(values, abs=1e-6), name
    assert (tmp_path / "0" / "results").is_dir()


# ------------------------------------------------------------------------------------------ without a second process


def test_batches_and_micro_batches_that_cannot_be_shared_are_refused() -> None:
    assert [TrainConfig(batch=8).micro_batches(n) for n in (1, 2, 4)] == [1, 1, 1]
    assert [TrainConfig(batch=8, micro_batch=2).micro_batches(n) for n in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(RecipeError, match="multiple"):
        TrainConfig(batch=8).micro_batches(3)
    with pytest.raises(RecipeError, match="multiple"):
        TrainConfig(batch=8, micro_batch=2).micro_batches(8)
    with pytest.raises(RecipeError, match="divisor"):
        TrainConfig(batch=8, micro_batch=3)


def test_models_with_statistics_of_the_batch_refuse_micro_batches(recipe, tmp_path) -> None:
    for model in ({"name": "sparse-small", "stride": 1}, {"name": "matrix-tiny", "norm": True}):
        given = load_recipe(str(recipe), {"model": model, "train": {"micro_batch": 4}})
        with pytest.raises(RecipeError, match="whole batch"):
            train(given, tmp_path / "run", quiet=True)


def test_each_process_has_its_own_gpu(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert select_device(3, gpus=0) == torch.device("cpu")
    assert [select_device(rank, gpus=2) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(TrainingError, match="has no GPU"):
        select_device(2, gpus=2)
    # A scheduler may show each process its own GPU alone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert select_device(2, gpus=1) == torch.device("cuda", 0)


def test_a_group_of_one_decides_alone(monkeypatch) -> None:
    group = ProcessGroup()
    group.check_same({"a": 1})
    assert group.send(b"own") == b"own"
    with pytest.raises(TrainingError, match="own"), group.raising_together():
        raise TrainingError("own")
    assert restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2
