"""Class capsules over plain vectors or images, as a scikit-learn classifier.

    X [n p]  --standardize, linear, squash-->  children [n i d]  --dynamic routing-->  class capsules [n j k]
    X [n (c h w)]  --convolution, primary capsules-->  children  --dynamic routing-->  class capsules [n j k]

The first is a row of numbers, the second, with `image_shape`, a `CapsNet`. Both learn by the margin loss on the lengths
of the class capsules. All that is learned is kept as numpy arrays: learned in float32, applied in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torchcaps.config import Count, NonNegativeFloat, Range
from torchcaps.errors import DataError, TrainingError
from torchcaps.estimators.columns import Array, Columns, flat, settings_of
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
"""What is left of the learning rate at the end of training."""
WIDEST = 0.5
"""Largest deviation of W at the start, in the row form."""
LARGEST_KERNEL = 9
"""Of both convolutions of the image form (Sabour 2017)."""


@dataclass(frozen=True)
class _Settings:
    """The parameters of `CapsuleClassifier`, checked: sklearn wants that done in `fit`."""

    pose_dim: Count
    child_dim: Count
    n_children: Count
    iterations: Count
    image_shape: tuple[Count, Count, Count] | None
    channels: Count
    kernel: Count | None
    reconstruction: NonNegativeFloat
    epochs: Count
    batch_size: Count
    learning_rate: Annotated[float, Range(0, 1e30, open_low=True)]  # Adam divides it, in float32, by less than 1

    def network(self, columns: int, classes: int, seed: int = 0) -> Model:
        """The network before training; the random numbers of the process stay as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.image_shape is None:
                return _Rows(self, columns, classes)
            spec = ImageSpec(*self.image_shape, classes)
            return self._capsnet(min(spec.height, spec.width)).build(spec)

    def _capsnet(self, side: int) -> CapsNetConfig:
        """A CapsNet whose kernels are a third of the image's side unless `kernel` says otherwise."""
        kernel = self.kernel or min(LARGEST_KERNEL, max(1, (side + 1) // 3))
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


class _Rows(Model):
    """Rows [b p] -> children [b i d], a linear map of the row, squashed -> class capsules [b j k]."""

    def __init__(self, settings: _Settings, columns: int, classes: int) -> None:
        super().__init__()
        self.d = settings.child_dim
        i = settings.n_children
        k = settings.pose_dim
        self.primary = nn.Linear(columns, i * self.d)
        std = min(WIDEST, classes / math.sqrt(i * k))  # class capsules of length about 1/3: neither flat nor full
        self.classes = DenseCapsules(i, classes, self.d, k, routing=Dynamic(settings.iterations), std=std)

    @in_chunks
    def scores(self, rows: Tensor) -> Tensor:
        pose = squash(torch.unflatten(self.primary(rows), 1, (-1, self.d)))  # [b i d]
        parents, _ = self.classes(Capsules(pose, norm(pose)))
        lengths: Tensor = parents.activation
        return lengths

    def objective(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return {"loss": margin_loss(self.scores(batch.images), batch.labels)}


def _descend(network: Model, inputs: Tensor, labels: Tensor, settings: _Settings, seed: int) -> int:
    """Adam over all rows, `epochs` times, the learning rate falling to DECAY of itself; returns the steps."""
    n = len(inputs)
    rate = settings.learning_rate
    parts = math.ceil(n / settings.batch_size)
    steps = settings.epochs * parts
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY ** (1 / steps))
    for step in range(steps):
        if step % parts == 0:
            rows = permutation(seed, step // parts, n).tensor_split(parts)
        index = rows[step % parts]
        loss = network.objective(Batch(inputs[index], labels[index], index), step)["loss"]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    if not all(bool(p.isfinite().all()) for p in network.parameters()):
        raise TrainingError(f"the capsules diverged at learning_rate={rate}; try a smaller one")
    return steps


class CapsuleClassifier(ClassifierMixin, BaseEstimator):
    """Rows [n p], or images [n (c h w)], -> a class each: that of the longest class capsule.

    pose_dim        K, numbers of a class capsule
    child_dim       d, numbers of a child
    n_children      I, children of a row; of images, kinds of children at each place
    iterations      of dynamic routing
    image_shape     (c, h, w): rows are such images, flattened or not, and a CapsNet sees them. None: they are plain
                    numbers
    channels, kernel, reconstruction   only of images: filters of the first convolution, side of the filters of both
                    (None: a third of the image's, at most 9), weight of redrawing the image from the right capsule
    epochs          passes over the rows
    batch_size      rows a step
    learning_rate   of Adam, at the start; large images want a smaller one
    random_state    a whole number makes `fit` a function of its input

    After `fit`: `classes_` [j], `weights_` name -> array, `mean_` and `scale_` [p], what is taken from each column
    and what it is then divided by (0 for a constant one; of images the least value and the range of all pixels),
    `n_iter_` steps.

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
        epochs: int = 30,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        random_state: Any = 0,
    ) -> None:
        self.pose_dim = pose_dim
        self.child_dim = child_dim
        self.n_children = n_children
        self.iterations = iterations
        self.image_shape = image_shape
        self.channels = channels
        self.kernel = kernel
        self.reconstruction = reconstruction
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> CapsuleClassifier:
        """Learn the classes y [n], of any kind of label, from the rows X [n p]."""
        settings = settings_of(_Settings, self)
        X, y = validate_data(self, flat(X, settings.image_shape), y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class, '{self.classes_[0]}'; two or more are wanted, to be told apart")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        shape = settings.image_shape
        columns = Columns.of(X) if shape is None else Columns.of_pixels(X, shape)
        self.mean_ = columns.mean
        self.scale_ = columns.scale
        self._settings = settings
        network = settings.network(X.shape[1], len(self.classes_), seed)
        self.n_iter_ = _descend(network, self._inputs(X).float(), torch.from_numpy(labels), settings, seed)
        self.weights_ = {name: t.detach().double().numpy().copy() for name, t in network.state_dict().items()}
        return self

    def predict(self, X: Any) -> Array:
        """[n] the class whose capsule is longest."""
        longest = self.predict_proba(X).argmax(1)  # [n]
        named: Array = self.classes_[longest]
        return named

    def predict_proba(self, X: Any) -> Array:
        """[n j] the lengths of the class capsules, divided by their sum."""
        lengths = self._lengths(X)
        shares: Array = lengths / lengths.sum(1, keepdims=True)
        return shares

    def decision_function(self, X: Any) -> Array:
        """[n j] the lengths of the class capsules; of two classes [n], the second's share less the first's."""
        check_is_fitted(self)
        if len(self.classes_) > 2:
            return self._lengths(X)
        shares = self.predict_proba(X)
        gap: Array = shares[:, 1] - shares[:, 0]
        return gap

    def _lengths(self, X: Any) -> Array:
        """[n j] in float64, found for a bounded number of rows at a time."""
        check_is_fitted(self)
        X = validate_data(self, flat(X, self._settings.image_shape), dtype=[np.float64, np.float32], reset=False)
        network = self._settings.network(X.shape[1], len(self.classes_)).double().eval()
        network.load_state_dict({name: torch.from_numpy(learned) for name, learned in self.weights_.items()})
        with torch.no_grad():
            lengths: Array = network.scores(self._inputs(X)).numpy()
        return lengths

    def _inputs(self, X: Array) -> Tensor:
        """What the network sees: standardized rows [n p], or images [n c h w] in [0, 1]."""
        rows = Columns(self.mean_, self.scale_).standardize(X)
        if self._settings.image_shape is None:
            return torch.from_numpy(rows)
        return torch.from_numpy(rows.clip(0, 1)).reshape(-1, *self._settings.image_shape)
