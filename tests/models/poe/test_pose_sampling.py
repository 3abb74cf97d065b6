"""Poses that no image gave, and what the whole model promises about its images and codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support import poe_reference as paper
from torchcaps.errors import DataError, RecipeError, ShapeError, TorchcapsError
from torchcaps.math.squash import unsquash
from torchcaps.models import AutoencoderConfig
from torchcaps.models.poe import DecoderConfig, EnergyConfig, PoE, PoEConfig, energy, pose_sampling
from torchcaps.models.poe.decoder import CapsuleDecoder
from torchcaps.routing import Dynamic
from torchcaps.types import Capsules, ImageSpec
from torchcaps.utils.random import resample_near

MEAN = torch.tensor([[0.5, -1.0, 0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.3, 0.0], [0.0, 0.5, -0.2], [0.0, 0.0, 0.8]], dtype=torch.float64)
COVARIANCE = torch.stack([ROOT @ ROOT.T, torch.diag(torch.tensor([0.2, 3.0, 0.1]).double())])


def near(value: Any, wanted: Any) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)


def decoder(mean: Tensor = MEAN, covariance: Tensor = COVARIANCE, weight: float = 2.5) -> CapsuleDecoder:
    """As if poses with this mean and covariance had been gathered."""
    made = CapsuleDecoder(DecoderConfig(), 2, len(mean), 2, mean.shape[1]).double()
    made.weight.fill_(weight)
    made.first.copy_(weight * mean)
    made.second.copy_(weight * (covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)))
    made.store_poses(with_moments(mean, covariance), torch.ones(200, len(mean)).bool())
    return made


def with_moments(mean: Tensor, covariance: Tensor, n: int = 200) -> Tensor:
    """Poses [n j k] that have exactly these moments."""
    noise = torch.randn(n, *mean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    white = [torch.linalg.qr(each - each.mean(0)).Q * n**0.5 for each in noise.unbind(1)]
    roots = [torch.linalg.cholesky(c + 1e-12 * torch.eye(len(c))) for c in covariance]
    return torch.stack([m + w @ r.T for m, w, r in zip(mean, white, roots, strict=True)], 1)


def drawn(j: int, domain: str, n: int = 20_000, seed: int = 0, made: CapsuleDecoder | None = None) -> Tensor:
    """z [n k], before squash."""
    return unsquash(pose_sampling.sample_poses(made or decoder(), j, n, domain, seed))


# --- Domains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("j", [0, 1])
def test_empirical_poses_are_drawn_near_those_of_the_training_images(j: int) -> None:
    made = decoder()
    z = drawn(j, "empirical", made=made)
    near = resample_near(made.examples_of(j), 0, j, torch.arange(len(z)))
    torch.testing.assert_close(z, near.double(), rtol=1e-4, atol=1e-4)
    # So they are where the training poses are, and somewhat narrower: the outermost have neighbors on one side
    torch.testing.assert_close(z.mean(0), MEAN[j], rtol=0, atol=0.15)
    torch.testing.assert_close(z.T.cov(), COVARIANCE[j], rtol=0.35, atol=0.1)


def test_complete_poses_are_isotropic() -> None:
    z = drawn(0, "complete")
    torch.testing.assert_close(z.mean(0), torch.zeros(3).double(), rtol=0, atol=0.03)
    torch.testing.assert_close(z.T.cov(), torch.eye(3).double(), rtol=0, atol=0.03)
    directions = z / z.norm(dim=1, keepdim=True)
    torch.testing.assert_close(directions.T.cov(), torch.eye(3).double() / 3, rtol=0, atol=0.02)


@pytest.mark.parametrize(("j", "axis"), [(0, MEAN[0]), (1, torch.tensor([0.0, 1, 0]).double())])
def test_restricted_poses_are_the_complete_ones_turned_to_the_side_that_was_visited(j: int, axis: Tensor) -> None:
    """The side of the mean; of poses around 0, one side of the axis along which they spread most."""
    z, complete = drawn(j, "restricted", 500), drawn(j, "complete", 500)
    side = z @ axis
    assert (side >= 0).all() or (j == 1 and (side <= 0).all())
    assert (complete @ axis < 0).any() and (complete @ axis > 0).any()
    near(z, torch.where((complete @ axis).mul(side) < 0, -1.0, 1.0).unsqueeze(1) * complete)


@pytest.mark.parametrize("way", [1.0, -1.0])
def test_of_poses_around_0_the_side_is_that_of_their_short_mean(way: float) -> None:
    mean = torch.tensor([[0.01, 0.05 * way, 0.01]]).double()  # shorter than a fifth of the deviation
    z = drawn(0, "restricted", 500, made=decoder(mean, COVARIANCE[1:]))
    assert (way * z[:, 1] >= 0).all() and (z @ mean[0] < 0).any()


@pytest.mark.parametrize("domain", pose_sampling.DOMAINS)
def test_a_pose_is_a_function_of_seed_capsule_and_number(domain: str) -> None:
    many = pose_sampling.sample_poses(decoder(), 0, 9, domain, 4)
    assert torch.equal(pose_sampling.sample_poses(decoder(), 0, 3, domain, 4), many[:3])
    assert not torch.equal(pose_sampling.sample_poses(decoder(), 0, 9, domain, 5), many)
    alike = decoder(MEAN[:1].repeat(2, 1), COVARIANCE[:1].repeat(2, 1, 1))
    assert not torch.equal(
        pose_sampling.sample_poses(alike, 1, 9, domain, 4), pose_sampling.sample_poses(alike, 0, 9, domain, 4)
    )
    assert len({tuple(row) for row in many.tolist()}) == 9
    assert (many.norm(dim=1) < 1).all()


def test_a_capsule_that_won_nothing_has_poses_all_the_same() -> None:
    empty = CapsuleDecoder(DecoderConfig(), 2, 2, 2, 3)
    for domain in pose_sampling.DOMAINS:
        z = pose_sampling.sample_poses(empty, 1, 4, domain, 0)
        assert torch.isfinite(z).all() and z.dtype == torch.float32
        assert bool(z.any()) == (domain in ("complete", "restricted"))


# --- Sweeps and ways --------------------------------------------------------------------------------------------------


def test_a_principal_sweep_moves_along_the_axes_of_the_covariance_widest_first() -> None:
    made = unsquash(pose_sampling.sweep_poses(decoder(), 0, steps=3, reach=1.5, principal=True).double())  # [k n k]
    values = torch.linalg.eigvalsh(COVARIANCE[0]).flip(0).tolist()
    for row, value in zip(made, values, strict=True):
        step = (row[2] - row[1]) / 1.5
        assert torch.allclose(row[1], MEAN[0].double(), atol=1e-5)
        assert torch.allclose(COVARIANCE[0].double() @ step, value * step, atol=1e-4)
        assert float(step @ step) == pytest.approx(max(value, 0.0), abs=1e-4)


def test_a_sweep_moves_one_number_at_a_time() -> None:
    made = pose_sampling.sweep_poses(decoder(), 0, steps=5, reach=2.0)
    assert made.shape == (3, 5, 3)
    for k in range(3):
        for n in range(5):
            z = MEAN[0].tolist()
            z[k] += (-2.0 + n) * COVARIANCE[0, k, k].item() ** 0.5
            near(made[k, n], torch.tensor(paper.squash(z), dtype=torch.float64))


def test_a_way_from_one_code_to_another() -> None:
    a, b = torch.rand(2, 3).double(), torch.rand(2, 3).double()
    way = pose_sampling.interpolate_poses(a, b, steps=5)
    assert torch.equal(way[0], a) and torch.equal(way[-1], b)
    for n in range(5):
        near(way[n], (4 - n) / 4 * a + n / 4 * b)


# --- The model --------------------------------------------------------------------------------------------------------

SPEC = ImageSpec(1, 12, 13, 10)
CONFIG = PoEConfig(
    capsules=3, dimension=4, child_dimension=2, autoencoder=AutoencoderConfig((3, 6), 4), energy=EnergyConfig(init=0.05)
)


def build(mode: Any = "competition", iterations: int = 1, rule: Any = "least squares", **settings: Any) -> PoE:
    torch.manual_seed(0)
    way = EnergyConfig(mode, Dynamic(iterations=iterations, agreement="cosine", over="children"), init=0.05)
    model = PoE(replace(CONFIG, energy=way, decoder=DecoderConfig(rule), **settings), SPEC).eval()
    with torch.no_grad():
        for conv in (model.autoencoder.conv1, model.autoencoder.conv2):
            conv.weight.mul_(3)  # an untrained one draws almost the same whatever it sees
        model.energy.fit_offset(model.features(images(20)))
    return model


def images(n: int, spec: ImageSpec = SPEC) -> Tensor:
    return torch.rand(n, *spec[:3], generator=torch.Generator().manual_seed(1))


def test_children_are_the_channels_of_a_place_some_at_a_time() -> None:
    model, x = build(), images(2)
    with torch.no_grad():
        maps, features = model.autoencoder.encode(x), model.features(x)  # [b C h w], [b i d]
        h, w = model.autoencoder.grid
        assert features.shape == (2, h * w * 3, 2)
        for place in range(h * w):
            for n in range(3):
                for d in range(2):
                    wanted = maps[:, 2 * n + d, place // w, place % w]
                    assert torch.equal(features[:, 3 * place + n, d], wanted)
        torch.testing.assert_close(model.draw_images(features), model.autoencoder.decode(maps))


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("mode", ["competition", "offset", "paper"])
def test_a_code_and_its_lengths(mode: str, iterations: int) -> None:
    model, x = build(mode, iterations), images(5)
    capsules = model.encode(x)
    assert isinstance(capsules, Capsules)
    assert capsules.pose.shape == (5, 3, 4) and capsules.activation.shape == (5, 3)
    torch.testing.assert_close(capsules.activation, capsules.pose.norm(dim=-1), rtol=1e-5, atol=1e-7)
    assert capsules.activation.min() >= 0 and capsules.activation.max() < 1
    on = capsules.pose.any(-1).sum(1)
    assert on.tolist() == [1 if mode == "competition" else 3] * 5
    seen = model.infer(x)
    F = model.free_energy(x)
    assert F.shape == (5,)
    gates = [None] * 5 if seen.gate is None else seen.gate.tolist()
    wanted = [paper.free_energy(z, m) for z, m in zip(seen.z.tolist(), gates, strict=True)]
    torch.testing.assert_close(F, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["least squares", "paper"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_reconstructions(iterations: int, rule: str) -> None:
    """One passes nothing but the code; the other goes back through W with the image's own coupling."""
    model, x = build("offset", iterations, rule), images(5)
    with torch.no_grad():
        capsules, seen = model.encode(x), model.infer(x)
        assert torch.equal(model.reconstruct(x), model.decode(capsules.pose))
        assert torch.equal(model.decode(capsules.pose), model.draw_images(model.decoder(capsules.pose)))
        tied = model.reconstruct_tied(x)
        expected = torch.stack(
            [
                torch.tensor(paper.expect(h, model.energy.W.tolist(), c))
                for h, c in zip(seen.hidden.tolist(), couplings(seen.coupling, model.energy.W), strict=True)
            ]
        )
        wanted = model.draw_images((expected + model.energy.offset).float())
    torch.testing.assert_close(tied, wanted, rtol=1e-4, atol=1e-6)
    for made in (model.reconstruct(x), tied):
        assert made.shape == x.shape and made.min() >= 0 and made.max() <= 1


def couplings(c: energy.Coupling, W: Tensor, b: int = 5) -> list[Any]:
    full = c if isinstance(c, Tensor) else torch.full((b, *W.shape[:2]), c)
    return full.tolist()


@pytest.mark.parametrize("domain", pose_sampling.DOMAINS)
def test_samples(domain: Any) -> None:
    model = build()
    model.decoder.weight.fill_(1)
    model.decoder.first.copy_(torch.randn(3, 4))
    model.decoder.second.copy_(torch.eye(4) + model.decoder.first.unsqueeze(-1) * model.decoder.first.unsqueeze(-2))
    model.decoder.store_poses(torch.randn(9, 3, 4), torch.ones(9, 3).bool())
    model.train()
    made = model.sample(1, n=6, domain=domain, seed=3)
    assert made.shape == (6, *SPEC[:3]) and made.min() >= 0 and made.max() <= 1 and not made.requires_grad
    assert model.training and model.autoencoder.training  # as it was, and yet without dropout:
    assert torch.equal(model.sample(1, n=6, domain=domain, seed=3), made)
    pose = torch.zeros(6, 3, 4)
    pose[:, 1] = pose_sampling.sample_poses(model.decoder, 1, 6, domain, 3)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().decode(pose), made)
        pose[:, 0] = pose_sampling.sample_poses(model.decoder, 0, 6, domain, 3)
        torch.testing.assert_close(model.decode(pose), model.sample([0, 1], n=6, domain=domain, seed=3))
    assert model.sample(2).shape[0] == 8
    assert not torch.equal(model.sample(1, n=6, domain=domain, seed=4), made)


def test_color_images() -> None:
    spec = ImageSpec(3, 12, 12, 2)
    model = PoE(CONFIG, spec).eval()
    assert model.sample(0, n=2).shape == (2, 3, 12, 12)
    assert model.reconstruct(images(2, spec)).shape == (2, 3, 12, 12)


# --- One line for what cannot be meant --------------------------------------------------------------------------------

REFUSED: list[tuple[type[TorchcapsError], str, Any]] = [
    (ShapeError, "capsule 3 is wanted; there are 0 to 2", lambda m: m.sample(3)),
    (ShapeError, "capsule -1 is wanted", lambda m: m.sample([0, -1])),
    (ShapeError, r"capsule 1\.5 is wanted; there are 0 to 2", lambda m: m.sample(1.5)),
    (ShapeError, "capsule '1' is wanted", lambda m: m.sample("12")),
    (ShapeError, "capsule None is wanted", lambda m: m.sample(None)),
    (RecipeError, "unknown domain None; known: complete, empirical", lambda m: m.sample(0, domain=None)),
    (ShapeError, "n = 0 images", lambda m: m.sample(0, n=0)),
    (RecipeError, "unknown domain 'complet'; did you mean 'complete'", lambda m: m.sample(0, domain="complet")),
    (ShapeError, r"pose has shape \[2, 3\]; \[b 3 4\] is wanted", lambda m: m.decode(torch.zeros(2, 3))),
    (ShapeError, r"pose has shape \[2, 4, 3\]", lambda m: m.decode(torch.zeros(2, 4, 3))),
    (DataError, r"divide bytes by 255", lambda m: m.encode(2 * torch.ones(1, *SPEC[:3]))),
    (DataError, "undo the standardization", lambda m: m.reconstruct(images(2) - 0.5)),
    (
        DataError,
        r"infinite values; finite numbers, in \[0, 1\] or standard",
        lambda m: m.free_energy(images(2) * float("nan")),
    ),
    (ShapeError, r"this model wants \[b 1 12 13\]", lambda m: m.encode(torch.rand(2, 1, 13, 13))),
    (ShapeError, "empty batch", lambda m: m.encode(torch.rand(0, *SPEC[:3]))),
    (ShapeError, "floating numbers", lambda m: m.encode(torch.zeros(2, *SPEC[:3], dtype=torch.uint8))),
]


@pytest.mark.parametrize(("error", "text", "use"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_bad_input_is_refused_in_one_line(error: type[TorchcapsError], text: str, use: Any) -> None:
    with pytest.raises(error, match=text) as caught:
        use(build())
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_built_is_refused_in_one_line() -> None:
    with pytest.raises(RecipeError, match="child_dimension = 4 does not divide the 6 channels") as caught:
        replace(CONFIG, child_dimension=4).build(SPEC)
    assert "\n" not in str(caught.value)
    with pytest.raises(ShapeError, match="too small"):
        CONFIG.build(ImageSpec(1, 6, 6, 10))


def test_constant_images_have_codes() -> None:
    model = build()
    for value in (0.0, 0.5, 1.0):
        x = torch.full((2, *SPEC[:3]), value)
        for made in (model.encode(x).pose, model.reconstruct(x), model.reconstruct_tied(x), model.free_energy(x)):
            assert torch.isfinite(made).all()
