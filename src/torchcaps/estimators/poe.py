"""Products of expert capsules over plain vectors, as a scikit-learn transformer.

    X [n p]  --standardize, pad, cut-->  features [n i d]  --squash-->  children x  --W-->  capsules [n j k]

There is no autoencoder: d neighboring columns, standardized, are a child. W is learned by contrastive divergence as in
`torchcaps.models.poe`, and what leads back from the capsules to the columns by ridge least squares. All that is learned
is kept as numpy arrays. W is learned in float32 and applied in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from torchcaps.config import Count, PositiveFloat
from torchcaps.errors import ShapeError, TrainingError
from torchcaps.estimators.columns import Array, Columns, settings_of
from torchcaps.models.poe import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState
from torchcaps.models.poe.energy import free_energy
from torchcaps.utils.random import permutation

__all__ = ["PoECapsules"]

RAMP = 0.2
LOOSEN = 0.7
"""Shares of training over which the competition sharpens and the hidden bias shortens."""
BIAS = 1.0
BOOST = 0.005
"""Of the energy, at the end; few columns ask for a shorter bias than many children do."""
MOMENTUM = 0.9
DECAY = 0.1
"""Momentum of the descent, and what is left of the learning rate at its end."""
CHUNK = 4096
"""Rows that are looked at together."""


@dataclass(frozen=True)
class _Settings:
    """The parameters of `PoECapsules`, checked: sklearn wants that done in `fit`."""

    n_capsules: Count
    pose_dim: Count
    child_dim: Count
    mode: Literal["competition", "offset", "paper"]
    epochs: Count
    batch_size: Count
    learning_rate: PositiveFloat
    gain: PositiveFloat | None
    ridge: PositiveFloat

    def energy(self, children: int, steps: int) -> EnergyConfig:
        """How W learns from so many children in so many steps."""
        gain = max(8.0, children / 2) if self.gain is None else self.gain
        ramp, loosen = (max(1, round(share * steps)) for share in (RAMP, LOOSEN))
        return EnergyConfig(mode=self.mode, gain=gain, ramp=ramp, loosen=loosen, bias=BIAS, boost=BOOST)


def _energy(config: EnergyConfig, shape: tuple[int, int, int, int], seed: int = 0) -> CapsuleEnergy:
    """W of shape [i j k d] as it is before training; the random numbers of the process stay as they were."""
    i, j, k, d = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CapsuleEnergy(config, i, j, d, k)


def _codes(energy: CapsuleEnergy, seen: CapsuleState) -> Tensor:
    return seen.hidden.flatten(1)  # [b (j k)]


def _familiar(energy: CapsuleEnergy, seen: CapsuleState) -> Tensor:
    return -free_energy(seen.z, seen.gate)  # [b]


def _descend(energy: CapsuleEnergy, features: Tensor, epochs: int, batch: int, rate: float, seed: int) -> None:
    """Contrastive divergence over all rows, `epochs` times; momentum and decay as stated above."""
    n = len(features)
    parts = math.ceil(n / batch)
    optimizer = torch.optim.SGD([energy.W], lr=rate * (1 - MOMENTUM), momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** (1 / (epochs * parts)))
    for step in range(epochs * parts):
        if step % parts == 0:
            rows = permutation(seed, step // parts, n).tensor_split(parts)
        indices = rows[step % parts]
        loss = energy.contrast(energy.visible(features[indices]), step, (seed, indices))["loss"]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    if not bool(energy.W.isfinite().all()):
        raise TrainingError(f"the capsules diverged at learning_rate={rate}; try a smaller one")


def _array(t: Tensor) -> Array:
    """A tensor's numbers as an array of its own, in float64."""
    return t.detach().double().numpy().copy()


def _least_squares(codes: Array, target: Array, ridge: float) -> tuple[Array, Array]:
    """U [(j k) p] and a [p] that minimize |codes U + a - target|² / n + ridge s |U|², s the codes' mean variance."""
    mean = codes.mean(0)
    centerd = codes - mean
    gram = centerd.T @ centerd / len(codes)
    weight = ridge * max(float(gram.diagonal().mean()), 1e-30)
    U = np.linalg.solve(gram + weight * np.eye(len(gram)), centerd.T @ target / len(codes))
    return U, target.mean(0) - mean @ U


class PoECapsules(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Rows [n p] -> the poses [n (j k)] of capsules that compete for them: all but the winner's are about 0.

    Capsule j wins a row if, of all capsules, what it expects alone points most nearly where the row does; its pose then
    says which of its rows it is. `predict` names the winner, `inverse_transform` leads back to rows.

    n_capsules, pose_dim   J and K
    child_dim       d: columns that make up a child
    mode            "competition"; "offset": without it, all capsules take part in every row; "paper": as printed
    epochs          passes over the rows; what counts is the number of steps, about 500 or more
    batch_size      rows a step
    learning_rate   at the start; it means the same for any number of capsules and columns
    gain            of the reverse pass: larger ones make a capsule more of a prototype. None: half the number of
                    children, but at least 8
    ridge           of the way back, relative to the mean variance of the codes
    random_state    a whole number makes `fit` a function of its input

    After `fit`: `labels_` [n] the winner of each row, `W_` [i j k d], `bias_` [j k], `offset_` [i d], `mean_` and
    `scale_` [p] of the columns (0 for a constant one), `decoder_` [(j k) p] and `intercept_` [p] of the way back in
    standardized columns, `n_iter_` steps.

    >>> from sklearn.datasets import load_iris
    >>> capsules = PoECapsules(n_capsules=3, pose_dim=4).fit(load_iris().data)
    >>> capsules.transform(load_iris().data).shape
    (150, 12)
    """

    def __init__(
        self,
        n_capsules: int = 20,
        pose_dim: int = 16,
        child_dim: int = 8,
        *,
        mode: str = "competition",
        epochs: int = 100,
        batch_size: int = 128,
        learning_rate: float = 12.0,
        gain: float | None = None,
        ridge: float = 1e-3,
        random_state: Any = 0,
    ) -> None:
        self.n_capsules = n_capsules
        self.pose_dim = pose_dim
        self.child_dim = child_dim
        self.mode = mode
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.gain = gain
        self.ridge = ridge
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> PoECapsules:
        """Learn W and the way back from the rows X [n p]; y is not used."""
        settings = settings_of(_Settings, self)
        X = validate_data(self, X, dtype=[np.float64, np.float32])
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        columns = Columns.of(X, settings.child_dim)
        features = columns.children(X).float()  # [n i d]
        steps = settings.epochs * math.ceil(len(X) / settings.batch_size)
        shape = (features.shape[1], settings.n_capsules, settings.pose_dim, settings.child_dim)
        energy = _energy(settings.energy(features.shape[1], steps), shape, seed)
        energy.fit_offset(features)
        _descend(energy, features, settings.epochs, settings.batch_size, settings.learning_rate, seed)
        self.mean_ = columns.mean
        self.scale_ = columns.scale
        self.n_iter_ = steps
        self.W_, self.bias_, self.offset_ = (_array(t) for t in (energy.W, energy.bias, energy.offset))
        self.labels_ = self._each(X, CapsuleEnergy.winners)
        target = columns.standardize(X)
        self.decoder_, self.intercept_ = _least_squares(self._each(X, _codes), target, settings.ridge)
        return self

    def transform(self, X: Any) -> Array:
        """The hidden capsules [n (j k)], squashed and behind the gate, in X's own precision."""
        X = self._checked(X)
        return self._each(X, _codes).astype(X.dtype, copy=False)

    def inverse_transform(self, X: Any) -> Array:
        """Codes [n (j k)] -> rows [n p] by least squares."""
        check_is_fitted(self)
        codes = check_array(X, dtype=[np.float64, np.float32], input_name="codes")
        if codes.shape[1] != len(self.decoder_):
            raise ShapeError(
                f"the codes have {codes.shape[1]} columns; {len(self.decoder_)}, as of `transform`, are wanted"
            )
        rows: Array = (codes @ self.decoder_ + self.intercept_) * self.scale_ + self.mean_
        return rows.astype(codes.dtype, copy=False)

    def predict(self, X: Any) -> Array:
        """[n] the capsule that wins each row; where none competes, the one most surely on."""
        return self._each(self._checked(X), CapsuleEnergy.winners)

    def score_samples(self, X: Any) -> Array:
        """[n] minus the free energy, sum_j m_j log(1 + |z_j|²): larger is more familiar. It is no log-likelihood."""
        return self._each(self._checked(X), _familiar)

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self)
        checked: Array = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return checked

    def _each(self, X: Array, answer: Callable[[CapsuleEnergy, CapsuleState], Tensor]) -> Array:
        """An answer [n ...] about all rows, found for CHUNK of them at a time, in float64."""
        energy = _energy(EnergyConfig(mode=settings_of(_Settings, self).mode), self.W_.shape).double()
        for part, learned in ((energy.W, self.W_), (energy.bias, self.bias_), (energy.offset, self.offset_)):
            part.data.copy_(torch.from_numpy(learned))
        columns = Columns(self.mean_, self.scale_, self.W_.shape[3])
        parts = (columns.children(X[n : n + CHUNK]) for n in range(0, len(X), CHUNK))
        return np.concatenate([answer(energy, energy.infer(energy.visible(part))).numpy() for part in parts])

    @property
    def _n_features_out(self) -> int:
        return len(self.decoder_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
