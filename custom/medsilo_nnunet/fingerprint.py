"""Count properties of images in each hospital; the sum of all hospitals' counts equals the counts for the pooled data.

nnU-Net's planner handles each axis separately. The planner computes percentiles of the spacings, and percentiles of the
image sizes after cropping and resampling. The planner never combines two axes. Therefore, the planner needs only
counts: for each axis, how many cases have each pair of spacing and size. The counts do not disclose which sizes on
different axes belong to the same case.
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
SAMPLES = 10**8  # number of intensities that nnU-Net samples in each channel, over all cases together
MOST_CASES = 100_000
MOST_BINS = 2**19
MOST_CHANNELS = 32
GREATEST = 3.5e38  # maximum absolute value of an intensity, slightly more than the largest float32 value
Number = Annotated[int, Field(ge=1, le=MOST_CASES)]
Intensities = Annotated[int, Field(ge=1, le=SAMPLES * MOST_CASES)]
Values = NDArray[np.float64]
Counts = NDArray[np.int64]


def rounded(numbers: ArrayLike) -> Values:
    """Round each number to 13 binary digits. The rounded numbers are the bins of histograms, so that all sites use the
    same bins.

    Integers up to 8192, such as CT values, remain exact. All numbers except integers up to 8192 change by at most 2^-13
    of their absolute value. Because rounding keeps the order of the numbers, percentiles also change by at most 2^-13
    of their absolute values.
    """
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent - DIGITS)


def check_order(subject: str, values: Sequence[Any]) -> None:
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"its {subject} are not in ascending order without repetitions")


class FloatHistogram(Section):
    """A histogram of numbers: the value of each bin in ascending order, and the number of values in each bin. The
    histogram is empty if the hospital may not disclose the numbers.
    """

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
        return cls.of_bins(*np.unique(rounded(numbers), return_counts=True))

    @classmethod
    def of_bins(cls, values: Values, counts: Counts) -> "FloatHistogram":
        """Create a histogram from bins that were computed in this process and therefore need no validation."""
        return cls.model_construct(values=values.tolist(), counts=counts.tolist())

    @classmethod
    def merged(cls, several: Iterable["FloatHistogram"]) -> "FloatHistogram":
        known = list(several)
        values = np.array([value for one in known for value in one.values], np.float64)
        different, places = np.unique(values, return_inverse=True)
        sums = np.zeros(len(different), dtype=np.int64)
        np.add.at(sums, places, np.array([count for one in known for count in one.counts], np.int64))
        return cls.of_bins(different, sums)

    def scaled(self, part: int, whole: int) -> "FloatHistogram":
        """Multiply each count by part / whole, round down, and remove the bins with the count 0."""
        counts = np.array(self.counts, np.int64) * part // whole
        return self.of_bins(np.array(self.values)[counts > 0], counts[counts > 0])

    @property
    def total(self) -> int:
        return sum(self.counts)

    def percentile(self, percent: float) -> float:
        """Return a percentile of the numbers; it is interpolated linearly between two numbers, as in
        numpy.percentile.
        """
        place = (self.total - 1) * percent / 100
        below = int(place)
        ends = np.cumsum(self.counts)
        low, high = (
            self.values[np.searchsorted(ends, rank, "right")] for rank in (below, min(below + 1, ends[-1] - 1))
        )
        return float(low + (high - low) * (place - below))

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.counts))

    @property
    def deviation(self) -> float:
        return float(np.sqrt(np.average((np.array(self.values) - self.mean) ** 2, weights=self.counts)))


def covering(cases: Sequence[FloatHistogram], least: int) -> FloatHistogram:
    """Return one histogram of the intensities of all cases, in which every bin has intensities of at least `least`
    cases.

    Neighbouring bins are merged into groups, and each group is as small as possible. The new bin of a group has the
    median of the group's intensities as its value. With `least=1`, the bins are not merged. If fewer than `least` cases
    have intensities, the histogram is empty.
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
    """Divide a histogram's bins into groups, so that each group has intensities of at least `least` cases. Return the
    first bin of each group. Bins after the last complete group belong to the last group.
    """
    begins, begin, seen = [], 0, set[int]()
    for place, owner in enumerate(owners):
        if seen or len(owner) < least:
            seen.update(owner.tolist())
        if max(len(seen), len(owner)) >= least:
            begins.append(begin)
            begin, seen = place + 1, set()
    return begins


AXES = 3  # number of axes; for a 2D image, the size along the first axis is 1
PERCENTILES = {"percentile_00_5": 0.5, "median": 50.0, "percentile_99_5": 99.5}
T = TypeVar("T")


class CountedExtent(Section):
    """The number of cases that have, along one axis, the same spacing in mm and the same size in voxels after
    cropping.
    """

    # for 2D images, nnU-Net sets the spacing along the first axis to 999 times the spacing along the other axes
    spacing: Annotated[float, Field(ge=1e-4, le=1e6)]
    size: Annotated[int, Field(ge=1, le=65_536)]
    cases: Number

    @classmethod
    def all_of(cls, axis: Iterable[tuple[float, int]]) -> "list[CountedExtent]":
        counted = sorted(Counter(axis).items())
        return [cls.model_construct(spacing=spacing, size=size, cases=n) for (spacing, size), n in counted]


class CountedShare(Section):
    """The number of cases in which cropping leaves the same fraction of the voxels."""

    share: Annotated[float, Field(gt=0, le=1)]
    cases: Number

    @classmethod
    def all_of(cls, shares: Iterable[float]) -> "list[CountedShare]":
        return [cls.model_construct(share=share, cases=n) for share, n in sorted(Counter(shares).items())]


def extents_of(axis: Iterable[CountedExtent]) -> list[tuple[float, int]]:
    return [(one.spacing, one.size) for one in axis for _ in range(one.cases)]


def shares_of(counted: Iterable[CountedShare]) -> list[float]:
    return [one.share for one in counted for _ in range(one.cases)]


@dataclass(frozen=True)
class CaseFacts:
    """The properties of a case that nnU-Net needs to make plans: spacing and size along each axis, and intensities in
    each channel.
    """

    spacing: Sequence[float]
    size: Sequence[int]
    share: float  # fraction of the voxels that remain after cropping
    intensities: Sequence[Sequence[float]]


class Fingerprint(Section):
    """A fingerprint that a hospital sends about its cases, or the joint fingerprint of several hospitals.

    The field `samples` is the number of intensities that were sampled in each channel of each case.
    """

    samples: Annotated[int, Field(ge=1, le=SAMPLES)]
    extents: Annotated[
        list[Annotated[list[CountedExtent], Field(max_length=MOST_CASES)]], Field(min_length=AXES, max_length=AXES)
    ]
    shares: Annotated[list[CountedShare], Field(min_length=1, max_length=MOST_CASES)]
    channels: Annotated[list[FloatHistogram], Field(min_length=1, max_length=MOST_CHANNELS)]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        check_order("shares", [share.share for share in self.shares])
        for axis in self.extents:
            check_order("spacings and sizes", [(one.spacing, one.size) for one in axis])
        if any(sum(one.cases for one in axis) != self.cases for axis in self.extents):
            raise ValueError("its numbers of cases differ from axis to axis")
        if any(channel.total > self.cases * self.samples for channel in self.channels):
            raise ValueError(f"it counts more than {self.samples} intensities of each case")
        return self

    @classmethod
    def of(cls, cases: Iterable[CaseFacts], samples: int, least: int = 1) -> "Fingerprint":
        """Return the fingerprint of a hospital's cases in a form that the hospital may send.

        Every number in the fingerprint stands for at least `least` cases. Along each axis, cases are sorted by spacing
        and size and divided into groups of `least` neighbours; the middle case represents its group. Cases beyond the
        last complete group are not counted. With `least=1`, all numbers are exact.
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
        """Return the joint fingerprint of several hospitals; raise Refused if the hospitals' channels or numbers of
        samples differ.
        """
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
        return gcd(*(one.cases for axis in self.extents for one in axis), *(share.cases for share in self.shares))

    def shifted(self, ranks: int) -> "Fingerprint":
        """Return a fingerprint with fewer cases, whose median along each axis is `ranks` ranks higher, or lower if
        `ranks` is negative. The new fingerprint has at least one case.
        """
        gone = min(2 * abs(ranks), self.cases - 1)
        kept = slice(gone, None) if ranks > 0 else slice(0, self.cases - gone)
        extents = [CountedExtent.all_of(extents_of(axis)[kept]) for axis in self.extents]
        return self.model_copy(update={"extents": extents, "shares": CountedShare.all_of(shares_of(self.shares)[kept])})

    @property
    def cases(self) -> int:
        return sum(share.cases for share in self.shares)

    def in_nnunet(self) -> dict[str, Any]:
        """Return the content of nnU-Net's dataset_fingerprint.json for the cases of this fingerprint.

        Each case in this file combines the values of different cases along the axes, so that no case in the file
        matches a patient.
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
    """Return the number of intensities that nnU-Net samples in each channel of a case, given the number of cases in all
    hospitals.
    """
    return max(SAMPLES // cases, 1)


def _middles(values: Sequence[T], least: int) -> list[T]:
    """Sort the values, divide them into groups of at least `least` neighbours, and return the middle value of each
    group.
    """
    ordered, groups = sorted(values), len(values) // least  # type: ignore[type-var]
    return [ordered[(2 * group + 1) * len(ordered) // (2 * groups)] for group in range(groups)]


def _properties(channel: FloatHistogram) -> dict[str, float]:
    if not channel.total:
        raise Refused("no hospital sent intensities of a channel; each hospital needs more cases with a structure")
    return {
        "mean": channel.mean,
        "std": channel.deviation,
        "min": channel.values[0],
        "max": channel.values[-1],
        **{name: channel.percentile(percent) for name, percent in PERCENTILES.items()},
    }


Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MeasuredSite(Section):
    """The message that a hospital sends before plans are made. The message contains the fingerprint of the hospital's
    data, the hash of the study's question, the file reader and the GPU memory.
    """

    question: Hash
    fingerprint: Fingerprint
    reader: Reader
    # memory of the hospital's GPU in GB, or None if the hospital trains on a CPU
    memory: Annotated[float, Field(gt=0, le=10_000)] | None = None

    def check(self, question: SegmentationQuestion) -> None:
        """Raise Refused if the message is about another question than this question, or if it has other channels."""
        if self.question != question.hash:
            raise Refused("it belongs to another question; measure again with the study's question")
        told, channels = len(self.fingerprint.channels), len(question.channels)
        if told != channels:
            raise Refused(f"it has {told} channels, and the study {channels}")


def facts_of(data: RawData, samples: int) -> Iterator[CaseFacts]:
    """For each case, yield the properties that nnU-Net needs to make plans, with `samples` intensities in each
    channel.
    """
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    reader = recursive_find_reader_writer_by_name(data.reader)
    for case in data.listing.usable:
        files = list(map(str, case.images))
        try:
            size, spacing, intensities, _, share = DatasetFingerprintExtractor.analyze_case(
                files, str(case.label), reader, samples
            )
        # libraries that read images raise many kinds of errors, so all errors are caught
        except Exception as error:
            raise DataError(
                "nnU-Net can't read a case; check its images and labels", f"{case.name}: {error}"
            ) from error
        if not all(np.isfinite(channel).all() for channel in intensities):
            raise DataError("an image has intensities that are not finite; correct it", case.name)
        yield CaseFacts(spacing, size, float(share), intensities)


def measured(
    data: RawData, question: SegmentationQuestion, cases: int, least: int, memory: float | None
) -> MeasuredSite:
    """Compute the message in which a hospital describes its data.

    Args:
        cases: The number of cases in all hospitals, which determines the number of sampled intensities.
        least: The minimum number of patients that each number must cover.
        memory: The memory of the hospital's GPU in GB.
    """
    # a minimum number of patients becomes a minimum number of cases: the number of patients times the largest number of
    # cases of a patient
    if least > 1:
        least *= data.most_of_a_patient
    samples = samples_of(cases)
    own = Fingerprint.of(facts_of(data, samples), samples, least)
    return MeasuredSite(question=question.hash, fingerprint=own, reader=data.reader, memory=memory)


def memory_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    # the memory is rounded, because a GPU that is sold with 8 GB has only 7.8 GB of usable memory
    return max(1.0, round(torch.cuda.get_device_properties(device).total_memory / 2**30))
