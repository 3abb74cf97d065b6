"""Any number of images in bounded memory, with the results of all at once; and every model under torch.compile."""

from __future__ import annotations

import os

import pytest
import torch

from support.small_models import DISTINCT, ROUTED, SMALL, SPEC, built, images
from torchcaps.errors import ShapeError
from torchcaps.kernels.threads import SWITCH, kernel_mode, kernels_enabled
from torchcaps.models import MODELS, CapsNet, Model, chunking
from torchcaps.types import Batch, Capsules

METHODS = ("encode", "scores", "reconstruct")


def tiled(model: Model, method: str) -> bool:
    """Whether the model's class, or one that it stands on, has a method that goes through tiles."""
    return hasattr(getattr(type(model), method, None), "__wrapped__")


CASES = [(name, method) for name in MODELS for method in METHODS if tiled(built(SMALL[name]), method)]


TILE = 7


@pytest.fixture
def allow(monkeypatch):
    """Sets the budget such that a tile of a model's method holds so many images; plain, since loops take a while."""
    monkeypatch.setenv(SWITCH, "plain")

    def limit(model: Model, method: str, tile: int = TILE) -> None:
        monkeypatch.setattr(chunking, "BUDGET", 2**26)
        with torch.no_grad():
            call(model, method, images(2))
        found = next(
            n for key, n in chunking._CHUNK_SIZES[model].items() if key[:2] == (unwrapped(model, method), 2**26)
        )
        monkeypatch.setattr(chunking, "BUDGET", tile * 2**26 // found)
        with torch.no_grad():
            call(model, method, images(2))  # looks at two images, once

    return limit


def unwrapped(model: Model, method: str):
    return getattr(type(model), method).__wrapped__


def call(model: Model, method: str, x: torch.Tensor):
    """`reconstruct` of CapsNet takes capsules and labels instead of images."""
    if method == "reconstruct" and isinstance(model, CapsNet):
        pose = x.flatten(1)[:, : 3 * 4].unflatten(1, (3, 4))
        return model.reconstruct(Capsules(pose, pose.norm(dim=-1)), chosen=torch.arange(len(x)) % 3)
    return getattr(model, method)(x)


def batches(model: Model) -> list[int]:
    """The sizes of the batches that the network itself gets to see from now on."""
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, given: seen.append(len(given[0])))
    return seen


def tensors(result) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, Capsules) else (result,)


def test_every_registered_model_is_tiled_here():
    assert {name for name, _ in CASES} == set(SMALL) == set(MODELS)
    assert {("cnn", "scores"), ("capsnet", "reconstruct"), ("poe", "encode"), ("matrix", "encode")} <= set(CASES)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_tiles_join_to_the_result_of_all_at_once(name, method, allow):
    model = built(SMALL[name])
    allow(model, method)
    for n in (1, 2, TILE, TILE + 1, 3 * TILE - 1):
        x = images(n)
        whole = call(model, method, x)  # with gradients, so not in tiles
        with torch.no_grad():
            tiled = call(model, method, x)
        assert type(tiled) is type(whole)
        for a, b in zip(tensors(tiled), tensors(whole), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_largest_batch_does_not_grow_with_the_number_of_images(name, method, allow):
    model = built(SMALL[name])
    allow(model, method)
    seen = batches(model)
    with torch.inference_mode():
        for n in (TILE, TILE + 1, 50):
            seen.clear()
            call(model, method, images(n))
            assert max(seen) <= TILE and sum(seen) % n == 0
            assert n > TILE or set(seen) == {n}  # what fits is not cut


def test_a_tile_is_as_large_as_the_budget_allows(monkeypatch):
    """The first convolution of this network makes 4 x 10 x 10 numbers of 4 bytes of an image; nothing makes more."""
    monkeypatch.setenv(SWITCH, "plain")
    model = built(SMALL["capsnet"])
    seen = batches(model)
    for tile in (1, 5, 30):
        monkeypatch.setattr(chunking, "BUDGET", tile * 4 * 10 * 10 * 4)
        with torch.no_grad():
            model.scores(images(2))
            seen.clear()
            model.scores(images(30))
        assert max(seen) == tile


@pytest.mark.parametrize("name", MODELS)
def test_no_images_are_refused_tiled_or_not(name):
    model = built(SMALL[name])
    method = "encode" if hasattr(model, "encode") else "scores"
    for record in (True, False):
        with torch.set_grad_enabled(record), pytest.raises(ShapeError, match="empty batch"):
            getattr(model, method)(images(0))


def test_errors_speak_of_what_came(allow):
    model = built(SMALL["capsnet"])
    allow(model, "scores")
    pose = torch.rand(50, 3, 4)
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"\[50, 5\]"):
            model.scores(torch.rand(50, 5))
        with pytest.raises(ShapeError, match=r"shape \[\]"):
            model.scores(torch.rand(()))
        for many in (49, 51):
            with pytest.raises(ShapeError, match="50 samples"):
                model.reconstruct(Capsules(pose, pose.norm(dim=-1)), torch.zeros(many).long())


def test_what_is_trained_or_differentiated_is_not_tiled(allow):
    model = built(SMALL["cnn"])
    allow(model, "scores")
    seen = batches(model)
    x = images(64).requires_grad_()
    model.scores(x).square().sum().backward()
    assert set(seen) == {64} and bool((x.grad.flatten(1).norm(dim=1) > 0).all())
    seen.clear()
    with torch.no_grad():
        model.train().scores(images(64))
    assert set(seen) == {64}


def test_the_plain_path_is_switched_on_and_back(monkeypatch):
    for before in (None, "fast", "plain"):
        monkeypatch.delenv(SWITCH, raising=False)
        if before:
            monkeypatch.setenv(SWITCH, before)
        with pytest.raises(ZeroDivisionError), kernel_mode("plain"):
            assert not kernels_enabled()
            raise ZeroDivisionError
        assert os.environ.get(SWITCH) == before
        assert kernels_enabled() == (before != "plain")


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")


@pytest.mark.parametrize("name", [*DISTINCT, "poe, routed"])
def test_compiled_models_give_the_same(name):
    model, x = built(SMALL.get(name, ROUTED)), images(3)
    methods = [method for method in ("scores", "encode") if tiled(model, method)]
    with torch.no_grad():
        expected = tensors(getattr(model, methods[0])(x))
        found = tensors(compiled(getattr(model, methods[0]))(x))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "capsnet",
        "cnn",
        pytest.param("matrix", marks=pytest.mark.long),
    ],
)
def test_compiled_classifiers_learn_the_same(name):
    batch = Batch(images(3), torch.arange(3) % SPEC.classes, torch.arange(3))

    def gradients(compile: bool):
        model = built(SMALL[name])
        objective = compiled(model.objective) if compile else model.objective
        loss = objective(batch, 0)["loss"]
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients(False), gradients(True)
    assert expected.keys() == found.keys() and len(found) > 4
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)
