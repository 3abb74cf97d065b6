"""The SVM probe of Rawlinson 2018, and the images that it learns from and is tested on.

It is a support vector machine over codes [n ...], flattened to [n d], with the kernel k(x, y) = exp(-gamma |x - y|^2);
each pair of classes has its own, and their votes decide. The network that made the codes was trained without labels:
only the SVM learns from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from torchcaps.config import to_dict
from torchcaps.data import AffnistConfig, BatchPosition, Dataset, MnistConfig, epoch_order, make_batch, subset
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.metrics import accuracy
from torchcaps.train.recipe import Recipe, stage_names, stage_of

__all__ = [
    "GAMMA",
    "MAX_TRAIN_IMAGES",
    "SVM",
    "C",
    "ProbeData",
    "build_probe_data",
    "fit_svm",
    "kernel",
    "require_sklearn",
]

C = 100.0
GAMMA = 0.1
"""Those of the authors' code, for capsules whose lengths are below 1."""
MAX_TRAIN_IMAGES = 10_000
"""Training images that the SVM learns from, unless told otherwise."""
MAX_GRAM_CODES = 16_000
MAX_GRAM_BYTES = 4_000_000_000
"""Codes of two classes whose kernel is one matrix, 2 GB at the most, which is many times as fast; bytes of all such
matrices at a time, beside those of each class with itself."""
TEST_CHUNK = 1000
CACHE_MEGABYTES = 2000
"""Test codes at a time; megabytes for blocks of a kernel that is no matrix."""
AFFNIST = {
    "mnist_svm": ("mnist", "mnist test"),
    "affnist_svm_a": ("affnist", "affnist test"),
    "affnist_svm_b": ("mnist", "affnist test"),
}
"""Metric -> which of the sets the SVM learns from, and which it is tested on."""


@dataclass(frozen=True, eq=False)
class SVM:
    """A fitted SVM: of each two classes, one function f(x) = sum_s w_s k(x_s, x) + b, above 0 where the first wins.

    Attributes:
        vectors: [s d] the support vectors x_s of all functions.
        weights: [p s] of each function; 0 for vectors that are not its own.
        bias: [p].
        pairs: [p 2] the two classes of each function.
        gamma: Of the kernel.
        shape: Of one code that it was fitted to.
    """

    vectors: Tensor
    weights: Tensor
    bias: Tensor
    pairs: Tensor
    gamma: float
    shape: tuple[int, ...]

    def functions(self, codes: Tensor) -> Tensor:
        """f [n p] of codes [n d], in float64, since thousands of large weights cancel each other."""
        return kernel(codes.double(), self.vectors, self.gamma) @ self.weights.T + self.bias

    def predict(self, codes: Tensor) -> Tensor:
        """[n] the class that wins most pairs, for codes [n ...]; of several, the lowest."""
        _check("test", codes)
        if codes.shape[1:] != self.shape:
            raise ShapeError(f"test codes are {list(codes.shape)}, wanted [n {' '.join(map(str, self.shape))}]")
        return torch.cat([self._winners(chunk) for chunk in torch.split(codes.detach().flatten(1), TEST_CHUNK)])

    def _winners(self, codes: Tensor) -> Tensor:
        # Index of the winner in its pair: the second class wins where f is not above 0.
        lost = (self.functions(codes) <= 0).long()  # [n p]
        won = self.pairs.expand(len(codes), -1, -1).gather(2, lost.unsqueeze(-1)).squeeze(-1)  # [n p]
        wins = won.new_zeros(len(codes), 1 + int(self.pairs.max()))  # [n j]
        return wins.scatter_add_(1, won, torch.ones_like(won)).argmax(1)

    def accuracy(self, codes: Tensor, labels: Tensor) -> float:
        """Return the share of codes [n ...] whose predicted class is that of their label [n]."""
        found = self.predict(codes)
        # Labels may go beyond the classes that the SVM was fitted to.
        classes = 1 + int(torch.cat([found, labels.long()]).max())
        return accuracy(one_hot(found, classes), labels)


def fit_svm(codes: Tensor, labels: Tensor, *, c: float = C, gamma: float | None = GAMMA) -> SVM:
    """Fit an SVM.

    Args:
        codes: [n ...].
        labels: [n] integers.
        c: Bounds the weight of a code: the smaller it is, the more codes may lie on the wrong side.
        gamma: Of the kernel; None for 1 / (d variance), which suits codes of any size.

    Returns:
        The SVM.

    Raises:
        ShapeError: If codes and labels do not fit.
        DataError: If all codes are of one class, or not finite.
        RecipeError: If a setting is not positive, or scikit-learn is missing.
    """
    # Refuse what cannot be fitted.
    _check("training", codes)
    if labels.shape != codes.shape[:1] or labels.is_floating_point():
        raise ShapeError(f"{len(codes)} codes but labels {labels.dtype} {list(labels.shape)}; integers, one a code")
    if int(labels.min()) == int(labels.max()):
        raise DataError(f"all {len(labels)} codes are of one class; two or more are wanted: take more images")
    if c <= 0 or (gamma is not None and gamma <= 0):
        raise RecipeError(f"c = {c}, gamma = {gamma}; numbers above 0 are wanted")
    require_sklearn()
    # The kernel, and the rows of each class; codes that are all the same have variance 0.
    rows = codes.detach().flatten(1).double()
    gamma = gamma or 1 / (rows.shape[1] * float(rows.var(correction=0)) or 1.0)
    classes = sorted(set(labels.tolist()))
    of = [(labels == name).nonzero().squeeze(1) for name in classes]  # [n of the class] each
    pairs = list(combinations(range(len(classes)), 2))
    most = sum(sorted(map(len, of))[-2:])  # codes of two classes
    # One function for each pair of classes, several at a time; the kernel of a class with itself is shared.
    with ThreadPoolExecutor(_workers(most)) as pool:
        groups = list(pool.map(lambda g: _group(rows[g], gamma, whole=most <= MAX_GRAM_CODES), of))
        found = list(pool.map(lambda pair: _fit_pair(groups[pair[0]], groups[pair[1]], c, gamma), pairs))
    # All functions in one matrix over the codes that are a support vector of any.
    weights = torch.zeros(len(pairs), len(rows), dtype=torch.float64)
    for row, pair, (w, _) in zip(weights, pairs, found, strict=True):
        row[torch.cat([of[i] for i in pair])] = w
    is_support = weights.any(0)
    bias = torch.tensor([b for _, b in found], dtype=torch.float64)
    return SVM(
        rows[is_support],
        weights[:, is_support],
        bias,
        torch.tensor(classes)[torch.tensor(pairs)],
        gamma,
        codes.shape[1:],
    )


class _Group(NamedTuple):
    """The codes [n d] of a class, and their kernel [n n] with each other, if there is room."""

    codes: Tensor
    gram: Tensor | None


def _group(codes: Tensor, gamma: float, *, whole: bool) -> _Group:
    return _Group(codes, kernel(codes, codes, gamma) if whole else None)


class _PairFunction(NamedTuple):
    """Weights [n] of the codes of two classes, and the bias, of the function that is above 0 for the first."""

    weights: Tensor
    bias: float


def _fit_pair(one: _Group, other: _Group, c: float, gamma: float) -> _PairFunction:
    """Fit the function of two classes, on a precomputed kernel if there is room for it."""
    from sklearn.svm import SVC

    # A precomputed kernel is much faster; without room for it, scikit-learn computes what it needs.
    inputs = _joint_gram(one, other, gamma)
    svc = SVC(C=c, kernel="precomputed")
    if inputs is None:
        svc = SVC(C=c, gamma=gamma, cache_size=CACHE_MEGABYTES)
        inputs = torch.cat([one.codes, other.codes])
    # The first class is +1, so that f is above 0 where it wins.
    svc.fit(inputs.numpy(), [1] * len(one.codes) + [-1] * len(other.codes))
    weights = torch.zeros(len(inputs), dtype=torch.float64)  # [n], 0 where not a support vector
    weights[torch.from_numpy(svc.support_).long()] = torch.from_numpy(svc.dual_coef_[0])
    return _PairFunction(weights, float(svc.intercept_[0]))


def _joint_gram(one: _Group, other: _Group, gamma: float) -> Tensor | None:
    """[n n] the kernel of all codes of two classes, if that of each with itself is known; None if not."""
    if one.gram is None or other.gram is None:
        return None
    a = len(one.codes)
    n = len(one.codes) + len(other.codes)
    known = one.gram.new_empty(n, n)
    # Two blocks are known, and the other two are each other transposed: only one is computed.
    known[:a, :a] = one.gram
    known[a:, a:] = other.gram
    known[:a, a:] = kernel(one.codes, other.codes, gamma)
    known[a:, :a] = known[:a, a:].T
    return known


def _workers(most: int) -> int:
    """How many pairs of classes to fit at a time, if the largest has `most` codes."""
    # 8 bytes a number: kernels are float64.
    return max(1, min(torch.get_num_threads(), MAX_GRAM_BYTES // (8 * min(most, MAX_GRAM_CODES) ** 2)))


def kernel(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Compute k [n m] of x [n d] and y [m d] in one matrix product, since |x - y|^2 = |x|^2 + |y|^2 - 2 x . y."""
    square = torch.addmm(y.square().sum(1), x, y.T, alpha=-2).add_(x.square().sum(1, keepdim=True))  # [n m]
    # Rounding may put the squared distance of equal codes below 0.
    return square.clamp_min_(0).mul_(-gamma).exp_()


def require_sklearn() -> None:
    """Refuse to go on without scikit-learn; call it before any work is done.

    Raises:
        RecipeError: If it is not installed.
    """
    try:
        import sklearn.svm  # noqa: F401
    except ImportError:
        raise RecipeError("the SVM needs scikit-learn: pip install 'torchcaps[sklearn]'") from None


@dataclass(frozen=True, eq=False)
class ProbeData:
    """The images that all rows of a table share.

    Attributes:
        sets: Name -> images of the SVM.
        protocols: Metric -> names of the sets that the SVM learns from and is tested on.
        main: The protocol by which simpler probes and groups are measured.
        augmented: [n c h w] augmented training images, as many as the SVM learns from, but 10,000 at most: to count
            winners and to fit controls to.
    """

    sets: Mapping[str, Dataset]
    protocols: Mapping[str, tuple[str, str]]
    main: str
    augmented: Tensor

    @property
    def train_count(self) -> int:
        """How many images the SVM learns from."""
        return len(self.sets[self.protocols[self.main][0]])


def build_probe_data(recipe: Recipe, images: int = MAX_TRAIN_IMAGES) -> ProbeData:
    """Build the sets of images to probe codes on.

    Args:
        recipe: Of the network that makes the codes; its seed has an influence on augmentation only.
        images: How many training images the SVM learns from.

    Returns:
        The sets and protocols, those of the paper for affNIST.

    Raises:
        RecipeError: If no image is asked for.
        DataError: If images have several labels.
    """
    if images < 1:
        raise RecipeError(f"the SVM is to learn from {images} images; at least 1 is wanted")
    # The data, and the settings of the last stage, for its augmentation.
    data = recipe.data
    splits = recipe.data.load()
    settings = stage_of(recipe, stage_names(recipe.model)[-1]).train
    train = splits.train
    if train.labels.ndim != 1:
        raise DataError("each image shows several classes; the SVM needs data of one label an image")
    # Augmented images: the first ones of the first epoch.
    count = min(images, len(train))
    order = epoch_order(recipe.seed, 0, len(train))
    augmented = make_batch(
        train, order, BatchPosition(0, 0), min(count, MAX_TRAIN_IMAGES), seed=recipe.seed, max_shift=settings.max_shift
    ).images
    # affNIST has the three protocols of the paper, other data have one.
    if isinstance(data, AffnistConfig):
        return ProbeData(_digits(data, count) | {"affnist test": splits.test}, AFFNIST, "affnist_svm_a", augmented)
    # The same images for every seed.
    train_images = subset(train, epoch_order(0, 0, len(train))[:count])
    name = f"{to_dict(recipe)['data']['name'].replace('-', '_')}_svm"
    return ProbeData({"train": train_images, "test": splits.test}, {name: ("train", "test")}, name, augmented)


def _digits(data: AffnistConfig, count: int) -> dict[str, Dataset]:
    """Load centered and transformed digits, each the first `count` of training, and the test digits, centered."""
    # Only training digits are taken from these sets, so a single test image will do.
    centered = replace(data, train_on="mnist", train=count, test=1, validation=0, placed_shift=0)
    tests = MnistConfig(test=data.test, data_dir=data.data_dir).load().test
    return {
        "mnist": centered.load().train,
        "affnist": replace(centered, train_on="affnist").load().train,
        "mnist test": replace(tests, images=_centered(tests.images, data.size)),
    }


def _centered(images: Tensor, size: int) -> Tensor:
    """Put images [n c h w] into the middle of a canvas, as affNIST's recipe has those of training."""
    before = (size - images.shape[-1]) // 2
    after = size - images.shape[-1] - before
    return pad(images, (before, after, before, after))


def _check(name: str, codes: Tensor) -> None:
    if codes.ndim < 2 or 0 in codes.shape:
        raise ShapeError(f"{name} codes are {list(codes.shape)}; [n ...] is wanted, no empty axis")
    if not bool(codes.isfinite().all()):
        raise DataError(f"{name} codes hold NaN or infinity: find what diverged before measuring it")
