"""The low bits of a noisy number disclose nothing about the exact number (Mironov 2012; Jin et al. 2022)."""

import math
from collections import Counter
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy import stats

from medsilo.learning.private import ClippedSum
from medsilo.privacy import noise
from medsilo.privacy.noise import CELLS, NoiseSource

DRAWN = 40_000


def finer_than(values: np.ndarray, step: float) -> int:
    return int((np.fmod(np.abs(values), step) != 0).sum())


def test_the_digits_of_a_sum_do_not_show() -> None:
    """If floating-point noise is added to a sum of 1, all results are multiples of 2^-53; if the sum is 0, the results
    have finer digits.
    """
    told = {}
    for exact in (0.0, 1.0, math.pi, 1e6 / 3):
        values = NoiseSource().with_normal(torch.full((DRAWN,), exact, dtype=torch.float64), 1.0).numpy()
        near = values[np.abs(values) < 0.25] if exact < 4 else values
        told[exact] = finer_than(near, 1 / CELLS) / len(near)
    assert told == dict.fromkeys(told, 0.0)


@pytest.mark.parametrize("bits", [0, 1, 3, 6])
def test_whole_numbers_have_the_law_of_the_discrete_gaussian(bits: int) -> None:
    """A chi-square test compares the sampled integers with P(k) ∝ exp(-k² / 2σ²), σ = 2^bits (Canonne, Kamath and
    Steinke 2020).
    """
    drawn = NoiseSource.from_seed(7, "law", bits).whole_normal(400_000, bits)
    sigma = 2.0**bits
    every = np.arange(-math.ceil(8 * sigma), math.ceil(8 * sigma) + 1)
    chance = np.exp(-(every**2) / (2 * sigma**2))
    chance /= chance.sum()
    found = Counter(drawn.astype(int).tolist())
    expected = chance * len(drawn)
    common = expected >= 10
    seen = np.array([found[int(k)] for k in every])
    rest = [seen[~common].sum(), expected[~common].sum()]
    statistic = ((seen[common] - expected[common]) ** 2 / expected[common]).sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert sum(found.values()) == seen.sum() and stats.chi2.sf(statistic, int(common.sum())) > 1e-4


def test_what_floating_point_can_not_decide_is_decided_exactly() -> None:
    """Two 64-bit random numbers are just below and just above a probability, although floating point rounds both
    numbers to the probability.
    """
    bits, source = 20, NoiseSource.from_seed(1, "x")
    numbers, chances = source.words(300), []
    with localcontext(prec=60):
        for number in numbers.tolist():
            blocks = next(place for place in range(20) if number >> (40 + place) & 1)
            size = (blocks << bits) + number % (1 << bits)
            exact = (Decimal(-(size**2)) / 2 ** (2 * bits + 1)).exp() * 13 * 2**blocks / 16
            chances.append(int(exact * 2**64))
    below, above = (
        noise.accepted(numbers, np.array([chance + shift for chance in chances], "u8"), bits, source)
        for shift in (-1, 1)
    )
    assert np.isfinite(below).all() and np.isnan(above).all()


def test_what_is_decided_exactly_has_more_digits_than_floating_point() -> None:
    source = NoiseSource.from_seed(2, "long")
    drawn = [source.long_uniform(first) for first in (0, 1 << 63, (1 << 64) - 1)]
    assert all(0 < own < 1 and len(own.as_tuple().digits) > 55 for own in drawn) and drawn == sorted(drawn)


def test_what_is_decided_exactly_takes_all_words_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    source = NoiseSource.from_seed(2, "long")
    monkeypatch.setattr(source, "words", lambda count: np.array([3, 5, 7], "u8")[:count])
    with localcontext(prec=80):
        for first, named in ((None, (3, 5, 7)), (9, (9, 3, 5))):
            high, middle, low = (Decimal(word) for word in named)
            exact = high / 2**64 + middle / 2**128 + low / 2**192 + Decimal(1) / 2**193
            assert abs(source.long_uniform(first) - exact) < Decimal(2) ** -250


@pytest.mark.slow
def test_counts_have_the_law_of_the_discrete_laplace() -> None:
    source, scale = NoiseSource.from_seed(3, "counts"), 1.7
    drawn = Counter(source.geometric(scale) for _ in range(20_000))
    q = math.exp(-1 / scale)
    expected = {k: 20_000 * (1 - q) / (1 + q) * q ** abs(k) for k in range(-8, 9)}
    statistic = sum((drawn[k] - own) ** 2 / own for k, own in expected.items())
    assert stats.chi2.sf(statistic, len(expected)) > 1e-4


@pytest.mark.parametrize("order", [1, -1])
def test_rounding_of_the_sum_stays_far_below_the_bound(order: int) -> None:
    """Removing one of 2000 patients changes the sum by exactly the patient's contribution, although sums are rounded to
    float32.
    """
    random = torch.Generator().manual_seed(0)
    own = torch.randn(2000, 3000, generator=random)[::order] if order == 1 else torch.randn(2000, 3000)
    weights = [torch.zeros(3000)]

    def total(gradients: torch.Tensor) -> torch.Tensor:
        clipped = ClippedSum(weights, 1.0)
        for start in range(0, len(gradients), 64):
            part = gradients[start : start + 64]
            clipped.add([part], torch.arange(start, start + len(part)))
        clipped.finish()
        return clipped.total[0].double()

    assert abs(float((total(own) - total(own[1:])).norm()) - 1) < 2e-6
