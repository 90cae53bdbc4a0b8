"""A hospital's side of the plans: what nnU-Net's extractor finds in its cases, and what of it leaves."""

from collections.abc import Iterator

import numpy as np
import torch

from medsilo.extend import DataError, Refused, SiteSettings, Stop
from medsilo_nnunet.fingerprint import CaseFacts, Fingerprint, samples_of
from medsilo_nnunet.fingerprint_message import HeldCases, MeasuredSite, ToldFingerprint
from medsilo_nnunet.nnunet_files import RawData
from medsilo_nnunet.question import SegmentationQuestion


def facts_of(data: RawData, samples: int, stop: Stop = lambda: None) -> Iterator[CaseFacts]:
    """Yield what nnU-Net finds in each case, with so many intensities per channel as it draws them.

    stop: is asked before every case.
    """
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    reader = recursive_find_reader_writer_by_name(data.reader)
    for case in data.cases:
        stop()
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


def covering(data: RawData, least: int) -> int:
    """Return how many cases a number must cover, so that they are of so many patients."""
    return least * data.most_of_a_patient if least > 1 else least


def held(data: RawData, least: int, memory: float | None) -> HeldCases:
    """Return what a hospital tells before it measures. Arguments as of `measured`."""
    least = covering(data, least)
    told = len(data.cases) // least * least
    if not told:
        raise Refused(f"a fingerprint of fewer than {least} cases does not leave this hospital (smallest_metric)")
    return HeldCases(cases=told, reader=data.reader, memory=memory)


def measured(
    data: RawData,
    question: SegmentationQuestion,
    cases: int,
    least: int,
    memory: float | None,
    stop: Stop = lambda: None,
) -> MeasuredSite:
    """Measure a hospital's data, and return what it tells.

    cases: of all hospitals together; by them nnU-Net draws intensities. least: the patients that each number must
    cover. memory: GB of the hospital's GPU.
    """
    holding, samples = held(data, least, memory), samples_of(cases)
    own = Fingerprint.of(facts_of(data, samples, stop), samples, covering(data, least))
    return MeasuredSite(question=question.hash, holding=holding, told=ToldFingerprint.of(own))


def memory_of(settings: SiteSettings) -> float | None:
    """Return the GB of the GPU that a hospital trains on; None without one, which bounds no plan."""
    device = settings.compute().device
    if device.type != "cuda":
        return None
    return max(1.0, round(torch.cuda.get_device_properties(device).total_memory / 2**30))  # 7.8 of what is sold as 8
