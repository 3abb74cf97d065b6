"""The scikit-learn estimators: sklearn's own checks, planted clusters, the way back, classes, and bad input."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import normalized_mutual_info_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import torchcaps
from torchcaps.errors import DataError, RecipeError, ShapeError, TrainingError
from torchcaps.estimators import CapsuleClassifier, PoECapsules
from torchcaps.estimators.classifier import _RowNetwork, _Settings
from torchcaps.estimators.preprocessing import check_settings
from torchcaps.models.poe.encoder import CapsuleEnergy


def planted(n=300, p=22, rank=3, seed=0):
    """Three centers in p dimensions, each with its own subspace in which its rows vary, and a little noise."""
    g = np.random.default_rng(seed)
    y = np.arange(n) % 3
    centers, axes = 2 * g.normal(size=(3, p)), g.normal(size=(3, rank, p))
    inside = np.einsum("nr,nrp->np", 0.5 * g.normal(size=(n, rank)), axes[y])
    return centers[y] + inside + 0.05 * g.normal(size=(n, p)), y


@pytest.fixture(scope="module")
def three():
    """Fitted to two thirds of the planted rows, whose first column is made constant; the rest is for tests."""
    X, y = planted(450)
    X[:, 0] = 7.5
    return PoECapsules(n_capsules=3, pose_dim=8, child_dim=4).fit(X[:300]), X, y


@parametrize_with_checks(
    [
        PoECapsules(4, 4, 2, epochs=8),
        PoECapsules(3, 2, 2, mode="offset", epochs=4),
        PoECapsules(1, 1, 1, mode="paper", epochs=4),
        CapsuleClassifier(epochs=4),
    ]
)
def test_sklearn_conventions(estimator, check):
    check(estimator)
    assert clone(estimator).get_params() == estimator.get_params()


@pytest.mark.long
@pytest.mark.parametrize("estimator", [PoECapsules(), CapsuleClassifier(), CapsuleClassifier(4, 2, 3, iterations=1)])
def test_sklearn_conventions_with_defaults(estimator):
    assert {r["status"] for r in check_estimator(estimator)} <= {"passed", "skipped"}


@pytest.mark.parametrize("seed", [1, 2])
def test_planted_clusters_are_found(seed):
    X, y = planted(300, seed=seed)
    capsules = PoECapsules(n_capsules=3, pose_dim=8, epochs=60, random_state=seed).fit(X)
    assert normalized_mutual_info_score(y, capsules.labels_) >= 0.9


def test_unseen_rows_go_to_their_clusters(three):
    capsules, X, y = three
    assert normalized_mutual_info_score(y[300:], capsules.predict(X[300:])) >= 0.9
    assert np.array_equal(capsules.labels_, capsules.predict(X[:300]))


def test_fit_predict_is_fit_and_the_labels():
    X, _ = planted(60, seed=1)
    found = PoECapsules(3, 2, epochs=4).fit_predict(X)
    assert np.array_equal(found, PoECapsules(3, 2, epochs=4).fit(X).labels_)


def test_poses_lead_back_to_unseen_rows_better_than_the_cluster_means(three):
    capsules, X, y = three
    back = capsules.inverse_transform(capsules.transform(X[300:]))
    error = ((back - X[300:]) ** 2).sum()
    means = np.stack([X[:300][y[:300] == j].mean(0) for j in range(3)])[y[300:]]
    assert error < 0.1 * ((X[:300].mean(0) - X[300:]) ** 2).sum()
    assert error < 0.7 * ((means - X[300:]) ** 2).sum()
    assert np.allclose(back[:, 0], 7.5)


def read_by_loops(capsules, row):
    """Definition: poses, winner and familiarity of one row, number by number, for uniform coupling."""
    I, J, K, d = capsules.W_.shape
    x = np.zeros((I, d))
    for p, value in enumerate(row):
        if capsules.scale_[p] > 0:
            x[p // d, p % d] = (value - capsules.mean_[p]) / capsules.scale_[p]
    for i in range(I):
        away = x[i] - capsules.offset_[i]
        length = np.sqrt((away**2).sum())
        x[i] = away * length / (1 + length**2)
    poses, cosines, experts = np.zeros((J, K)), [], []
    for j in range(J):
        z = capsules.bias_[j] + sum(capsules.W_[i, j] @ x[i] for i in range(I)) / I
        expected = np.stack([capsules.W_[i, j].T @ z for i in range(I)])
        cosines.append((expected * x).sum() / np.sqrt((expected**2).sum() * (x**2).sum()))
        poses[j] = z * np.sqrt((z**2).sum()) / (1 + (z**2).sum())
        experts.append(np.log(1 + (z**2).sum()))
    winner = int(np.argmax(cosines))
    poses[np.arange(J) != winner] = 0
    return poses.ravel(), winner, experts[winner]


def test_every_answer_equals_its_definition(three):
    capsules, X, _ = three
    X = X[300:310] + np.random.default_rng(0).normal(size=(10, X.shape[1]))  # the constant column moves, to no effect
    codes, winners, scores = capsules.transform(X), capsules.predict(X), capsules.score_samples(X)
    for row, code, winner, score in zip(X, codes, winners, scores, strict=True):
        expected = read_by_loops(capsules, row)
        assert np.allclose(code, expected[0], atol=1e-12)
        assert winner == expected[1]
        assert score == pytest.approx(expected[2])


def test_the_way_back_is_the_ridge_regression_of_its_docstring(three):
    from sklearn.linear_model import Ridge

    capsules, X, _ = three
    codes, varies = capsules.transform(X[:300]), capsules.scale_ > 0
    target = ((X[:300] - capsules.mean_) / np.where(varies, capsules.scale_, 1))[:, varies]
    ridge = Ridge(alpha=300 * 1e-3 * codes.var(0).mean()).fit(codes, target)
    assert np.allclose(capsules.decoder_[:, varies], ridge.coef_.T, atol=1e-6)
    assert np.allclose(capsules.intercept_[varies], ridge.intercept_, atol=1e-6)
    assert not capsules.decoder_[:, ~varies].any()


def test_chunks_do_not_show(three, monkeypatch):
    capsules, X, _ = three
    whole = capsules.transform(X)
    monkeypatch.setattr("torchcaps.estimators.poe.CHUNK", 7)
    assert np.allclose(capsules.transform(X), whole, atol=1e-12)


def test_fit_is_a_function_of_its_seed_and_leaves_input_and_global_random_numbers_alone():
    X, _ = planted(60)
    kept = X.copy()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (PoECapsules(4, 3, epochs=5, random_state=s).fit(X) for s in (1, 1, 2))
    first.transform(X)
    assert torch.equal(torch.rand(1), expected)
    assert np.array_equal(first.W_, again.W_) and not np.array_equal(first.W_, other.W_)
    assert np.array_equal(X, kept)


def test_single_precision_gives_the_same_and_comes_back_as_single():
    X, _ = planted(60)
    double = PoECapsules(4, 3, epochs=5).fit(X)
    codes = double.transform(X.astype(np.float32))
    assert codes.dtype == np.float32 == double.inverse_transform(codes).dtype
    assert np.allclose(codes, double.transform(X), atol=1e-5)


def test_samples_are_near_the_rows_that_their_capsules_win(three):
    capsules, X, _ = three
    rows, winners = capsules.sample(600)
    assert rows.shape == (600, X.shape[1]) and winners.shape == (600,) and np.isfinite(rows).all()
    assert np.array_equal(rows, capsules.sample(600)[0])  # random_state is a number
    shares = [np.bincount(w, minlength=3) / len(w) for w in (winners, capsules.labels_)]
    assert np.allclose(*shares, atol=0.08)
    rebuilt = capsules.inverse_transform(capsules.transform(X[:300]))
    for j in np.unique(winners):
        own = rebuilt[capsules.labels_ == j]
        assert np.allclose(rows[winners == j].mean(0), own.mean(0), atol=0.5 * own.std() + 1e-9)
    # A capsule's samples belong to it
    assert (capsules.predict(rows) == winners).mean() > 0.8
    for wrong in (0, 1.5, "3"):
        with pytest.raises(ShapeError, match=f"n_samples = {wrong!r}; a whole number"):
            capsules.sample(wrong)


def test_what_is_learned_is_plain_arrays(three):
    capsules, _, _ = three
    learned = {name: value for name, value in vars(capsules).items() if name.endswith("_")}
    assert {"W_", "bias_", "offset_", "mean_", "scale_", "labels_", "decoder_", "intercept_"} <= set(learned)
    assert all(isinstance(v, np.ndarray | int) for v in learned.values())
    assert capsules.n_iter_ == 100 * 3 and capsules.W_.shape == (6, 3, 8, 4)


def test_without_competition_all_capsules_take_part():
    X, _ = planted(60)
    poses = PoECapsules(4, 3, mode="offset", epochs=5).fit_transform(X).reshape(60, 4, 3)
    assert (np.abs(poses).sum(-1) > 0).all()
    names = PoECapsules(4, 3, epochs=1).fit(X).get_feature_names_out()
    assert list(names[:2]) == ["poecapsules0", "poecapsules1"] and len(names) == 12


def test_a_grid_search_may_set_numpy_numbers():
    X, y = planted(60)
    search = GridSearchCV(
        PoECapsules(pose_dim=2, epochs=2), {"n_capsules": np.array([2, 3])}, cv=2,
        scoring=lambda e, X, y=None: normalized_mutual_info_score(y, e.predict(X)),
    )  # fmt: skip
    assert search.fit(X, y).best_params_["n_capsules"] in (2, 3)


@pytest.mark.parametrize("X", [np.ones((5, 3)), np.ones((1, 1)), np.full((9, 2), 0.1, np.float32), np.eye(3) * 1e-300])
def test_poor_input_gives_finite_answers(X):
    capsules = PoECapsules(4, 3, epochs=3).fit(X)
    assert np.isfinite(capsules.transform(X)).all() and np.isfinite(capsules.score_samples(X)).all()
    assert np.allclose(capsules.inverse_transform(capsules.transform(X)), X, atol=1e-6 + abs(X).max() * (X.std() > 0))


def test_values_far_beyond_training_are_finite(three):
    capsules, X, _ = three
    far = np.full((1, X.shape[1]), 1e300)
    assert np.isfinite(capsules.transform(far)).all() and np.isfinite(capsules.score_samples(-far)).all()


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"n_capsules": 0}, "n_capsules"),
        ({"pose_dim": 2.5}, "pose_dim"),
        ({"mode": "competitoin"}, "did you mean 'competition'"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": 1e300}, "learning_rate"),
        ({"gain": "much"}, "gain"),
        ({"gain": 0}, "gain = 0.0 must be above 0 or None"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(setting, line):
    with pytest.raises(RecipeError, match=line) as caught:
        PoECapsules(**setting).fit(np.eye(4))
    assert "\n" not in str(caught.value)


def test_other_bad_input_is_named_in_one_line(three):
    capsules, _, _ = three
    with pytest.raises(ShapeError, match="5 columns; 24"):
        capsules.inverse_transform(np.zeros((2, 5)))
    with pytest.raises(DataError, match="column 1 of X"):
        PoECapsules(epochs=1).fit(np.array([[0.0, 1e200], [1.0, -1e200]]))


def test_capsules_that_diverge_say_at_which_rate(monkeypatch):
    # No rate that is allowed makes the energy overflow; a loss may still be NaN
    contrast = CapsuleEnergy.contrast
    monkeypatch.setattr(CapsuleEnergy, "contrast", lambda *given: {"loss": contrast(*given)["loss"] * float("nan")})
    with pytest.raises(TrainingError, match="diverged at learning_rate"):
        PoECapsules(2, 2, epochs=1, learning_rate=0.1).fit(planted(30)[0])


@pytest.mark.parametrize("mode", ["competition", "offset", "paper"])
def test_capsules_whose_weights_explode_say_so(mode, recwarn):
    X, _ = load_iris(return_X_y=True)
    PoECapsules(3, 4, mode=mode, epochs=5).fit(X)
    assert not recwarn.list
    with pytest.warns(ConvergenceWarning, match=r"learning_rate=1e\+30 the weights grew to \d.* try a smaller one"):
        PoECapsules(3, 4, mode=mode, epochs=5, learning_rate=1e30).fit(X)


def test_scikit_learn_is_asked_for_only_when_needed():
    code = (
        "import sys; sys.modules['sklearn'] = None; import torchcaps\n"
        "try: torchcaps.PoECapsules\n"
        "except torchcaps.errors.RecipeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and "pip install 'torchcaps[sklearn]'" in done.stdout
    assert torchcaps.PoECapsules is PoECapsules and torchcaps.CapsuleClassifier is CapsuleClassifier


# ------------------------------------------------------------------------------------------------- CapsuleClassifier


def digits(n=400):
    """Rows of 8x8 pixels to learn from, and others to be tested by."""
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, train_size=n, test_size=500, random_state=0, stratify=y)
    return X, y, X_test, y_test


@pytest.fixture(scope="module")
def read():
    """Digits named by words, and the classifier of rows that was fitted to them."""
    X, y, X_test, y_test = digits()
    words = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    return CapsuleClassifier(epochs=12).fit(X, words[y]), X_test, words[y_test], words


@pytest.fixture(scope="module")
def seen():
    X, y, X_test, y_test = digits()
    return CapsuleClassifier(8, 4, 8, image_shape=(1, 8, 8), channels=16, epochs=10).fit(X, y), X_test, y_test


def test_digits_are_told_apart_by_rows_and_by_images(read, seen):
    rows, X, names, words = read
    assert rows.score(X, names) > 0.9 and list(rows.classes_) == sorted(words)
    images, X, y = seen
    assert images.score(X, y) > 0.9 and images.n_iter_ == 10 * 13


def lengths_by_loops(classifier, row):
    """Definition: the lengths of the class capsules of one row, number by number."""
    W, A, a = (classifier.weights_[name] for name in ("classes.W", "primary.weight", "primary.bias"))
    I, J, K, d = W.shape
    x = [(v - m) / s if s > 0 else 0.0 for v, m, s in zip(row, classifier.mean_, classifier.scale_, strict=True)]
    squash = lambda z: z * np.sqrt((z**2).sum()) / (1 + (z**2).sum())  # noqa: E731
    z = np.array([a[n] + sum(A[n, p] * x[p] for p in range(len(x))) for n in range(I * d)]).reshape(I, d)
    votes = np.array([[W[i, j] @ squash(z[i]) for j in range(J)] for i in range(I)])
    b = np.zeros((I, J))
    for _ in range(3):
        v = np.zeros((J, K))
        for j in range(J):
            c = [np.exp(b[i, j]) / np.exp(b[i]).sum() for i in range(I)]
            v[j] = squash(sum(c[i] * votes[i, j] for i in range(I)))
        b += np.array([[votes[i, j] @ v[j] for j in range(J)] for i in range(I)])
    return np.sqrt((v**2).sum(1))


def test_every_answer_of_the_classifier_equals_its_definition(read):
    rows, X, _, _ = read
    lengths, shares, named = rows.decision_function(X[:3]), rows.predict_proba(X[:3]), rows.predict(X[:3])
    for row, length, share, name in zip(X, lengths, shares, named, strict=False):
        expected = lengths_by_loops(rows, row)
        assert np.allclose(length, expected, atol=1e-10)
        assert np.allclose(share, expected / expected.sum(), atol=1e-10)
        assert name == rows.classes_[expected.argmax()]


def test_the_images_are_those_of_a_capsnet(seen):
    from torchcaps.models import CapsNetConfig
    from torchcaps.types import ImageSpec

    images, X, _ = seen
    config = CapsNetConfig(16, 3, types=8, type_dimension=4, primary_kernel=3, dimension=8, decoder=(64,))
    net = config.build(ImageSpec(1, 8, 8, 10)).double().eval()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in images.weights_.items()})
    with torch.no_grad():
        expected = net.scores(torch.from_numpy(X / 16).view(-1, 1, 8, 8))
    assert np.allclose(images.decision_function(X), expected, atol=1e-12)
    assert np.array_equal(images.predict(X.reshape(-1, 1, 8, 8)), images.predict(X))


def test_channels_may_come_last():
    draw = np.random.default_rng(0)
    X = draw.integers(0, 256, (12, 3, 10, 9), dtype=np.uint8)
    y = np.arange(12) % 2
    sizes = {"pose_dim": 2, "child_dim": 2, "n_children": 2, "channels": 2, "epochs": 1}
    first = CapsuleClassifier(image_shape=(3, 10, 9), **sizes).fit(X, y)
    last = CapsuleClassifier(image_shape=(10, 9, 3), **sizes).fit(X.transpose(0, 2, 3, 1), y)
    assert np.array_equal(first.decision_function(X), last.decision_function(X.transpose(0, 2, 3, 1)))
    with pytest.raises(ShapeError, match=r"\[n 10 9 3\]"):
        last.predict(X)


def test_images_are_moved_while_training_by_a_sixteenth_of_their_side():
    def most(**given):
        return check_settings(_Settings, CapsuleClassifier(**given)).shift

    assert most() == 0 == most(image_shape=(1, 8, 8)) and most(image_shape=(32, 48, 3)) == 2
    assert most(image_shape=(1, 32, 32), max_shift=5) == 5 and most(max_shift=5) == 0
    X = np.random.default_rng(0).random((12, 1, 16, 16))
    sizes = {"pose_dim": 2, "child_dim": 2, "n_children": 2, "channels": 2, "epochs": 1, "image_shape": (1, 16, 16)}
    fits = [CapsuleClassifier(**sizes, max_shift=n).fit(X, list("ab") * 6).weights_ for n in (None, 1, 0)]
    first = next(iter(fits[0]))
    assert np.array_equal(fits[0][first], fits[1][first]) and not np.array_equal(fits[0][first], fits[2][first])


def test_the_default_rate_falls_with_the_size_of_images():
    def rate(shape: tuple[int, int, int] | None, learning_rate: float | None = None) -> float:
        return check_settings(_Settings, CapsuleClassifier(image_shape=shape, learning_rate=learning_rate)).rate

    assert rate(None) == rate((1, 8, 8)) == 0.01 and rate((3, 32, 32), 0.5) == 0.5
    assert 0.0009 < rate((3, 32, 32)) == rate((32, 32, 3)) < 0.001 < rate((1, 28, 28)) < 0.003


def test_a_classifier_that_learned_nothing_says_so():
    X, y = load_iris(return_X_y=True)
    with pytest.warns(
        ConvergenceWarning, match=r"learned nothing: they are right about 33% .* try a lower learning_rate"
    ):
        fitted = CapsuleClassifier(2, 2, 2, epochs=1, learning_rate=1e-9).fit(np.zeros_like(X), y)
    assert fitted.n_iter_ == 5


def test_of_two_classes_the_decision_is_one_number_whose_sign_is_the_class():
    X, y = load_iris(return_X_y=True)
    pair = CapsuleClassifier(4, 4, 4, epochs=10).fit(X[:100], y[:100] > 0)
    decision, share = pair.decision_function(X[:100]), pair.predict_proba(X[:100])
    assert decision.shape == (100,) and np.array_equal(decision > 0, pair.predict(X[:100]))
    assert np.allclose(decision, share[:, 1] - share[:, 0]) and np.allclose(share.sum(1), 1)
    assert pair.score(X[:100], y[:100] > 0) == 1


def test_the_classifier_is_a_function_of_its_seed_and_leaves_global_random_numbers_alone():
    X, y = load_iris(return_X_y=True)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (CapsuleClassifier(4, 4, 4, epochs=2, random_state=s).fit(X, y) for s in (1, 1, 2))
    first.predict(X)
    assert torch.equal(torch.rand(1), expected)
    for name, learned in first.weights_.items():
        assert np.array_equal(learned, again.weights_[name]) and not np.array_equal(learned, other.weights_[name])


def test_the_classifier_can_be_changed_after_it_was_fitted_to_no_effect_and_searched():
    X, y = load_iris(return_X_y=True)
    fitted = CapsuleClassifier(4, 4, 4, epochs=2).fit(X, y)
    before = fitted.predict_proba(X)
    assert np.array_equal(fitted.set_params(pose_dim=7, image_shape=(1, 2, 2)).predict_proba(X), before)
    search = GridSearchCV(CapsuleClassifier(4, 4, 4, epochs=2), {"iterations": np.array([1, 2])}, cv=2)
    assert search.fit(X, y).best_params_["iterations"] in (1, 2)


@pytest.mark.parametrize("image_shape", [None, (1, 2, 3)])
def test_poor_rows_give_finite_shares(image_shape):
    for X in (np.ones((6, 6)), np.eye(6) * 1e-300, np.eye(6) * 1e150):
        fitted = CapsuleClassifier(2, 2, 2, image_shape=image_shape, epochs=2).fit(X, list("aabbcc"))
        for rows in (X, X + 1e300, X - 1e300):
            assert np.isfinite(fitted.predict_proba(rows)).all()


def one_line(error, match, estimator, X, y):
    with pytest.raises(error, match=match) as caught:
        estimator.fit(X, y)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce")  # by sklearn, of X that is too large
def test_bad_input_of_the_classifier_is_named_in_one_line():
    X, y = np.random.default_rng(0).normal(size=(8, 6)), list("aabbccdd")
    one_line(DataError, "one class, 'a'", CapsuleClassifier(), X, 8 * ["a"])
    one_line(DataError, "column 0 of X", CapsuleClassifier(), X * 1e200, y)
    one_line(DataError, "too far for pixels", CapsuleClassifier(image_shape=(1, 2, 3)), np.sign(X) * 1.7e308, y)
    one_line(ShapeError, "6 columns.* 1x4x4 have 16", CapsuleClassifier(image_shape=(1, 4, 4)), X, y)
    one_line(ShapeError, r"\[n 1 2 3\]", CapsuleClassifier(image_shape=(1, 2, 3)), X.reshape(8, 1, 3, 2), y)
    one_line(ShapeError, "too small", CapsuleClassifier(image_shape=(1, 2, 3), kernel=3), X, y)
    one_line(RecipeError, "image_shape", CapsuleClassifier(image_shape=(2, 3)), X, y)
    one_line(RecipeError, "iterations", CapsuleClassifier(iterations=0), X, y)
    one_line(ValueError, "Unknown label type", CapsuleClassifier(), X, np.linspace(0, 1, 8))


def test_a_classifier_that_diverges_says_at_which_rate(monkeypatch):
    # No rate that is allowed makes squashed vectors overflow; a loss may still be NaN
    X, y = np.random.default_rng(0).normal(size=(8, 6)), list("aabbccdd")
    objective = _RowNetwork.objective
    monkeypatch.setattr(_RowNetwork, "objective", lambda *given: {"loss": objective(*given)["loss"] * float("nan")})
    one_line(TrainingError, "diverged at learning_rate=0.1", CapsuleClassifier(learning_rate=0.1, epochs=5), X, y)
