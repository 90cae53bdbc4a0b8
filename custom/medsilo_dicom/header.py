"""Read the headers of DICOM files, as far as a volume needs them. No pixel is read here."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from medsilo.extend import DEFLATED, MedsiloError, tags_in

CT, MR, PET = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.4", "1.2.840.10008.5.1.4.1.1.128"
SLICES = (CT, MR, PET)  # classes of objects that are one slice of a volume
SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
STRUCTURES = "1.2.840.10008.5.1.4.1.1.481.3"  # contours (RTSTRUCT)
PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")  # transfer syntaxes without compression
PACKED = (  # and with one that can be undone here: RLE, JPEG of 8 and 12 bits, lossless, LS, 2000
    "1.2.840.10008.1.2.5",
    *(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)),
)
LARGEST = 1 << 30  # bytes of a file
SIDE = 8192  # pixels along an axis of a slice

# Elements that must be the same in all slices of a series: where one differs, two volumes lie in it.
ALIKE = (
    *("PatientID", "StudyInstanceUID", "FrameOfReferenceUID", "Modality", "SOPClassUID", "ImageType", "EchoTime"),
    *("EchoNumbers", "InversionTime", "TemporalPositionIdentifier", "DiffusionBValue", "ConvolutionKernel"),
    *("ContrastBolusAgent", "NominalPercentageOfCardiacPhase", "Units", "KVP"),
)
# Elements that tell who a patient is, or lead there (the direct identifiers of PS3.15, table E.1-1).
IDENTIFIERS = (
    *("PatientName", "PatientID", "IssuerOfPatientID", "OtherPatientIDs", "OtherPatientNames", "PatientBirthName"),
    *("PatientBirthDate", "PatientBirthTime", "PatientAddress", "PatientTelephoneNumbers", "PatientMotherBirthName"),
    *("MedicalRecordLocator", "MilitaryRank", "EthnicGroup", "PatientComments", "AdditionalPatientHistory"),
    *("AccessionNumber", "StudyID", "StudyDate", "SeriesDate", "AcquisitionDate", "ContentDate", "StudyTime"),
    *("InstitutionName", "InstitutionAddress", "InstitutionalDepartmentName", "StationName", "DeviceSerialNumber"),
    *("ReferringPhysicianName", "PerformingPhysicianName", "OperatorsName", "NameOfPhysiciansReadingStudy"),
    *("RequestingPhysician", "PhysiciansOfRecord", "ImageComments", "StudyDescription", "SeriesDescription"),
)
PRIVATE = "private elements"  # of a manufacturer, which may say anything
OTHERS = (
    *("SOPInstanceUID", "SeriesInstanceUID", "Rows", "Columns", "BitsAllocated", "SamplesPerPixel", "NumberOfFrames"),
    *("PhotometricInterpretation", "ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"),
    *("GantryDetectorTilt", "RescaleSlope", "RescaleIntercept", "BurnedInAnnotation"),
    *("ReferencedSeriesSequence", "ReferencedFrameOfReferenceSequence"),
)
NOT_SLICES = "series are not slices of CT, MR or PET, one for each file; export multi-frame (Enhanced) objects as such"
SECONDARY = "series are derived, secondary or localiser images; take the original ones"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Header:
    """One file. `wrong`: why it can't be a slice of a volume, in one line; empty where it can."""

    path: Path
    kind: str  # the UID of its class
    instance: str
    series: str
    patient: str
    wrong: str
    alike: tuple[str, ...] = ()  # values of ALIKE
    shape: tuple[int, int] = (0, 0)  # rows, columns
    orientation: tuple[float, ...] = ()
    position: tuple[float, ...] = ()
    spacing: tuple[float, ...] = ()  # between rows, between columns
    tilt: float = 0.0
    identifiers: frozenset[str] = frozenset()
    burned_in: bool = False
    refers: frozenset[str] = frozenset()  # series that a segmentation or contours belong to


@cache
def library() -> Any:
    """Return pydicom, which is an extra. It says nothing of what it reads: its words would hold values of headers."""
    try:
        import pydicom
    except ImportError as error:
        raise MedsiloError("DICOM needs more packages; install medsilo[dicom]") from error
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").disabled = True
    warnings.filterwarnings("ignore", module="pydicom")
    return pydicom


def read_header(path: Path) -> Header | None:
    """Read a file's header; return None where nothing tells which series it is of."""
    pydicom = library()
    damage, tags = "", set[tuple[int, int]]()
    if path.stat().st_size > LARGEST:
        return None
    data = path.read_bytes()
    try:
        tags = tags_in(data)
    except ValueError:
        if DEFLATED in data:
            return None  # no library may open it
        damage = "series have a damaged file; copy or export them again"
    wanted = [*ALIKE, *IDENTIFIERS, *OTHERS]
    try:
        # From memory, so that a length which is a lie takes none.
        elements = pydicom.dcmread(BytesIO(data), stop_before_pixels=True, specific_tags=wanted)
        header = _named(path, elements, damage, any(group % 2 for group, _ in tags))
    except Exception:  # pydicom raises anything over damaged files, also when an element is looked at
        return None
    if not header.series:
        return None
    if header.kind in (*SEGMENTATIONS, STRUCTURES):
        return replace(header, refers=_asked(lambda: _referred(elements), frozenset()))
    wrong = damage or _asked(lambda: _unlike_a_slice(elements, len(data)), "series have headers that no slice has")
    return replace(header, wrong=wrong) if wrong else _placed(header, elements)


def _named(path: Path, elements: Any, damage: str, private: bool) -> Header:
    """Return a header with what says whose it is."""
    held = {name for name in IDENTIFIERS if str(elements.get(name) or "").strip()}
    return Header(
        path,
        str(elements.get("SOPClassUID") or ""),
        str(elements.get("SOPInstanceUID") or ""),
        str(elements.get("SeriesInstanceUID") or ""),
        str(elements.get("PatientID") or "").strip(),
        damage,
        identifiers=frozenset(held | ({PRIVATE} if private else set())),
        burned_in=str(elements.get("BurnedInAnnotation") or "") == "YES",
    )


def _placed(header: Header, elements: Any) -> Header:
    """Return a slice's header with what says where it lies."""
    return replace(
        header,
        alike=tuple(str(elements.get(name, "")) for name in ALIKE),
        shape=(int(elements.Rows), int(elements.Columns)),
        orientation=_floats(elements.ImageOrientationPatient),
        position=_floats(elements.ImagePositionPatient),
        spacing=_floats(elements.PixelSpacing),
        tilt=_asked(lambda: float(elements.get("GantryDetectorTilt") or 0), 0.0),
    )


def _asked(ask: Callable[[], Value], otherwise: Value) -> Value:
    """Return an answer, or this where an element has a value that its kind doesn't allow."""
    try:
        return ask()
    except Exception:  # pydicom raises anything over values of the wrong kind
        return otherwise


def _referred(elements: Any) -> frozenset[str]:
    """Return the series that a segmentation or a set of contours says it belongs to."""
    places = list(elements.get("ReferencedSeriesSequence") or ())
    for frame in elements.get("ReferencedFrameOfReferenceSequence") or ():
        for study in frame.get("RTReferencedStudySequence") or ():
            places += study.get("RTReferencedSeriesSequence") or ()
    return frozenset(str(place.SeriesInstanceUID) for place in places)


def _unlike_a_slice(elements: Any, size: int) -> str:
    """Return why a file is not a slice of a volume."""
    if elements.SOPClassUID not in SLICES or int(elements.get("NumberOfFrames") or 1) != 1:
        return NOT_SLICES
    kind = [str(word).upper() for word in elements.get("ImageType") or ()]
    if {"DERIVED", "SECONDARY", "LOCALIZER"} & set(kind):
        return SECONDARY
    return _unreadable(elements, size) or _without_place(elements) or _without_units(elements)


def _unreadable(elements: Any, size: int) -> str:
    syntax = str(elements.file_meta.TransferSyntaxUID)
    if syntax not in (*PLAIN, *PACKED):
        return "series are compressed in a way that can't be read here; export them without compression"
    rows, columns, bits = int(elements.Rows), int(elements.Columns), int(elements.BitsAllocated)
    if int(elements.SamplesPerPixel) != 1 or elements.PhotometricInterpretation != "MONOCHROME2":
        return "series are in colour or inverted (MONOCHROME1); export grey images (MONOCHROME2)"
    if bits not in (8, 16, 32) or not (1 < rows <= SIDE and 1 < columns <= SIDE):
        return f"series have slices of no usual size; 2 to {SIDE} rows and columns of 8, 16 or 32 bits are read"
    if syntax in PLAIN and rows * columns * bits // 8 > size:
        return "series have a header that claims more pixels than the file holds; export them again"
    return ""


def _without_place(elements: Any) -> str:
    values = [
        *_floats(elements.get("ImageOrientationPatient") or ()),
        *_floats(elements.get("ImagePositionPatient") or ()),
        *_floats(elements.get("PixelSpacing") or ()),
    ]
    spaced = len(values) == 11 and min(values[9:]) > 0 and all(map(isfinite, values))
    if not spaced or not elements.get("FrameOfReferenceUID"):
        return "series don't say where their slices lie (position, orientation, pixel spacing); export them again"
    return ""


def _without_units(elements: Any) -> str:
    slope = elements.get("RescaleSlope")
    lacks = slope is None or elements.get("RescaleIntercept") is None
    if (lacks and elements.SOPClassUID != MR) or (slope is not None and float(slope) == 0):
        return "series lack rescale slope and intercept, so that their values have no unit; export them again"
    return ""


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
