"""Histograms of real numbers over bins that need no agreement: each number is rounded to 13 binary digits.

Whole numbers up to 8192 have a bin of their own, so that CT values are kept exactly. Any other number moves by at most
2^-13 of its size. Rounding keeps the order of numbers, so a percentile moves by no more than that either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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
    """Counts of numbers in bins; the bins are in ascending order, and none is empty."""

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


def covering(cases: Sequence[FloatHistogram], least: int) -> FloatHistogram:
    """Return the histogram of all cases' numbers in groups that at least so many cases have a part in.

    A group is a run of neighbouring bins, as short as it can be, and stands at the bin of its median. With 1 each bin
    is a group. There is none where fewer cases than that have numbers.
    """
    whole = FloatHistogram.merged(cases)
    if least == 1:
        return whole
    owners = np.concatenate([np.full(len(case.values), number) for number, case in enumerate(cases)])
    order = np.argsort(np.concatenate([case.values for case in cases]), kind="stable")
    once = [FloatHistogram.of_bins(case.values, np.ones_like(case.counts)) for case in cases]
    ends = np.cumsum(FloatHistogram.merged(once).counts)
    groups = _runs(np.split(owners[order], ends[:-1]), least)
    if not groups:
        return FloatHistogram.of([])
    sums = np.add.reduceat(whole.counts, groups)
    before = np.cumsum(sums) - sums
    middles = np.searchsorted(np.cumsum(whole.counts), before + (sums - 1) // 2, "right")
    return FloatHistogram(whole.values[middles], sums)


def _runs(owners: Sequence[NDArray[Any]], least: int) -> list[int]:
    """Return where runs of bins begin that so many cases have a part in; the last one takes what is left over."""
    begins, begin, seen = [], 0, set[int]()
    for place, own in enumerate(owners):
        if seen or len(own) < least:
            seen.update(own.tolist())
        if max(len(seen), len(own)) >= least:
            begins.append(begin)
            begin, seen = place + 1, set()
    return begins


def _added(values: Sequence[Values], counts: Sequence[Counts]) -> tuple[Values, Counts]:
    """Return the different values, and the sum of the counts of each."""
    different, places = np.unique(np.concatenate([*values, []]), return_inverse=True)
    sums = np.zeros(len(different), dtype=np.int64)
    np.add.at(sums, places, np.concatenate([*counts, np.zeros(0, np.int64)]))
    return different, sums
