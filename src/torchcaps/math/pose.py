"""How a child's pose becomes a vote: a matrix W_ij times a vector (Sabour) or a product of 4x4 poses (Hinton)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcaps.errors import ShapeError

__all__ = ["MATRIX", "add_coordinates", "as_matrix", "matrix_votes", "vector_votes"]

MATRIX = 4
"""Side of a pose matrix; a matrix pose travels as its MATRIX * MATRIX elements in row order."""


def vector_votes(pose: Tensor, weights: Tensor) -> Tensor:
    """Return the votes V_ij = W_ij x_i.

    Args:
        pose: x [b i d].
        weights: W [i j k d].

    Returns:
        [b i j k].
    """
    return torch.einsum("ijkd,bid->bijk", weights, pose)


def matrix_votes(pose: Tensor, weights: Tensor) -> Tensor:
    """Return the votes V_ij = M_i W_ij.

    Args:
        pose: M [b i 16], 4x4 matrices in row order.
        weights: W [i j 4 4].

    Returns:
        [b i j 16].
    """
    # One product for each child: its matrices of all samples, times W of all parents side by side
    b, i, _ = pose.shape
    _, j, rows, columns = weights.shape
    side_by_side = weights.transpose(1, 2).reshape(i, rows, j * columns)  # [i 4 (j 4)]
    votes = as_matrix(pose).transpose(0, 1).reshape(i, b * rows, rows) @ side_by_side  # [i (b 4) (j 4)]
    return votes.view(i, b, rows, j, columns).permute(1, 0, 3, 2, 4).reshape(b, i, j, rows * columns)


def as_matrix(pose: Tensor) -> Tensor:
    """View poses [... 16] as matrices [... 4 4]."""
    side = math.isqrt(pose.shape[-1])
    return pose.view(*pose.shape[:-1], side, side)


def add_coordinates(centers: Tensor, dimension: int) -> Tensor:
    """Return what coordinate addition adds to the votes of each child (section 4 of Hinton 2018).

    The row and the column go to the first two elements of the right-hand column of the pose matrix: elements 3 and 7
    of 16. A pose that is not a 4x4 matrix gets them in its first two elements.

    Args:
        centers: [i 2], row and column of each child.
        dimension: k, the numbers of a vote.

    Returns:
        [i k].

    Raises:
        ShapeError: If a vote cannot hold a row and a column.
    """
    if dimension < 2:
        raise ShapeError(f"a pose of {dimension} number cannot hold a row and a column; at least 2 are wanted")
    # Zero but for row and column
    offset = centers.new_zeros(centers.shape[0], dimension)  # [i k]
    row, column = (MATRIX - 1, 2 * MATRIX - 1) if dimension == MATRIX * MATRIX else (0, 1)
    offset[:, row] = centers[:, 0]
    offset[:, column] = centers[:, 1]
    return offset
