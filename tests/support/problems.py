"""Votes whose right routing is known without routing them.

A `Problem` holds votes [b i j k], activations [b i] and what must come out, as `expect(parents, info)`. `needs` names
the kinds of competition in which that holds: a child is shared among "parents", a parent among "children", or there
is none at one place ("positions"). PROBLEMS lists those of each router; the contract test refuses a router without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcaps.types import Capsules, RoutingInfo

__all__ = ["PROBLEMS", "Problem"]

Expect = Callable[[Capsules, RoutingInfo], None]
ANY = frozenset({"parents", "children", "positions"})
SHARED = frozenset({"parents", "children"})


@dataclass(frozen=True)
class Problem:
    """One known answer; `votes` and `activation` are float64 and exact in float32 too."""

    name: str
    votes: Tensor
    activation: Tensor
    expect: Expect
    needs: frozenset[str] = ANY

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, votes=self.votes.to(dtype), activation=self.activation.to(dtype))


def problem(
    name: str, votes: Tensor, expect: Expect, activation: Tensor | None = None, needs: frozenset[str] = ANY
) -> Problem:
    """Everything exact in float32; every child is on unless `activation` says otherwise."""
    a = torch.ones(votes.shape[:2]) if activation is None else activation
    return Problem(name, votes.float().double(), a.double(), expect, needs)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_direction(x: Tensor, wanted: Tensor, within: float) -> None:
    """The cosine of the angle over the last axis is above 1 - within."""
    x, wanted = x.double(), wanted.double()
    cosine = (x * wanted).sum(-1) / (x * x).sum(-1).sqrt() / (wanted * wanted).sum(-1).sqrt()
    assert (cosine > 1 - within).all(), f"cosine {cosine.tolist()}"


# --- Clusters -------------------------------------------------------------------------------------------------

CENTER = torch.tensor([1.0, -2.0, 2.0, 0.5])


def cluster_and_noise() -> Tensor:
    """Six children agree about parent 0 and contradict each other about parent 1."""
    votes = noise(1, 6, 2, 4)
    votes[:, :, 0] = CENTER + 0.01 * noise(1, 6, 4, seed=1)
    return votes


def one_cluster() -> Problem:
    def expect(parents: Capsules, info: RoutingInfo) -> None:
        assert parents.activation[0, 0] > parents.activation[0, 1] + 0.005
        same_direction(parents.pose[0, 0], CENTER, within=1e-3)

    return problem("one clean cluster", cluster_and_noise(), expect)


def cluster_wins() -> Problem:
    """Every child gives the parent that it agrees about the larger share."""

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        assert (info.coupling[-1, 0, :, 0] > info.coupling[-1, 0, :, 1]).all()

    return problem("the cluster wins its children", cluster_and_noise(), expect, needs=frozenset({"parents"}))


def scaled_cluster(scale: float, name: str) -> Problem:
    """The pose must be right at any scale. (The activation depends on it: by |s_j| or by log sigma_j + beta_u.)"""

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        same_direction(parents.pose[0, 0], CENTER, within=1e-3)

    return problem(name, scale * cluster_and_noise(), expect)


def two_clusters(scale: float = 1.0) -> Problem:
    """Children 0-3 agree about parent 0, children 4-7 about parent 1; about the other they contradict each other."""
    votes = noise(1, 8, 2, 4, seed=2)
    votes[:, :4, 0] = CENTER + 0.01 * noise(1, 4, 4, seed=3)
    votes[:, 4:, 1] = -CENTER + 0.01 * noise(1, 4, 4, seed=4)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        c = info.coupling[-1, 0]  # [i j]
        assert c[:4, 0].min() > c[4:, 0].max()
        assert c[4:, 1].min() > c[:4, 1].max()
        same_direction(parents.pose[0], torch.stack([CENTER, -CENTER]), within=0.2)

    return problem("two clusters for two parents", scale * votes, expect, needs=SHARED)


def one_outlier() -> Problem:
    """Child 5 stands against the five that agree about parent 0."""
    votes = noise(1, 6, 2, 4, seed=5)
    votes[:, :, 0] = CENTER + 0.01 * noise(1, 6, 4, seed=6)
    votes[:, 5, 0] = -CENTER

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        c = info.coupling[-1, 0, :, 0]  # [i]
        assert c[5] < 0.5 * c[:5].min()
        same_direction(parents.pose[0, 0], CENTER, within=0.01)

    return problem("one outlier", votes, expect, needs=SHARED)


# --- Nothing to find ------------------------------------------------------------------------------------------


def no_direction() -> Problem:
    """Each child has a twin of opposite vote. Halves of small integers: their sums are exact in any order."""
    half = torch.randint(-3, 4, (1, 8, 2, 4), generator=torch.Generator().manual_seed(7)) / 2
    votes = torch.cat([half, -half], 1)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        torch.testing.assert_close(parents.pose, torch.zeros_like(parents.pose), atol=1e-6, rtol=0)
        c = info.coupling[-1, 0]
        torch.testing.assert_close(c[:8], c[8:], atol=1e-5, rtol=0)

    return problem("noise without a direction", votes, expect)


def pure_noise(scale: float = 1.0) -> Problem:
    """Parents whose votes are alike in distribution: none may take all the children."""
    votes = scale * noise(1, 40, 3, 4, seed=8)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        mass = info.coupling[-1, 0].sum(0)  # [j]
        assert mass.max() < 2 * mass.min(), f"masses {mass.tolist()}"
        assert parents.activation.max() < parents.activation.min() + 0.35

    return problem("pure noise", votes, expect)


# --- Votes that leave no choice -------------------------------------------------------------------------------


def identical_votes() -> Problem:
    """All children say the same about a parent, so that is where it lies, whoever gets how much of them."""
    wanted = noise(3, 4, seed=9)
    votes = wanted.expand(1, 5, 3, 4)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        same_direction(parents.pose[0], wanted, within=1e-6)
        c = info.coupling[-1, 0]
        torch.testing.assert_close(c, c[:1].expand_as(c))

    return problem("identical votes", votes, expect)


def one_child() -> Problem:
    votes = noise(1, 1, 3, 4, seed=10)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        same_direction(parents.pose[0], votes[0, 0], within=1e-6)

    return problem("one child", votes, expect)


def one_parent() -> Problem:
    """A child with one parent to choose gives it everything."""
    votes = noise(1, 5, 1, 4, seed=11)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        torch.testing.assert_close(info.coupling, torch.ones_like(info.coupling))
        same_direction(parents.pose[0, 0], votes[0, :, 0].mean(0), within=1e-6)

    return problem("one parent", votes, expect, needs=frozenset({"parents", "positions"}))


# --- Children that are not there: for dynamic routing the votes say so, for EM the activations -------------------


def zero_vote() -> Problem:
    """A child of length 0 votes 0 for all parents: it agrees with none, and its share stays equal."""
    votes = noise(1, 5, 3, 4, seed=12)
    votes[0, 2] = 0

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        share = info.coupling[-1, 0, 2]  # [j]
        torch.testing.assert_close(share, torch.full_like(share, 1 / 3))

    return problem("a zero vote", votes, expect, needs=frozenset({"parents"}))


def zero_votes() -> Problem:
    """Nobody says anything: no parent is there, and the coupling stays equal."""

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        assert not parents.pose.any()
        assert parents.activation.max() < 1e-9
        torch.testing.assert_close(info.coupling, info.coupling[..., :1, :1].expand_as(info.coupling))

    return problem("zero votes", torch.zeros(1, 5, 3, 4), expect)


def zero_activation() -> Problem:
    """Two images that differ only in the votes of child 0, which is off: their parents are the same."""
    votes = noise(1, 6, 2, 4, seed=13).repeat(2, 1, 1, 1)
    votes[1, 0] = 4 - 3 * votes[1, 0]
    activation = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.75, 1.0]).expand(2, 6)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        torch.testing.assert_close(parents.pose[0], parents.pose[1])
        torch.testing.assert_close(parents.activation[0], parents.activation[1])
        torch.testing.assert_close(info.coupling[-1, 0, 1:], info.coupling[-1, 1, 1:])

    return problem("one child is off", votes, expect, activation)


def zero_activations() -> Problem:
    """Every child is off: there is nothing to describe, and with beta_a = 0 a switch is as good on as off."""
    votes = noise(1, 5, 3, 4, seed=14)

    def expect(parents: Capsules, info: RoutingInfo) -> None:
        torch.testing.assert_close(parents.activation, torch.full_like(parents.activation, 0.5))
        assert parents.pose.abs().max() <= votes.abs().max()

    return problem("all children are off", votes, expect, torch.zeros(1, 5))


NO_CHOICE = (no_direction(), identical_votes(), one_child(), one_parent())
COMMON = (
    one_cluster(),
    cluster_wins(),
    two_clusters(),
    one_outlier(),
    *NO_CHOICE,
    pure_noise(),
    scaled_cluster(1e-6, "tiny votes"),
    scaled_cluster(1e6, "huge votes"),
)

PROBLEMS: dict[str, tuple[Problem, ...]] = {
    "dynamic": (*COMMON, zero_vote(), zero_votes()),
    "em": (*COMMON, zero_activation(), zero_activations()),
    # The prior has a scale, and the activation grows with the entropy's fall, not with agreement alone.
    "vb": (
        scaled_cluster(1.0, "one clean cluster"),
        cluster_wins(),
        two_clusters(2.0),
        one_outlier(),
        *NO_CHOICE,
        pure_noise(),
        scaled_cluster(1e-6, "tiny votes"),
        scaled_cluster(30.0, "large votes"),
        zero_activation(),
    ),
    # Agreement is a sum over all children, so that the votes of many must be short.
    "attention": (
        one_cluster(),
        cluster_wins(),
        two_clusters(),
        one_outlier(),
        *NO_CHOICE,
        pure_noise(0.2),
        scaled_cluster(1e-6, "tiny votes"),
        scaled_cluster(1e6, "huge votes"),
        zero_vote(),
        zero_votes(),
    ),
    # No agreement: what it is to find is in the mean of the votes already.
    "uniform": (
        one_cluster(),
        *NO_CHOICE,
        pure_noise(),
        scaled_cluster(1e-6, "tiny votes"),
        scaled_cluster(1e6, "huge votes"),
        zero_vote(),
        zero_votes(),
    ),
}
