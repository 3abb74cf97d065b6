"""The card of a model that is given away: what it is, how it was made, how well it does; as data and as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torchcaps.config import Count, NonNegativeFloat, NonNegativeInt, Table, from_dict, to_dict
from torchcaps.errors import DataError, RecipeError
from torchcaps.evaluate.results import Result
from torchcaps.systems.report import rows_of
from torchcaps.utils.files import parse_json, read_regular

__all__ = ["CARD", "README", "RESULT", "ModelCard", "Origin", "Picture", "card_text", "encode_card", "read_card"]

CARD = "config.json"
RESULT = "result.json"
README = "README.md"
"""Names of the files beside the weights."""

_MAX_BYTES = 1 << 20

_HEADLINES = {
    "multimnist_error": "{percent:.2f} % of pairs wrong",
    "confident_fraction": "{percent:.1f} % of samples recognized",
    "mnist_svm": "an SVM reads {percent:.2f} % right",
}
"""Metrics whose names say little to a visitor, in words."""


@dataclass(frozen=True)
class Origin:
    """How the weights were made.

    Attributes:
        command: What to run to make them again, up to the numbers that another machine rounds differently.
        commit: Of the repository, by whose code they were trained.
        note: What else a user must know, such as a conversion; "" for nothing.
    """

    command: str
    commit: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Small images for a list of models: bytes in base64, as the explorer's page draws them.

    Attributes:
        shape: (n, c, h, w).
        data: The bytes.
    """

    shape: tuple[Count, Count, Count, Count]
    data: str


@dataclass(frozen=True)
class ModelCard:
    """What a model that is given away says about itself.

    Attributes:
        name: Of the model; `torchcaps.load` takes it.
        summary: One sentence about what it does.
        system: Name of its system, a key of `SYSTEMS`.
        recipe: Name of its recipe, which is stored whole in the weights.
        seed: Of its run.
        data: Name of the data set that it learned from.
        data_license: Of that data set.
        origin: Command and commit.
        parameters: Their number.
        steps: Of training.
        seconds: Of training.
        metrics: Metric name -> value on the whole test set, measured with these weights.
        check_images: Number of test images that ship with the weights.
        check: Metric name -> value on these, see `spot_check`.
        picture: Images for a list of models.
    """

    name: str
    summary: str
    system: str
    recipe: str
    seed: NonNegativeInt
    data: str
    data_license: str
    origin: Origin
    parameters: Count
    steps: NonNegativeInt
    seconds: NonNegativeFloat
    metrics: dict[str, float]
    check_images: Count
    check: dict[str, float]
    picture: Picture

    @property
    def headline(self) -> str:
        """The first metric as people say it, as in "test error 0.49 %"."""
        name, value = next(iter(self.metrics.items()))
        if name in _HEADLINES:
            return _HEADLINES[name].format(percent=100 * value)
        words = name.replace("_", " ")
        is_share = "error" in name or "accuracy" in name or name.endswith("_svm")
        return f"{words} {100 * value:.2f} %" if is_share else f"{words} {value:.3g}"


def read_card(folder: Path) -> ModelCard:
    """Read and check the card in a folder.

    Args:
        folder: Of a model that is given away.

    Returns:
        The card.

    Raises:
        DataError: There is none, or it is not one.
    """
    path = folder / CARD
    try:
        # Whether it is a table at all, `from_dict` checks
        return from_dict(ModelCard, cast(Table, parse_json(read_regular(path, _MAX_BYTES))), where=str(path))
    except (OSError, ValueError, RecipeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the model card '{path}': {reason}; name the folder of a model") from None


def encode_card(card: ModelCard) -> bytes:
    """Return the bytes of `config.json`."""
    return (json.dumps(to_dict(card), indent=2) + "\n").encode()


def card_text(card: ModelCard, result: Result) -> str:
    """Write the model card as Markdown, with the header that model hubs read.

    Args:
        card: The facts.
        result: What `torchcaps evaluate` measured with these weights.

    Returns:
        Text of `README.md`.
    """
    # The header is YAML; JSON strings are YAML, too
    header = ["---", "library_name: torchcaps", "license: mit", f"datasets: [{json.dumps(card.data)}]", "---"]
    checks = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in card.check.items())
    lines = [
        *header,
        f"# {card.name}",
        "",
        card.summary,
        "",
        "```python",
        "import torchcaps",
        "",
        f'model = torchcaps.load("{card.name}")',
        "```",
        "",
        "## Result",
        "",
        *_markdown_table(rows_of(result)),
        "",
        f"Measured with these weights, in half precision, by `torchcaps evaluate {card.name}`. This is one seed"
        f" ({card.seed}), not a mean over seeds.",
        "",
        f"On the {card.check_images} test images that ship with the weights: {checks}"
        f" (`torchcaps zoo check {card.name}`).",
        "",
        "## Origin",
        "",
        f"- command: `{card.origin.command}`",
        f"- commit: {card.origin.commit}",
        f"- recipe: {card.recipe}, {card.parameters:,} parameters, {card.steps:,} steps in {card.seconds:,.0f} s",
        f"- data: {card.data}, license: {card.data_license}",
        *([f"- note: {card.origin.note}"] if card.origin.note else []),
    ]
    return "\n".join(lines) + "\n"


def _markdown_table(rows: list[list[str]]) -> list[str]:
    """Lay a table out on its side if it is wide: one metric a line."""
    turned = [list(cells) for cells in zip(*rows, strict=True)] if len(rows[0]) > len(rows) else rows
    head, *body = turned
    ruler = ["---", *["--:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, ruler, *body)]
