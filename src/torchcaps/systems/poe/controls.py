"""The controls of a run of products of expert capsules: other energies, random capsules and baselines.

All work on the features of the run's autoencoder, which also draws for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import torch

from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.baselines import BASELINES, LocalPCA, fit_local_pca
from torchcaps.models.poe import DecoderConfig, PoE, PoEConfig
from torchcaps.models.poe.stages import DecoderStage
from torchcaps.routing import Dynamic
from torchcaps.systems.poe.encoders import CHUNK, BaselineEncoder, DrawnOnly, Encoder, PoEEncoder
from torchcaps.systems.poe.metrics import EvaluationData, measure
from torchcaps.systems.run_folders import output_folder
from torchcaps.train import Recipe, train
from torchcaps.train.initial_weights import load_stage
from torchcaps.train.recipe import OptimizerConfig, StageConfig, stage_of
from torchcaps.train.train_state import build_model
from torchcaps.types import Batch
from torchcaps.utils.progress import progress

__all__ = ["CONTROLS", "RunRows", "require_controls", "run_and_controls"]

CONTROL_SHARE = 0.25
"""Of the run's own steps of W, what a trained control takes: it has converged long before."""
CONTROL_DECODER_STEPS = 166
"""Of the run's own steps of U, what a trained control takes at most."""

_RUN = ""
"""Key of the run itself among the names of its controls."""

CONTROLS = ("paper", "offset only", "random W", *BASELINES)
GROUPING = frozenset({"k-means", "k-means centroid", "local PCA"})
"""Baselines that group images, which they do by the children that rank the capsules."""
NEED_SKLEARN = frozenset(BASELINES) - {"PCA"}


def require_controls(names: Sequence[str]) -> None:
    """Refuse controls that need scikit-learn where it is missing, before any work is done.

    Raises:
        RecipeError: If there is one.
    """
    if NEED_SKLEARN & set(names) and find_spec("sklearn") is None:
        raise RecipeError(
            "k-means and RBM need scikit-learn: pip install 'torchcaps[sklearn]', or choose others with --only"
        )


class RunRows(NamedTuple):
    """The metrics of a run, and those of its controls by their names."""

    run: dict[str, float]
    controls: dict[str, dict[str, float]]


def run_and_controls(recipe: Recipe, folder: Path, data: EvaluationData, names: Sequence[str] = CONTROLS) -> RunRows:
    """Measure a run and its controls.

    Args:
        recipe: Of the run.
        folder: Of the run. Controls that are trained, for a quarter of the run's own steps, are stored in
            FOLDER/controls; a file of weights has one beside it.
        data: The run's model, and the images to measure on.
        names: Which controls; one that would be the run again is left out.

    Returns:
        All rows.
    """
    # Baselines are fitted when their turn comes, so that one at a time is in memory; controls that need
    # training are trained here, before the first measurement.
    encoders: dict[str, Callable[[], Encoder]] = {_RUN: partial(PoEEncoder, data.model)}
    for name in names:
        if name in BASELINES:
            encoders[name] = partial(_fit_baseline, name, data, recipe.seed)
        elif name == "random W":
            encoders[name] = partial(_random_encoder, recipe, data)
        elif (variant := _variant(recipe, name, data.trained_on)).model != recipe.model:
            control_folder = output_folder(folder) / "controls" / name.split()[0]
            encoders[name] = partial(PoEEncoder, _train_control(variant, control_folder, data.model))
    bar = progress(list(encoders.items()), "measuring the run and its controls")
    rows = {name: measure(make(), data) for name, make in bar}
    return RunRows(rows.pop(_RUN), rows)


def _variant(recipe: Recipe, name: str, images: int) -> Recipe:
    """Return the run's recipe with another energy: "offset only" is centered, "paper" is Algorithm 1 as printed.

    Both have the paper's capsule, without a slab, and its linear decoder.

    "paper" has the paper's own optimizer. All J capsules are soon the same there and answer together, so that a step
    counts J times: with the rate that suits capsules in competition, 2, the first dozen steps overshoot. It gets 1 / J.
    """
    model = cast(PoEConfig, recipe.model)
    model = replace(model, decoder=replace(model.decoder, curvature=0))
    capsules = stage_of(recipe, "capsules")
    decoder = stage_of(recipe, "decoder")
    # Shorter than the run, since controls converge early.
    stages = {
        "capsules": _shortened(capsules, CONTROL_SHARE * capsules.train.epochs),
        "decoder": _shortened(decoder, CONTROL_DECODER_STEPS * decoder.train.batch / images),
    }
    if name == "offset only":
        energy = replace(model.energy, mode="offset", slab=0)
        return replace(recipe, name=f"{recipe.name}-offset", model=replace(model, energy=energy), stages=stages)
    # Algorithm 1: the energy and the routing as printed, and the smaller rate.
    routing = Dynamic(iterations=3, agreement="cosine", over="children")
    energy = replace(model.energy, mode="paper", slab=0, routing=routing)
    stage = stages["capsules"]
    slow = replace(stage, optimizer=OptimizerConfig("SGD", 2 / model.capsules, {"momentum": 0.9}))
    return replace(
        recipe,
        name=f"{recipe.name}-paper",
        model=replace(model, energy=energy),
        stages={**stages, "capsules": slow},
    )


def _shortened(stage: StageConfig, epochs: float) -> StageConfig:
    """Limit a stage to a number of epochs."""
    return replace(stage, train=replace(stage.train, epochs=min(stage.train.epochs, epochs)))


def _train_control(recipe: Recipe, folder: Path, model: PoE) -> PoE:
    """Load the control in a folder, trained there if it was not before, on top of the autoencoder of a run's model."""
    # Only capsules and decoder are trained: the autoencoder is that of the run.
    try:
        outcome = train(recipe, folder, resume="auto", given={"autoencoder": model.autoencoder})
    except TrainingError as error:
        raise TrainingError(f"{error}; for this control: delete '{folder}', or leave it out with --only") from None
    if not outcome.finished:
        raise TrainingError(f"the control in '{folder}' is not trained to its end; run the command again to go on")
    found = cast(PoE, outcome.model.eval())
    # A folder may hold the control of an earlier run with another autoencoder.
    wanted = model.autoencoder.state_dict()
    loaded = found.autoencoder.state_dict()
    if not all(torch.equal(wanted[key], loaded[key]) for key in wanted):
        raise TrainingError(f"the control in '{folder}' has another autoencoder than the run; delete it and try again")
    return found


@torch.no_grad()
def _random_encoder(recipe: Recipe, data: EvaluationData) -> PoEEncoder:
    """Build capsules with W as before training, on centered children, without competition; U by least squares.

    W is divided by one number, so that |z_j|^2 is 1 on average: a capsule is then on for about half of the images.
    """
    # An untrained model on top of the autoencoder of the run.
    config = cast(PoEConfig, recipe.model)
    plain = replace(config, energy=replace(config.energy, mode="offset", slab=0), decoder=DecoderConfig())
    model = cast(PoE, build_model(replace(recipe, model=plain), data.model.spec)).eval()
    load_stage(model.stages(), {"autoencoder": data.model.autoencoder})
    # Center the children, then scale W.
    f = data.fitted
    energy = model.energy
    energy.fit_offset(f)
    power = torch.cat([energy.infer(energy.visible(x)).z.square().sum(-1) for x in torch.split(f, CHUNK)]).mean()
    energy.W.div_(power.sqrt().clamp_min(torch.finfo(power.dtype).tiny))
    # Fit U as the decoder stage does, to all features as one batch.
    stage = DecoderStage(model.decoder, energy, lambda features: features, model.draw_images)
    stage.store_features(torch.split(f, CHUNK), data.fitted_frames)
    stage.objective(Batch(f, data.fitted_labels, torch.arange(len(f))), 0)
    stage.finish()
    return PoEEncoder(model)


def _fit_baseline(name: str, data: EvaluationData, seed: int) -> Encoder:
    """Fit a baseline to the features of the capsules, grouped by those that rank these, and give it the frames."""
    model = data.model
    fit = BASELINES[name]
    groups = name in GROUPING
    f = data.grouped if groups else data.fitted
    frames = data.grouped_frames if groups else data.fitted_frames
    # Edges group images but are not drawn.
    seen = model.energy.ranking * model.config.child_dimension
    if seen and not groups:
        f = f[:, : model.decoder.U.shape[1]]
    flat = f.flatten(1)
    more: dict[str, float] = {"seen": seen} if seen and groups else {}
    # Local PCA samples as the capsules do: near the rows of a group that it rebuilds best
    if fit is fit_local_pca:
        more["coverage"] = model.decoder.config.coverage
    baseline = fit(flat, model.capsules, model.dimension, seed, **more)
    members = baseline.winners(flat) if model.framed else None
    if members is not None and isinstance(baseline, LocalPCA):
        members = members.masked_fill(~baseline.covered, -1)
    encoder = BaselineEncoder(baseline, model, frames, members)
    return DrawnOnly(encoder) if seen and not groups else encoder
