"""Algorithm 1 of Hauser 2019 line by line, and what torchcaps adds to it: offset, competition, scale and chains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support import poe_reference as paper
from torchcaps.kernels import contrastive_ops
from torchcaps.math.squash import squash
from torchcaps.models.poe import EnergyConfig, energy
from torchcaps.models.poe.encoder import CapsuleEnergy, CapsuleState, SampleDraws
from torchcaps.routing import Dynamic
from torchcaps.utils.random import uniform

B, I, J, K, D = 4, 5, 3, 3, 2
OVERS = ("children", "parents")


def near(value: Any, wanted: Any) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12)


def roughly(value: Any, wanted: Any) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def children(seed: int = 0, b: int = B, I: int = I) -> Tensor:
    return squash(2 * normal(b, I, D, seed=seed))


def build(
    over: Any = "children", iterations: int = 3, sizes: tuple[int, int, int, int] = (I, J, D, K), **settings: Any
) -> CapsuleEnergy:
    """In float64, with weights large enough for routing to have something to say, and a power that is not 1."""
    routing = Dynamic(iterations=iterations, agreement="cosine", over=over)
    model = CapsuleEnergy(EnergyConfig(routing=routing, **settings), *sizes).double()
    model.W.data.copy_(normal(*model.W.shape, seed=1))
    model.power.fill_(2.5)
    return model


def draws(n: int = B) -> SampleDraws:
    return SampleDraws(0, torch.arange(n))


def slope(model: CapsuleEnergy, x: Tensor, step: int = 0) -> Tensor:
    """W.grad after one step's loss; the gradient is what the optimizer subtracts."""
    model.W.grad = None
    model.contrast(x, step, draws(len(x)))["loss"].backward()
    assert model.W.grad is not None
    return model.W.grad


# --- As printed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["closed", "autograd"])
@pytest.mark.parametrize("over", OVERS)
def test_every_line_of_algorithm_1(over: str, gradient: str) -> None:
    model, x = build(over, mode="paper", gradient=gradient), children()
    W = model.W.tolist()
    wanted = [paper.algorithm_1(x_b, W, 3, over) for x_b in x.tolist()]
    line = paper.Pass(*(number(lines) for lines in zip(*wanted, strict=True)))

    seen = model.infer(x)
    assert isinstance(seen.coupling, Tensor) and seen.gate is None and seen.ranks is None
    near(seen.coupling, line.c)  # find routing coefficients
    near(seen.coupling.sum(1 if over == "children" else 2), torch.ones(B, J if over == "children" else I).double())
    assert float((seen.coupling - 1 / (I if over == "children" else J)).abs().max()) > 0.05  # they do something
    near(seen.z, line.z)  # route capsules forward
    near(seen.hidden, line.x)  # squash
    near(model.reconstruct_children(seen.hidden, seen.coupling), line.model_z_i)  # reconstruct input capsules
    near(energy.reverse(seen.hidden, model.W, seen.coupling), line.model_x_i)  # squash
    near(model.negative_phase(seen, 0, draws()), line.model_x_i)
    model_z = contrastive_ops.forward(line.model_x_i, model.W, seen.coupling)
    near(model_z, line.model_z)  # reconstruct output capsules
    near(energy.hidden(model_z), line.model_x)  # squash

    delta = line.delta.mean(0)  # calculate gradient
    near(slope(model, x), -model.scale(None) * delta)
    assert model.scale(None) == pytest.approx((I if over == "children" else J) ** 2 / 2.5)
    before, rate = model.W.detach().clone(), 0.7
    torch.optim.SGD([model.W], lr=rate / model.scale(None)).step()
    near(model.W.detach(), before + rate * delta)  # update weights


@pytest.mark.parametrize("over", OVERS)
def test_one_iteration_of_routing_is_uniform_coupling(over: str) -> None:
    model, x = build(over, iterations=1, mode="paper"), children()
    c, _ = model.route(x)
    assert c == pytest.approx(1 / (I if over == "children" else J), rel=1e-15)
    wanted = [paper.algorithm_1(x_b, model.W.tolist(), 1, over) for x_b in x.tolist()]
    near(model.infer(x).z, number([p.z for p in wanted]))
    near(slope(model, x), -model.scale(None) * number([p.delta for p in wanted]).mean(0))


def test_what_contrast_reports() -> None:
    model, x = build(mode="paper"), children()
    terms = model.contrast(x, 0, draws())
    wanted = [paper.algorithm_1(x_b, model.W.tolist(), 3, "children") for x_b in x.tolist()]
    gap = [paper.free_energy(p.z) - paper.free_energy(p.model_z) for p in wanted]
    near(terms["gap"].detach(), number(gap).mean())
    near(terms["loss"].detach(), model.scale(None) * number(gap).mean())
    model_x = number([p.model_x_i for p in wanted])
    near(terms["error"], (model_x - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(("over", "share"), [("children", 1 / 30), ("parents", 1 / 20)])
def test_weights_at_the_start(over: Any, share: float) -> None:
    """N(0, .01) in the paper, which is a deviation of .1; else c W has the deviation `init` whatever c is."""
    routing = Dynamic(iterations=1, over=over)
    torch.manual_seed(0)
    printed = CapsuleEnergy(EnergyConfig("paper", routing), 30, 20, 8, 16)
    own = CapsuleEnergy(EnergyConfig("offset", routing, init=0.004), 30, 20, 8, 16)
    assert own.share == share
    assert float(printed.W.detach().std()) == pytest.approx(0.1, rel=0.02)
    assert float(own.W.detach().std()) * share == pytest.approx(0.004, rel=0.02)


# --- Offset -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paper", "offset", "competition"])
def test_visible_children_are_centered_and_their_power_is_measured(mode: str) -> None:
    features = 1 + normal(7, I, D, seed=3)
    model = build(mode=mode, chain="persistent", particles=9)
    model.fit_offset(features, chunk=3)
    mean = [[sum(f[i][d] for f in features.tolist()) / 7 for d in range(D)] for i in range(I)]
    offset = [[0.0] * D for _ in range(I)] if mode == "paper" else mean
    x = [
        [paper.squash([f[i][d] - offset[i][d] for d in range(D)]) for i in range(I)] for f in features.tolist()
    ]  # [n i d]
    near(model.offset, number(offset))
    near(model.visible(features), number(x))
    near(model.power, number(x).square().sum() / 7)
    near(model.particles, number([x[n % 7] for n in range(9)]))  # the chains start at images, in turn


def test_a_stage_that_is_resumed_keeps_its_chains() -> None:
    model = build(chain="persistent", particles=4)
    model.fit_offset(normal(7, I, D, seed=3))
    model.particles.mul_(0.5)
    kept = model.particles.clone()
    model.fit_offset(normal(7, I, D, seed=3))
    assert torch.equal(model.particles, kept)


def test_images_that_are_all_alike_have_no_power_and_a_finite_scale() -> None:
    model = build(mode="offset").float()
    model.fit_offset(torch.ones(6, I, D).half())
    x = model.visible(torch.ones(6, I, D))
    assert not x.any() and float(model.power) == 1
    terms = model.contrast(x, 0, draws(6))
    assert all(math.isfinite(float(value.detach())) for value in terms.values())


# --- Competition ------------------------------------------------------------------------------------------------------

COMPETITION = {"mode": "competition", "bias": 0.5, "bias_start": 2.0, "gain": 3.0, "sharpness": 4.0, "ramp": 10}


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_support_is_the_cosine_between_an_image_and_a_capsules_own_picture(iterations: int, over: str) -> None:
    model, x = build(over, iterations, **COMPETITION), children()
    seen = model.infer(x)
    wanted = [paper.support(x_b, model.W.tolist(), z_b) for x_b, z_b in zip(x.tolist(), seen.z.tolist(), strict=True)]
    near(model.support(x, seen.z).detach(), number(wanted))
    assert min(map(min, wanted)) >= 0 and max(map(max, wanted)) <= 2


def test_support_of_an_image_without_anything_is_1() -> None:
    model, x = build(iterations=1, **COMPETITION), torch.zeros(2, I, D).double()
    near(model.support(x, model.infer(x).z).detach(), torch.ones(2, J).double())


@pytest.mark.parametrize("gradient", ["closed", "autograd"])
@pytest.mark.parametrize(("iterations", "over"), [(1, "children"), (1, "parents"), (3, "children"), (3, "parents")])
def test_a_step_of_competition(iterations: int, over: str, gradient: str) -> None:
    """Algorithm 1 with a hidden bias, a gain, and a gate by rank of support times boost; the same gate twice."""
    model, x, step = build(over, iterations, gradient=gradient, loosen=8, **COMPETITION), children(), 3
    assert model.mask is not None
    model.mask.boost.copy_(number([1.0, 1.4, 1.1]))
    W, total, gate_sum = model.W.tolist(), torch.zeros_like(model.W), 0.0
    b = [[(1 - 3 / 8) * 2.0 + 3 / 8 * 0.5] + [0.0] * (K - 1) for _ in range(J)]
    for x_b in x.tolist():
        c = paper.couple(x_b, W, iterations, over)
        z = paper.weigh(x_b, W, c, b)
        boosted = [s * g for s, g in zip(paper.support(x_b, W, z), (1.0, 1.4, 1.1), strict=True)]
        m = paper.gates(paper.ranks(boosted), 4.0 * 3 / 10)
        h = [[m[j] * e for e in paper.squash(z[j])] for j in range(J)]
        rebuilt = [paper.squash(z_i) for z_i in paper.expect(h, W, c, gain=3.0)]
        model_z = paper.weigh(rebuilt, W, c, b)
        total += number(paper.phase(z, x_b, c, m)) - number(paper.phase(model_z, rebuilt, c, m))
        gate_sum += sum(m)
    scale = 1 / (model.share**2 * 3.0 * 2.5 * gate_sum / (B * J))
    roughly(slope(model, x, step), -scale * total / B)  # the gate is computed in float32


def test_sharpness_rises_and_the_bias_loosens() -> None:
    model = build(loosen=8, **COMPETITION)
    assert [model.sharpness_at(n) for n in (0, 5, 10, 99)] == [0, 2, 4, 4]
    start = [[2.0, 0, 0]] * J
    assert model.bias.tolist() == start
    for step, length in ((0, 2.0), (4, 1.25), (8, 0.5), (99, 0.5)):
        model.contrast(children(), step, draws())
        assert model.bias.tolist() == [[length, 0, 0]] * J
    plain = build(mode="offset")
    plain.contrast(children(), 5, draws())
    assert not plain.bias.any()


def test_the_gate_follows_the_rank_and_what_is_below_one_percent_is_0() -> None:
    model, x = build(**{**COMPETITION, "sharpness": 8.0}), children()
    seen = model.infer(x)
    assert seen.ranks is not None and seen.gate is not None
    for s, r, m in zip(model.support(x, seen.z).tolist(), seen.ranks.tolist(), seen.gate.tolist(), strict=True):
        assert r == paper.ranks(s)
        assert m == pytest.approx(paper.gates(r, 8.0))
        assert m == pytest.approx([[1, math.exp(-4), 0][n] for n in r])
    assert torch.equal(model.winners(seen), seen.ranks.argmin(-1))
    near(model.infer(x, sharpness=0.0).gate, torch.ones(B, J).double())
    open_to_all = build(mode="offset")
    seen = open_to_all.infer(x)
    assert torch.equal(open_to_all.winners(seen), seen.hidden.norm(dim=-1).argmax(-1))


def test_boost_counts_in_training_and_not_afterwards() -> None:
    model, x = build(**COMPETITION), children()
    assert model.mask is not None
    plain = model.infer(x).ranks
    model.mask.boost.copy_(number([1.0, 50.0, 1.0]))
    boosted = model.infer(x, boosted=True).ranks
    assert boosted is not None and (boosted[:, 1] == 0).all()
    assert plain is not None and torch.equal(model.infer(x).ranks, plain) and not (plain[:, 1] == 0).all()


def test_those_who_win_too_seldom_are_boosted() -> None:
    """After 50 batches of the same image: mu_j = .99^50 / J + (1 - .99^50) share of wins."""
    model, x = build(boost=0.03, loosen=8, **COMPETITION), children(b=1)
    assert model.mask is not None
    for _ in range(50):
        assert model.mask.boost.tolist() == [1.0] * J
        model.contrast(x, 8, draws(1))
    first = model.infer(x).ranks
    assert first is not None
    share = [(first[:, j] == 0).double().mean().item() for j in range(J)]
    mu = [0.99**50 / J + (1 - 0.99**50) * s for s in share]
    roughly(model.mask.frequency, number(mu))
    assert model.mask.boost.tolist() == pytest.approx([1.03 if m < 0.64 / J else 1.0 for m in mu])
    assert sum(share) == 1 and max(model.mask.boost.tolist()) > 1


def test_losers_learn_nothing_at_full_sharpness() -> None:
    model, x = build(**{**COMPETITION, "sharpness": 120.0}), children(b=1)
    seen = model.infer(x)
    won = int(model.winners(seen))
    grad = slope(model, x, step=10)
    for j in range(J):
        assert bool(grad[:, j].any()) == (j == won)
    assert seen.hidden[0].any(-1).tolist() == [j == won for j in range(J)]
    assert slope(model, x, step=0).abs().amin(dim=(0, 2, 3)).gt(0).all()  # at the start all of them learn


# --- Scale ------------------------------------------------------------------------------------------------------------


def stepped(model: CapsuleEnergy, x: Tensor, step: int = 99, rate: float = 0.1) -> Tensor:
    """c W [i j k d] after a step of plain gradient descent."""
    return (model.W.detach() - rate * slope(model, x, step)) * model.share


@pytest.mark.parametrize("mode", ["paper", "offset", "competition"])
def test_a_step_of_c_w_does_not_know_how_the_coupling_is_normalized(mode: str) -> None:
    """The same c W, once with c = 1 / I and once with c = 1 / J, is the same model, and stays so."""
    one, other = (build(over, iterations=1, mode=mode) for over in OVERS)
    other.W.data.copy_(one.W.data * one.share / other.share)
    assert one.share != other.share
    near(stepped(one, children()), stepped(other, children()))


def given_phases(model: CapsuleEnergy, x: Tensor, y: Tensor, rate: float = 0.1) -> Tensor:
    """W after a step for which the model's images are given."""
    W = model.W.detach().clone().requires_grad_()
    loss = energy.contrast(
        W, model.bias, energy.Phase(x, model.share, None), energy.Phase(y, model.share, None)
    ) * model.scale(None)
    (grad,) = torch.autograd.grad(loss, W)
    return W.detach() - rate * grad


@pytest.mark.parametrize("over", OVERS)
def test_every_child_twice_is_the_same_model_after_a_step(over: str) -> None:
    """z = sum_i c W x stays z if every child is there twice and c W is halved; the power |x|² doubles. Given the same
    images of the model, c W is still half of that without copies after a step: so z and, for its size, the
    reconstruction have changed alike."""
    x, y = children(0), children(5)
    one = build(over, iterations=1, mode="offset")
    two = build(over, iterations=1, mode="offset", sizes=(2 * I, J, D, K))
    two.W.data.copy_(one.W.data.repeat(2, 1, 1, 1) * one.share / two.share / 2)
    two.power.copy_(2 * one.power)
    twice = [t.repeat(1, 2, 1) for t in (x, y)]
    near(two.infer(twice[0]).z, one.infer(x).z)
    W_1, W_2 = given_phases(one, x, y), given_phases(two, *twice)
    near(W_2 * two.share, W_1.repeat(2, 1, 1, 1) * one.share / 2)
    near(contrastive_ops.forward(twice[0], W_2, two.share), contrastive_ops.forward(x, W_1, one.share))
    assert float((W_1 - one.W).detach().abs().max()) > 1e-3


def test_a_step_does_not_know_the_power_of_the_data() -> None:
    """Children of a tenth of the length and c W ten times as large: again the same z after a step."""
    x, y = children(0), children(5)
    one, faint = (build(iterations=1, mode="offset") for _ in range(2))
    faint.W.data.mul_(10)
    faint.power.div_(100)
    near(given_phases(faint, x / 10, y / 10), 10 * given_phases(one, x, y))


def test_a_step_of_the_reconstruction_does_not_know_the_gain() -> None:
    x, y, h = children(0), children(5), squash(normal(B, J, K, seed=9))
    changes = []
    for gain in (1.0, 20.0):
        model = build(iterations=1, mode="competition", gain=gain)
        after = given_phases(model, x, y)
        changes.append(gain * contrastive_ops.reverse(h, after - model.W.detach(), model.share))
    near(changes[0], changes[1])


def test_a_capsule_learns_from_the_images_that_it_wins_as_if_it_were_alone() -> None:
    """Two capsules that share the images evenly, one winner each: each takes the step of a lone capsule on its own."""
    both = build(iterations=1, sizes=(I, 2, D, K), **{**COMPETITION, "sharpness": 120.0})
    x = children(b=40)
    won = both.winners(both.infer(x))
    count = int(torch.stack([(won == j).sum() for j in range(2)]).min())
    assert count > 3
    parts = [x[won == j][:count] for j in range(2)]
    after = stepped(both, torch.cat(parts))
    for j in range(2):
        alone = build(iterations=1, sizes=(I, 1, D, K), **COMPETITION)
        alone.W.data.copy_(both.W.data[:, j : j + 1])
        near(stepped(alone, parts[j])[:, 0], after[:, j])


# --- Chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paper", "competition"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cd_k_repeats_the_two_passes_with_the_coupling_and_gate_of_the_start(mode: str, steps: int) -> None:
    model, x = build(mode=mode, steps=steps, gain=1.5), children()
    seen = model.infer(x)
    W, b, wanted = model.W.tolist(), model.bias.tolist(), []
    assert isinstance(seen.coupling, Tensor)
    for n in range(B):
        y, c = x[n].tolist(), seen.coupling[n].tolist()
        m = [1.0] * J if seen.gate is None else seen.gate[n].tolist()
        for _ in range(steps):
            h = [[m_j * e for e in paper.squash(z_j)] for m_j, z_j in zip(m, paper.weigh(y, W, c, b), strict=True)]
            y = [paper.squash(z_i) for z_i in paper.expect(h, W, c, gain=1.5 if mode == "competition" else 1.0)]
        wanted.append(y)
    near(model.negative_phase(seen, 0, draws()), number(wanted))


def test_persistent_chains_go_on_where_they_stopped() -> None:
    """With uniform coupling nothing of the start stays in a chain, so two times CD-1 is CD-2 from the same start."""
    settings = {"mode": "offset", "chain": "persistent", "particles": 3}
    model, x = build(iterations=1, **settings), children()
    model.fit_offset(2 * normal(6, I, D, seed=4))
    start = model.particles.clone()
    for step in range(2):
        grad = slope(model, x, step)
    twice = build(iterations=1, **{**settings, "steps": 2})
    near(model.particles, twice.negative_phase(twice.infer(start), 0, draws(3)))
    assert float((model.particles - start).abs().max()) > 0.01
    c = [[model.share] * J] * I
    up, down = (
        number([paper.phase(paper.weigh(y, model.W.tolist(), c), y, c) for y in images.tolist()]).mean(0)
        for images in (x, model.particles)  # the model's phase of the last step is where the chains then stood
    )
    near(grad, -model.scale(None) * (up - down))


def test_persistent_chains_survive_a_checkpoint() -> None:
    settings = {"mode": "competition", "chain": "persistent", "particles": 3, "magnitudes": "bernoulli", "ramp": 2}
    one, x = build(**settings), children()
    one.fit_offset(2 * normal(6, I, D, seed=4))
    one.contrast(x, 0, draws())
    other = build(**settings)
    other.load_state_dict(one.state_dict())
    assert other.particles.any() and torch.equal(other.particles, one.particles)
    assert torch.equal(slope(one, x, 1), slope(other, x, 1))
    assert torch.equal(other.particles, one.particles)


def switches(n: int, steps: int = 1) -> tuple[CapsuleEnergy, CapsuleState]:
    """Child i is seen by capsule i alone, so what it shows after one step tells whether that capsule was on."""
    model = build(iterations=1, sizes=(2, 2, 2, 2), mode="paper", magnitudes="bernoulli", steps=steps)
    model.W.data.zero_()
    for j, size in enumerate((1.2, 2.5)):
        model.W.data[j, j] = size * torch.eye(2).double()
    return model, model.infer(number([[[0.6, 0.5], [-0.4, 0.7]]]).repeat(n, 1, 1))


def test_bernoulli_magnitudes_have_the_frequencies_of_equation_12() -> None:
    n = 20_000
    model, seen = switches(n)
    on = model.negative_phase(seen, 0, draws(n)).any(-1).double()  # [b i]
    p = [sum(e * e for e in z) / (1 + sum(e * e for e in z)) for z in seen.z[0].tolist()]
    assert 0.1 < p[0] < p[1] < 0.9
    for j in range(2):
        assert abs(float(on[:, j].mean()) - p[j]) < 4 * math.sqrt(p[j] * (1 - p[j]) / n)
    both = p[0] * p[1]  # eq. 11
    assert abs(float(on.prod(1).mean()) - both) < 4 * math.sqrt(both * (1 - both) / n)


def test_bernoulli_magnitudes_are_functions_of_seed_step_place_and_image() -> None:
    n = 200
    model, seen = switches(n)
    whole = model.negative_phase(seen, 3, draws(n))
    parts = []
    for rows in (torch.arange(150, n), torch.arange(150)):  # two processes, in any order
        part = CapsuleState(seen.x[rows], seen.coupling, seen.z[rows], None, None)
        parts.append(model.negative_phase(part, 3, SampleDraws(0, rows)))
    assert torch.equal(torch.cat(parts[::-1]), whole)
    assert not torch.equal(model.negative_phase(seen, 4, draws(n)), whole)
    assert not torch.equal(model.negative_phase(seen, 3, SampleDraws(1, torch.arange(n))), whole)
    numbers = [uniform(0, 3, place, torch.arange(n), count=2, dtype=torch.float64) for place in range(2)]
    h = energy.hidden(seen.z, None, numbers[0])
    assert torch.equal(squash(model.reconstruct_children(h, seen.coupling)), whole)
    twice, _ = switches(n, steps=2)
    again = energy.hidden(contrastive_ops.forward(whole, model.W, seen.coupling), None, numbers[1])
    near(twice.negative_phase(seen, 3, draws(n)), squash(model.reconstruct_children(again, seen.coupling)))


def test_mean_magnitudes_need_no_numbers() -> None:
    model, x = build(mode="paper"), children()
    seen = model.infer(x)
    assert torch.equal(
        model.negative_phase(seen, 0, draws()), model.negative_phase(seen, 7, SampleDraws(5, torch.arange(B) + 9))
    )


def test_a_capsule_that_never_wins_restarts_as_a_noisy_copy_of_the_busiest() -> None:
    torch.manual_seed(0)
    config = EnergyConfig(ramp=1, loosen=200, boost=0.0, restart=0.2, gain=4.0)
    model = CapsuleEnergy(config, 6, 3, child_dimension=2, dimension=3)
    assert model.mask is not None
    x = squash(torch.randn(8, 6, 2))
    draws = SampleDraws(3, torch.arange(8))
    before = model.W.detach().clone()
    for step, restarted in ((99, False), (100, True), (250, False)):
        model.W.data.copy_(before)
        model.mask.frequency.copy_(torch.tensor([0.7, 0.01, 0.29]))
        model.contrast(x, step, draws)
        after = model.W.detach()
        assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
        assert torch.equal(after[:, 1], before[:, 1]) != restarted
    model.W.data.copy_(before)
    model.mask.frequency.copy_(torch.tensor([0.7, 0.01, 0.29]))
    model._restart_losers(100, 3)
    copy = model.W.detach()[:, 1] - before[:, 0]
    assert 0.1 < float(copy.std() / before[:, 0].std()) < 0.6
    assert model.mask.frequency.tolist() == pytest.approx([0.35, 0.35, 0.29])
