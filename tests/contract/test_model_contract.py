"""Every model in MODELS keeps the contract of `models.Model`; a model that is added there is held to it at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from support.small_models import SMALL, SPEC, built
from torchcaps.models import MODELS, Model
from torchcaps.models.chunking import in_chunks, is_chunked

IN_CHUNKS = ("encode", "scores", "reconstruct")
"""The public methods that take any number of samples."""


def methods(model: type[Model]) -> dict[str, Callable[..., object]]:
    """The functions that a model's class and those it stands on define, `Model` itself excepted."""
    own = [cls for cls in reversed(model.__mro__) if issubclass(cls, Model) and cls is not Model]
    return {name: value for cls in own for name, value in vars(cls).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", MODELS)
def test_methods_of_samples_take_any_number(name: str) -> None:
    found = methods(type(built(SMALL[name])))
    assert set(found) & set(IN_CHUNKS), f"{name} has none of {IN_CHUNKS}"
    unmarked = [method for method in IN_CHUNKS if method in found and not is_chunked(found[method])]
    assert not unmarked, f"{name}: mark {unmarked} with @in_chunks"


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrapped_behind_the_models_back(name: str) -> None:
    model = type(built(SMALL[name]))
    assert all("__init_subclass__" not in vars(cls) for cls in model.__mro__ if issubclass(cls, Model))
    for method, function in methods(model).items():
        marked = "@in_chunks" in inspect.getsource(inspect.unwrap(function)).split("def ")[0]
        assert marked == is_chunked(function), method


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_models_named_by_the_configuration(name: str) -> None:
    stages = built(SMALL[name]).stages()
    assert tuple(stages) == getattr(SMALL[name], "STAGES", ("all",))
    assert all(isinstance(stage, Model) for stage in stages.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_knows_its_images_and_whether_it_classifies(name: str) -> None:
    model = built(SMALL[name])
    assert model.spec == SPEC
    assert model.is_classifier == ("scores" in methods(type(model)))
    if not model.is_classifier:
        with pytest.raises(TypeError, match="is not a classifier"):
            model.scores(torch.zeros(1, *SPEC[:3]))


def test_only_what_is_marked_is_chunked() -> None:
    def scores(model: Model, images: torch.Tensor) -> torch.Tensor:
        return images

    assert not is_chunked(scores)
    assert is_chunked(in_chunks(scores))
