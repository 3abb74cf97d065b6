"""Several processes that share nothing but a link: process 0 decides, all agree or all end, as one would."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
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
from torchcaps.utils.distributed import ProcessGroup, process_group, restart_count, select_device


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
        "folder": ([*words[:-2], recipe, "--quiet"], [*words], "choose another folder"),
    }
    for name, (first, second, line) in cases.items():
        ended = Ranks(tmp_path / name, [first, second]).wait()
        for one in ended:
            assert one.code == 2 and line in one.text and one.text.count("\n") == 1, (name, ended)
        assert not (tmp_path / name / "0" / "run").exists()


@pytest.mark.parametrize(
    ("lost", "sent"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), pytest.param(0, signal.SIGSTOP, marks=pytest.mark.long)],
    ids=["killed", "silent", "main"],
)
def test_a_process_that_is_gone_or_silent_ends_the_others(recipe, tmp_path, lost, sent) -> None:
    words = ["train", recipe, "--out", "run", "--quiet", "--train.epochs", 1000, "--train.save-every", 2]
    # Also the limit for the start, where processes may wait for a processor
    ranks = Ranks(tmp_path, [words] * 2, environment={"TORCHCAPS_TIMEOUT": 10})
    saved = tmp_path / "0" / "run" / "checkpoint.safetensors"
    while not saved.exists() and ranks.processes[0].is_alive():
        time.sleep(0.02)
    os.kill(ranks.processes[lost].pid, sent)
    ranks.processes[1 - lost].join(200)
    ranks.processes[lost].kill()
    other = ranks.wait()[1 - lost]
    assert other.code == 2 and "--resume" in other.text and other.text.count("torchcaps: ") == 1, other
    assert load_run(tmp_path / "0" / "run").step >= 2


def leave_by_an_error(words: list[str]) -> int:
    """Train a step in a group, leave it by an error that keeps the module, and print the names of threads."""
    try:
        with process_group() as group:
            module = group.wrap(torch.nn.Linear(3, 2))
            module(torch.ones(1, 3)).sum().backward()
            print("inside", *thread_names())
            raise TrainingError("the error of a step")
    except TrainingError as error:
        print("outside", *thread_names())
        return int(error.__traceback__ is None)


def thread_names() -> list[str]:
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_the_threads_of_a_group_end_with_it_and_not_with_a_module_that_an_error_keeps(tmp_path) -> None:
    """Before, they ended when the error was deleted, with the interpreter locked: a thread that wanted it waited."""
    ranks = Ranks(tmp_path, [[]] * 2, function=leave_by_an_error)
    for one in ranks.wait():
        inside, outside = one.text.splitlines()
        assert one.code == 0 and "gloo" in inside and "gloo" not in outside, one


def test_a_process_0_that_never_answers_is_not_waited_for(monkeypatch) -> None:
    """Before, reading from its store had no limit: the silence of a stopped process 0 at the start lasted for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "TORCHCAPS_TIMEOUT": 1}
        for name, value in (variables | {"MASTER_PORT": silent.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(TrainingError, match="has not answered for 1 s"), process_group():
            pytest.fail("joined a group that does not exist")


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
    # Two of the four micro-batches each, and one, one and two
    for size in (2, 3):
        ended = Ranks(tmp_path / str(size), [["train", path, "--out", "run", "--quiet"]] * size).wait()
        assert [one.code for one in ended] == [0] * size, ended
        assert_equal_runs(tmp_path / "one", tmp_path / str(size) / "0" / "run")


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


def test_shares_of_a_batch_are_all_of_it_and_weigh_what_they_hold() -> None:
    for settings in (TrainConfig(batch=12), TrainConfig(batch=12, micro_batch=2)):
        for processes in range(1, 7):
            shares = [settings.share(rank, processes) for rank in range(processes)]
            rows = [row for share in shares for row in range(12)[share.rows]]
            assert rows == list(range(12))
            sizes = [len(range(12)[share.rows]) for share in shares]
            assert [share.weight for share in shares] == pytest.approx([n * processes / 12 for n in sizes])
            assert max(sizes) - min(sizes) <= (settings.micro_batch or 1)
            # Every micro-batch, or every process, has random numbers of its own
            numbers = [share.first_part + n for share in shares for n in range(share.parts)]
            assert numbers == list(range(6 if settings.micro_batch else processes))


def test_batches_with_less_than_one_part_for_each_process_are_refused() -> None:
    with pytest.raises(RecipeError, match="a batch of 8 images is too small for 9 processes"):
        TrainConfig(batch=8).share(0, 9)
    with pytest.raises(RecipeError, match="a batch of 4 micro-batches of 2 images is too small for 5 processes"):
        TrainConfig(batch=8, micro_batch=2).share(0, 5)
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
