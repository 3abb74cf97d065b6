"""States come back with their types, bit for bit, and training goes on from them as if it had never stopped."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, Optimizer, RMSprop, lr_scheduler

from support.tensor_equality import any_tensor, assert_same_state, one_line
from torchcaps.errors import CheckpointError
from torchcaps.train.checkpoint import read_tensors, write_tensors
from torchcaps.train.state_packing import pack_state, unpack_state


def through_a_file(state: Any, path: Path) -> Any:
    tensors, skeleton = pack_state(state, "state")
    write_tensors(path, tensors, {"state": skeleton})
    came = read_tensors(path)
    return unpack_state(came.document["state"], came.tensors)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: RMSprop([{"params": [p], "lr": 0.01} for p in model.parameters()], centered=True),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
}


def run(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> None:
    for n in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(n))
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_training_resumed_from_a_file_is_training_never_stopped(tmp_path: Path, method: str, schedule: str) -> None:
    def fresh() -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS[method](model)
        return model, optimizer, SCHEDULERS[schedule](optimizer)

    straight = fresh()
    run(*straight, range(4))
    state = [part.state_dict() for part in straight]
    came = through_a_file(state, tmp_path / "a")
    assert_same_state(came, state)
    resumed = fresh()
    for part, saved in zip(resumed, came, strict=True):
        part.load_state_dict(saved)
    run(*straight, range(4, 9))
    run(*resumed, range(4, 9))
    assert_same_state([part.state_dict() for part in resumed], [part.state_dict() for part in straight])


KEYS = st.integers() | st.text(max_size=3) | st.sampled_from(["$tensor", "$tuple", "$dict", "0", "a.b", "a"])
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | any_tensor(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(STATES, st.sampled_from(["", "optimizer", "a"]))
def test_unpack_inverts_pack(state: Any, prefix: str) -> None:
    tensors, skeleton = pack_state(state, prefix)
    assert all(name.startswith(prefix) for name in tensors)
    assert_same_state(unpack_state(json.loads(json.dumps(skeleton)), tensors), state)


def test_names_are_paths_and_stay_apart_when_they_read_the_same() -> None:
    state = {"a": {0: torch.zeros(1), "0": torch.ones(1)}, "a.0": torch.full((1,), 2.0)}
    tensors, skeleton = pack_state(state, "p")
    assert {name: tensor.item() for name, tensor in tensors.items()} == {
        "p.a.0": 0,
        "p.a.0~": 1,
        "p.a.0~~": 2,
    }
    assert_same_state(unpack_state(skeleton, tensors), state)


def test_a_parameter_is_packed_without_its_graph() -> None:
    tensors, _ = pack_state([nn.Parameter(torch.ones(2))], "p")
    assert not tensors["p.0"].requires_grad


@pytest.mark.parametrize(
    "value", [len, object(), {1}, 1j, b"bytes", np.float64(1), torch.Size([1]), torch.float32, range(3)]
)
def test_what_cannot_be_packed_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        pack_state({"groups": [0, {"bad": value}]}, "optimizer")
    one_line(error, "'optimizer.groups.1.bad'", type(value).__name__)


@pytest.mark.parametrize("key", [True, None, 1.5, (1, 2)])
def test_a_key_that_cannot_be_packed_is_named(key: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        pack_state({"groups": {key: 1}}, "optimizer")
    one_line(error, "'optimizer.groups'", repr(key))


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        pack_state(state, "p")
    with pytest.raises(CheckpointError, match="too deep"):
        unpack_state(state, {})


def test_a_missing_tensor_is_named() -> None:
    tensors, skeleton = pack_state({"m": torch.ones(1), "v": torch.ones(1)}, "adam")
    del tensors["adam.v"]
    with pytest.raises(CheckpointError, match=r"'adam\.v' of the state is missing"):
        unpack_state(skeleton, tensors)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": 3},
        {"$tensor": ["w"]},
        {"$tensor": "w", "more": 1},
        {"$tuple": {"0": 1}},
        {"$tuple": None},
        {"$dict": {"a": 1}},
        {"$dict": [["a"]]},
        {"$dict": [["a", 1, 2]]},
        {"$dict": [[None, 1]]},
        {"$dict": [[["a"], 1]]},
        {"$dict": [[True, 1]]},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$counter": 3},
        {"$eval": "1 + 1"},
        {"a": [{"$": 1}]},
        {0: 1},
        (1, 2),
        len,
        [torch.ones(1)],
    ],
)
def test_a_malformed_skeleton_is_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        unpack_state(skeleton, {"w": torch.ones(1)})
    one_line(error, "skeleton of a state")


def test_a_counter_comes_back_as_one() -> None:
    tensors, skeleton = pack_state(Counter({3: 2, "x": 1}), "p")
    assert tensors == {}
    assert_same_state(unpack_state(skeleton, {}), Counter({3: 2, "x": 1}))
