"""Write DICOM studies for tests: the slices of a volume, and a segmentation or contours of the volume."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from medsilo_dicom.header import CT, STRUCTURES
from tests.hospital import affine_of, ball

NAME = "DOE^JANE"


def write_series(
    folder: Path,
    values: np.ndarray,
    affine: np.ndarray,
    patient: str = "p0",
    shuffled: int = 0,
    **changes: Any,
) -> list[Path]:
    """Write a volume [D, H, W] of integers as CT slices, and return the files in spatial order."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    turn = affine[:3, :3] / lengths
    study, series, frame = (generate_uid() for _ in range(3))
    names = np.random.default_rng(shuffled).permutation(len(values))
    files = []
    for number, pixels in enumerate(values):
        slice_ = Dataset()
        slice_.SOPClassUID, slice_.SOPInstanceUID = CT, generate_uid()
        slice_.StudyInstanceUID, slice_.SeriesInstanceUID, slice_.FrameOfReferenceUID = study, series, frame
        slice_.PatientID, slice_.PatientName, slice_.PatientBirthDate, slice_.PatientSex = (
            patient,
            NAME,
            "19700101",
            "O",
        )
        slice_.StudyDate, slice_.StudyTime, slice_.StudyID, slice_.AccessionNumber = "20200101", "120000", "1", "A17"
        slice_.ReferringPhysicianName, slice_.PositionReferenceIndicator, slice_.Manufacturer = "", "", "tests"
        slice_.Modality, slice_.SeriesNumber, slice_.InstanceNumber = "CT", 1, number + 1
        slice_.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        slice_.Rows, slice_.Columns = pixels.shape
        slice_.SamplesPerPixel, slice_.PhotometricInterpretation = 1, "MONOCHROME2"
        slice_.BitsAllocated, slice_.BitsStored, slice_.HighBit, slice_.PixelRepresentation = 16, 16, 15, 1
        slice_.RescaleSlope, slice_.RescaleIntercept = 1, -1024
        slice_.PixelSpacing = [f"{lengths[1]:.10g}", f"{lengths[0]:.10g}"]
        slice_.SliceThickness = f"{lengths[2]:.10g}"
        slice_.ImageOrientationPatient = [f"{value:.13f}"[:16] for value in (*turn[:, 0], *turn[:, 1])]
        slice_.ImagePositionPatient = [f"{v:.10f}"[:16] for v in (affine @ (0, 0, number, 1))[:3]]
        slice_.PixelData = (np.asarray(pixels) + 1024).astype("<i2").tobytes()
        for key, value in changes.items():
            setattr(slice_, key, value)
        files.append(folder / f"IM{names[number]:04d}")
        write(slice_, files[-1])
    return files


def write(elements: Dataset, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = elements.SOPClassUID, elements.SOPInstanceUID
    FileDataset(path, elements, preamble=b"\0" * 128, file_meta=meta).save_as(path, enforce_file_format=True)


def change(path: Path, **changes: Any) -> None:
    elements = pydicom.dcmread(path)
    for key, value in changes.items():
        if value is None:
            delattr(elements, key)
        else:
            setattr(elements, key, value)
    elements.save_as(path)


def write_segmentation(path: Path, files: Iterable[Path], labels: np.ndarray, names: Mapping[int, str]) -> None:
    """Write a DICOM SEG of labels [D, H, W] with highdicom."""
    import highdicom as hd
    from pydicom.sr.codedict import codes

    described = [
        hd.seg.SegmentDescription(
            number,
            names[label],
            codes.SCT.AnatomicalStructure,
            codes.SCT.Tissue,
            hd.seg.SegmentAlgorithmTypeValues.MANUAL,
        )
        for number, label in enumerate(sorted(names), 1)
    ]
    planes = np.stack([labels == label for label in sorted(names)], -1).astype(np.uint8)
    segmentation = hd.seg.Segmentation(
        [pydicom.dcmread(file) for file in files],
        planes,
        hd.seg.SegmentationTypeValues.BINARY,
        described,
        hd.UID(),
        2,
        hd.UID(),
        1,
        "tests",
        "tests",
        "1",
        "1",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    segmentation.save_as(path)


def write_contours(path: Path, files: list[Path], structures: Mapping[str, list[np.ndarray]]) -> None:
    """Write a DICOM RTSTRUCT from polygons [n, 3] in millimetres."""
    image = pydicom.dcmread(files[0], stop_before_pixels=True)
    drawn = Dataset()
    drawn.SOPClassUID, drawn.SOPInstanceUID, drawn.Modality = STRUCTURES, generate_uid(), "RTSTRUCT"
    drawn.SeriesInstanceUID, drawn.StudyInstanceUID = generate_uid(), image.StudyInstanceUID
    drawn.PatientID = image.PatientID
    series, study, frame = Dataset(), Dataset(), Dataset()
    series.SeriesInstanceUID, study.RTReferencedSeriesSequence = image.SeriesInstanceUID, Sequence([series])
    frame.FrameOfReferenceUID, frame.RTReferencedStudySequence = image.FrameOfReferenceUID, Sequence([study])
    drawn.ReferencedFrameOfReferenceSequence = Sequence([frame])
    rois, contours = [], []
    for number, (name, polygons) in enumerate(structures.items(), 1):
        roi, contour = Dataset(), Dataset()
        roi.ROINumber, roi.ROIName, roi.ReferencedFrameOfReferenceUID = number, name, image.FrameOfReferenceUID
        contour.ReferencedROINumber, contour.ContourSequence = number, Sequence()
        for polygon in polygons:
            line = Dataset()
            line.ContourGeometricType, line.NumberOfContourPoints = "CLOSED_PLANAR", len(polygon)
            line.ContourData = [f"{value:.8f}"[:16] for value in polygon.ravel()]
            contour.ContourSequence.append(line)
        rois.append(roi)
        contours.append(contour)
    drawn.StructureSetROISequence, drawn.ROIContourSequence = Sequence(rois), Sequence(contours)
    write(drawn, path)


def write_study(
    folder: Path, patient: str, seed: int, label: str = "ball", shape: tuple[int, int, int] = (7, 12, 12)
) -> list[Path]:
    spacing = (1.5, 1.5, 2.5)
    values, mask = ball(shape, spacing, seed)
    files = write_series(folder / "A" / "series", np.rint(values * 100), affine_of(spacing), patient, seed)
    write_segmentation(folder / "B" / "mask", files, mask, {1: label})
    return files


# ------------------------------------------------------------------------------------------------------ damage
def _shift(files: list[Path]) -> None:
    for number, path in enumerate(files):
        x, y, z = pydicom.dcmread(path).ImagePositionPatient
        change(path, ImagePositionPatient=[x, y + 0.3 * number, z])


def _one_of(what: Mapping[str, Any]) -> Callable[[list[Path]], None]:
    return lambda files: change(files[len(files) // 2], **what)


def _all(what: Mapping[str, Any]) -> Callable[[list[Path]], None]:
    def spoil(files: list[Path]) -> None:
        for path in files:
            change(path, **what)

    return spoil


def _cut(files: list[Path]) -> None:
    files[-1].write_bytes(files[-1].read_bytes()[:-200])


def _head_cut(files: list[Path]) -> None:
    files[3].write_bytes(files[3].read_bytes()[:300])


def _twice(files: list[Path]) -> None:
    copy = files[4].with_name("copy")
    copy.write_bytes(files[4].read_bytes())


def _phases(files: list[Path]) -> None:
    for path in files:
        other = pydicom.dcmread(path)
        other.SOPInstanceUID = other.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        other.save_as(path.with_name(f"{path.name}-late"))


def _two_in_one(files: list[Path]) -> None:
    for path in files[::2]:
        change(path, EchoTime="12.5")


def _syntax(files: list[Path]) -> None:
    data = files[0].read_bytes()
    files[0].write_bytes(data.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.2\0"))


def _compressed(files: list[Path]) -> None:
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.9\0"))


def _claims(files: list[Path]) -> None:
    data = bytearray(files[0].read_bytes())
    place = data.index(b"\x28\x00\x10\x00US") + 8
    data[place : place + 2] = (65535).to_bytes(2, "little")
    files[0].write_bytes(bytes(data))


def _element_claims(files: list[Path]) -> None:
    data = bytearray(files[0].read_bytes())
    place = data.index(b"\xe0\x7f\x10\x00OW") + 8
    data[place : place + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    files[0].write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "missing": (lambda files: files[5].unlink(), "uneven distances|lack slices"),
    "end missing": (lambda files: files[-1].unlink(), "lack slices that their segmentation refers to"),
    "twice": (_twice, "a slice twice"),
    "phases": (_phases, "several slices at each position"),
    "two in one": (_two_in_one, "several phases, echoes"),
    "tilt": (_shift, "tilted gantry"),
    "tilt told": (_all({"GantryDetectorTilt": "12"}), "tilted gantry"),
    "orientations": (_one_of({"ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}), "several orientations"),
    "spacings": (_one_of({"PixelSpacing": [2, 2]}), "several pixel spacings"),
    "two patients": (_one_of({"PatientID": "another"}), "phases, echoes, kernels or patients"),
    "derived": (_all({"ImageType": ["DERIVED", "SECONDARY", "MPR"]}), "derived, secondary or localiser"),
    "localiser": (_all({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}), "derived, secondary or localiser"),
    "no position": (_one_of({"ImagePositionPatient": None}), "don't say where"),
    "no spacing": (_all({"PixelSpacing": None}), "don't say where"),
    "no unit": (_all({"RescaleSlope": None}), "lack rescale slope"),
    "colour": (_all({"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3}), "in colour"),
    "multi-frame": (_all({"NumberOfFrames": 3}), "not slices of CT"),
    "burned in": (_all({"BurnedInAnnotation": "YES"}), "burned into their pixels"),
    "nobody": (_all({"PatientID": ""}), "no PatientID"),
    "cut": (_cut, "a damaged file"),
    "head cut": (_head_cut, "nothing tells|uneven|lack slices"),
    "syntax": (_syntax, "a damaged file|nothing tells|lack slices"),
    "compressed": (_compressed, "compressed in a way"),
    "claims": (_claims, "no usual size|claims more"),
    "element claims": (_element_claims, "a damaged file"),
    "size": (_one_of({"Rows": 10}), "several sizes"),
    "not a number": (_one_of({"ImagePositionPatient": [0, 0, 1e300]}), "uneven|tilted|lack"),
}
