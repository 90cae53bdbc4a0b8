"""A hospital's message before there are plans: the fingerprint of its cases."""

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from medsilo.extend import DataError, Message, Refused, SiteSettings
from medsilo_nnunet.fingerprint import CaseFacts, Fingerprint, samples_of
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.nnunet_plans_file import Reader
from medsilo_nnunet.question import SegmentationQuestion

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class HeldCases(Message):
    """By what a hospital reads its data for a study, and trains."""

    reader: Reader  # the class with which nnU-Net reads its files
    memory: Annotated[float, Field(gt=0, le=10_000)] | None = None  # GB of its GPU; None: no bound


class MeasuredSite(Message):
    """The whole message of a hospital: what it holds for which question, and the fingerprint of it."""

    question: Hash
    told: Fingerprint
    holding: HeldCases

    def fingerprint(self, question: SegmentationQuestion) -> Fingerprint:
        """Return the fingerprint; raises Refused where it is of another question, or of other channels."""
        if self.question != question.hash:
            raise Refused("it answers another question; measure again with the study's")
        told, channels = len(self.told.channels), len(question.channels)
        if told != channels:
            raise Refused(f"it tells of {told} channels, and the study has {channels}")
        return self.told


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
    samples = samples_of(cases)
    own = Fingerprint.of(facts_of(data, samples), samples, least)
    return MeasuredSite(question=question.hash, holding=HeldCases(reader=data.reader, memory=memory), told=own)


def memory_of(settings: SiteSettings) -> float | None:
    """Return the GB of the GPU that a hospital trains on; None without one, which bounds no plan."""
    device = settings.compute().device
    if device.type != "cuda":
        return None
    return max(1.0, round(torch.cuda.get_device_properties(device).total_memory / 2**30))  # 7.8 of what is sold as 8
