"""Poses that no image gave: samples from the domains of section 4.2, sweeps and interpolation."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcaps.errors import RecipeError, suggestion
from torchcaps.math.mixture import fit_mixture, sample_mixture
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.models.poe.energy import hidden, split
from torchcaps.models.poe.frames import Frame
from torchcaps.utils.random import normal, resample, resample_near

__all__ = ["DOMAINS", "check_domain", "interpolate_poses", "sample_frames", "sample_poses", "sweep_poses"]

DOMAINS = ("empirical", "mixture", "gaussian", "complete", "restricted")

_JOINT = ("empirical", "mixture")
"""Domains in which the frame is sampled together with the pose."""

_TURNED = 0.2
"""Mean orientations shorter than this say nothing about which half of the sphere was visited."""


def sample_poses(decoder: CapsuleDecoder, j: int, n: int, domain: str, seed: int) -> Tensor:
    """Sample poses of a capsule from a domain; sample m is a function of (seed, j, m).

    "empirical" draws z near stored poses (`utils.random.resample_near`), "mixture" from a mixture of at most eight
    Gaussians that is fitted to them, "gaussian" from a normal distribution with the mean and the covariance of all.
    "complete" is z ~ N(0, 1). Of a capsule with a slab it is a direction uniform on S^m, as long as the mean of s, and
    N(0, 1) in R^n, where each slab is measured from its mean in its own deviations: in coordinates whose covariance
    over training is 1. "restricted" mirrors the direction onto the half that training visited.

    Args:
        decoder: Holds the distribution of each capsule's poses.
        j: Number of the capsule.
        n: How many poses.
        domain: One of `DOMAINS`.
        seed: Of the samples.

    Returns:
        [n k], hidden capsules: squashed, or with a slab, `energy.hidden`.

    Raises:
        RecipeError: If there is no such domain.
    """
    check_domain(domain)
    which = torch.arange(n)
    # Near training poses, or like them
    if domain in _JOINT:
        return _hide(decoder, _with_frames(decoder, j, n, domain, seed)[:, : decoder.first.shape[1]])
    # Or a standard normal
    z = normal(seed, j, which, count=decoder.first.shape[1], dtype=torch.float64)  # [n k]
    if domain == "gaussian":
        return _hide(decoder, decoder.pose_mean()[j] + z @ _root(decoder.pose_covariance()[j]))
    # Mirrored onto the visited half if that is asked for: its direction, the slab has no such half
    direction, real = split(z, decoder.slab)
    if domain == "restricted":
        side = direction @ _visited(decoder, j)  # [n]
        direction = torch.where(side.unsqueeze(-1) < 0, -direction, direction)
    if not decoder.slab:
        return _hide(decoder, direction)
    # With a slab: a direction of the usual length, and the slab in its own units
    mean = decoder.pose_mean()[j]
    covariance = decoder.pose_covariance()[j]
    m = direction.shape[1]
    length = mean[:m].norm().clamp_min(torch.finfo(torch.float32).tiny)
    unit = direction / direction.norm(dim=-1, keepdim=True)
    slab = mean[m:] + real @ _root(covariance[m:, m:])
    return _hide(decoder, torch.cat([length * unit, slab], -1))


def sample_frames(decoder: CapsuleDecoder, j: int, n: int, domain: str, seed: int) -> Frame:
    """Sample the frames in which a capsule's samples are drawn; frame m goes with pose m of `sample_poses`.

    Args:
        decoder: Holds the frames that go with each capsule's poses.
        j: Number of the capsule.
        n: How many frames.
        domain: "empirical": with the pose, near a stored pose and its frame. "mixture": with the pose, from a mixture
            of Gaussians of poses and frames. Else a normal distribution with the mean and the covariance of the stored
            frames.
        seed: Of the samples.

    Returns:
        n frames.
    """
    check_domain(domain)
    if domain in _JOINT:
        numbers = _with_frames(decoder, j, n, domain, seed)[:, decoder.first.shape[1] :]
    else:
        numbers = resample(decoder.frames_of(j), seed, j, torch.arange(n), 0, breadth=1.0)
    return Frame.of_numbers(numbers.to(decoder.U.dtype))


def _with_frames(decoder: CapsuleDecoder, j: int, n: int, domain: str, seed: int) -> Tensor:
    """Draw poses [n k] like the stored ones, or where there are frames, poses with their frames [n k + 4]."""
    stored = decoder.examples_of(j)
    if decoder.example_frames is not None:
        stored = torch.cat([stored, decoder.frames_of(j)], -1)
    which = torch.arange(n)
    if domain == "empirical":
        return resample_near(stored, seed, j, which)
    return sample_mixture(fit_mixture(stored), seed, j, which)


def _hide(decoder: CapsuleDecoder, z: Tensor) -> Tensor:
    """Poses z [... k] as hidden capsules, in the decoder's precision."""
    return hidden(z, slab=decoder.slab).to(decoder.U.dtype)


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root [k k] of a covariance; what rounding made negative is 0."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root


def check_domain(domain: str) -> None:
    """Refuse an unknown domain.

    Raises:
        RecipeError: With the nearest known one.
    """
    if domain not in DOMAINS:
        raise RecipeError(f"unknown domain {domain!r}{suggestion(str(domain), DOMAINS)}")


def _visited(decoder: CapsuleDecoder, j: int) -> Tensor:
    """[m + 1] the axis whose positive side training visited: the mean of s_j or, if that is short, the widest axis."""
    m = decoder.first.shape[1] - decoder.slab
    mean = decoder.pose_mean()[j, :m]
    covariance = decoder.pose_covariance()[j, :m, :m]
    # The mean says which half, unless the poses lie around 0 on all sides
    spread = covariance.diagonal().sum().clamp_min(0).sqrt()
    if mean.norm() > _TURNED * spread:
        return mean
    # An eigenvector has no sign of its own: take that of the mean
    axis: Tensor = torch.linalg.eigh(covariance).eigenvectors[:, -1]
    return axis * torch.where(axis @ mean < 0, -1.0, 1.0)


def sweep_poses(decoder: CapsuleDecoder, j: int, steps: int = 9, reach: float = 2.5, principal: bool = False) -> Tensor:
    """Move each number of a capsule's mean pose in turn.

    Args:
        decoder: Holds the distribution of each capsule's poses.
        j: Number of the capsule.
        steps: n, poses a number.
        reach: From -reach to reach standard deviations of the number.
        principal: Move along the axes of the poses' covariance instead, the widest first: training may turn a
            capsule's space as it likes, so that its numbers vary together.

    Returns:
        [k n k], squashed.
    """
    mean = decoder.pose_mean()[j]
    covariance = decoder.pose_covariance()[j]
    axes = torch.diag(covariance.diagonal().clamp_min(0).sqrt())  # [k k], a row an axis, a deviation long
    if principal:
        # eigh sorts upward and returns columns: rows are wanted, the widest first
        values, vectors = torch.linalg.eigh(covariance)
        axes = (vectors * values.clamp_min(0).sqrt()).T.flip(0)
    moves = torch.linspace(-reach, reach, steps, dtype=mean.dtype)
    z = mean + axes.unsqueeze(1) * moves.view(1, -1, 1)  # [k n k]
    return _hide(decoder, z)


def interpolate_poses(start: Tensor, end: Tensor, steps: int = 9) -> Tensor:
    """Interpolate between two codes, both ends included.

    Args:
        start: [j k].
        end: [j k].
        steps: n.

    Returns:
        [n j k].
    """
    weight = torch.linspace(0, 1, steps, dtype=start.dtype).view(-1, 1, 1)
    return (1 - weight) * start + weight * end
