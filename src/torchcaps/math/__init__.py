"""Pure tensor functions: the capsule algebra. Nothing here owns a parameter or knows of routing."""

from torchcaps.math.gaussian import diagonal_log_density, weighted_mean, weighted_variance
from torchcaps.math.grid import Grid, Window
from torchcaps.math.logspace import log_floor
from torchcaps.math.pose import matrix_votes, vector_votes
from torchcaps.math.squash import cosine, norm, squash, unsquash

__all__ = [
    "Grid",
    "Window",
    "cosine",
    "diagonal_log_density",
    "log_floor",
    "matrix_votes",
    "norm",
    "squash",
    "unsquash",
    "vector_votes",
    "weighted_mean",
    "weighted_variance",
]
