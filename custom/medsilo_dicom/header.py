"""Read the headers of DICOM files and folders, as far as a volume needs them. No pixel is read here."""

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
ENHANCED = (  # classes of objects that are many slices, as of modern scanners and of converters; those of MR first
    *("1.2.840.10008.5.1.4.1.1.4.1", "1.2.840.10008.5.1.4.1.1.4.4"),
    *("1.2.840.10008.5.1.4.1.1.2.1", "1.2.840.10008.5.1.4.1.1.2.2"),
    *("1.2.840.10008.5.1.4.1.1.130", "1.2.840.10008.5.1.4.1.1.128.1"),
)
SLICES = (CT, MR, PET, *ENHANCED)  # classes of objects that are slices of a volume
UNITLESS = (MR, *ENHANCED[:2])
SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
STRUCTURES = "1.2.840.10008.5.1.4.1.1.481.3"  # contours (RTSTRUCT)
PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")  # transfer syntaxes without compression
PACKED = (  # and with one that can be undone here: RLE, JPEG of 8 and 12 bits, lossless, LS, 2000
    "1.2.840.10008.1.2.5",
    *(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91)),
)
DEFLATED = "1.2.840.10008.1.2.1.99"  # whose data may become of any size
LARGEST = 1 << 30  # bytes of a file
FRAMES = 1 << 16  # of a file
SIDE = 8192  # pixels along an axis of a slice

# Elements that must be the same in all slices of a series: where one differs, two volumes lie in it.
ALIKE = (
    *("PatientID", "StudyInstanceUID", "FrameOfReferenceUID", "Modality", "SOPClassUID", "ImageType", "EchoTime"),
    *("EchoNumbers", "InversionTime", "TemporalPositionIdentifier", "DiffusionBValue", "ConvolutionKernel"),
    *("ContrastBolusAgent", "NominalPercentageOfCardiacPhase", "Units", "KVP"),
)
# And those that frames of one file may say each of its own: their group, and their name in it.
ALIKE_FRAMES = (
    *(("FrameContentSequence", "StackID"), ("FrameContentSequence", "TemporalPositionIndex")),
    *((f"{kind}FrameTypeSequence", "FrameType") for kind in ("MRImage", "CTImage", "PET")),
    *(("MREchoSequence", "EffectiveEchoTime"), ("MRDiffusionSequence", "DiffusionBValue")),
    *(("MRModifierSequence", "InversionTimes"), ("CTReconstructionSequence", "ConvolutionKernel")),
    ("CardiacSynchronizationSequence", "NominalPercentageOfCardiacPhase"),
)
PLACES = (  # elements that say where a frame lies, and what its values mean: their group, and their names in it
    ("PlaneOrientationSequence", ("ImageOrientationPatient",)),
    ("PlanePositionSequence", ("ImagePositionPatient",)),
    ("PixelMeasuresSequence", ("PixelSpacing",)),
    ("PixelValueTransformationSequence", ("RescaleSlope", "RescaleIntercept")),
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
NOT_SLICES = "series are not slices of CT, MR or PET, one for each file or many in an Enhanced one; export those"
SECONDARY = "series are derived, secondary or localiser images; take the original ones"

NEEDED = "DICOM needs more packages; install medsilo[dicom]"
STRANGE = "series have headers that no slice has; export them again"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Header:
    """One file, or one frame of it. `wrong`: why it can't be a slice of a volume, in one line; empty where it can."""

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
    scale: tuple[float, float] = (1.0, 0.0)  # slope and intercept
    frame: int = 0  # its place in the file
    identifiers: frozenset[str] = frozenset()
    burned_in: bool = False
    refers: frozenset[str] = frozenset()  # series that a segmentation or contours belong to


def highdicom() -> Any:
    """Return highdicom, which is an extra."""
    with MedsiloError.needing(NEEDED):
        import highdicom
    return highdicom


@cache
def library() -> Any:
    """Return pydicom, which is an extra. It says nothing of what it reads: its words would hold values of headers."""
    with MedsiloError.needing(NEEDED):
        import pydicom
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").addFilter(lambda record: False)  # NVFlare enables loggers when it changes log levels
    warnings.filterwarnings("ignore", module="pydicom")
    return pydicom


def read_headers(path: Path) -> tuple[Header, ...]:
    """Read a file's header, of each frame; return none where nothing tells which series it is of."""
    damage, tags = "", set[tuple[int, int]]()
    if path.stat().st_size > LARGEST:
        return ()
    data = path.read_bytes()
    try:
        tags = Scan.dicom_tags(data)
    except ValueError:
        if DEFLATED.encode() in data:
            return ()  # no library may open it
        damage = "series have a damaged file; copy or export them again"
    try:
        elements = _elements(data, [*ALIKE, *IDENTIFIERS, *OTHERS])
        header = _named(path, elements, damage, any(group % 2 for group, _ in tags))
    except Exception:  # pydicom raises anything over damaged files, also when an element is looked at
        return ()
    if not header.series:
        return ()
    if header.kind in (*SEGMENTATIONS, STRUCTURES):
        return (replace(header, refers=_asked(lambda: _referred(elements), frozenset())),)
    wrong = damage or _asked(lambda: _unlike_a_slice(elements, len(data)), STRANGE)
    strange = (replace(header, wrong=wrong or STRANGE),)
    return strange if wrong else _asked(lambda: _frames(header, elements, data), strange)


def as_compared(text: str) -> str:
    """Return a name in the one of the two ways in which letters with marks are written, as the hospital's settings."""
    return unicodedata.normalize("NFC", text).strip()


def _elements(data: bytes, wanted: Sequence[str]) -> Any:
    # From memory, so that a length which is a lie takes none.
    return library().dcmread(BytesIO(data), stop_before_pixels=True, specific_tags=list(wanted))


def _frames(header: Header, elements: Any, data: bytes) -> tuple[Header, ...]:
    """Return the header of each slice in a file: of the one, or of all of an Enhanced object."""
    if header.kind not in ENHANCED:
        return (_placed(header, elements, elements),)
    groups = _elements(data, ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"])
    shared, own = shared_groups(groups), groups.PerFrameFunctionalGroupsSequence
    if len(own) != int(elements.NumberOfFrames):
        raise ValueError("frames lack their groups")
    found: list[Header] = []
    for number, frame in enumerate(own):
        place = {name: functional_group(kind, frame, shared).get(name) for kind, names in PLACES for name in names}
        alike = tuple(str(functional_group(kind, frame, shared).get(name, "")) for kind, name in ALIKE_FRAMES)
        one = _placed(replace(header, frame=number), elements, place)
        found.append(one if one.wrong else replace(one, alike=one.alike + alike))
    return tuple(found)


def shared_groups(elements: Any) -> Any:
    """Return the functional groups of all frames; none where each frame has all of its own."""
    return next(iter(elements.get("SharedFunctionalGroupsSequence") or ()), {})


def functional_group(name: str, frame: Any, shared: Any) -> Any:
    """Return a functional group, the frame's own or that of all frames; an empty one where there is none."""
    items = frame.get(name) or shared.get(name)
    return items[0] if items else {}


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


def _placed(header: Header, elements: Any, place: Any) -> Header:
    """Return a slice's header with what says where it lies. place: elements of the file, or of the frame."""
    wrong = _without_place(place) or _without_units(header.kind, place)
    if wrong:
        return replace(header, wrong=wrong)
    slope, intercept = place.get("RescaleSlope"), place.get("RescaleIntercept")
    return replace(
        header,
        alike=tuple(str(elements.get(name, "")) for name in ALIKE),
        shape=(int(elements.Rows), int(elements.Columns)),
        orientation=_floats(place.get("ImageOrientationPatient")),
        position=_floats(place.get("ImagePositionPatient")),
        spacing=_floats(place.get("PixelSpacing")),
        tilt=_asked(lambda: float(elements.get("GantryDetectorTilt") or 0), 0.0),
        scale=(float(1 if slope is None else slope), float(intercept or 0)),
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
    """Return why a file is no slice of a volume, nor many."""
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


def _without_place(place: Any) -> str:
    names = ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing")
    values = [value for name in names for value in _floats(place.get(name) or ())]
    if len(values) == 11 and min(values[9:]) > 0 and all(map(isfinite, values)):
        return ""
    return "series don't say where their slices lie (position, orientation, pixel spacing); export them again"


def _without_units(kind: str, place: Any) -> str:
    slope = place.get("RescaleSlope")
    lacks = slope is None or place.get("RescaleIntercept") is None
    if (lacks and kind not in UNITLESS) or (slope is not None and float(slope) == 0):
        return "series lack rescale slope and intercept, so that their values have no unit; export them again"
    return ""


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@dataclass
class Tree:
    """The series of a folder by their UIDs, and the files that can't be told to any."""

    images: dict[str, list[Header]] = field(default_factory=dict)
    annotations: dict[str, list[Header]] = field(default_factory=dict)  # of each series
    unreferenced: list[Path] = field(default_factory=list)  # annotations that name no series
    unreadable: list[Path] = field(default_factory=list)  # files that say they are DICOM, and nothing else


def read_tree(files: Iterable[Path]) -> Tree:
    """Read the headers of all DICOM files among these; others are passed over."""
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
    # A study has other objects beside its images: reports, settings of viewers, dose maps.
    tree.images = {
        series: own
        for series, own in sorted(images.items())
        if series in annotations or any(one.kind in SLICES or _looks_like_images(one) for one in own)
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
    """Return whether a file is an image of another class, which is told of and not passed over."""
    return header.kind.startswith("1.2.840.10008.5.1.4.1.1.") and not header.kind.startswith(OTHER_OBJECTS)


OTHER_OBJECTS = (  # presentation states, waveforms, registrations, reports, encapsulated documents, radiotherapy
    *(f"1.2.840.10008.5.1.4.1.1.{group}" for group in ("11.", "9.", "66.", "88.", "104.", "481.", "67", "68.")),
)
