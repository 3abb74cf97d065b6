"""Class capsules over plain vectors or images, as a scikit-learn classifier.

    X [n p]  --standardize, linear, squash-->  children [n i d]  --dynamic routing-->  class capsules [n j k]
    X [n (c h w)]  --convolution, primary capsules-->  children  --dynamic routing-->  class capsules [n j k]

The first form takes rows of numbers; the second, with `image_shape`, is a `CapsNet`. Both are trained by the margin
loss on the lengths of the class capsules. Weights are stored as numpy arrays; training is in float32, prediction in
float64.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torchcaps.config import Count, NonNegativeFloat, Range
from torchcaps.data.augment import SampleKey, shift
from torchcaps.errors import DataError, TrainingError
from torchcaps.estimators.preprocessing import (
    ColumnScaler,
    FloatArray,
    RandomState,
    Rows,
    check_settings,
    flatten_images,
)
from torchcaps.layers import DenseCapsules
from torchcaps.losses import margin_loss
from torchcaps.math.squash import norm, squash
from torchcaps.models import CapsNetConfig, Model
from torchcaps.models.chunking import in_chunks
from torchcaps.routing import Dynamic
from torchcaps.types import Batch, Capsules, ImageSpec
from torchcaps.utils.random import permutation

__all__ = ["CapsuleClassifier"]

DECAY = 0.1
"""Final learning rate, relative to the initial one."""
RATE = 0.01
SMALL_IMAGE = 64
RATE_EXPONENT = 0.6
"""Initial learning rate of rows and of images of up to so many numbers; that of larger ones falls with this power."""
CHANNELS = (1, 2, 3, 4)
"""Numbers of channels that tell (h, w, c) from (c, h, w)."""
MAX_INIT_STD = 0.5
"""Largest standard deviation of the initial W, for rows."""
MOST_CHECKED = 1000
"""Training rows on which a classifier is compared with chance."""
SHIFT_SHARE = 16
"""Images are moved by up to their side divided by this while training: 2 pixels of 32, none of 8."""
MAX_KERNEL = 9
"""Largest side of the filters of both convolutions, for images (Sabour 2017)."""


@dataclass(frozen=True)
class _Settings:
    """Checked parameters of `CapsuleClassifier`; scikit-learn wants them checked in `fit`, not in the constructor."""

    pose_dim: Count
    child_dim: Count
    n_children: Count
    iterations: Count
    image_shape: tuple[Count, Count, Count] | None
    channels: Count
    kernel: Count | None
    reconstruction: NonNegativeFloat
    max_shift: Annotated[int, Range(0, 1000)] | None
    epochs: Count
    batch_size: Count
    learning_rate: Annotated[float, Range(0, 1e30, open_low=True)] | None  # Adam divides it, in float32, by less than 1

    @property
    def image_spec(self) -> tuple[int, int, int] | None:
        """The shape (c, h, w) of images, which `image_shape` may give as (h, w, c); None for rows."""
        if self.image_shape is None or not self.channels_are_last:
            return self.image_shape
        height, width, channels = self.image_shape
        return channels, height, width

    @property
    def channels_are_last(self) -> bool:
        """Whether `image_shape` is (h, w, c): its last number is one that channels have, and its first is not."""
        return self.image_shape is not None and self.image_shape[2] in CHANNELS and self.image_shape[0] not in CHANNELS

    @property
    def rate(self) -> float:
        """The learning rate at the start: as given or, for images, smaller the larger they are."""
        if self.learning_rate is not None:
            return self.learning_rate
        pixels = SMALL_IMAGE if self.image_shape is None else math.prod(self.image_shape)
        share: float = min(1.0, SMALL_IMAGE / pixels) ** RATE_EXPONENT
        return RATE * share

    @property
    def shift(self) -> int:
        """The most pixels by which images are moved while training; rows are not moved."""
        shape = self.image_spec
        if shape is None:
            return 0
        return min(shape[1:]) // SHIFT_SHARE if self.max_shift is None else self.max_shift

    def build(self, columns: int, classes: int, seed: int = 0) -> Model:
        """Build the network before training; the global random state of torch is left as it was.

        Args:
            columns: p, numbers of a row.
            classes: number of classes.
            seed: of the initial weights.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            shape = self.image_spec
            if shape is None:
                return _RowNetwork(self, columns, classes)
            spec = ImageSpec(*shape, classes)
            return self._capsnet_config(min(spec.height, spec.width)).build(spec)

    def _capsnet_config(self, side: int) -> CapsNetConfig:
        """Configure a CapsNet whose kernels are a third of the image's side, unless `kernel` is given."""
        kernel = self.kernel or min(MAX_KERNEL, max(1, (side + 1) // 3))
        return CapsNetConfig(
            channels=self.channels,
            kernel=kernel,
            types=self.n_children,
            type_dimension=self.child_dim,
            primary_kernel=kernel,
            dimension=self.pose_dim,
            routing=Dynamic(self.iterations),
            reconstruction=self.reconstruction,
            decoder=(8 * self.pose_dim,),
        )


class _RowNetwork(Model):
    """Class capsules over rows: children [b i d] are a linear map of the row [b p], squashed."""

    def __init__(self, settings: _Settings, columns: int, classes: int) -> None:
        super().__init__()
        self.d = settings.child_dim
        i = settings.n_children
        k = settings.pose_dim
        # A child is d neighboring outputs of one linear map
        self.primary = nn.Linear(columns, i * self.d)
        # Class capsules of length about 1/3, where squash is neither flat nor saturated
        std = min(MAX_INIT_STD, classes / math.sqrt(i * k))
        self.classes = DenseCapsules(i, classes, self.d, k, routing=Dynamic(settings.iterations), std=std)

    @in_chunks
    def scores(self, rows: Tensor) -> Tensor:
        """Compute the lengths [b j] of the class capsules of rows [b p]."""
        # The length of a squashed child is its activation
        pose = squash(torch.unflatten(self.primary(rows), 1, (-1, self.d)))  # [b i d]
        parents, _ = self.classes(Capsules(pose, norm(pose)))
        lengths: Tensor = parents.activation
        return lengths

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Compute the margin loss of a batch."""
        return {"loss": margin_loss(self.scores(batch.images), batch.labels)}


def _train(network: Model, inputs: Tensor, labels: Tensor, settings: _Settings, seed: int) -> int:
    """Train a network with Adam and an exponentially decaying learning rate.

    Args:
        network: trained in place.
        inputs: rows [n p] or images [n c h w].
        labels: [n]
        settings: epochs, batch size, learning rate and shift.
        seed: of the order and the shifts.

    Returns:
        The number of steps.

    Raises:
        TrainingError: the weights are not finite at the end.
    """
    # Length of training, which the schedule must know: it ends at DECAY of the initial rate
    n = len(inputs)
    batches = math.ceil(n / settings.batch_size)
    steps = settings.epochs * batches
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** (1 / steps))
    # Batches of nearly equal size, so that no step averages over very few rows
    for epoch in range(settings.epochs):
        for number, index in enumerate(permutation(seed, epoch, n).tensor_split(batches)):
            images = shift(inputs[index], settings.shift, SampleKey(seed, epoch, index))
            batch = Batch(images, labels[index], index)
            loss = network.objective(batch, epoch * batches + number)["loss"]
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    # Weights that diverged would predict NaN
    if not all(bool(p.isfinite().all()) for p in network.parameters()):
        raise TrainingError(f"the capsules diverged at learning_rate={settings.rate}; try a smaller one")
    return steps


class CapsuleClassifier(ClassifierMixin, BaseEstimator):
    """Classify rows [n p], or images [n (c h w)], by the longest class capsule.

    Args:
        pose_dim: K, numbers of a class capsule.
        child_dim: d, numbers of a child.
        n_children: I, children of a row; for images, capsule types at each place.
        iterations: of dynamic routing.
        image_shape: (c, h, w) or (h, w, c), as X has them, if the rows are images, flattened or not, for a CapsNet;
            None for plain numbers. The last of three numbers is taken for the channels if it is 1 to 4 and the first is
            not.
        channels: filters of the first convolution; for images only.
        kernel: side of the filters of both convolutions, None for a third of the image's, at most 9; for images only.
        reconstruction: weight of the reconstruction loss; for images only.
        max_shift: pixels by which images are moved at random while training, None for a sixteenth of their side; for
            images only.
        epochs: passes over the rows.
        batch_size: rows a step.
        learning_rate: of Adam, at the start. None for 0.01, which falls with the size of images beyond 8x8.
        random_state: an integer makes `fit` a function of its input.

    Attributes:
        classes_: [j] the classes.
        weights_: name -> array, the weights of the network.
        mean_: [p] subtracted from each column; for images, the smallest of all pixels.
        scale_: [p] by which each column is then divided, 0 for a constant one; for images, the range of all pixels.
        n_iter_: steps taken.

    >>> from sklearn.datasets import load_iris
    >>> rows, species = load_iris(return_X_y=True)
    >>> capsules = CapsuleClassifier().fit(rows, species)
    >>> capsules.predict_proba(rows).shape, bool(capsules.score(rows, species) > 0.9)
    ((150, 3), True)
    """

    def __init__(
        self,
        pose_dim: int = 16,
        child_dim: int = 8,
        n_children: int = 16,
        *,
        iterations: int = 3,
        image_shape: tuple[int, int, int] | None = None,
        channels: int = 32,
        kernel: int | None = None,
        reconstruction: float = 0.0005,
        max_shift: int | None = None,
        epochs: int = 30,
        batch_size: int = 32,
        learning_rate: float | None = None,
        random_state: RandomState = 0,
    ) -> None:
        self.pose_dim = pose_dim
        self.child_dim = child_dim
        self.n_children = n_children
        self.iterations = iterations
        self.image_shape = image_shape
        self.channels = channels
        self.kernel = kernel
        self.reconstruction = reconstruction
        self.max_shift = max_shift
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> CapsuleClassifier:
        """Train on labeled rows.

        Args:
            X: rows [n p], or images [n c h w] (or [n h w c]) or [n (c h w)].
            y: [n] labels of any kind.

        Returns:
            This estimator.

        Raises:
            DataError: y has a single class, or X is too large to be scaled.
            RecipeError: a parameter has the wrong type or is out of range.
            ShapeError: X does not fit `image_shape`.
            TrainingError: training diverged.

        Warns:
            ConvergenceWarning: the capsules tell the classes apart no better than by naming the most frequent one.
        """
        # Check parameters and data
        settings = check_settings(_Settings, self)
        shape = settings.image_shape
        rows, targets = validate_data(self, flatten_images(X, shape), y, dtype=[np.float64, np.float32])
        check_classification_targets(targets)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class, '{self.classes_[0]}'; two or more are wanted, to be told apart")
        # Scale the columns, which `predict` repeats
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        scaler = ColumnScaler.fit(rows) if shape is None else ColumnScaler.fit_pixels(rows, shape)
        self.mean_ = scaler.mean
        self.scale_ = scaler.scale
        self._settings = settings
        # Train, and store the weights as arrays, as scikit-learn's tools for copying and pickling expect
        network = settings.build(rows.shape[1], len(self.classes_), seed)
        self.n_iter_ = _train(network, self._to_input(rows).float(), torch.from_numpy(labels), settings, seed)
        self.weights_ = {name: t.detach().double().numpy().copy() for name, t in network.state_dict().items()}
        self._warn_at_chance(rows, labels)
        return self

    def _warn_at_chance(self, rows: Rows, labels: NDArray[np.int64]) -> None:
        """Say so if nothing was learned, which a mere low score would hide."""
        some = np.linspace(0, len(rows) - 1, min(len(rows), MOST_CHECKED)).astype(int)
        found = (self._lengths_of(rows[some]).argmax(1) == labels[some]).mean()
        chance = np.bincount(labels[some]).max() / len(some)
        if found <= chance:
            warnings.warn(
                f"the capsules have learned nothing: they are right about {found:.0%} of the training rows, and the "
                f"most frequent class is {chance:.0%}; try a lower learning_rate than {self._settings.rate:.3g}, or "
                "more epochs",
                ConvergenceWarning,
                stacklevel=3,
            )

    def predict(self, X: ArrayLike) -> NDArray[np.generic]:
        """Return the class [n] whose capsule is longest, for each row of X."""
        longest = self.predict_proba(X).argmax(1)  # [n]
        labels: NDArray[np.generic] = self.classes_[longest]
        return labels

    def predict_proba(self, X: ArrayLike) -> FloatArray:
        """Return the lengths of the class capsules [n j], divided by their sum."""
        lengths = self._lengths(X)
        shares: FloatArray = lengths / lengths.sum(1, keepdims=True)
        return shares

    def decision_function(self, X: ArrayLike) -> FloatArray:
        """Return the lengths of the class capsules [n j]; for two classes [n], the second's share minus the first's."""
        check_is_fitted(self)
        # Two classes: scikit-learn wants one column, whose sign decides as `predict` does
        if len(self.classes_) > 2:
            return self._lengths(X)
        shares = self.predict_proba(X)
        gap: FloatArray = shares[:, 1] - shares[:, 0]
        return gap

    def _lengths(self, X: ArrayLike) -> FloatArray:
        """Compute the lengths of the class capsules [n j] in float64."""
        check_is_fitted(self)
        rows: Rows = validate_data(
            self, flatten_images(X, self._settings.image_shape), dtype=[np.float64, np.float32], reset=False
        )
        return self._lengths_of(rows)

    def _lengths_of(self, rows: Rows) -> FloatArray:
        """Compute the lengths of the class capsules [n j] of checked rows."""
        # The network is rebuilt from its weights; rows are scored in float64
        network = self._settings.build(rows.shape[1], len(self.classes_)).double().eval()
        network.load_state_dict({name: torch.from_numpy(array) for name, array in self.weights_.items()})
        with torch.no_grad():
            lengths: FloatArray = network.scores(self._to_input(rows)).numpy()
        return lengths

    def _to_input(self, X: Rows) -> Tensor:
        """Convert rows to the network's input: scaled rows [n p], or images [n c h w] in [0, 1]."""
        rows = ColumnScaler(self.mean_, self.scale_).transform(X)
        if self._settings.image_shape is None:
            return torch.from_numpy(rows)
        # The network was trained on pixels in [0, 1]; darker and lighter ones than those of training are clipped
        images = torch.from_numpy(rows.clip(0, 1)).reshape(-1, *self._settings.image_shape)
        return images.permute(0, 3, 1, 2).contiguous() if self._settings.channels_are_last else images
