"""Which part of poe-quick does what: the run, and the same with one thing changed, on the same autoencoder.

    python experiments/poe_ablation.py runs/poe-quick-0 [--only NAME ...]

Trains each variant's W and U into RUN/ablation/NAME (resumable), measures it like `torchcaps evaluate`, and writes
results/poe-ablation.json, in which the variants stand as controls.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcaps.evaluate import write_result
from torchcaps.evaluate.reference_classifier import train_reference_classifier
from torchcaps.evaluate.results import gather
from torchcaps.routing import Dynamic
from torchcaps.systems.evaluation import evaluate_runs, judge_folder
from torchcaps.systems.poe.metrics import PoEEncoder, build_evaluation_data, measure
from torchcaps.train import load_run, train
from torchcaps.train.recipe import OptimizerConfig

ROOT = Path(__file__).parents[1]
ENERGY: dict[str, dict[str, Any]] = {
    "no hidden bias": {"bias": 0.0, "bias_start": 0.0},
    "hidden bias not loosened": {"bias_start": 2.0},
    "SGD, rate 3": {},
    "gain 1": {"gain": 1.0, "init": 0.01},
    "no ramp": {"ramp": 1},
    "long ramp": {"ramp": 1000},
    "no boost": {"boost": 0.0},
    "three winners": {"sharpness": 30.0},
    "routed, 3 iterations": {"routing": Dynamic(iterations=3, agreement="cosine", over="children")},
    "routed over parents": {"routing": Dynamic(iterations=3, agreement="cosine", over="parents")},
    "bernoulli": {"magnitudes": "bernoulli"},
    "CD-3": {"steps": 3},
    "persistent": {"chain": "persistent"},
}
SGD = OptimizerConfig("SGD", 3.0, {"momentum": 0.9})
DECODER: dict[str, dict[str, Any]] = {"U by gradient": {"rule": "gradient"}, "U by the paper's rule": {"rule": "paper"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--only", nargs="*", default=[*ENERGY, *DECODER])
    words = parser.parse_args()
    base = load_run(words.run)
    result = evaluate_runs([words.run], only=())
    material = build_evaluation_data(
        base.model,
        base.recipe.data.load(),
        train_reference_classifier(base.recipe.data, judge_folder(base.recipe, words.run)),
    )
    rows = {}
    for name in words.only:
        rows[name] = gather([measure(PoEEncoder(variant(base, words.run / "ablation", name)), material)])
        print(name, {metric: round(values[0], 3) for metric, values in rows[name].items()}, flush=True)
        write_result(ROOT / "results", replace(result, recipe="poe-ablation", controls=rows))


def variant(base: Any, folder: Path, name: str) -> Any:
    """The run's model with one thing changed, trained on the run's own autoencoder (and W, if only U is other)."""
    model = base.recipe.model
    given = {"autoencoder": base.model.autoencoder}
    stages = base.recipe.stages
    if name in ENERGY:
        model = replace(model, energy=replace(model.energy, **ENERGY[name]))
        if name.startswith("SGD"):
            stages = {**stages, "capsules": replace(stages["capsules"], optimizer=SGD)}
    else:
        model = replace(model, decoder=replace(model.decoder, **DECODER[name]))
        given["capsules"] = base.model.energy
        stages = {**stages, "decoder": RATES[DECODER[name]["rule"]](stages["decoder"])}
    slug = name.replace(" ", "-").replace(",", "").replace("'", "").lower()
    recipe = replace(base.recipe, name=slug, model=model, stages=stages)
    return train(recipe, folder / slug, resume=True, quiet=True, given=given).model.eval()


def _by_adam(stage: Any) -> Any:
    optimizer = replace(stage.optimizer, name="Adam", lr=0.002, options={})
    return replace(stage, optimizer=optimizer, train=replace(stage.train, epochs=4.0))


def _by_sgd(stage: Any) -> Any:
    optimizer = replace(stage.optimizer, name="SGD", lr=1.0, options={"momentum": 0.9})
    return replace(stage, optimizer=optimizer, train=replace(stage.train, epochs=4.0))


RATES = {"gradient": _by_adam, "paper": _by_sgd}

if __name__ == "__main__":
    main()
