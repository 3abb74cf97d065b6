"""Capsules as scikit-learn estimators (the `sklearn` extra): a transformer without labels, and a classifier."""

from __future__ import annotations

from torchcaps.errors import RecipeError

try:
    from sklearn.utils.validation import validate_data  # noqa: F401  (of scikit-learn 1.6)
except ImportError as missing:
    raise RecipeError(
        f"torchcaps.estimators needs scikit-learn 1.6 or later ({missing}); run: pip install 'torchcaps[sklearn]'"
    ) from None

from torchcaps.estimators.classifier import CapsuleClassifier
from torchcaps.estimators.poe import PoECapsules

__all__ = ["CapsuleClassifier", "PoECapsules"]
