"""MultiMNIST: two digits of different class, whole, overlapping as in the paper, and the same in any batch."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from torchcaps.data.glyphs import glyphs
from torchcaps.data.multimnist import multimnist
from torchcaps.errors import TorchcapsError

SHA256 = "4f441295c9dd717ccdf987a7043b7c33010b83e1e4da7d4590b29e286208d07e"


def digits(count: int = 400) -> tuple[Tensor, Tensor]:
    images, factors = glyphs(8, torch.arange(count), 28)
    return images, factors.label


def marked(count: int) -> Tensor:
    """Images that name themselves: the corners are 255, and number n stands in base 200 between them."""
    images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    images[:, :, ::27, ::27] = 255
    images[:, 0, 0, 1] = (torch.arange(count) % 200).byte()
    images[:, 0, 0, 2] = (torch.arange(count) // 200).byte()
    return images


def corners(parts: Tensor) -> Tensor:  # [b 2 2]
    """Row and column of the first pixel that is 255, of marked parts [b 2 h w]."""
    first = (parts == 255).flatten(2).byte().argmax(-1)
    return torch.stack((first // parts.shape[-1], first % parts.shape[-1]), dim=-1)


def numbers(parts: Tensor) -> Tensor:  # [b 2]
    """Which marked images the parts are."""
    row, column = corners(parts).unbind(-1)
    place = (row * parts.shape[-1] + column)[..., None] + torch.tensor([1, 2])
    low, high = parts.flatten(2).long().gather(2, place).unbind(-1)
    return low + 200 * high


def test_every_part_is_a_whole_source_image_and_the_image_is_their_sum_cut_off_at_255():
    images, labels = digits()
    both, pairs, parts = multimnist(images, labels, 3, torch.arange(300, 420))
    assert (both.shape, pairs.shape, parts.shape) == ((120, 1, 36, 36), (120, 2), (120, 2, 36, 36))
    assert both.dtype == parts.dtype == torch.uint8
    known = {(tuple(image.flatten().tolist()), int(label)) for image, label in zip(images, labels, strict=True)}
    for n in range(120):
        for part, label in zip(parts[n], pairs[n], strict=True):
            cuts = (part[y : y + 28, x : x + 28] for y in range(9) for x in range(9))
            held = [c for c in cuts if (tuple(c.flatten().tolist()), int(label)) in known]
            assert any(int(c.sum()) == int(part.sum()) for c in held)
        for p, q, sum_ in zip(*(t.flatten().tolist() for t in (parts[n, 0], parts[n, 1], both[n])), strict=True):
            assert sum_ == min(p + q, 255)
    assert int((parts.int().sum(1) > 255).sum()) > 100  # so that the cut matters


def test_the_first_digit_is_the_index_and_the_second_any_of_another_class():
    n, classes = 60, torch.tensor([0, 0, 0, 4, 4, 9])  # of unequal number, in no order
    labels = classes[torch.arange(n) * 7 % 6]
    _, pairs, parts = multimnist(marked(n), labels, 1, torch.arange(12_000))
    first, second = numbers(parts).unbind(-1)
    assert torch.equal(first, torch.arange(12_000) % n)
    assert torch.equal(pairs, labels[torch.stack((first, second), dim=1)])
    assert not (pairs[:, 0] == pairs[:, 1]).any()
    for own in (0, 4, 9):
        counts = torch.bincount(second[pairs[:, 0] == own], minlength=n)
        others = counts[labels != own].double()
        assert not counts[labels == own].any()
        assert float(((others - others.mean()) ** 2 / others.mean()).sum()) < len(others) + 5 * (2 * len(others)) ** 0.5


def test_shifts_are_uniform_and_boxes_overlap_by_80_percent_on_average():
    labels = torch.arange(10)
    _, _, parts = multimnist(marked(10), labels, 0, torch.arange(20_000))
    place = corners(parts)  # [b 2 2]
    assert (int(place.min()), int(place.max())) == (0, 8)
    for column in place.flatten(1).T:
        counts = torch.bincount(column, minlength=9).double()
        assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 35  # χ² with 8 degrees: 1 in 40,000
    corr = torch.corrcoef(place.flatten(1).T.double()) - torch.eye(4)
    assert float(corr.abs().max()) < 0.03
    both = 28 - (place[:, 0] - place[:, 1]).abs()  # [b 2], rows and columns in common
    share = both.prod(-1).double() / 28**2
    assert 0.75 < float(share.mean()) < 0.85
    assert float(share.mean()) == pytest.approx((1 - 80 / 27 / 28) ** 2, abs=0.003)


def test_an_image_depends_on_seed_and_index_alone():
    images, labels = digits()
    index = torch.tensor([5, 405, 1 << 40, 0])
    whole = multimnist(images, labels, 2, index)
    for n in range(4):
        alone = multimnist(images, labels, 2, index[[n]])
        assert all(torch.equal(a[0], w[n]) for a, w in zip(alone, whole, strict=True))
    assert torch.equal(whole[1][0, 0], whole[1][1, 0])  # the same first digit
    assert not torch.equal(whole[0][0], whole[0][1])
    assert not torch.equal(multimnist(images, labels, 3, index)[0], whole[0])
    assert hashlib.sha256(whole[0].numpy().tobytes()).hexdigest() == SHA256


def test_other_sizes_and_shifts():
    images, labels = marked(10), torch.arange(10)
    _, _, parts = multimnist(images, labels, 0, torch.arange(2000), size=41, most_shift=2)
    assert sorted(corners(parts).unique().tolist()) == [4, 5, 6, 7, 8]  # 6 is the middle, (41 - 28) // 2
    _, _, still = multimnist(images, labels, 0, torch.arange(50), size=28, most_shift=0)
    assert torch.equal(still[:, 0], images[torch.arange(50) % 10, 0])
    both, pairs, parts = multimnist(images, labels, 0, torch.arange(0))
    assert (both.shape, pairs.shape, parts.shape) == ((0, 1, 36, 36), (0, 2), (0, 2, 36, 36))


IMAGES, LABELS = marked(4), torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize(
    ("images", "labels", "index", "options", "text"),
    [
        (IMAGES, torch.zeros(4).long(), torch.tensor([0]), {}, "two classes"),
        (IMAGES, LABELS[:3], torch.tensor([0]), {}, "one each"),
        (IMAGES.float(), LABELS, torch.tensor([0]), {}, "uint8"),
        (IMAGES[:, 0], LABELS, torch.tensor([0]), {}, "n 1 h w"),
        (IMAGES[:0], LABELS[:0], torch.tensor([0]), {}, "n > 0"),
        (IMAGES, LABELS, torch.tensor([-1]), {}, "-1"),
        (IMAGES, LABELS, torch.tensor(0), {}, "shape"),
        (IMAGES, LABELS, torch.tensor([0]), {"size": 35}, "36"),
        (IMAGES, LABELS, torch.tensor([0]), {"most_shift": 5}, "38"),
        (IMAGES, LABELS, torch.tensor([0]), {"most_shift": -1}, "0 or more"),
    ],
)
def test_what_multimnist_cannot_be_made_of_is_refused_in_one_line(images, labels, index, options, text):
    with pytest.raises(TorchcapsError, match=text) as caught:
        multimnist(images, labels, 0, index, **options)
    assert "\n" not in str(caught.value)
