"""Products of expert capsules over plain vectors, as a scikit-learn transformer.

    X [n p]  --standardize, pad, cut-->  features [n i d]  --squash-->  children x  --W-->  capsules [n j k]

There is no autoencoder: d neighboring columns, standardized, are a child. W is trained by contrastive divergence as in
`torchcaps.models.poe`; the decoder from capsules to columns is a ridge regression. Weights are stored as numpy arrays;
training is in float32, prediction in float64.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from torchcaps.config import Count, PositiveFloat, Range
from torchcaps.errors import ShapeError, TrainingError
from torchcaps.estimators.preprocessing import ColumnScaler, FloatArray, RandomState, Rows, check_settings
from torchcaps.models.poe import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState, SampleDraws
from torchcaps.utils.random import permutation, resample, uniform

__all__ = ["PoECapsules"]

RAMP = 0.2
LOOSEN = 0.7
"""Fractions of training over which the competition sharpens and the hidden bias shrinks."""
BIAS = 1.0
BOOST = 0.005
"""Final hidden bias and step of the boost; few columns want a smaller bias than many children do."""
MOMENTUM = 0.9
DECAY = 0.1
"""Momentum of gradient descent, and the final learning rate relative to the initial one."""
SATURATED = 1000.0
"""Weights beyond this make z so long that squash returns 1 in single precision; useful ones stay far below."""
CHUNK = 4096
"""Rows that are computed together."""


@dataclass(frozen=True)
class _Settings:
    """Checked parameters of `PoECapsules`; scikit-learn wants them checked in `fit`, not in the constructor."""

    n_capsules: Count
    pose_dim: Count
    child_dim: Count
    mode: Literal["competition", "offset", "paper"]
    epochs: Count
    batch_size: Count
    learning_rate: Annotated[float, Range(0, 1e30, open_low=True)]  # beyond, a step overflows in float32
    gain: PositiveFloat | None
    ridge: PositiveFloat

    def energy_config(self, children: int, steps: int) -> EnergyConfig:
        """Configure training of W for a number of children and of steps."""
        gain = max(8.0, children / 2) if self.gain is None else self.gain
        return EnergyConfig(
            mode=self.mode,
            gain=gain,
            ramp=max(1, round(RAMP * steps)),
            loosen=max(1, round(LOOSEN * steps)),
            bias=BIAS,
            boost=BOOST,
        )


class _LinearDecoder(NamedTuple):
    """Linear map from codes to standardized columns: weights [(j k) p] and intercept [p]."""

    weights: FloatArray
    intercept: FloatArray


def _build_energy(config: EnergyConfig, shape: tuple[int, int, int, int], seed: int = 0) -> CapsuleEnergy:
    """Build W [i j k d] before training; the global random state of torch is left as it was."""
    i, j, k, d = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CapsuleEnergy(config, i, j, child_dimension=d, dimension=k)


def _codes(energy: CapsuleEnergy, state: CapsuleState) -> Tensor:
    """Flatten the hidden capsules to codes [b (j k)]."""
    return state.hidden.flatten(1)


def _negative_free_energy(energy: CapsuleEnergy, state: CapsuleState) -> Tensor:
    """Compute minus the free energy [b]."""
    return -state.free_energy


def _train(energy: CapsuleEnergy, features: Tensor, settings: _Settings, seed: int) -> int:
    """Train W by contrastive divergence, with momentum and an exponentially decaying learning rate.

    Args:
        energy: trained in place.
        features: [n i d]
        settings: epochs, batch size and learning rate.
        seed: of the order of the rows.

    Returns:
        The number of steps.

    Raises:
        TrainingError: W is not finite at the end.

    Warns:
        ConvergenceWarning: W is so large that every capsule is on for every row.
    """
    # Length of training, which the schedule must know: it ends at DECAY of the initial rate
    n = len(features)
    batches = math.ceil(n / settings.batch_size)
    steps = settings.epochs * batches
    # Momentum makes a step 1 / (1 - MOMENTUM) times as long in the end; divided out, the rate means the same without it
    rate = settings.learning_rate
    optimizer = torch.optim.SGD([energy.W], lr=rate * (1 - MOMENTUM), momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** (1 / steps))
    # Batches of nearly equal size, so that no step averages over very few rows
    for epoch in range(settings.epochs):
        for number, indices in enumerate(permutation(seed, epoch, n).tensor_split(batches)):
            x = energy.visible(features[indices])  # [b i d]
            loss = energy.contrast(x, epoch * batches + number, SampleDraws(seed, indices))["loss"]
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    # Weights that diverged would predict NaN
    if not bool(energy.W.isfinite().all()):
        raise TrainingError(f"the capsules diverged at learning_rate={rate}; try a smaller one")
    largest = float(energy.W.detach().abs().max())
    if largest > SATURATED:
        warnings.warn(
            f"at learning_rate={rate:.4g} the weights grew to {largest:.4g}, where every capsule is on for every row; "
            "what was learned is likely of no use: try a smaller one",
            ConvergenceWarning,
            stacklevel=3,
        )
    return steps


def _to_array(tensor: Tensor) -> FloatArray:
    """Copy a tensor into an array of float64."""
    return tensor.detach().double().numpy().copy()


def _fit_decoder(codes: FloatArray, target: FloatArray, ridge: float) -> _LinearDecoder:
    """Fit U and a that minimize |codes U + a - target|² / n + ridge s |U|², s the mean variance of the codes.

    Args:
        codes: [n (j k)]
        target: [n p]
        ridge: weight of the penalty.
    """
    # Centered, so that the intercept is not penalized
    mean = codes.mean(0)
    centered = codes - mean
    gram = centered.T @ centered / len(codes)  # [(j k) (j k)]
    penalty = ridge * max(float(gram.diagonal().mean()), 1e-30)
    # Relative to the variance of the codes, so that the penalty does not depend on their scale
    U = np.linalg.solve(gram + penalty * np.eye(len(gram)), centered.T @ target / len(codes))
    return _LinearDecoder(U, target.mean(0) - mean @ U)


class PoECapsules(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Transform rows [n p] to the poses [n (j k)] of capsules that compete for them: all but the winner's are about 0.

    Capsule j wins a row if its reconstruction of the row, alone, has the largest cosine with it; its pose then says
    which of its rows it is. `predict` returns the winner, `inverse_transform` maps poses back to rows.

    Args:
        n_capsules: J, number of capsules.
        pose_dim: K, numbers of a capsule.
        child_dim: d, columns that make up a child.
        mode: "competition"; "offset", without it, all capsules take part in every row; "paper", as printed.
        epochs: passes over the rows; what counts is the number of steps, about 500 or more.
        batch_size: rows a step.
        learning_rate: at the start; it means the same for any number of capsules and columns.
        gain: of the reverse pass; larger values make a capsule more of a prototype. None for half the number of
            children, but at least 8.
        ridge: of the decoder, relative to the mean variance of the codes.
        random_state: an integer makes `fit` a function of its input.

    Attributes:
        labels_: [n] the winner of each row.
        W_: [i j k d] weights.
        bias_: [j k] hidden bias.
        offset_: [i d] of the children.
        mean_: [p] mean of the columns.
        scale_: [p] standard deviation of the columns, 0 for a constant one.
        decoder_: [(j k) p] from codes to standardized columns.
        intercept_: [p] of the decoder.
        poses_: [n k] the winner's hidden capsule of each training row, which `sample` resamples.
        n_iter_: steps taken.

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
        random_state: RandomState = 0,
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

    def fit(self, X: ArrayLike, y: object = None) -> PoECapsules:
        """Train W and the decoder on rows.

        Args:
            X: rows [n p].
            y: not used.

        Returns:
            This estimator.

        Raises:
            DataError: a column is too large to be scaled.
            RecipeError: a parameter has the wrong type or is out of range.
            TrainingError: training diverged.

        Warns:
            ConvergenceWarning: the weights grew so large that the capsules tell nothing.
        """
        # Check parameters and data, scale the columns and cut them into children
        settings = check_settings(_Settings, self)
        rows: Rows = validate_data(self, X, dtype=[np.float64, np.float32])
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        scaler = ColumnScaler.fit(rows, settings.child_dim)
        features = scaler.to_children(rows).float()  # [n i d]
        # Train W; ramps of the competition are fractions of the number of steps
        steps = settings.epochs * math.ceil(len(rows) / settings.batch_size)
        shape = (features.shape[1], settings.n_capsules, settings.pose_dim, settings.child_dim)
        energy = _build_energy(settings.energy_config(features.shape[1], steps), shape, seed)
        energy.fit_offset(features)
        self.n_iter_ = _train(energy, features, settings, seed)
        # Store what prediction needs as arrays, as scikit-learn's tools for copying and pickling expect
        self.mean_ = scaler.mean
        self.scale_ = scaler.scale
        self.W_ = _to_array(energy.W)
        self.bias_ = _to_array(energy.bias)
        self.offset_ = _to_array(energy.offset)
        # Winners of the training rows, and the decoder from their codes, both in float64
        self.labels_ = self._compute(rows, CapsuleEnergy.winners).numpy()
        codes = self._compute(rows, _codes).numpy()  # [n (j k)]
        decoder = _fit_decoder(codes, scaler.transform(rows), settings.ridge)
        self.decoder_ = decoder.weights
        self.intercept_ = decoder.intercept
        # Poses of the winners, which samples are drawn from
        by_capsule = codes.reshape(len(rows), settings.n_capsules, settings.pose_dim)
        self.poses_ = by_capsule[np.arange(len(rows)), self.labels_].copy()
        return self

    def transform(self, X: ArrayLike) -> Rows:
        """Return the hidden capsules [n (j k)], squashed and behind the gate, in the precision of X [n p]."""
        rows = self._check_rows(X)
        codes: FloatArray = self._compute(rows, _codes).numpy()
        return codes if rows.dtype == np.float64 else codes.astype(np.float32)

    def inverse_transform(self, X: ArrayLike) -> Rows:
        """Decode codes [n (j k)] to rows [n p] by the linear decoder.

        Raises:
            ShapeError: the codes have another number of columns than those of `transform`.
        """
        check_is_fitted(self)
        codes = check_array(X, dtype=[np.float64, np.float32], input_name="codes")
        if codes.shape[1] != len(self.decoder_):
            raise ShapeError(
                f"the codes have {codes.shape[1]} columns; {len(self.decoder_)}, as of `transform`, are wanted"
            )
        # Decode, then undo the scaling; constant columns have scale 0 and get their mean back
        rows: FloatArray = (codes @ self.decoder_ + self.intercept_) * self.scale_ + self.mean_
        result: Rows = rows.astype(codes.dtype, copy=False)
        return result

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:
        """Return the capsule [n] that wins each row; without competition, the most probable one."""
        winners: NDArray[np.int64] = self._compute(self._check_rows(X), CapsuleEnergy.winners).numpy()
        return winners

    def fit_predict(self, X: ArrayLike, y: object = None) -> NDArray[np.int64]:
        """Train on rows [n p] and return the capsule [n] that wins each of them; `y` is not used."""
        winners: NDArray[np.int64] = self.fit(X).labels_
        return winners

    def score_samples(self, X: ArrayLike) -> FloatArray:
        """Return minus the free energy [n], sum_j m_j log(1 + |z_j|²): larger is more familiar, but no likelihood."""
        scores: FloatArray = self._compute(self._check_rows(X), _negative_free_energy).numpy()
        return scores

    def sample(self, n_samples: int = 1) -> tuple[FloatArray, NDArray[np.int64]]:
        """Draw rows from the capsules, each as often as it wins training rows, in poses near those of these rows.

        A pose is that of a training row and noise, so that its mean and covariance are the capsule's
        (`utils.random.resample`); the decoder makes it a row.

        Args:
            n_samples: How many rows.

        Returns:
            Rows [n p], and the capsule [n] of each. The same call gives the same rows, as `random_state` decides;
            a `RandomState` instance goes on.

        Raises:
            ShapeError: `n_samples` is below 1.
        """
        check_is_fitted(self)
        # numpy's whole numbers are welcome, too
        n = operator.index(n_samples) if hasattr(n_samples, "__index__") else 0
        if n < 1:
            raise ShapeError(f"n_samples = {n_samples!r}; a whole number of rows, at least 1, is wanted")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # A training row for each sample: its capsule is as frequent as it wins
        which = torch.arange(n)
        rows = torch.minimum(
            (uniform(seed, which, count=1, dtype=torch.float64) * len(self.labels_)).long().squeeze(-1),
            torch.tensor(len(self.labels_) - 1),
        )
        winners = self.labels_[rows.numpy()]
        codes = np.zeros((n, self.W_.shape[1], self.W_.shape[2]))
        for j in np.unique(winners):
            own = torch.from_numpy(self.poses_[self.labels_ == j])  # [m k]
            drawn = resample(own, seed, int(j), which[torch.from_numpy(winners == j)])
            codes[winners == j, j] = drawn.numpy()
        found: FloatArray = np.asarray(self.inverse_transform(codes.reshape(n, -1)), dtype=np.float64)
        return found, winners

    def _check_rows(self, X: ArrayLike) -> Rows:
        check_is_fitted(self)
        rows: Rows = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return rows

    def _compute(self, X: Rows, function: Callable[[CapsuleEnergy, CapsuleState], Tensor]) -> Tensor:
        """Compute a function of the trained capsules' state [n ...] of all rows, CHUNK at a time, in float64."""
        # The trained capsules, rebuilt from their arrays
        config = EnergyConfig(mode=check_settings(_Settings, self).mode)
        energy = _build_energy(config, self.W_.shape).double()
        for tensor, array in ((energy.W, self.W_), (energy.bias, self.bias_), (energy.offset, self.offset_)):
            tensor.data.copy_(torch.from_numpy(array))
        # In chunks, which bounds the memory for any number of rows
        scaler = ColumnScaler(self.mean_, self.scale_, self.W_.shape[3])
        chunks = (scaler.to_children(X[n : n + CHUNK]) for n in range(0, len(X), CHUNK))
        return torch.cat([function(energy, energy.infer(energy.visible(chunk))) for chunk in chunks])

    @property
    def _n_features_out(self) -> int:
        return len(self.decoder_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
