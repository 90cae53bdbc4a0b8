"""Histograms of real numbers over bins that need no agreement: each number is rounded to 13 binary digits.

Whole numbers up to 8192 have a bin of their own, so that CT values are kept exactly. Any other number moves by at most
2^-13 of its size. Rounding keeps the order of numbers, so a percentile moves by no more than that either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

DIGITS = 13
LARGEST_STEP = 2.0**-DIGITS  # by which a number may move, as a share of its size
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


def rounded(numbers: ArrayLike) -> Values:
    """Return the bin of each number: itself with 13 binary digits."""
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent - DIGITS)


@dataclass(frozen=True)
class FloatHistogram:
    """How many numbers are in each bin; bins in ascending order, none of them empty."""

    values: Values
    counts: Counts

    @classmethod
    def of(cls, numbers: ArrayLike) -> Self:
        """Return the histogram of some numbers."""
        values, counts = np.unique(rounded(numbers), return_counts=True)
        return cls(values, counts.astype(np.int64))

    @classmethod
    def merged(cls, several: Iterable["FloatHistogram"]) -> Self:
        """Return the histogram of the numbers of all."""
        known = list(several)
        return cls(*_added([one.values for one in known], [one.counts for one in known]))

    @classmethod
    def of_bins(cls, values: ArrayLike, counts: ArrayLike) -> Self:
        """Return a histogram of bins and their counts."""
        return cls(np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.int64))

    def scaled(self, part: int, whole: int) -> Self:
        """Return the same with part / whole of each count, rounded down; bins of which nothing is left are gone."""
        counts = self.counts * part // whole
        return replace(self, values=self.values[counts > 0], counts=counts[counts > 0])

    @property
    def total(self) -> int:
        """The number of numbers."""
        return int(self.counts.sum())

    def percentile(self, percent: float) -> float:
        """Return the percentile as numpy.percentile does: on the line between the two numbers beside it."""
        place = (self.total - 1) * percent / 100
        below = int(place)
        ends = np.cumsum(self.counts)
        low, high = (
            self.values[np.searchsorted(ends, rank, "right")] for rank in (below, min(below + 1, ends[-1] - 1))
        )
        return float(low + (high - low) * (place - below))

    @property
    def mean(self) -> float:
        """The mean of all numbers."""
        return float(np.average(self.values, weights=self.counts))

    @property
    def deviation(self) -> float:
        """The standard deviation of all numbers, over their number."""
        return float(np.sqrt(np.average((self.values - self.mean) ** 2, weights=self.counts)))


class Tally:
    """A histogram over cases that come one by one, which knows how many of them each bin covers."""

    def __init__(self) -> None:
        empty = FloatHistogram.of([])
        self.numbers, self.cases = empty, empty

    def add(self, numbers: ArrayLike) -> None:
        """Add the numbers of one case."""
        own = FloatHistogram.of(numbers)
        self.numbers = FloatHistogram.merged([self.numbers, own])
        self.cases = FloatHistogram.merged([self.cases, FloatHistogram(own.values, np.ones_like(own.counts))])

    def covering(self, least: int) -> FloatHistogram:
        """Return the numbers in bins of so many cases or more; those of other bins are put into the nearest of these.

        It is empty where no bin has so many.
        """
        kept = self.numbers.values[self.cases.counts >= least]
        if not len(kept):
            return FloatHistogram.of([])
        nearest = np.searchsorted((kept[1:] + kept[:-1]) / 2, self.numbers.values)
        return FloatHistogram(*_added([kept[nearest]], [self.numbers.counts]))


def _added(values: Sequence[Values], counts: Sequence[Counts]) -> tuple[Values, Counts]:
    """Return the different values, and the sum of the counts of each."""
    different, places = np.unique(np.concatenate([*values, []]), return_inverse=True)
    sums = np.zeros(len(different), dtype=np.int64)
    np.add.at(sums, places, np.concatenate([*counts, np.zeros(0, np.int64)]))
    return different, sums
