"""The fingerprint of data that lie in several hospitals: counts, which add up to those of all data together.

nnU-Net's planner works along one axis at a time: it takes percentiles of spacings, of sizes after cropping and of sizes
after resampling, and never looks at two axes of one case together. So it is enough to know, along each axis, how many
cases have each pair of spacing and size; which pairs of different axes belong to one case is told to nobody.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import gcd
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from medsilo.extend import DataError, Refused, Section
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_network import Reader
from medsilo_nnunet.question import SegmentationQuestion

DIGITS = 13
SAMPLES = 10**8  # intensities that nnU-Net draws in each channel, over all cases together
MOST_CASES = 100_000  # of one hospital
MOST_BINS = 2**19
MOST_CHANNELS = 32
GREATEST = 3.5e38  # of an intensity: a little more than float32 holds
Number = Annotated[int, Field(ge=1, le=MOST_CASES)]
Intensities = Annotated[int, Field(ge=1, le=SAMPLES * MOST_CASES)]
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


def rounded(numbers: ArrayLike) -> Values:
    """Return the bin of each number, on which nobody has to agree: itself with 13 binary digits.

    Whole numbers up to 8192 have a bin of their own, so that CT values are kept exactly. Any other moves by at most
    2^-13 of its size, and so does a percentile, as rounding keeps the order.
    """
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent - DIGITS)


def check_order(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError unless values are in ascending order, each once."""
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"its {what} are not in ascending order, each once")


class FloatHistogram(Section):
    """Counts of numbers in bins, which are in ascending order; without bins where nothing is told."""

    values: Annotated[list[Annotated[float, Field(ge=-GREATEST, le=GREATEST)]], Field(max_length=MOST_BINS)]
    counts: Annotated[list[Intensities], Field(max_length=MOST_BINS)]

    @model_validator(mode="after")
    def _has_bins(self) -> Self:
        if len(self.values) != len(self.counts):
            raise ValueError(f"it has {len(self.values)} bins of intensities and {len(self.counts)} counts")
        check_order("bins of intensities", self.values)
        if not np.array_equal(rounded(self.values), self.values):
            raise ValueError(f"its bins of intensities have more than {DIGITS} binary digits")
        return self

    @classmethod
    def of(cls, numbers: ArrayLike) -> "FloatHistogram":
        """Return the histogram of some numbers."""
        return cls.of_bins(*np.unique(rounded(numbers), return_counts=True))

    @classmethod
    def of_bins(cls, values: Values, counts: Counts) -> "FloatHistogram":
        """Return a histogram that was made here, so that nothing of it is checked."""
        return cls.model_construct(values=values.tolist(), counts=counts.tolist())

    @classmethod
    def merged(cls, several: Iterable["FloatHistogram"]) -> "FloatHistogram":
        """Return the histogram of the numbers of all."""
        known = list(several)
        values = np.array([value for one in known for value in one.values], np.float64)
        different, places = np.unique(values, return_inverse=True)
        sums = np.zeros(len(different), dtype=np.int64)
        np.add.at(sums, places, np.array([count for one in known for count in one.counts], np.int64))
        return cls.of_bins(different, sums)

    def scaled(self, part: int, whole: int) -> "FloatHistogram":
        """Return the same with part / whole of each count, rounded down; bins of which nothing is left are gone."""
        counts = np.array(self.counts, np.int64) * part // whole
        return self.of_bins(np.array(self.values)[counts > 0], counts[counts > 0])

    @property
    def total(self) -> int:
        """The number of numbers."""
        return sum(self.counts)

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
        return float(np.sqrt(np.average((np.array(self.values) - self.mean) ** 2, weights=self.counts)))


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
    once = [case.model_copy(update={"counts": [1] * len(case.values)}) for case in cases]
    ends = np.cumsum(FloatHistogram.merged(once).counts)
    groups = _runs(np.split(owners[order], ends[:-1]), least)
    if not groups:
        return FloatHistogram.of([])
    sums = np.add.reduceat(whole.counts, groups)
    before = np.cumsum(sums) - sums
    middles = np.searchsorted(np.cumsum(whole.counts), before + (sums - 1) // 2, "right")
    return FloatHistogram.of_bins(np.array(whole.values)[middles], sums)


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


AXES = 3  # a flat image has one place along the first
PERCENTILES = {"percentile_00_5": 0.5, "median": 50.0, "percentile_99_5": 99.5}
T = TypeVar("T")


class CountedExtent(Section):
    """The cases that have one spacing (mm) and one size after cropping (voxels) along an axis."""

    spacing: Annotated[float, Field(ge=1e-4, le=1e6)]  # nnU-Net gives flat images 999 times theirs along the first axis
    size: Annotated[int, Field(ge=1, le=65_536)]
    cases: Number

    @classmethod
    def all_of(cls, axis: Iterable[tuple[float, int]]) -> "list[CountedExtent]":
        """Return the cases of an axis by spacing and size, in order."""
        counted = sorted(Counter(axis).items())
        return [cls.model_construct(spacing=spacing, size=size, cases=n) for (spacing, size), n in counted]


class CountedShare(Section):
    """The cases of which one share is left after cropping."""

    share: Annotated[float, Field(gt=0, le=1)]
    cases: Number

    @classmethod
    def all_of(cls, shares: Iterable[float]) -> "list[CountedShare]":
        """Return the cases by share, in order."""
        return [cls.model_construct(share=share, cases=n) for share, n in sorted(Counter(shares).items())]


def extents_of(axis: Iterable[CountedExtent]) -> list[tuple[float, int]]:
    """Return spacing and size of each case."""
    return [(one.spacing, one.size) for one in axis for _ in range(one.cases)]


def shares_of(counted: Iterable[CountedShare]) -> list[float]:
    """Return the share of each case."""
    return [one.share for one in counted for _ in range(one.cases)]


@dataclass(frozen=True)
class CaseFacts:
    """The facts that nnU-Net finds in one case: spacing and size along each axis, and intensities by channel."""

    spacing: Sequence[float]
    size: Sequence[int]  # after cropping
    share: float  # of its voxels, that are left after cropping
    intensities: Sequence[Sequence[float]]  # of the foreground; those that nnU-Net draws


class Fingerprint(Section):
    """The fingerprint of one hospital's cases, as it travels, or of several hospitals' cases together.

    samples: intensities that were drawn of each case in each channel.
    """

    samples: Annotated[int, Field(ge=1, le=SAMPLES)]
    extents: Annotated[
        list[Annotated[list[CountedExtent], Field(max_length=MOST_CASES)]], Field(min_length=AXES, max_length=AXES)
    ]
    shares: Annotated[list[CountedShare], Field(min_length=1, max_length=MOST_CASES)]
    channels: Annotated[list[FloatHistogram], Field(min_length=1, max_length=MOST_CHANNELS)]  # of the foreground

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        check_order("shares", [one.share for one in self.shares])
        for axis in self.extents:
            check_order("spacings and sizes", [(one.spacing, one.size) for one in axis])
        if any(sum(one.cases for one in axis) != self.cases for axis in self.extents):
            raise ValueError("its numbers of cases differ from axis to axis")
        if any(channel.total > self.cases * self.samples for channel in self.channels):
            raise ValueError(f"it counts more intensities than {self.samples} of each case")
        return self

    @classmethod
    def of(cls, cases: Iterable[CaseFacts], samples: int, least: int = 1) -> "Fingerprint":
        """Return the fingerprint of a hospital's cases as it may leave the hospital.

        least: the cases that each number must cover. Of so many neighbours in the order of spacing and size, the
        middle one counts for all; cases that are left over are not counted. With 1, all is told as it is.
        """
        axes: list[list[tuple[float, int]]] = [[] for _ in range(AXES)]
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
            raise Refused(
                f"a fingerprint of fewer than {least} cases does not leave this hospital (min_patients_per_metric)"
            )
        told = len(shares) // least * least
        return cls.model_construct(
            samples=samples,
            extents=[CountedExtent.all_of(_middles(axis, least) * least) for axis in axes],
            shares=CountedShare.all_of(_middles(shares, least) * least),
            channels=[covering(channel, least).scaled(told, len(shares)) for channel in channels],
        )

    @classmethod
    def merged(cls, hospitals: Iterable["Fingerprint"]) -> "Fingerprint":
        """Return the fingerprint of all cases together; raises Refused where they do not belong together."""
        several = list(hospitals)
        if len({(one.samples, len(one.channels)) for one in several}) != 1:
            raise Refused("the fingerprints differ in their channels, or in how many intensities of a case were drawn")
        return cls.model_construct(
            samples=several[0].samples,
            extents=[
                CountedExtent.all_of(extents_of(chain(*axis)))
                for axis in zip(*(one.extents for one in several), strict=True)
            ],
            shares=CountedShare.all_of(shares_of(chain(*(one.shares for one in several)))),
            channels=list(map(FloatHistogram.merged, zip(*(one.channels for one in several), strict=True))),
        )

    @property
    def least(self) -> int:
        """The cases that each number covers."""
        return gcd(*(one.cases for axis in self.extents for one in axis), *(one.cases for one in self.shares))

    def shifted(self, ranks: int) -> "Fingerprint":
        """Return the fingerprint whose median lies so many ranks higher along each axis, or lower; one case is left."""
        gone = min(2 * abs(ranks), self.cases - 1)
        kept = slice(gone, None) if ranks > 0 else slice(0, self.cases - gone)
        extents = [CountedExtent.all_of(extents_of(axis)[kept]) for axis in self.extents]
        return self.model_copy(update={"extents": extents, "shares": CountedShare.all_of(shares_of(self.shares)[kept])})

    @property
    def cases(self) -> int:
        """The number of cases."""
        return sum(one.cases for one in self.shares)

    def in_nnunet(self) -> dict[str, Any]:
        """Return the content of nnU-Net's dataset_fingerprint.json for these cases.

        The cases in it are put together axis by axis, so that none of them is a patient's.
        """
        along, shares = [extents_of(axis) for axis in self.extents], shares_of(self.shares)
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
        raise Refused("no hospital sent intensities of a channel; each needs more cases with a structure")
    return {
        "mean": channel.mean,
        "std": channel.deviation,
        "min": channel.values[0],
        "max": channel.values[-1],
        **{name: channel.percentile(percent) for name, percent in PERCENTILES.items()},
    }


Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MeasuredSite(Section):
    """The whole message of a hospital: the fingerprint of its data for a question, and by what it reads and trains."""

    question: Hash
    fingerprint: Fingerprint
    reader: Reader  # the class with which nnU-Net reads its files
    memory: Annotated[float, Field(gt=0, le=10_000)] | None = None  # GB of its GPU; None: no bound

    def check(self, question: SegmentationQuestion) -> None:
        """Raise Refused where it is of another question, or of other channels."""
        if self.question != question.hash:
            raise Refused("it answers another question; measure again with the study's")
        told, channels = len(self.fingerprint.channels), len(question.channels)
        if told != channels:
            raise Refused(f"it has {told} channels, and the study {channels}")


def facts_of(data: RawData, samples: int) -> Iterator[CaseFacts]:
    """Yield what nnU-Net finds in each case, with so many intensities per channel as it draws them."""
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    reader = recursive_find_reader_writer_by_name(data.reader)
    for case in data.listing.usable:
        files = list(map(str, case.images))
        try:
            size, spacing, intensities, _, share = DatasetFingerprintExtractor.analyze_case(
                files, str(case.label), reader, samples
            )
        except Exception as error:  # of any of the libraries that read images
            raise DataError(
                "nnU-Net can't read a case; check its images and labels", f"{case.name}: {error}"
            ) from error
        if not all(np.isfinite(channel).all() for channel in intensities):
            raise DataError("an image has intensities that are not finite; correct it", case.name)
        yield CaseFacts(spacing, size, float(share), intensities)


def measured(
    data: RawData, question: SegmentationQuestion, cases: int, least: int, memory: float | None
) -> MeasuredSite:
    """Measure a hospital's data, and return what it tells.

    cases: of all hospitals together; by them nnU-Net draws intensities. least: the patients that each number must
    cover. memory: GB of the hospital's GPU.
    """
    if least > 1:  # cases, which are of so many patients
        least *= data.most_of_a_patient
    samples = samples_of(cases)
    own = Fingerprint.of(facts_of(data, samples), samples, least)
    return MeasuredSite(question=question.hash, fingerprint=own, reader=data.reader, memory=memory)


def memory_of(device: torch.device) -> float | None:
    """Return the GB of the GPU that a hospital trains on; None without one, which bounds no plan."""
    if device.type != "cuda":
        return None
    return max(1.0, round(torch.cuda.get_device_properties(device).total_memory / 2**30))  # 7.8 of what is sold as 8
