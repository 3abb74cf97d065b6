"""Several ranking capsules for each capsule: how they are joined to groups, and what the groups do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.models.poe import EnergyConfig, PoEConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.models.poe.joining import LARGEST, WIDTH, join_groups, nearness


def test_nearness_equals_a_loop_over_images() -> None:
    support = torch.rand(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 5
    wanted = torch.zeros(4, 4, dtype=torch.float64)
    for s in support.tolist():
        j = s.index(max(s))
        for k in range(4):
            wanted[j, k] += math.exp(-(s[j] - s[k]) / WIDTH) / 7
    torch.testing.assert_close(nearness(support), wanted, rtol=1e-12, atol=1e-12)
    # The diagonal counts the images that each wins
    torch.testing.assert_close(
        nearness(support).diagonal(), torch.bincount(support.argmax(1), minlength=4).double() / 7
    )


def joined_by_loops(near: list[list[float]], count: int) -> set[frozenset[int]]:
    """The groups, by the rule of the module's docstring over all pairs of images of the first capsules."""
    groups = [[j] for j in range(len(near))]

    def cost(one: list[int], other: list[int]) -> float:
        n = sum(near[j][j] for j in one)
        m = sum(near[k][k] for k in other)
        between = sum(near[j][k] + near[k][j] for j in one for k in other)
        return n * m / (n + m) / (between / (n * m))

    def size(*joined: list[int]) -> float:
        return sum(near[j][j] for group in joined for j in group)

    while len(groups) > count:
        every = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        pairs = [(a, b) for a, b in every if size(groups[a], groups[b]) <= LARGEST * size(*groups) / count] or every
        a, b = min(pairs, key=lambda pair: cost(groups[pair[0]], groups[pair[1]]))
        groups[a] += groups.pop(b)
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 3, 6])
def test_groups_equal_those_of_loops(seed: int, count: int) -> None:
    support = torch.rand(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    near = nearness(support)
    group = join_groups(near, count)
    assert sorted(set(group.tolist())) == list(range(count))
    found = {frozenset(torch.nonzero(group == g).flatten().tolist()) for g in range(count)}
    assert found == joined_by_loops(near.tolist(), count)


def test_capsules_that_share_images_join_and_one_without_images_harms_nobody() -> None:
    # 0 and 2 have support for the same images, 1 and 3 for others, 4 for none
    near = torch.tensor(
        [
            [0.3, 0.0, 0.2, 0.0, 0.0],
            [0.0, 0.2, 0.0, 0.1, 0.0],
            [0.2, 0.0, 0.3, 0.01, 0.0],
            [0.0, 0.1, 0.01, 0.2, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ]
    )
    assert join_groups(near, 5).tolist() == [0, 1, 2, 3, 4]
    two = join_groups(near, 2).tolist()
    assert two[0] == two[2] != two[1] == two[3]


def test_groups_do_not_grow_beyond_one_and_a_half_even_shares() -> None:
    # 0, 1 and 2 are near to each other, but together they win .75 of the images; 3 is far from all
    near = torch.full((4, 4), 0.2) + 0.05 * torch.eye(4)
    near[3, :3] = near[:3, 3] = 0.01
    group = join_groups(near, 2)
    assert int((group == group[0]).sum()) == 3  # exactly 1.5 even shares
    assert max(torch.bincount(join_groups(torch.block_diag(near, near[:2, :2]), 3)).tolist()) == 3


def energy_of(loosen: int = 4) -> CapsuleEnergy:
    torch.manual_seed(0)
    config = EnergyConfig(ramp=1, loosen=loosen, boost=0.0, restart=0.2, gain=4.0, rank_dimension=2, prototypes=2)
    return CapsuleEnergy(config, 6, 3, child_dimension=2, dimension=3, ranking=4)


def train_step(energy: CapsuleEnergy, step: int) -> None:
    x = energy.visible(torch.randn(16, 10, 2, generator=torch.Generator().manual_seed(step)))
    energy.contrast(x, step, SampleDraws(3, torch.arange(16)))["loss"].backward()


@torch.no_grad()
def best_of(energy: CapsuleEnergy, x: Tensor) -> Tensor:
    """The capsule [b] whose ranking capsule has the most support."""
    assert energy.ranker is not None and energy.owner is not None
    others = x[:, 6:]
    _, z = energy.ranker.route(others)
    return energy.owner[energy.ranker.support(others, z + energy.ranker.bias).argmax(1)]


def test_ranking_capsules_are_joined_once_and_the_best_of_a_group_wins() -> None:
    energy = energy_of()
    assert energy.ranker is not None and len(energy.ranker.bias) == 6 and energy.owner is not None
    x = energy.visible(torch.randn(20, 10, 2, generator=torch.Generator().manual_seed(9)))
    # Before, every capsule learns from every image
    for step in (0, 1):
        train_step(energy, step)
        before = energy.infer(x)
        assert before.ranks is None and before.gate is not None and before.gate.shape == (20, 3) and before.gate.all()
    assert energy.W.grad is not None and energy.W.grad.flatten(2).any(-1).all()
    # Half of `loosen` steps later the groups are known, and stay
    train_step(energy, 2)
    owner = energy.owner.clone()
    assert sorted(set(owner.tolist())) == [0, 1, 2]
    train_step(energy, 3)
    assert torch.equal(energy.owner, owner)
    state = energy.infer(x)
    assert state.ranks is not None and state.gate is not None and state.ranks.shape == (20, 3)
    assert torch.equal(state.ranks.sort(1).values, torch.arange(3).expand(20, 3))
    assert torch.equal(energy.winners(state), best_of(energy, x))
    assert torch.equal(state.gate.argmax(1), energy.winners(state))


def test_groups_are_part_of_a_checkpoint() -> None:
    energy = energy_of()
    for step in range(3):
        train_step(energy, step)
    again = energy_of()
    again.load_state_dict(energy.state_dict())
    x = energy.visible(torch.randn(5, 10, 2))
    assert torch.equal(again.winners(again.infer(x)), energy.winners(energy.infer(x)))
    # Without several prototypes there is nothing to store
    plain = CapsuleEnergy(EnergyConfig(), 6, 3, child_dimension=2, dimension=3, ranking=4)
    assert not [name for name in plain.state_dict() if "owner" in name or "near" in name]


def test_several_prototypes_need_edges_that_rank() -> None:
    with pytest.raises(RecipeError, match=r'prototypes = 2 .* children = "edges"'):
        PoEConfig(energy=EnergyConfig(prototypes=2))


def test_groups_are_in_the_graph_of_an_export() -> None:
    class Gate(torch.nn.Module):
        """The gate that children find, without anything else."""

        def __init__(self, energy: CapsuleEnergy) -> None:
            super().__init__()
            self.energy = energy

        def forward(self, x: Tensor) -> Tensor:
            gate = self.energy.infer(x).gate
            assert gate is not None
            return gate

    energy = energy_of().eval()
    assert energy.owner is not None
    energy.owner.copy_(torch.tensor([0, 2, 1, 0, 1, 2]))
    x = torch.randn(7, 10, 2)
    exported = torch.export.export(Gate(energy), (x[:3],), dynamic_shapes=({0: torch.export.Dim("b", min=2)},))
    torch.testing.assert_close(exported.module()(x), Gate(energy)(x))
