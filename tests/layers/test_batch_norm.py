"""Batch norms of features and capsules: torch's own numbers, over all processes, and never NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.processes import run_group
from torchcaps.errors import ShapeError
from torchcaps.layers import CapsuleBatchNorm, PerTypeBatchNorm
from torchcaps.types import Capsules


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def capsules(*shape: int) -> Capsules:
    return Capsules(drawn(*shape, 4), drawn(*shape, seed=1).sigmoid())


def test_each_type_by_hand() -> None:
    norm, x = PerTypeBatchNorm(2, -2).double(), drawn(3, 2, 2, 4)
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([2.0, 0.5]))
        norm.shift.copy_(torch.tensor([1.0, -1.0]))
    y = norm(x).detach()
    for i, (scale, shift) in enumerate([(2.0, 1.0), (0.5, -1.0)]):
        values = [float(x[b, h, i, d]) for b in range(3) for h in range(2) for d in range(4)]
        m = sum(values) / len(values)
        v = sum((value - m) ** 2 for value in values) / len(values)
        for b, h, d in [(0, 0, 0), (2, 1, 3), (1, 0, 2)]:
            wanted = scale * (float(x[b, h, i, d]) - m) / math.sqrt(v + 1e-5) + shift
            assert float(y[b, h, i, d]) == pytest.approx(wanted, abs=1e-12)
        assert (float(norm.mean[i]), float(norm.variance[i])) == (pytest.approx(m), pytest.approx(v))


def test_features_are_normed_as_by_torch_in_training_and_by_moving_averages_after_it() -> None:
    """But for the moving variance, which is of the batch itself, not of what a larger one would have, and for the first
    batch, which counts in full."""
    own, theirs = PerTypeBatchNorm(5, 1).double(), nn.BatchNorm2d(5).double()
    own(first := drawn(4, 5, 3, 2, seed=7))
    assert theirs.running_mean is not None and theirs.running_var is not None
    theirs.running_mean.copy_(first.mean((0, 2, 3)))
    theirs.running_var.copy_(first.var((0, 2, 3)))
    for seed in range(3):
        x = drawn(4, 5, 3, 2, seed=seed)
        torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(own.mean, theirs.running_mean)
    assert bool((own.variance < theirs.running_var).all())
    theirs.running_var.copy_(own.variance)
    torch.testing.assert_close(own.eval()(x), theirs.eval()(x))
    before = own.mean.clone()
    own(drawn(4, 5, 3, 2, seed=9))
    assert torch.equal(own.mean, before)


def test_the_norm_has_the_right_gradient() -> None:
    norm = PerTypeBatchNorm(3, -1).double()
    x = drawn(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, norm.scale, norm.shift))


def test_capsules_are_normed_by_pose_and_log_odds() -> None:
    norm, given = CapsuleBatchNorm(3).double(), capsules(6, 2, 2, 3)
    pose, activation = norm(given)
    odds = given.activation.logit()
    wanted = (odds - odds.mean((0, 1, 2))) / (odds.var((0, 1, 2), correction=0) + 1e-9).sqrt()
    torch.testing.assert_close(activation, wanted.sigmoid())
    torch.testing.assert_close(pose.mean((0, 1, 2, 4)), torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(pose.square().mean((0, 1, 2, 4)), torch.ones(3).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("on", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_switches_that_are_all_alike_are_half_open_and_nothing_is_nan(on: float, dtype: torch.dtype) -> None:
    given = Capsules(torch.zeros(2, 3, 4, dtype=dtype), torch.full((2, 3), on, dtype=dtype).requires_grad_())
    norm = CapsuleBatchNorm(3)
    pose, activation = norm(given)
    activation.sum().backward()
    assert pose.dtype == activation.dtype == torch.float32
    assert not bool(pose.any()) and bool((activation - 0.5).abs().max() < 1e-3)
    assert given.activation.grad is not None and bool(given.activation.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in norm.parameters() if p.grad is not None)


def test_another_number_of_types_is_refused_in_one_line() -> None:
    with pytest.raises(ShapeError, match=r"3 types along axis 1 are wanted; x has shape \[2, 4, 5, 5\]"):
        PerTypeBatchNorm(3, 1)(torch.zeros(2, 4, 5, 5))
    with pytest.raises(ShapeError, match="at least 1"):
        CapsuleBatchNorm(0)
    with pytest.raises(ShapeError, match=r"x has shape \[3\]"):
        PerTypeBatchNorm(3, 0)(torch.zeros(3))


def test_one_value_a_type_teaches_nothing_and_is_refused_in_training_alone() -> None:
    norm = PerTypeBatchNorm(3, -1)
    with pytest.raises(ShapeError, match="batches of two images or more"):
        norm(torch.zeros(1, 3))
    assert norm.eval()(torch.zeros(1, 3)).shape == (1, 3)


def test_mixed_precision_loses_no_digits_of_the_means() -> None:
    x = (5 + 0.2 * torch.randn(64, 4, 6, 6)).bfloat16()
    torch.testing.assert_close(PerTypeBatchNorm(4, 1)(x).mean((0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-5)


def _half(folder: Path) -> None:
    """A process with one half of the batch; the halves are unlike. Its loss is that of its half."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    norm, x = PerTypeBatchNorm(3, -1).double(), drawn(6, 3)[3 * rank : 3 * rank + 3].requires_grad_()
    y = norm(x)
    (y**3).mean().backward()
    assert x.grad is not None and norm.scale.grad is not None
    record = {"y": y.tolist(), "x": x.grad.tolist(), "scale": norm.scale.grad.tolist()}
    record |= {"mean": norm.mean.tolist(), "variance": norm.variance.tolist()}
    (folder / f"{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def test_two_processes_norm_as_one_with_the_whole_batch(tmp_path: Path) -> None:
    run_group(_half, tmp_path)
    norm, x = PerTypeBatchNorm(3, -1).double(), drawn(6, 3).requires_grad_()
    y = norm(x)
    (y**3).mean().backward()
    assert x.grad is not None and norm.scale.grad is not None
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    torch.testing.assert_close(torch.tensor(one["y"] + other["y"]).double(), y, rtol=0, atol=1e-6)
    # A half's loss is a mean over half as many: the mean of the two gradients is that of the whole.
    torch.testing.assert_close(torch.tensor(one["x"] + other["x"]).double() / 2, x.grad, rtol=0, atol=1e-6)
    halves = (torch.tensor(one["scale"]) + torch.tensor(other["scale"])).double() / 2
    torch.testing.assert_close(halves, norm.scale.grad, rtol=0, atol=1e-6)
    for name in ("mean", "variance"):
        assert one[name] == other[name] == pytest.approx(getattr(norm, name).tolist()), name
