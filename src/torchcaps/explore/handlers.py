"""What each question of the page is answered with: from a run in memory and a question to what JSON can hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcaps.errors import ShapeError
from torchcaps.explore.messages import (
    CHILDREN,
    Draw,
    Look,
    Picture,
    Route,
    Sample,
    Sweep,
    Wall,
    encode_images,
    pixels_of,
    to_json,
)
from torchcaps.explore.run_registry import OpenRun, RunRegistry

__all__ = ["QUESTIONS", "Question", "example", "facts", "runs"]

Answer = dict[str, Any]


def runs(shelf: RunRegistry) -> list[Answer]:
    """The table of runs."""
    return [
        {"id": n, "name": e.name, "kind": e.kind, "shipped": e.shipped, "loaded": shelf.is_open(n)}
        for n, e in enumerate(shelf.entries)
    ]


def facts(number: int, opened: OpenRun) -> Answer:
    """What the page must know of a run to lay itself out."""
    run = opened.run
    subject = opened.subject
    examples = opened.examples
    return {
        "id": number,
        "name": opened.entry.name,
        "kind": subject.kind,
        "shape": list(run.model.spec[:3]),
        "names": list(subject.names),
        "dimension": subject.dimension,
        "iterations": subject.iterations,
        "draws": subject.draws,
        "domains": list(subject.domains),
        "samples": subject.samples,
        "children": subject.children,
        "places": list(subject.places),
        "examples": len(examples),
        "source": examples.source,
        "about": run.recipe.about,
        "recipe": run.recipe.name,
        "steps": run.step,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "classifies": run.model.is_classifier,
        "display": "standardized" if examples.standardized else "unit",
    }


def example(n: int, opened: OpenRun) -> Answer:
    """An image to look at."""
    examples = opened.examples
    return {"image": encode_images(examples.image(n)), "label": examples.label(n), "name": examples.name(n), "n": n}


def _look(opened: OpenRun, asked: Look) -> Answer:
    start = time.perf_counter()
    subject = opened.subject
    image, shown = _images(opened, asked.image)
    seen = subject.infer(shown)
    parts = subject.draw_each(shown)
    return {
        "activation": to_json(seen.activation),
        "winner": seen.winner,
        "pose": to_json(seen.pose),
        "drawn": _drawn(opened, seen.drawn, image),
        "parts": _drawn(opened, parts, image),
        "limits": _limits(opened, seen.winner, seen.pose[seen.winner]),
        "milliseconds": to_json(1000 * (time.perf_counter() - start)),
    }


def _route(opened: OpenRun, asked: Route) -> Answer:
    if len(asked.children) > CHILDREN:
        raise ShapeError(f"{len(asked.children)} children are asked for; {CHILDREN} at most are wanted")
    routed = opened.subject.routing(_images(opened, asked.image)[1], asked.parent, asked.children)
    answer = {name: to_json(value) for name, value in vars(routed).items() if name not in ("maps", "histogram")}
    histogram = routed.histogram and {name: to_json(value) for name, value in routed.histogram._asdict().items()}
    return {"maps": encode_images(routed.maps), **answer, "histogram": histogram}


def _draw(opened: OpenRun, asked: Draw) -> Answer:
    return {"image": _drawn(opened, opened.subject.draw(asked.capsule, _pose(asked.pose)))}


def _sweep(opened: OpenRun, asked: Sweep) -> Answer:
    pose = _pose(asked.pose)
    images = opened.subject.sweep(asked.capsule, pose, asked.steps)
    return {"images": _drawn(opened, images), **_limits(opened, asked.capsule, pose)}


def _sample(opened: OpenRun, asked: Sample) -> Answer:
    pose = opened.subject.sample(asked.capsule, asked.domain, asked.seed)
    image = _drawn(opened, opened.subject.draw(asked.capsule, pose))
    return {"pose": to_json(pose), "image": image, **_limits(opened, asked.capsule, pose)}


def _wall(opened: OpenRun, asked: Wall) -> Answer:
    wall = opened.subject.sample_grid(asked.count, asked.domain, asked.seed)
    return {
        "images": _drawn(opened, wall.images),
        "poses": to_json(wall.poses),
        "capsules": list(wall.capsules),
    }


@dataclass(frozen=True)
class Question:
    """What a body must be, and who answers it."""

    body: type[Any]
    answer: Callable[[OpenRun, Any], Answer]


QUESTIONS: Mapping[str, Question] = {
    "look": Question(Look, _look),
    "routing": Question(Route, _route),
    "draw": Question(Draw, _draw),
    "sweep": Question(Sweep, _sweep),
    "sample": Question(Sample, _sample),
    "wall": Question(Wall, _wall),
}
"""The last word of a path -> what it asks."""


def _images(opened: OpenRun, picture: Picture) -> tuple[Tensor, Tensor]:
    """[c h w] a picture in [0, 1], and what the model is shown of it."""
    image = pixels_of(picture, opened.run.model.spec[:3])
    return image, opened.examples.prepared(image.unsqueeze(0))[0]


def _pose(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _limits(opened: OpenRun, capsule: int, pose: Tensor) -> Answer:
    low, high = opened.subject.limits(capsule, pose)
    return {"low": to_json(low), "high": to_json(high)}


def _drawn(opened: OpenRun, images: Tensor | None, image: Tensor | None = None) -> Answer | None:
    """Images that the model drew, of an image or of none, as they travel."""
    return None if images is None else encode_images(opened.examples.levels(images, image))
