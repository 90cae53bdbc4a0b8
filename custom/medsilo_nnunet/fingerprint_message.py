"""A hospital's message before there are plans: the number of its cases, and their fingerprint."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from medsilo.extend import DataError, Message, Refused, SiteSettings
from medsilo_nnunet.fingerprint import (
    AXES,
    DIGITS,
    SAMPLES,
    CaseFacts,
    Fingerprint,
    FloatHistogram,
    rounded,
    samples_of,
)
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_plans_file import Reader
from medsilo_nnunet.question import SegmentationQuestion

MOST_CASES = 100_000  # of one hospital
MOST_BINS = 2**19
MOST_CHANNELS = 32
GREATEST = 3.5e38  # of an intensity: a little more than float32 holds

Number = Annotated[int, Field(ge=1, le=MOST_CASES)]
Intensities = Annotated[int, Field(ge=1, le=SAMPLES * MOST_CASES)]
# nnU-Net gives flat images 999 times their spacing along the first axis.
Spacing = Annotated[float, Field(ge=1e-4, le=1e6)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class HeldCases(Message):
    """The data that a hospital has for a study, in numbers that are no patient's, and by what it reads and trains."""

    reader: Reader  # the class with which nnU-Net reads its files
    memory: Annotated[float, Field(gt=0, le=10_000)] | None = None  # GB of its GPU; None: no bound
    cases: Number


class ToldExtent(Message):
    """The cases that have one spacing (mm) and one size after cropping (voxels) along an axis."""

    spacing: Spacing
    size: Annotated[int, Field(ge=1, le=65_536)]
    cases: Number


class ToldShare(Message):
    """The cases of which one share is left after cropping."""

    share: Annotated[float, Field(gt=0, le=1)]
    cases: Number


class ToldChannel(Message):
    """The foreground's intensities in one channel, by bin; without bins where nothing is told of it."""

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


class ToldFingerprint(Message):
    """The fingerprint of one hospital's data."""

    samples: Annotated[int, Field(ge=1, le=SAMPLES)]
    extents: Annotated[
        list[Annotated[list[ToldExtent], Field(max_length=MOST_CASES)]], Field(min_length=AXES, max_length=AXES)
    ]
    shares: Annotated[list[ToldShare], Field(min_length=1, max_length=MOST_CASES)]
    channels: Annotated[list[ToldChannel], Field(min_length=1, max_length=MOST_CHANNELS)]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        check_order("shares", [one.share for one in self.shares])
        for axis in self.extents:
            check_order("spacings and sizes", [(one.spacing, one.size) for one in axis])
        cases = sum(one.cases for one in self.shares)
        if any(sum(one.cases for one in axis) != cases for axis in self.extents):
            raise ValueError("its numbers of cases differ from axis to axis")
        if any(sum(channel.counts) > cases * self.samples for channel in self.channels):
            raise ValueError(f"it counts more intensities than {self.samples} of each case")
        return self

    @classmethod
    def of(cls, own: Fingerprint) -> Self:
        """Return a hospital's fingerprint as it travels."""
        return cls(
            samples=own.samples,
            extents=[
                [ToldExtent(spacing=spacing, size=size, cases=n) for (spacing, size), n in sorted(axis.items())]
                for axis in own.extents
            ],
            shares=[ToldShare(share=share, cases=n) for share, n in sorted(own.shares.items())],
            channels=[ToldChannel(values=one.values.tolist(), counts=one.counts.tolist()) for one in own.channels],
        )

    def fingerprint(self, cases: int, channels: int) -> Fingerprint:
        """Return what was told; raises Refused unless it is of the cases and channels that were agreed on."""
        if len(self.channels) != channels:
            raise Refused(f"it tells of {len(self.channels)} channels, and the study has {channels}")
        own = Fingerprint(
            self.samples,
            tuple(Counter({(one.spacing, one.size): one.cases for one in axis}) for axis in self.extents),
            Counter({one.share: one.cases for one in self.shares}),
            tuple(FloatHistogram.of_bins(one.values, one.counts) for one in self.channels),
        )
        if own.cases != cases:
            raise Refused(f"its fingerprint is of {own.cases} cases, and it said that it has {cases}")
        return own


class MeasuredSite(Message):
    """The whole message of a hospital: what it holds for which question, and the fingerprint of it."""

    question: Hash
    told: ToldFingerprint
    holding: HeldCases

    def fingerprint(self, question: SegmentationQuestion) -> Fingerprint:
        """Return the fingerprint; raises Refused where it is of another question."""
        if self.question != question.hash:
            raise Refused("it answers another question; measure again with the study's")
        return self.told.fingerprint(self.holding.cases, len(question.channels))


def check_order(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError unless values are in ascending order, each once."""
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"its {what} are not in ascending order, each told once")


def facts_of(data: RawData, samples: int) -> Iterator[CaseFacts]:
    """Yield what nnU-Net finds in each case, with so many intensities per channel as it draws them."""
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    reader = recursive_find_reader_writer_by_name(data.reader)
    for case in data.cases:
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
    told, samples = len(data.cases) // least * least, samples_of(cases)
    if not told:
        raise Refused(f"a fingerprint of fewer than {least} cases does not leave this hospital (smallest_metric)")
    own = Fingerprint.of(facts_of(data, samples), samples, least)
    holding = HeldCases(cases=told, reader=data.reader, memory=memory)
    return MeasuredSite(question=question.hash, holding=holding, told=ToldFingerprint.of(own))


def memory_of(settings: SiteSettings) -> float | None:
    """Return the GB of the GPU that a hospital trains on; None without one, which bounds no plan."""
    device = settings.compute().device
    if device.type != "cuda":
        return None
    return max(1.0, round(torch.cuda.get_device_properties(device).total_memory / 2**30))  # 7.8 of what is sold as 8
