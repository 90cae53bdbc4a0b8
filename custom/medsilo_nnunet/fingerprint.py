"""The fingerprint of data that lie in several hospitals: counts, which add up to those of all data together.

nnU-Net's planner works along one axis at a time: it takes percentiles of spacings, of sizes after cropping and of sizes
after resampling, and never looks at two axes of one case together. So it is enough to know, along each axis, how many
cases have each pair of spacing and size; which pairs of different axes belong to one case is told to nobody.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medsilo.extend import Refused

DIGITS = 13
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


def rounded(numbers: ArrayLike) -> Values:
    """Return the bin of each number, on which nobody has to agree: itself with 13 binary digits.

    Whole numbers up to 8192 have a bin of their own, so that CT values are kept exactly. Any other moves by at most
    2^-13 of its size, and so does a percentile, as rounding keeps the order.
    """
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


AXES = 3  # a flat image has one place along the first
SAMPLES = 10**8  # intensities that nnU-Net draws in each channel, over all cases together
PERCENTILES = {"percentile_00_5": 0.5, "median": 50.0, "percentile_99_5": 99.5}
Extent = tuple[float, int]  # spacing in mm and size after cropping in voxels, along one axis
T = TypeVar("T")


@dataclass(frozen=True)
class CaseFacts:
    """The facts that nnU-Net finds in one case: spacing and size along each axis, and intensities by channel."""

    spacing: Sequence[float]
    size: Sequence[int]  # after cropping
    share: float  # of its voxels, that are left after cropping
    intensities: Sequence[Sequence[float]]  # of the foreground; those that nnU-Net draws


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one hospital's cases, or of several hospitals' cases together."""

    samples: int  # intensities that were drawn of each case in each channel
    extents: tuple[Counter[Extent], ...]  # cases by spacing and size, along each axis
    shares: Counter[float]  # cases by the share of the image that is left after cropping
    channels: tuple[FloatHistogram, ...]  # intensities of the foreground; empty where nothing is told of the channel

    @classmethod
    def of(cls, cases: Iterable[CaseFacts], samples: int, least: int = 1) -> Self:
        """Return the fingerprint of a hospital's cases as it may leave the hospital.

        least: the cases that each number must cover. Of so many neighbours in the order of spacing and size, the
        middle one counts for all; cases that are left over are not counted. With 1, all is told as it is.
        """
        axes: list[list[Extent]] = [[] for _ in range(AXES)]
        shares: list[float] = []
        channels: list[list[FloatHistogram]] = []
        for case in cases:
            shares.append(float(case.share))
            for axis, spacing, size in zip(axes, case.spacing, case.size, strict=True):
                axis.append((float(spacing), int(size)))
            channels = channels or [[] for _ in case.intensities]
            for channel, intensities in zip(channels, case.intensities, strict=True):
                channel.append(FloatHistogram.of(intensities))
        if len(shares) < max(least, 1):
            raise Refused(f"a fingerprint of fewer than {least} cases does not leave this hospital (smallest_metric)")
        told = len(shares) // least * least
        return cls(
            samples,
            tuple(Counter(middle for middle in _middles(axis, least) for _ in range(least)) for axis in axes),
            Counter(share for share in _middles(shares, least) for _ in range(least)),
            tuple(covering(channel, least).scaled(told, len(shares)) for channel in channels),
        )

    @classmethod
    def merged(cls, hospitals: Iterable["Fingerprint"]) -> Self:
        """Return the fingerprint of all cases together; raises Refused where they do not belong together."""
        several = list(hospitals)
        if len({(one.samples, len(one.channels)) for one in several}) != 1:
            raise Refused("the fingerprints differ in their channels, or in how many intensities of a case were drawn")
        return cls(
            several[0].samples,
            tuple(sum(axis, Counter()) for axis in zip(*(one.extents for one in several), strict=True)),
            sum((one.shares for one in several), Counter()),
            tuple(map(FloatHistogram.merged, zip(*(one.channels for one in several), strict=True))),
        )

    @property
    def least(self) -> int:
        """The cases that each number covers."""
        return gcd(*(cases for axis in self.extents for cases in axis.values()), *self.shares.values())

    def shifted(self, ranks: int) -> Self:
        """Return the fingerprint whose median lies so many ranks higher along each axis, or lower; one case is left."""
        gone = min(2 * abs(ranks), self.cases - 1)

        def rest(held: Counter[T]) -> Counter[T]:
            ordered = sorted(held.elements())  # type: ignore[type-var]
            return Counter(ordered[gone:] if ranks > 0 else ordered[: len(ordered) - gone])

        return replace(self, extents=tuple(map(rest, self.extents)), shares=rest(self.shares))

    @property
    def cases(self) -> int:
        """The number of cases."""
        return self.shares.total()

    def in_nnunet(self) -> dict[str, Any]:
        """Return the content of nnU-Net's dataset_fingerprint.json for these cases.

        The cases in it are put together axis by axis, so that none of them is a patient's.
        """
        along = [sorted(axis.elements()) for axis in self.extents]
        shares = sorted(self.shares.elements())
        middle = len(shares) // 2
        return {
            "spacings": [[spacing for spacing, _ in case] for case in zip(*along, strict=True)],
            "shapes_after_crop": [[size for _, size in case] for case in zip(*along, strict=True)],
            "foreground_intensity_properties_per_channel": {
                str(number): _properties(channel) for number, channel in enumerate(self.channels)
            },
            "median_relative_size_after_cropping": (shares[middle] + shares[~middle]) / 2,
        }


def samples_of(cases: int) -> int:
    """Return how many intensities nnU-Net draws of each case and channel, where all hospitals have so many cases."""
    return max(SAMPLES // cases, 1)


def _middles(values: Sequence[T], least: int) -> list[T]:
    """Return the middle one of each group of neighbours; groups have `least` values or a few more."""
    ordered, groups = sorted(values), len(values) // least  # type: ignore[type-var]
    return [ordered[(2 * group + 1) * len(ordered) // (2 * groups)] for group in range(groups)]


def _properties(channel: FloatHistogram) -> dict[str, float]:
    """Return what nnU-Net's plans say of the intensities in one channel."""
    if not channel.total:
        raise Refused("no hospital tells intensities of a channel; each needs more cases with a structure")
    return {
        "mean": channel.mean,
        "std": channel.deviation,
        "min": float(channel.values[0]),
        "max": float(channel.values[-1]),
        **{name: channel.percentile(percent) for name, percent in PERCENTILES.items()},
    }
