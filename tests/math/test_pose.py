"""Votes against loops of plain products, and where coordinate addition puts row and column."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from torchcaps.math.pose import MATRIX, add_coordinates, as_matrix, matrix_votes, vector_votes


def random_poses(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_product(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    inner, columns = range(len(right)), range(len(right[0]))
    return [[sum(row[n] * right[n][c] for n in inner) for c in columns] for row in left]


def rows_of(pose: Tensor) -> list[list[float]]:
    """16 numbers -> four rows of four, the first four numbers being the first row."""
    x = pose.tolist()
    return [x[0:4], x[4:8], x[8:12], x[12:16]]


@given(
    b=st.integers(1, 3), i=st.integers(1, 4), j=st.integers(1, 4), d=st.integers(1, 5), k=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_vector_votes_are_W_times_x(b: int, i: int, j: int, d: int, k: int, seed: int) -> None:
    x, W = random_poses(b, i, d, seed=seed), random_poses(i, j, k, d, seed=seed + 1)
    votes = vector_votes(x, W)
    assert votes.shape == (b, i, j, k)
    for s in range(b):
        for c in range(i):
            for p in range(j):
                column = [[v] for v in x[s, c].tolist()]
                wanted = [row[0] for row in slow_product(W[c, p].tolist(), column)]
                assert votes[s, c, p].tolist() == pytest.approx(wanted, abs=1e-12)


@given(b=st.integers(1, 3), i=st.integers(1, 4), j=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_matrix_votes_are_M_times_W(b: int, i: int, j: int, seed: int) -> None:
    M, W = random_poses(b, i, 16, seed=seed), random_poses(i, j, 4, 4, seed=seed + 1)
    votes = matrix_votes(M, W)
    assert votes.shape == (b, i, j, 16)
    for s in range(b):
        for c in range(i):
            for p in range(j):
                wanted = slow_product(rows_of(M[s, c]), W[c, p].tolist())
                for found, row in zip(rows_of(votes[s, c, p]), wanted, strict=True):
                    assert found == pytest.approx(row, abs=1e-12)


def test_the_pose_stands_left_of_the_transformation() -> None:
    M, W = random_poses(1, 1, 16), random_poses(1, 1, 4, 4, seed=1)
    swapped = (W[0, 0] @ M.view(4, 4)).flatten()
    assert not torch.allclose(matrix_votes(M, W).flatten(), swapped, atol=0.1)


def test_a_change_of_viewpoint_moves_every_vote_alike() -> None:
    """Votes of the poses T M_i are T times the votes of M_i: why agreement survives a change of viewpoint."""
    M, W, T = random_poses(2, 3, 16), random_poses(3, 4, 4, 4, seed=1), random_poses(4, 4, seed=2)
    moved = (T @ as_matrix(M)).flatten(-2)
    wanted = (T @ as_matrix(matrix_votes(M, W))).flatten(-2)
    torch.testing.assert_close(matrix_votes(moved, W), wanted)


def test_the_identity_votes_for_its_own_pose() -> None:
    x = random_poses(2, 3, 5)
    votes = vector_votes(x, torch.eye(5, dtype=torch.float64).expand(3, 2, 5, 5))
    torch.testing.assert_close(votes, x.unsqueeze(2).expand(2, 3, 2, 5), rtol=0, atol=0)
    M = random_poses(2, 3, 16)
    votes = matrix_votes(M, torch.eye(4, dtype=torch.float64).expand(3, 2, 4, 4))
    torch.testing.assert_close(votes, M.unsqueeze(2).expand(2, 3, 2, 16), rtol=0, atol=0)


def test_poses_and_weights_need_not_be_contiguous() -> None:
    M, W = random_poses(16, 3, 2).permute(2, 1, 0), random_poses(4, 4, 4, 3).permute(3, 2, 1, 0)
    torch.testing.assert_close(matrix_votes(M, W), matrix_votes(M.contiguous(), W.contiguous()))
    torch.testing.assert_close(vector_votes(M, W[..., :1].expand(3, 4, 4, 16)), vector_votes(
        M.contiguous(), W[..., :1].expand(3, 4, 4, 16).contiguous()
    ))  # fmt: skip


def test_votes_have_gradients_in_both_factors() -> None:
    x, W = random_poses(2, 2, 3).requires_grad_(), random_poses(2, 2, 4, 3, seed=1).requires_grad_()
    assert gradcheck(vector_votes, (x, W))
    M, W = random_poses(2, 2, 16).requires_grad_(), random_poses(2, 2, 4, 4, seed=1).requires_grad_()
    assert gradcheck(matrix_votes, (M, W))


def test_a_pose_is_read_row_by_row() -> None:
    pose = torch.arange(32.0).view(2, 16)
    assert as_matrix(pose)[1].tolist() == [
        [16, 17, 18, 19], [20, 21, 22, 23], [24, 25, 26, 27], [28, 29, 30, 31]
    ]  # fmt: skip


def test_row_and_column_go_to_the_top_of_the_right_hand_column() -> None:
    offset = add_coordinates(torch.tensor([[0.5, 0.25], [7.0, 9.0]]), MATRIX**2)
    assert as_matrix(offset).tolist() == [
        [[0, 0, 0, 0.5], [0, 0, 0, 0.25], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 7.0], [0, 0, 0, 9.0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]


def test_a_vector_pose_gets_them_in_its_first_two_elements() -> None:
    assert add_coordinates(torch.tensor([[3.0, 4.0]]), 5).tolist() == [[3, 4, 0, 0, 0]]
    assert add_coordinates(torch.tensor([[3.0, 4.0]]), 2).tolist() == [[3, 4]]
