"""Create DICOM results with highdicom: a segmentation of a series, and a structured report.

As the DICOM standard requires, the results carry the identifiers of the patient and the study. Results must therefore
be protected in the same way as the images of the study. The DICOM objects state that they are unverified research
results and not a diagnosis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from medsilo.core.errors import DataError
from medsilo_dicom.header import highdicom, library
from medsilo_dicom.series import ImageSeries

SCHEME = "99MEDSILO"  # DICOM coding scheme for terms that are in no standard vocabulary
ANATOMY = ("cid4030", "cid7166")  # DICOM context groups of anatomical structures and tissues
SPELLED = {"tumour": "Tumor", "oedema": "Edema", "haemorrhage": "Hemorrhage"}
ABNORMAL = ("Tumor", "Neoplasm", "Lesion", "Metastasis", "Cyst", "Mass", "Nodule", "Hemorrhage", "Edema", "Necrosis")


StructureCode = tuple[Any, ...]


def code_of(name: str) -> StructureCode:
    """Return the SNOMED code for the English name of a structure, or the general SNOMED code for tissue if the name is
    unknown.
    """
    from pydicom.sr.codedict import codes

    word = SPELLED.get(name.lower()) or "".join(part.capitalize() for part in name.replace("-", " ").split())
    lists = [codes.SCT] if word in ABNORMAL else [getattr(codes, name) for name in ANATOMY] if word.isalnum() else []
    return next((known for known in (getattr(group, word, None) for group in lists) if known), codes.SCT.Tissue)


MAKER = "medsilo"
RESEARCH = "Research result by medsilo, not a diagnosis"
MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate"),
    *("StudyTime", "ReferringPhysicianName"),
)
SEGMENTATION_NUMBER, REPORT_NUMBER = 9001, 9002


@dataclass(frozen=True)
class MadeBy:
    """The model that created a DICOM result: its name, the version of medsilo and the plan's hash."""

    name: str
    version: str
    plan: str


def sources_of(series: ImageSeries) -> list[Any]:
    """Read the headers of the files of a series, in the order of its slices. If a series lacks an element of the study
    that DICOM results need, the element is set to an empty value.
    """
    pydicom = library()
    sources = [pydicom.dcmread(BytesIO(path.read_bytes()), stop_before_pixels=True) for path in series.files]
    if 1 < len(sources) < len(series.slices):
        raise DataError(
            "series consist of several Enhanced objects, to which no segmentation can refer; export each series as "
            "one object"
        )
    for source in sources:
        # the UID of the coordinate system is the same in all results for the same series
        if not source.get("FrameOfReferenceUID"):
            source.FrameOfReferenceUID = pydicom.uid.generate_uid(entropy_srcs=[series.uid])
        for name in MAY_BE_EMPTY:
            if name not in source:
                setattr(source, name, None)
    return sources


def segmentation(
    sources: Sequence[Any],
    labels: np.ndarray,
    structures: Mapping[str, StructureCode],
    maker: MadeBy,
) -> Any:
    """Create a SEG object from an array of labels [slices, rows, columns] on the grid of a series. Label 1 stands for
    the first structure.

    Args:
        structures: The code of each structure by its name.
    """
    hd = highdicom()
    identified = hd.AlgorithmIdentificationSequence(
        maker.name, _code("123110", "DCM", "Artificial Intelligence"), maker.version, parameters={"plan": maker.plan}
    )
    described = [
        hd.seg.SegmentDescription(
            number,
            name,
            _category(code),
            _code(*code[:3]),
            hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            identified,
            tracking_uid=hd.UID(),
            tracking_id=name,
        )
        for number, (name, code) in enumerate(structures.items(), 1)
    ]
    planes = np.stack([labels == number for number in range(1, len(structures) + 1)], axis=-1)
    return hd.seg.Segmentation(
        sources,
        planes.astype(np.uint8),
        hd.seg.SegmentationTypeValues.BINARY,
        described,
        hd.UID(),
        SEGMENTATION_NUMBER,
        hd.UID(),
        1,
        MAKER,
        maker.name,
        maker.version,
        maker.plan[:16],
        content_label="RESEARCH",
        content_description=RESEARCH,
        series_description=RESEARCH,
        omit_empty_frames=bool(planes.any()),
    )


def report(
    sources: Sequence[Any],
    values: Any,
    structures: Mapping[str, StructureCode],
    volumes: Mapping[str, float],
    maker: MadeBy,
) -> Any:
    hd = highdicom()
    groups = []
    for number, (name, code) in enumerate(structures.items(), 1):
        unit = _code("ml", "UCUM", "milliliter")
        measured = [hd.sr.Measurement(_code("118565006", "SCT", "Volume"), round(volumes[name], 6), unit)]
        words = {
            "tracking_identifier": hd.sr.TrackingIdentifier(uid=hd.UID(), identifier=name),
            "finding_type": _code(*code[:3]),
            "algorithm_id": hd.sr.AlgorithmIdentification(maker.name, maker.version, [f"plan {maker.plan}"]),
            "measurements": measured,
            "qualitative_evaluations": [_remark()],
        }
        if volumes[name] > 0:
            drawn_on = hd.sr.SourceSeriesForSegmentation(sources[0].SeriesInstanceUID)
            segment = hd.sr.ReferencedSegment(values.SOPClassUID, values.SOPInstanceUID, number, source_series=drawn_on)
            groups.append(hd.sr.VolumetricROIMeasurementsAndQualitativeEvaluations(referenced_segment=segment, **words))
        # a structured report cannot refer to a structure that was not found, because such a structure has no segment
        else:
            groups.append(hd.sr.MeasurementsAndQualitativeEvaluations(**words))
    return _reported([*sources, values], groups, maker)


def class_report(sources: Sequence[Any], name: str, probability: float, maker: MadeBy) -> Any:
    hd = highdicom()
    group = hd.sr.MeasurementsAndQualitativeEvaluations(
        hd.sr.TrackingIdentifier(uid=hd.UID(), identifier="class"),
        algorithm_id=hd.sr.AlgorithmIdentification(maker.name, maker.version, [f"plan {maker.plan}"]),
        measurements=[
            hd.sr.Measurement(
                _code("probability", SCHEME, "Probability of the class"), probability, _code("1", "UCUM", "no units")
            )
        ],
        qualitative_evaluations=[_evaluated("class", "Class", name[:16], name), _remark()],
    )
    return _reported(sources, [group], maker)


def _reported(evidence: Sequence[Any], groups: Sequence[Any], maker: MadeBy) -> Any:
    hd = highdicom()
    device = hd.sr.ObserverContext(
        observer_type=_code("121007", "DCM", "Device"),
        observer_identifying_attributes=hd.sr.DeviceObserverIdentifyingAttributes(
            uid=hd.UID(), name=MAKER, manufacturer_name=MAKER, model_name=maker.name, serial_number=maker.plan
        ),
    )
    content = hd.sr.MeasurementReport(
        observation_context=hd.sr.ObservationContext(observer_device_context=device),
        procedure_reported=_code("363679005", "SCT", "Imaging procedure"),
        imaging_measurements=groups,
        title=_code("126000", "DCM", "Imaging Measurement Report"),
    )
    made = hd.sr.ComprehensiveSR(
        evidence,
        content[0],
        hd.UID(),
        REPORT_NUMBER,
        hd.UID(),
        1,
        manufacturer=MAKER,
        is_complete=False,
        is_final=False,
        is_verified=False,
        series_description=RESEARCH,
    )
    made.CompletionFlagDescription = RESEARCH
    return made


def _remark() -> Any:
    return _evaluated("use", "Intended use", "research", RESEARCH)


def _evaluated(word: str, about: str, value: str, meaning: str) -> Any:
    return highdicom().sr.QualitativeEvaluation(_code(word, SCHEME, about), _code(value, SCHEME, meaning))


def _category(code: StructureCode) -> Any:
    if code[2] in ABNORMAL:
        return _code("49755003", "SCT", "Morphologically Abnormal Structure")
    return _code("91723000", "SCT", "Anatomical Structure")


def _code(value: str, scheme: str, meaning: str) -> Any:
    return highdicom().sr.CodedConcept(value, scheme, meaning)
