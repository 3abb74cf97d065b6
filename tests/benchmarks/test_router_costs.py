"""A user's router equals the fused kernel that it is compared with, and tables are ratios of their two sides."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from benchmarks.cases import ROUTER_RUNS, case_of
from benchmarks.memory import Peaks
from experiments.sweep import EXPERIMENTS, load_sweep

from benchmarks import routers, user_router
from torchcaps.layers import DenseCapsules
from torchcaps.math.squash import norm, squash
from torchcaps.routing import ROUTERS, Dynamic
from torchcaps.types import Capsules


def test_the_users_router_equals_dynamic_routing(monkeypatch):
    monkeypatch.setitem(ROUTERS, "user", user_router.ROUTER)
    found = []
    for settings in (Dynamic(), user_router.UserDynamic()):
        torch.manual_seed(0)
        layer = DenseCapsules(96, 4, 8, 16, routing=settings)
        pose = squash(torch.randn(8, 96, 8)).requires_grad_()
        parents, info = layer(Capsules(pose, norm(pose)))
        parents.pose.square().sum().backward()
        found.append((parents.pose.detach(), info.coupling.squeeze(), pose.grad, layer.W.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_users_router_has_at_most_thirty_lines():
    tree = ast.parse(Path(user_router.__file__).read_text())
    parts = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert sum(node.end_lineno - node.lineno + 1 for node in parts) <= 30


def test_a_users_router_is_registered_only_while_it_is_measured():
    work = case_of("dynamic-user-48x8-3x16").ours(4)
    work.forward()
    work.step()
    assert "user" not in ROUTERS


def test_every_run_of_the_sweep_on_these_data_is_measured():
    runs = load_sweep(EXPERIMENTS / "routers.toml").runs
    assert set(ROUTER_RUNS) == {name for name in runs if name.startswith(("routers-mnist", "routers-smallnorb"))}


@pytest.fixture
def measured(monkeypatch):
    """Times by the length of a name, and no step that is run."""
    monkeypatch.setattr(routers, "_step_times", lambda names, seconds, cpu: {name: len(name) / 1000 for name in names})
    monkeypatch.setattr(routers, "peaks", lambda name, batch, what: Peaks(1.0, 2.0, 300.4))


def test_ratios_are_composed_over_fused_and_router_over_uniform(measured, tmp_path, capsys):
    table = routers.fused_table(1.0)
    assert table[1] == ["dynamic-user-1152x8-10x16", "25.0", "dynamic-1152x8-10x16", "20.0", "1.25"]
    path = tmp_path / "costs.json"
    assert routers.main(["table", "--cpu", "--seconds", "1", "--json", str(path)]) == 0
    costs = {row[0]: row[1:] for row in json.loads(path.read_text())}
    assert costs["run"] == ["CPU ms a step", "x uniform", "peak MB"]
    assert costs["routers-mnist"] == ["13", "1.00", "300"]
    assert costs["routers-mnist-vb"] == ["16", "1.23", "300"]
    assert "peak MB" in capsys.readouterr().out
