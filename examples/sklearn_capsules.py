"""Capsules in scikit-learn
========================

Learn capsules of 8x8 digits without labels, then use their codes in a pipeline of scikit-learn.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from torchcaps import PoECapsules

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0)

capsules = PoECapsules(n_capsules=20, pose_dim=16, epochs=40).fit(X)
print("shape of the codes", capsules.transform(X_test).shape, "= 20 capsules of 16 numbers, all but one of them 0")

# %%
# Which digit does each capsule win most often? NMI says how much the winner tells about the class, from 0 to 1.

winners = set(capsules.labels_.tolist())
print("capsule: digit", {j: int(np.bincount(y[capsules.labels_ == j]).argmax()) for j in winners})
print(f"NMI with the labels {normalized_mutual_info_score(y_test, capsules.predict(X_test)):.2f}")

# %%
# How much of the images is lost in their codes, and how well can a classifier read them?

back = capsules.inverse_transform(capsules.transform(X_test))
error = ((back - X_test) ** 2).mean()
variance = ((X.mean(0) - X_test) ** 2).mean()
print(f"error of the images decoded from codes: {error / variance:.2f} of the variance")

labeled = make_pipeline(capsules, LogisticRegression(max_iter=200)).fit(X, y)
print(f"accuracy of logistic regression on the codes {labeled.score(X_test, y_test):.3f}")
