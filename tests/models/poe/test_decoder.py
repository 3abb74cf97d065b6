"""The decoder U by its three rules, and the poses that are gathered on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from support import poe_reference as paper
from torchcaps.errors import RecipeError
from torchcaps.math.squash import squash
from torchcaps.models.poe import DecoderConfig, EnergyConfig, PoEConfig, stages
from torchcaps.models.poe.decoder import CapsuleDecoder, axis_products, decoder_coupling, paper_update
from torchcaps.models.poe.encoder import CapsuleEnergy
from torchcaps.models.poe.energy import hidden
from torchcaps.models.poe.stages import DecoderStage, collect
from torchcaps.types import Batch
from torchcaps.utils.mapped import is_mapped

B, I, J, K, D = 8, 4, 3, 2, 3


def near(value: Any, wanted: Any) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def codes(b: int = B) -> Tensor:
    """x [b j k] in which the first image has all capsules on, the second two, the third only the last."""
    x = squash(2 * normal(b, J, K, seed=2))
    x[1, 0] = 0
    x[2, :2] = 0
    return x


# --- Routing in reverse -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_children_are_shared_among_the_capsules_that_are_on(iterations: int) -> None:
    U, x = normal(J, I, D, K, seed=1), codes()
    e = decoder_coupling(x, U, iterations)  # [b j i]
    near(e, number([paper.share_out(x_b, U.tolist(), iterations) for x_b in x.tolist()]))
    near(e.sum(1), torch.ones(B, I).double())
    assert not e[1, 0].any() and torch.equal(e[2, 2], torch.ones(I).double())  # none for 0, all for one alone
    if iterations > 1:
        assert float((e[0] - 1 / J).abs().max()) > 0.01


def test_without_any_capsule_there_is_nothing_to_share() -> None:
    assert not decoder_coupling(torch.zeros(2, J, K), normal(J, I, D, K, seed=1).float()).any()


def test_the_update_of_section_4_1() -> None:
    U, x, z = normal(J, I, D, K, seed=1), codes(), normal(B, I, D, seed=3)
    e = decoder_coupling(x, U)
    wanted = [paper.update_U(U.tolist(), *one) for one in zip(x.tolist(), z.tolist(), e.tolist(), strict=True)]
    near(paper_update(U, x, z, e), number(wanted).mean(0))


@pytest.mark.parametrize("rule", ["least squares", "gradient", "refined", "paper"])
def test_the_pre_activations_of_a_code(rule: Any) -> None:
    """z_i = sum_j e_ji U_ji x_j + a_i, with e = 1 unless the rule is the paper's."""
    decoder, x = CapsuleDecoder(DecoderConfig(rule), I, J, D, K).double(), codes()
    decoder.intercept.copy_(normal(I, D, seed=4))
    U, a, wanted = decoder.U.tolist(), decoder.intercept.tolist(), []
    for x_b in x.tolist():
        e = paper.share_out(x_b, U) if rule == "paper" else [[1.0] * I] * J
        wanted.append(
            [
                [
                    sum(e[j][i] * U[j][i][d][k] * x_b[j][k] for j in range(J) for k in range(K)) + a[i][d]
                    for d in range(D)
                ]
                for i in range(I)
            ]
        )
    near(decoder(x).detach(), number(wanted))


def test_the_pre_activations_of_a_quadratic_decoder() -> None:
    """z_i = sum_j (U_ji x_j + Q_ji p_j) + a_i, p_j the products of every two of y = A_jᵀ x_j, in plain loops."""
    q = 2
    decoder, x = CapsuleDecoder(DecoderConfig(curvature=q), I, J, D, K).double(), codes()
    assert decoder.Q is not None and decoder.axes is not None and decoder.Q.shape == (J, I, D, 3)
    decoder.Q.data.copy_(normal(J, I, D, 3, seed=6))
    decoder.axes.copy_(normal(J, K, q, seed=7))
    decoder.intercept.copy_(normal(I, D, seed=4))
    U, Q, A, a = decoder.U.tolist(), decoder.Q.tolist(), decoder.axes.tolist(), decoder.intercept.tolist()
    wanted = []
    for x_b in x.tolist():
        rows = [[a[i][d] for d in range(D)] for i in range(I)]
        for j in range(J):
            y = [sum(A[j][k][m] * x_b[j][k] for k in range(K)) for m in range(q)]
            products = [y[m] * y[n] for m in range(q) for n in range(m, q)]
            for i in range(I):
                for d in range(D):
                    rows[i][d] += sum(U[j][i][d][k] * x_b[j][k] for k in range(K))
                    rows[i][d] += sum(Q[j][i][d][p] * products[p] for p in range(len(products)))
        wanted.append(rows)
    near(decoder(x).detach(), number(wanted))
    assert not axis_products(x, decoder.axes)[2, 0].any()  # a capsule that is off draws nothing


@pytest.mark.parametrize("slab", [0, 2])
def test_axes_are_the_widest_principal_ones_of_the_stored_poses(slab: int) -> None:
    dimension = 4
    decoder = CapsuleDecoder(DecoderConfig(curvature=2), I, J, D, dimension, slab=slab).double()
    z = normal(40, J, dimension, seed=8) * number([1.0, 3.0, 2.0, 1.5])
    decoder.store_poses(z, torch.ones(40, J).bool())
    decoder.fit_axes()
    assert decoder.axes is not None
    for j in range(J):
        x = hidden(z[:, j].float().double(), slab=slab).numpy()
        values, vectors = np.linalg.eigh(np.cov(x.T))
        wanted = torch.from_numpy(vectors[:, np.argsort(-values)[:2]].copy())
        # An axis has no sign
        near((decoder.axes[j] * wanted).sum(0).abs(), torch.ones(2).double())


def test_a_quadratic_decoder_draws_a_bent_surface_that_a_linear_one_does_not() -> None:
    stage, energy = stage_of("least squares", curvature=K)
    x = images(40)
    stage.prepare((255 * x).round().byte())
    state = energy.infer(energy.visible(features_of(x)))
    code = stage.decoder.code(state.hidden)
    true = normal(code.shape[1] + 1, I * D, seed=9)
    # Features that are quadratic in the pose: found but for the ridge
    features = (torch.cat([code, torch.ones(40, 1).double()], 1) @ true).view(40, I, D)
    stage._reset_sums(energy)
    stage._least_squares(state.hidden, features, x)
    stage.decoder.config = DecoderConfig(ridge=1e-9, curvature=K)
    stage._solve()
    torch.testing.assert_close(stage.decoder(state.hidden).detach(), features, rtol=1e-4, atol=1e-4)
    linear, _ = stage_of("least squares")
    linear._reset_sums(energy)
    linear._least_squares(state.hidden, features, x)
    linear._solve()
    assert float((linear.decoder(state.hidden) - features).detach().square().mean()) > 0.003


@pytest.mark.parametrize(
    "make",
    [
        lambda: DecoderConfig("paper", curvature=2),
        lambda: DecoderConfig(curvature=-1),
        lambda: DecoderConfig(examples=0),
        lambda: PoEConfig(dimension=4, decoder=DecoderConfig(curvature=5)),
    ],
)
def test_decoders_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(RecipeError, match=r"curvature|examples"):
        make()


# --- The stage --------------------------------------------------------------------------------------------------------


def features_of(images: Tensor) -> Tensor:
    """Pixels as features: [b 1 i d] in [0, 1] -> [b i d] in [-2, 2]."""
    return 4 * images.flatten(0, 1) - 2


def stage_of(
    rule: Any, ridge: float = 1e-3, mode: Any = "competition", curvature: int = 0, coverage: float = 1.0
) -> tuple[DecoderStage, CapsuleEnergy]:
    """A stage over a frozen encoder, in float64, where the features are the pixels."""
    torch.manual_seed(0)
    energy = CapsuleEnergy(EnergyConfig(mode, bias_start=0.7), I, J, D, K).double()
    energy.W.data.copy_(normal(I, J, K, D, seed=1))
    energy.fit_offset(features_of(images(40)))
    decoder = CapsuleDecoder(DecoderConfig(rule, ridge, curvature, coverage=coverage), I, J, D, K).double()
    return DecoderStage(decoder, energy, features_of, lambda f: ((f + 2) / 4).sigmoid().unsqueeze(1)), energy


def images(n: int) -> Tensor:
    return torch.rand(n, 1, I, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def batches(x: Tensor, size: int = B) -> list[Batch]:
    return [Batch(x[n : n + size], torch.zeros(size), torch.arange(n, n + size)) for n in range(0, len(x), size)]


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
@pytest.mark.parametrize("mode", ["competition", "paper"])
def test_least_squares_with_a_ridge(mode: str, ridge: float) -> None:
    """The numbers of numpy for the same rows, and one row a weight of the size of the ridge; none for the intercept."""
    stage, energy = stage_of("least squares", ridge, mode)
    x = images(40)
    stage.decoder.gram.fill_(7.0)  # the first step forgets what an earlier run left
    for step, batch in enumerate(batches(x)):
        stage.objective(batch, step)
    stage.finish()
    code = energy.infer(energy.visible(features_of(x))).hidden.flatten(1).numpy()
    lam = ridge * (code**2).mean() * len(x)
    rows = np.concatenate([code, np.ones((len(x), 1))], 1)
    rows = np.concatenate([rows, np.sqrt(lam) * np.eye(J * K, J * K + 1)])
    right = np.concatenate([features_of(x).flatten(1).numpy(), np.zeros((J * K, I * D))])
    solution = torch.from_numpy(np.linalg.lstsq(rows, right, rcond=None)[0])
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)
    close(stage.decoder.U.detach().permute(0, 3, 1, 2).reshape(J * K, I * D), solution[:-1])
    close(stage.decoder.intercept.flatten(), solution[-1])
    assert not stage.by_gradient


def test_least_squares_of_capsules_that_never_win_is_finite() -> None:
    stage, energy = stage_of("least squares")
    energy.W.data[:, 1] = 0
    energy.bias[1] = 0
    for step, batch in enumerate(batches(images(8), size=4)):
        stage.objective(batch, step)
    stage.finish()
    assert torch.isfinite(stage.decoder.U).all() and float(stage.decoder.U.detach()[1].abs().max()) < 1e-6


@pytest.mark.parametrize("rule", ["least squares", "gradient", "paper"])
def test_poses_of_the_images_that_a_capsule_won(rule: str) -> None:
    stage, energy = stage_of(rule)
    x = images(40)
    for step, batch in enumerate(batches(x)):
        stage.objective(batch, step)
    seen = energy.infer(energy.visible(features_of(x)))
    won = energy.winners(seen)
    counts = [int((won == j).sum()) for j in range(J)]
    assert sorted(counts)[1] > 3
    for j in range(J):
        z = seen.z[won == j, j].numpy()
        near(stage.decoder.weight[j], number(counts[j] / B))
        if counts[j]:
            near(stage.decoder.pose_mean()[j], torch.from_numpy(z.mean(0)))
            near(stage.decoder.pose_covariance()[j], torch.from_numpy(np.cov(z.T, bias=True)))


@pytest.mark.parametrize("mode", ["competition", "offset"])
def test_examples_are_the_first_poses_of_the_images_that_a_capsule_took_part_in(mode: str) -> None:
    stage, energy = stage_of("least squares", mode=mode)
    x = images(40)
    stage.store_features(torch.split(features_of(x), 7))
    seen = energy.infer(energy.visible(features_of(x)))
    for j in range(J):
        own = [z[j] for n, z in enumerate(seen.z) if mode == "offset" or int(energy.winners(seen)[n]) == j]
        assert int(stage.decoder.kept[j]) == len(own)
        near(stage.decoder.examples_of(j).double(), torch.stack(own) if own else torch.zeros(1, K).double())


def test_of_a_share_of_its_images_a_capsule_stores_and_measures_those_that_it_supports_most() -> None:
    """coverage = .7: per capsule, the poses at or above the .3 quantile of its own support, sorted out by a loop."""
    stage, energy = stage_of("least squares", coverage=0.7)
    x = images(64)
    stage.store_features(torch.split(features_of(x), 7))
    for step, batch in enumerate(batches(x)):
        stage.objective(batch, step)
    found = energy.infer(energy.visible(features_of(x)))
    won = energy.winners(found)
    support = energy.support(found.x, found.z).detach()
    left_out = 0
    for j in range(J):
        own = [n for n in range(64) if int(won[n]) == j]
        if not own:
            assert int(stage.decoder.kept[j]) == 0
            continue
        least = np.quantile([float(support[n, j]) for n in own], 0.3)
        covered = [n for n in own if float(support[n, j]) >= least - 1e-12]
        left_out += len(own) - len(covered)
        near(stage.decoder.examples_of(j).double(), found.z[covered, j])
        near(stage.decoder.pose_mean()[j], found.z[covered, j].mean(0))
    assert left_out > 10


def test_a_coverage_outside_of_0_to_1_is_refused() -> None:
    for share in (0.0, 1.1):
        with pytest.raises(RecipeError, match="coverage"):
            DecoderConfig(coverage=share)


def test_no_more_examples_are_kept_than_there_is_room_for() -> None:
    decoder = CapsuleDecoder(DecoderConfig(examples=7), I, J, D, K)
    decoder.store_poses(torch.ones(12, J, K), torch.ones(12, J).bool())
    assert decoder.examples_of(0).shape == (7, K) and bool((decoder.examples_of(J - 1) == 1).all())


def test_poses_of_a_capsule_that_won_nothing_are_0_and_without_competition_all_count() -> None:
    decoder = CapsuleDecoder(DecoderConfig(), I, J, D, K)
    assert not decoder.pose_mean().any() and not decoder.pose_covariance().any()
    stage, energy = stage_of("least squares", mode="offset")
    x = images(16)
    for step, batch in enumerate(batches(x)):
        stage.objective(batch, step)
    z = energy.infer(energy.visible(features_of(x))).z
    near(stage.decoder.pose_mean(), z.mean(0))
    near(stage.decoder.pose_covariance()[1], torch.from_numpy(np.cov(z[:, 1].T.numpy(), bias=True)))


def test_the_papers_rule_as_a_loss() -> None:
    stage, energy = stage_of("paper", mode="offset")
    [batch] = batches(images(B))
    stage.objective(batch, 0)["loss"].backward()
    features = features_of(batch.images)
    h, target = energy.infer(energy.visible(features)).hidden, features - energy.offset
    U = stage.decoder.U.detach()
    e = [paper.share_out(h_b, U.tolist()) for h_b in h.tolist()]
    wanted = [paper.update_U(U.tolist(), *one) for one in zip(h.tolist(), target.tolist(), e, strict=True)]
    near(stage.decoder.U.grad, -number(wanted).mean(0))
    assert torch.equal(stage.decoder.intercept, energy.offset)


def test_the_gradient_rule_lowers_the_loss_of_the_pixels() -> None:
    stage, energy = stage_of("gradient")
    [batch] = batches(images(32), size=32)
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.05)
    losses = []
    for step in range(30):
        terms = stage.objective(batch, step)
        losses.append(float(terms["loss"].detach()))
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.02
    assert [name for name, _ in stage.named_parameters()] == ["decoder.U"] and energy.W.grad is None
    code = energy.infer(energy.visible(features_of(batch.images))).hidden
    drawn = ((stage.decoder(code).detach() + 2) / 4).sigmoid().unsqueeze(1)
    terms = stage.objective(batch, 30)
    near(terms["loss"].detach(), binary_cross_entropy(drawn, batch.images))
    near(terms["mse"], (drawn - batch.images).square().mean())


def test_the_refined_rule_starts_from_least_squares(monkeypatch) -> None:
    """Its U before the first step is that of least squares on the same images, and then it learns by gradient."""
    monkeypatch.setattr(stages, "to_float", lambda chunk: chunk)  # these images are numbers, not bytes
    refined, _ = stage_of("refined")
    solved, _ = stage_of("least squares")
    [batch] = batches(images(32), size=32)
    for stage in (refined, solved):
        stage.prepare(batch.images)
        loss = stage.objective(batch, 0)["loss"]
    solved.finish()
    near(refined.decoder.U.detach(), solved.decoder.U.detach())
    near(refined.decoder.intercept, solved.decoder.intercept)
    assert not loss.requires_grad and refined.by_gradient
    first = refined.objective(batch, 1)["loss"]
    torch.autograd.backward(first)
    with torch.no_grad():
        refined.decoder.U -= 0.5 * refined.decoder.U.grad
    refined.finish()
    assert float(refined.objective(batch, 2)["loss"].detach()) < float(first.detach())


def test_features_beyond_a_bound_go_to_a_mapped_file(tmp_path, monkeypatch) -> None:
    bytes_ = torch.arange(3 * I * D, dtype=torch.uint8).view(3, 1, I, D).repeat(400, 1, 1, 1)
    wanted = collect(features_of, bytes_)
    monkeypatch.setattr(stages, "IN_MEMORY", 1000)
    monkeypatch.setattr(stages, "cache_dir", lambda: tmp_path)
    found = collect(features_of, bytes_)
    assert is_mapped(found) and not is_mapped(wanted) and torch.equal(found, wanted)
    assert list((tmp_path / "scratch").iterdir()) == []
    monkeypatch.setattr(stages, "cache_dir", lambda: tmp_path / "scratch" / "file")
    (tmp_path / "scratch" / "file").write_text("")
    assert torch.equal(collect(features_of, bytes_), wanted), "where the cache cannot be written, in memory"


def test_features_are_collected_in_parts() -> None:
    bytes_ = torch.arange(3 * I * D, dtype=torch.uint8).view(3, 1, I, D)
    kept = collect(features_of, bytes_.repeat(400, 1, 1, 1))
    assert kept.shape == (1200, I, D) and kept.dtype == torch.float16
    assert torch.equal(kept[600:603], features_of(bytes_.float() / 255).half())
