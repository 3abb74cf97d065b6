"""Two machines, each in a network namespace of its own, without a shared folder; one loses its worker on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.ranks import elastic_node, start
from support.tiny_recipe import tiny_toml
from torchcaps.train import load_recipe, load_run, train
from torchcaps.train.journal import read_journal

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CHANGES = {"optimizer": {"name": "SGD", "lr": 0.05}, "train": {"epochs": 6.0, "save_every": 5}}  # 60 steps


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces that are linked by a cable."""
    names = [f"caps{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and `ip`: {error}")
    try:
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def wait_for(happened, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)
    assert happened()


def test_two_hosts_train_as_one_though_a_worker_is_killed(hosts: list[str], tmp_path: Path) -> None:
    recipe = tiny_toml(tmp_path)
    words = ["train", recipe, "--out", "run", "--quiet", "--optimizer.name", "SGD", "--optimizer.lr", 0.05]
    words += ["--train.epochs", 6, "--train.save-every", 5]
    homes = [tmp_path / letter for letter in "ab"]
    agents = []
    for name, address, home in zip(hosts, ADDRESSES, homes, strict=True):
        home.mkdir()
        variables = {"NETWORK_NAMESPACE": name, "OWN_ADDRESS": address, "GLOO_SOCKET_IFNAME": name}
        variables["TORCHCAPS_TIMEOUT"] = 30
        agents.append(start(elastic_node, [f"{ADDRESSES[0]}:29400", "2", *map(str, words)], home, variables))
    try:
        # Kill the worker of the second host when the first has a checkpoint
        wait_for(lambda: (homes[0] / "run" / "checkpoint.safetensors").exists() or not agents[0].is_alive())
        os.kill(int((homes[1] / "worker-0.pid").read_text()), signal.SIGKILL)
        train(load_recipe(str(recipe), CHANGES), tmp_path / "one", quiet=True)  # meanwhile, the run of one process
        for agent in agents:
            agent.join(120)
        said = [(home / "output.txt").read_text() for home in homes]
        assert [agent.exitcode for agent in agents] == [0, 0], said
    finally:
        for agent in agents:
            agent.kill()
    # It was restarted, and went on by itself to the same end
    assert (homes[0] / "worker-1.pid").exists() and (homes[1] / "worker-1.pid").exists()
    one, two = load_run(tmp_path / "one"), load_run(homes[0] / "run")
    assert one.step == two.step == 60 and two.finished
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(two.model.state_dict()[name], value, rtol=0, atol=1e-5)
    assert [line["step"] for line in read_journal(homes[0] / "run" / "journal.jsonl")][-1] == 60
    assert not (homes[1] / "run").exists()
