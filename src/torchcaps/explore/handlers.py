"""What the server computes for each request: from an open run and a parsed request to what JSON can hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchcaps.errors import ShapeError
from torchcaps.explore.messages import (
    MAX_CHILDREN,
    DrawRequest,
    EncodedImage,
    InferRequest,
    RoutingRequest,
    SampleGridRequest,
    SampleRequest,
    SweepRequest,
    decode_image,
    encode_images,
    to_json,
)
from torchcaps.explore.run_registry import OpenRun, RunEntry, RunRegistry

__all__ = ["ACTIONS", "Action", "JsonObject", "describe_run", "get_example", "list_runs"]

JsonObject = dict[str, object]

MIN_WON = 3
"""Test images that a capsule must win to be called by what they show."""

_DIGITS = ("zeros", "ones", "twos", "threes", "fours", "fives", "sixes", "sevens", "eights", "nines")

R = TypeVar("R")


@dataclass(frozen=True)
class Action(Generic[R]):
    """A computation that the page can request: the form of its body, and the function that does it."""

    request: type[R]
    respond: Callable[[OpenRun, R], JsonObject]


def list_runs(registry: RunRegistry) -> list[JsonObject]:
    """List the runs of the registry, whether open or not."""
    return [
        {
            "id": number,
            "name": entry.name,
            "kind": entry.kind,
            "shipped": entry.shipped,
            "loaded": registry.is_open(number),
            "card": _card(entry),
        }
        for number, entry in enumerate(registry.entries)
    ]


def describe_run(number: int, run: OpenRun) -> JsonObject:
    """Describe a run as far as the page needs it for its layout.

    Args:
        number: the run's number in the registry.
        run: the run.
    """
    # The view knows the capsules, the trained run its recipe, the examples their images
    model = run.trained.model
    view = run.view
    examples = run.examples
    return {
        "id": number,
        "name": run.entry.name,
        "kind": view.kind,
        "shape": list(model.spec[:3]),
        "names": list(view.names),
        "dimension": view.dimension,
        "iterations": view.iterations,
        "has_decoder": view.has_decoder,
        "has_tiles": view.has_decoder or len(examples) > 0,
        "things": examples.things,
        "domains": list(view.domains),
        "children": view.children,
        "places": list(view.places),
        "examples": len(examples),
        "source": examples.source,
        "about": run.trained.recipe.about,
        "recipe": run.trained.recipe.name,
        "steps": run.trained.step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classifies": model.is_classifier,
        "nicknames": _nicknames(run),
        "factors": examples.factors,
        "frame": view.frame and view.frame._asdict(),
        "routers": list(view.routers),
        "display": "standardized" if examples.standardized else "unit",
    }


def get_example(n: int, run: OpenRun) -> JsonObject:
    """Return test image `n` of a run with its label."""
    examples = run.examples
    return {"image": encode_images(examples.image(n)), "label": examples.label(n), "name": examples.name(n), "n": n}


def _infer(run: OpenRun, request: InferRequest) -> JsonObject:
    start = time.perf_counter()
    # Decode, infer, and encode all that the parents panel shows
    image = _decode(run, request.image)
    result = run.view.infer(run.examples.to_input(image.unsqueeze(0))[0])
    return {
        "activation": to_json(result.activation),
        "winner": result.winner,
        "pose": to_json(result.pose),
        "reconstruction": _encode(run, result.reconstruction, image),
        "capsule_images": _encode(run, result.capsule_images, image),
        "silent": to_json(result.silent),
        "nearest": _encode(run, result.nearest, image),
        "competition": result.competition and {n: to_json(x) for n, x in result.competition._asdict().items()},
        "frame": to_json(result.frame),
        "limits": _limits(run, result.winner, result.pose[result.winner]),
        "milliseconds": to_json(1000 * (time.perf_counter() - start)),
    }


def _routing(run: OpenRun, request: RoutingRequest) -> JsonObject:
    # Refuse before the image is decoded: the response grows with the number of children
    if len(request.children) > MAX_CHILDREN:
        raise ShapeError(f"{len(request.children)} children are asked for; ask for {MAX_CHILDREN} at most")
    image = _decode(run, request.image)
    # The model takes batches; the view takes one image of its input
    shown = run.examples.to_input(image.unsqueeze(0))[0]
    found = run.view.routing(shown, request.parent, request.children, request.router)
    # Fields of the record are fields of the response; images and the histogram have a form of their own
    response = {name: to_json(value) for name, value in vars(found).items() if name not in ("maps", "histogram")}
    histogram = found.histogram and {name: to_json(value) for name, value in found.histogram._asdict().items()}
    return {"maps": encode_images(found.maps), **response, "histogram": histogram}


def _draw(run: OpenRun, request: DrawRequest) -> JsonObject:
    return {"image": _encode(run, run.view.draw(request.capsule, _pose(request.pose), request.frame))}


def _sweep(run: OpenRun, request: SweepRequest) -> JsonObject:
    pose = _pose(request.pose)
    images = run.view.sweep(request.capsule, pose, request.steps)
    return {"images": _encode(run, images), **_limits(run, request.capsule, pose)}


def _sample(run: OpenRun, request: SampleRequest) -> JsonObject:
    pose = run.view.sample(request.capsule, request.domain, request.seed)
    # The page shows the sample at once: pose, image and limits in one response
    image = _encode(run, run.view.draw(request.capsule, pose))
    return {"pose": to_json(pose), "image": image, **_limits(run, request.capsule, pose)}


def _sample_grid(run: OpenRun, request: SampleGridRequest) -> JsonObject:
    grid = run.view.sample_grid(request.count, request.domain, request.seed)
    return {"images": _encode(run, grid.images), "poses": to_json(grid.poses), "capsules": list(grid.capsules)}


def _card(entry: RunEntry) -> JsonObject | None:
    """Return what the front page shows of a shipped model."""
    card = entry.card
    if card is None:
        return None
    picture = {"shape": list(card.picture.shape), "data": card.picture.data}
    return {"summary": card.summary, "headline": card.headline, "data": card.data, "picture": picture}


def _nicknames(run: OpenRun) -> list[str | None]:
    """Say of each capsule that was learned without labels what it mostly wins: None if that is no single class."""
    names: list[str | None] = [None] * run.view.capsules
    examples = run.examples
    if run.trained.model.is_classifier or not len(examples) or examples.label(0) is None:
        return names
    # Majorities among few images mean nothing
    labels = torch.tensor([examples.label(n) or 0 for n in range(len(examples))])
    for j in range(run.view.capsules):
        counts = torch.bincount(labels[run.view.winners == j], minlength=1)
        if int(counts.sum()) >= MIN_WON and int(counts.max()) > 0.5 * int(counts.sum()):
            names[j] = f"mostly {_plural(examples.names[int(counts.argmax())])}"
    return names


def _plural(name: str) -> str:
    """Name several things of a class as people do: "7" as "sevens", "dress" as "dresses"."""
    if name in tuple("0123456789"):
        return _DIGITS[int(name)]
    # A folder may be called anything: names that are no words, or several things already, stay as they are
    is_word = name.replace(" ", "").replace("-", "").isalpha()
    if not is_word or (name.endswith("s") and not name.endswith("ss")):
        return name
    return f"{name}es" if name.endswith(("ss", "x", "sh", "ch")) else f"{name}s"


ACTIONS: Mapping[str, Action[Any]] = {
    "infer": Action(InferRequest, _infer),
    "routing": Action(RoutingRequest, _routing),
    "draw": Action(DrawRequest, _draw),
    "sweep": Action(SweepRequest, _sweep),
    "sample": Action(SampleRequest, _sample),
    "sample-grid": Action(SampleGridRequest, _sample_grid),
}
"""The last word of a path -> what it computes."""


def _decode(run: OpenRun, image: EncodedImage) -> Tensor:
    """[c h w] an image of the page in [0, 1]; `examples.to_input` makes the model's input of it."""
    return decode_image(image, run.trained.model.spec[:3])


def _pose(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _limits(run: OpenRun, capsule: int, pose: Tensor) -> JsonObject:
    # How far the page's sliders go, for each number of the pose
    low, high = run.view.limits(capsule, pose)
    return {"low": to_json(low), "high": to_json(high)}


def _encode(run: OpenRun, images: Tensor | None, image: Tensor | None = None) -> JsonObject | None:
    """Encode images that the model decoded, in the brightness of the image that they reconstruct if there is one."""
    return None if images is None else encode_images(run.examples.to_display(images, image))
