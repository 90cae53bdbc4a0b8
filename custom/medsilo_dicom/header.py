"""Read the header elements that are needed to build volumes from DICOM files, without reading pixels."""

import logging
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from medsilo.extend import MedsiloError, Scan

CT, MR, PET = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.4", "1.2.840.10008.5.1.4.1.1.128"
ENHANCED = (  # UIDs of the DICOM classes whose objects hold many slices ("Enhanced"); the UIDs of MR classes come first
    *("1.2.840.10008.5.1.4.1.1.4.1", "1.2.840.10008.5.1.4.1.1.4.4"),
    *("1.2.840.10008.5.1.4.1.1.2.1", "1.2.840.10008.5.1.4.1.1.2.2"),
    *("1.2.840.10008.5.1.4.1.1.130", "1.2.840.10008.5.1.4.1.1.128.1"),
)
SLICES = (CT, MR, PET, *ENHANCED)  # UIDs of the DICOM classes whose objects are slices of a volume
UNITLESS = (MR, *ENHANCED[:2])
SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
STRUCTURES = "1.2.840.10008.5.1.4.1.1.481.3"
PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")  # transfer syntaxes without compression
# supported transfer syntaxes with compression: RLE, JPEG (8 and 12 bits), lossless JPEG, JPEG-LS and JPEG 2000
PACKED = (
    "1.2.840.10008.1.2.5",
    *(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)),
)
# transfer syntax "Deflated"; a compressed file with this syntax could expand to more data than the memory can hold
DEFLATED = "1.2.840.10008.1.2.1.99"
LARGEST = 1 << 30
FRAMES = 1 << 16
SIDE = 8192

# DICOM elements that must be equal in all slices of a series. If one of the elements in ALIKE differs between slices,
# the series contains several volumes.
ALIKE = (
    *("PatientID", "StudyInstanceUID", "FrameOfReferenceUID", "Modality", "SOPClassUID", "ImageType", "EchoTime"),
    *("EchoNumbers", "InversionTime", "TemporalPositionIdentifier", "DiffusionBValue", "ConvolutionKernel"),
    *("ContrastBolusAgent", "NominalPercentageOfCardiacPhase", "Units", "KVP"),
)
# Functional group and name of the DICOM elements whose values must be equal in all frames of a file.
ALIKE_FRAMES = (
    *(("FrameContentSequence", "StackID"), ("FrameContentSequence", "TemporalPositionIndex")),
    *((f"{kind}FrameTypeSequence", "FrameType") for kind in ("MRImage", "CTImage", "PET")),
    *(("MREchoSequence", "EffectiveEchoTime"), ("MRDiffusionSequence", "DiffusionBValue")),
    *(("MRModifierSequence", "InversionTimes"), ("CTReconstructionSequence", "ConvolutionKernel")),
    ("CardiacSynchronizationSequence", "NominalPercentageOfCardiacPhase"),
)
PLACES = (  # functional groups and element names from which the position and the physical units of a frame are read
    ("PlaneOrientationSequence", ("ImageOrientationPatient",)),
    ("PlanePositionSequence", ("ImagePositionPatient",)),
    ("PixelMeasuresSequence", ("PixelSpacing",)),
    ("PixelValueTransformationSequence", ("RescaleSlope", "RescaleIntercept")),
)
# DICOM elements that identify a patient directly or indirectly (the direct identifiers of PS3.15, table E.1-1).
IDENTIFIERS = (
    *("PatientName", "PatientID", "IssuerOfPatientID", "OtherPatientIDs", "OtherPatientNames", "PatientBirthName"),
    *("PatientBirthDate", "PatientBirthTime", "PatientAddress", "PatientTelephoneNumbers", "PatientMotherBirthName"),
    *("MedicalRecordLocator", "MilitaryRank", "EthnicGroup", "PatientComments", "AdditionalPatientHistory"),
    *("AccessionNumber", "StudyID", "StudyDate", "SeriesDate", "AcquisitionDate", "ContentDate", "StudyTime"),
    *("InstitutionName", "InstitutionAddress", "InstitutionalDepartmentName", "StationName", "DeviceSerialNumber"),
    *("ReferringPhysicianName", "PerformingPhysicianName", "OperatorsName", "NameOfPhysiciansReadingStudy"),
    *("RequestingPhysician", "PhysiciansOfRecord", "ImageComments", "StudyDescription", "SeriesDescription"),
)
PRIVATE = "private elements"  # a manufacturer's private DICOM elements may identify a patient, too
OTHERS = (
    *("SOPInstanceUID", "SeriesInstanceUID", "Rows", "Columns", "BitsAllocated", "SamplesPerPixel", "NumberOfFrames"),
    *("PhotometricInterpretation", "ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"),
    *("GantryDetectorTilt", "RescaleSlope", "RescaleIntercept", "BurnedInAnnotation"),
    *("ReferencedSeriesSequence", "ReferencedFrameOfReferenceSequence"),
)
NOT_SLICES = "series are not slices of CT, MR or PET, one for each file or many in an Enhanced one; export those"
SECONDARY = "series are derived, secondary or localiser images; take the original ones"

NEEDED = "DICOM needs more packages; install medsilo[dicom]"
STRANGE = "series have headers that no slice has; export them again"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a DICOM file, or the header of one frame in a DICOM file. `wrong` is the reason why the file or
    frame cannot be a slice of a volume. For a usable slice, `wrong` is an empty text.
    """

    path: Path
    kind: str
    instance: str
    series: str
    patient: str
    wrong: str
    alike: tuple[str, ...] = ()
    shape: tuple[int, int] = (0, 0)
    orientation: tuple[float, ...] = ()
    position: tuple[float, ...] = ()
    spacing: tuple[float, ...] = ()  # distance between neighbouring rows, and distance between neighbouring columns
    tilt: float = 0.0
    scale: tuple[float, float] = (1.0, 0.0)  # rescale slope and intercept
    frame: int = 0
    identifiers: frozenset[str] = frozenset()
    burned_in: bool = False
    refers: frozenset[str] = frozenset()


def highdicom() -> Any:
    with MedsiloError.needing(NEEDED):
        import highdicom
    return highdicom


@cache
def library() -> Any:
    """Import pydicom, an optional dependency, and silence its warnings, because a warning could quote values from
    headers.
    """
    with MedsiloError.needing(NEEDED):
        import pydicom
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    # A log filter is used because a log level for pydicom would be lost: NVFlare changes the levels of all loggers.
    logging.getLogger("pydicom").addFilter(lambda record: False)
    warnings.filterwarnings("ignore", module="pydicom")
    return pydicom


def read_headers(path: Path) -> tuple[Header, ...]:
    """Read the header of a DICOM file, or of each frame in the file. If the file names no series, the result is
    empty.
    """
    damage, tags = "", set[tuple[int, int]]()
    if path.stat().st_size > LARGEST:
        return ()
    data = path.read_bytes()
    try:
        tags = Scan.dicom_tags(data)
    except ValueError:
        if DEFLATED.encode() in data:
            return ()
        damage = "series have a damaged file; copy or export them again"
    try:
        elements = _elements(data, [*ALIKE, *IDENTIFIERS, *OTHERS])
        header = _named(path, elements, damage, any(group % 2 for group, _ in tags))
    except Exception:  # pydicom can raise any error for a damaged file, even when a DICOM element is accessed
        return ()
    if not header.series:
        return ()
    if header.kind in (*SEGMENTATIONS, STRUCTURES):
        return (replace(header, refers=_asked(lambda: _referred(elements), frozenset())),)
    wrong = damage or _asked(lambda: _unlike_a_slice(elements, len(data)), STRANGE)
    strange = (replace(header, wrong=wrong or STRANGE),)
    return strange if wrong else _asked(lambda: _frames(header, elements, data), strange)


def as_compared(text: str) -> str:
    """Normalise the Unicode form of a name, so that accented letters compare equal."""
    return unicodedata.normalize("NFC", text).strip()


def _elements(data: bytes, wanted: Sequence[str]) -> Any:
    # The whole DICOM file is read into memory first, so that a wrong length in its header cannot make pydicom allocate
    # too much memory.
    return library().dcmread(BytesIO(data), stop_before_pixels=True, specific_tags=list(wanted))


def _frames(header: Header, elements: Any, data: bytes) -> tuple[Header, ...]:
    if header.kind not in ENHANCED:
        return (_placed(header, elements, elements),)
    groups = _elements(data, ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"])
    shared, own = shared_groups(groups), groups.PerFrameFunctionalGroupsSequence
    if len(own) != int(elements.NumberOfFrames):
        raise ValueError("frames lack their functional groups")
    found: list[Header] = []
    for number, frame in enumerate(own):
        place = {name: functional_group(kind, frame, shared).get(name) for kind, names in PLACES for name in names}
        alike = tuple(str(functional_group(kind, frame, shared).get(name, "")) for kind, name in ALIKE_FRAMES)
        one = _placed(replace(header, frame=number), elements, place)
        found.append(one if one.wrong else replace(one, alike=one.alike + alike))
    return tuple(found)


def shared_groups(elements: Any) -> Any:
    return next(iter(elements.get("SharedFunctionalGroupsSequence") or ()), {})


def functional_group(name: str, frame: Any, shared: Any) -> Any:
    """Return a functional group of a frame. If the frame lacks this functional group, return the group that all frames
    of the file share. If the file has no shared functional group, return an empty mapping.
    """
    items = frame.get(name) or shared.get(name)
    return items[0] if items else {}


def _named(path: Path, elements: Any, damage: str, private: bool) -> Header:
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


def _placed(header: Header, elements: Any, element: Any) -> Header:
    """Add the position of a slice to its header. `element` has the DICOM elements of the file, or of one frame."""
    wrong = _without_place(element) or _without_units(header.kind, element)
    if wrong:
        return replace(header, wrong=wrong)
    slope, intercept = element.get("RescaleSlope"), element.get("RescaleIntercept")
    return replace(
        header,
        alike=tuple(str(elements.get(name, "")) for name in ALIKE),
        shape=(int(elements.Rows), int(elements.Columns)),
        orientation=_floats(element.get("ImageOrientationPatient")),
        position=_floats(element.get("ImagePositionPatient")),
        spacing=_floats(element.get("PixelSpacing")),
        tilt=_asked(lambda: float(elements.get("GantryDetectorTilt") or 0), 0.0),
        scale=(float(1 if slope is None else slope), float(intercept or 0)),
    )


def _asked(ask: Callable[[], Value], otherwise: Value) -> Value:
    """Call a function that reads a DICOM element; if the element has an invalid value, return `otherwise`."""
    try:
        return ask()
    except Exception:  # pydicom can raise any error for values of a wrong type
        return otherwise


def _referred(elements: Any) -> frozenset[str]:
    places = list(elements.get("ReferencedSeriesSequence") or ())
    for frame in elements.get("ReferencedFrameOfReferenceSequence") or ():
        for study in frame.get("RTReferencedStudySequence") or ():
            places += study.get("RTReferencedSeriesSequence") or ()
    return frozenset(str(place.SeriesInstanceUID) for place in places)


def _unlike_a_slice(elements: Any, size: int) -> str:
    """Return the reason why a DICOM file is no slice of a volume, or an empty text for a slice."""
    frames, most = int(elements.get("NumberOfFrames") or 1), FRAMES if elements.SOPClassUID in ENHANCED else 1
    if elements.SOPClassUID not in SLICES or not 0 < frames <= most:
        return NOT_SLICES
    kind = [str(word).upper() for word in elements.get("ImageType") or ()]
    if {"DERIVED", "SECONDARY", "LOCALIZER"} & set(kind):
        return SECONDARY
    return _unreadable(elements, size, frames)


def _unreadable(elements: Any, size: int, frames: int) -> str:
    syntax = str(elements.file_meta.TransferSyntaxUID)
    if syntax not in (*PLAIN, *PACKED):
        return "series are compressed in a way that can't be read here; export them without compression"
    rows, columns, bits = int(elements.Rows), int(elements.Columns), int(elements.BitsAllocated)
    if int(elements.SamplesPerPixel) != 1 or elements.PhotometricInterpretation != "MONOCHROME2":
        return "series are in colour or inverted (MONOCHROME1); export grey images (MONOCHROME2)"
    if bits not in (8, 16, 32) or not (1 < rows <= SIDE and 1 < columns <= SIDE):
        return f"series have slices of no usual size; 2 to {SIDE} rows and columns of 8, 16 or 32 bits are read"
    if syntax in PLAIN and frames * rows * columns * bits // 8 > size:
        return "series have a header that claims more pixels than the file holds; export them again"
    return ""


def _without_place(element: Any) -> str:
    names = ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing")
    values = [value for name in names for value in _floats(element.get(name) or ())]
    if len(values) == 11 and min(values[9:]) > 0 and all(map(isfinite, values)):
        return ""
    return "series don't say where their slices lie (position, orientation, pixel spacing); export them again"


def _without_units(kind: str, element: Any) -> str:
    slope = element.get("RescaleSlope")
    lacks = slope is None or element.get("RescaleIntercept") is None
    if (lacks and kind not in UNITLESS) or (slope is not None and float(slope) == 0):
        return "series lack rescale slope and intercept, so that their values have no unit; export them again"
    return ""


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@dataclass
class Tree:
    """The series of a folder by UID, and the folder's files whose series is unknown."""

    images: dict[str, list[Header]] = field(default_factory=dict)
    annotations: dict[str, list[Header]] = field(default_factory=dict)
    unreferenced: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)


def read_tree(files: Iterable[Path]) -> Tree:
    tree = Tree()
    images: defaultdict[str, list[Header]] = defaultdict(list)
    annotations: defaultdict[str, list[Header]] = defaultdict(list)
    for path in files:
        for header in _headers(path, tree):
            if header.kind in (*SEGMENTATIONS, STRUCTURES):
                for series in header.refers:
                    annotations[series].append(header)
                if not header.refers:
                    tree.unreferenced.append(path)
            else:
                images[header.series].append(header)
    # DICOM objects without images cause no message, because every study may contain reports, viewer settings and dose
    # maps.
    tree.images = {
        series: image
        for series, image in sorted(images.items())
        if series in annotations or any(one.kind in SLICES or _looks_like_images(one) for one in image)
    }
    tree.annotations = dict(sorted(annotations.items()))
    return tree


def _headers(path: Path, tree: Tree) -> tuple[Header, ...]:
    try:
        if not Scan.is_dicom(path):
            return ()
        found = read_headers(path)
    except OSError:
        found = ()
    if not found and not path.name.upper().startswith("DICOMDIR"):
        tree.unreadable.append(path)
    return found


def _looks_like_images(header: Header) -> bool:
    """Return True if a file is an image of a DICOM class that medsilo cannot read."""
    return header.kind.startswith("1.2.840.10008.5.1.4.1.1.") and not header.kind.startswith(OTHER_OBJECTS)


# UID prefixes of presentation states, waveforms, registrations, reports, encapsulated documents and radiotherapy
# objects
OTHER_OBJECTS = (
    *(f"1.2.840.10008.5.1.4.1.1.{group}" for group in ("11.", "9.", "66.", "88.", "104.", "481.", "67", "68.")),
)
