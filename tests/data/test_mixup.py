"""Mixup and label smoothing: shares of two images and of their classes, each a function of (seed, epoch, index)."""

from __future__ import annotations

import math

import pytest
import torch

from torchcaps.data import Dataset, Preprocess, SampleKey, batch_position, epoch_order, make_batch
from torchcaps.data.augment import mixup_partners, mixup_shares
from torchcaps.errors import DataError
from torchcaps.types import Batch

N = 20_000


def stereo(n: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (n, 2, 9, 9), generator=generator).byte()
    return Dataset(images, torch.arange(n) % 3, classes=3, preprocess=Preprocess(7, standardize=True))


def batch_of(data: Dataset, step: int = 1, **options: float) -> Batch:
    place = batch_position(step, len(data), 8)
    return make_batch(data, epoch_order(4, place.epoch, len(data)), place, 8, seed=4, **options)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_shares_have_the_distribution_of_the_larger_part_of_a_beta_variable(alpha):
    share = mixup_shares(SampleKey(0, 0, torch.arange(N)), alpha)
    assert float(share.min()) >= 0.5 and float(share.max()) <= 1
    torch.manual_seed(0)
    drawn = torch.distributions.Beta(torch.tensor(alpha).double(), alpha).sample((N,))
    drawn = torch.maximum(drawn, 1 - drawn).float()  # rounded alike: many are closer to 1 than float32 can say
    # Kolmogorov and Smirnov's distance of two samples, at the 1 in 10,000 level.
    at = torch.cat((share, drawn)).sort().values
    first, second = (torch.searchsorted(x.sort().values, at, right=True) / N for x in (share, drawn))
    assert float((first - second).abs().max()) < 2.23 * math.sqrt(2 / N)


def test_shares_and_partners_are_functions_of_seed_epoch_and_index():
    index = torch.tensor([5, 3, 17])
    whole = SampleKey(7, 2, torch.arange(24))
    some = whole._replace(indices=index)
    assert torch.equal(mixup_shares(some, 0.2), mixup_shares(whole, 0.2)[index])
    assert torch.equal(mixup_partners(some, 24), mixup_partners(whole, 24)[index])
    assert mixup_partners(whole, 24).sort().values.tolist() == list(range(24))  # each is a partner once
    for other in (whole._replace(seed=8), whole._replace(epoch=3)):
        assert not torch.equal(mixup_shares(other, 0.2), mixup_shares(whole, 0.2))
        assert not torch.equal(mixup_partners(other, 24), mixup_partners(whole, 24))
    with pytest.raises(DataError, match="at most 1"):
        mixup_shares(whole, 1.5)


def test_a_mixed_batch_image_by_image():
    data = stereo()
    plain, mixed = batch_of(data), batch_of(data, mixup_alpha=0.5)
    key = SampleKey(4, 0, plain.indices)
    own, partners = mixup_shares(key, 0.5), mixup_partners(key, len(data))
    # Every image as it looks in this epoch, wherever its place is.
    looks = {int(n): image for step in range(3) for n, image in zip(*_by_index(batch_of(data, step)), strict=True)}
    for n, partner in enumerate(partners.tolist()):
        share = float(own[n])
        wanted = share * plain.images[n] + (1 - share) * looks[partner]
        torch.testing.assert_close(mixed.images[n], wanted, rtol=0, atol=1e-5)
        label, other = int(plain.labels[n]), int(data.labels[partner])
        for j in range(3):
            assert float(mixed.shares[n, j]) == pytest.approx(share * (j == label) + (1 - share) * (j == other))
    assert torch.equal(mixed.labels, plain.labels) and plain.shares is None and plain.targets is plain.labels
    assert torch.equal(mixed.shares.argmax(-1), mixed.labels) and mixed.targets is mixed.shares


def _by_index(batch: Batch) -> tuple[list[int], torch.Tensor]:
    return batch.indices.tolist(), batch.images


def test_processes_share_a_mixed_batch():
    data = stereo()
    whole = batch_of(data, 4, mixup_alpha=0.2, label_smoothing=0.1)
    halves = [batch_of(data, 4, mixup_alpha=0.2, label_smoothing=0.1, rows=rows) for rows in (slice(3), slice(3, 8))]
    for name in ("images", "labels", "indices", "shares"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))


def test_label_smoothing_divides_a_share_among_all_classes():
    smooth = batch_of(stereo(), label_smoothing=0.3)
    for shares, label in zip(smooth.shares.tolist(), smooth.labels.tolist(), strict=True):
        assert shares == pytest.approx([0.1 + 0.7 * (j == label) for j in range(3)])
    assert torch.equal(smooth.images, batch_of(stereo()).images)
    data = stereo()
    several = Dataset(data.images, torch.stack((data.labels, data.labels), dim=1), 3)
    with pytest.raises(DataError, match="one label each"):
        batch_of(several, label_smoothing=0.1)
