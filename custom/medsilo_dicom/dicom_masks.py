"""Convert DICOM segmentations (SEG) and contours (RTSTRUCT) to masks on the grid of their series."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.extend import DataError, MedsiloError
from medsilo_dicom.header import NEEDED, PLAIN, functional_group, library, shared_groups
from medsilo_dicom.series import RLE, ImageSeries

OVERLAP = "structures overlap, and a voxel can have one label; correct them"
MOST = 1 << 31  # maximum number of pixels in a SEG file, over all of its frames
MOST_POINTS = 10_000_000  # maximum number of contour points in an RTSTRUCT file
NEAR = 0.05  # maximum distance, in voxels, between a frame of a SEG file and the nearest slice
BESIDE = 0.1  # maximum distance between a contour and the nearest slice, as a fraction of the distance between slices
Number = Callable[[str], int]
Drawn = tuple[int, tuple[np.ndarray, ...]]


def mask_of_segmentation(path: Path, series: ImageSeries, number: Number) -> np.ndarray:
    """Return the labels in a SEG file as an array [slices, rows, columns] on the grid of the series.

    Args:
        number: Returns the label for a segment's name; 0 leaves the segment out.
    """

    def structures(elements: Any) -> Iterator[Drawn]:
        series.refuse_elsewhere(elements.get("FrameOfReferenceUID"), "segmentations")
        for place in elements.get("ReferencedSeriesSequence") or ():
            if str(place.SeriesInstanceUID) == series.uid:
                series.refuse_lacking(place.get("ReferencedInstanceSequence") or (), "segmentation refers")
        return ((number(segment), places) for segment, places in _frames_of(elements, series))

    return read_mask("segmentations", path, series, structures)


def read_mask(
    subject: str, path: Path, series: ImageSeries, structures: Callable[[Any], Iterator[Drawn]]
) -> np.ndarray:
    """Combine the structures in a segmentation or contour file into one mask with at most one label per voxel; raise
    DataError if structures overlap.

    Args:
        subject: The kind of the file, for the error message.
        structures: Yields the label and the voxels of each structure.
    """
    try:
        labels = np.zeros(series.shape, np.int64)
        for label, places in structures(library().dcmread(BytesIO(path.read_bytes()))):
            if label == 0:
                continue
            held = labels[places]
            if ((held != 0) & (held != label)).any():
                raise DataError(OVERLAP)
            labels[places] = label
    except DataError as error:
        raise DataError(str(error), private=error.private or str(path)) from error
    except Exception as error:  # pydicom can raise any error for damaged files
        raise DataError(f"{subject} can't be read; copy or export them again", private=f"{path}: {error}") from error
    return labels


def _frames_of(elements: Any, series: ImageSeries) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    names = {int(one.SegmentNumber): str(one.SegmentLabel) for one in elements.SegmentSequence}
    frames = int(elements.get("NumberOfFrames") or 1)
    if str(elements.file_meta.TransferSyntaxUID) not in (*PLAIN, RLE):
        raise DataError("segmentations have an unsupported compression; export them without compression")
    if prod((frames, int(elements.Rows), int(elements.Columns))) > MOST:
        raise DataError("segmentations announce too many frames; export them again")
    pixels = elements.pixel_array.reshape(frames, int(elements.Rows), int(elements.Columns))
    kind = str(elements.SegmentationType)
    if kind == "FRACTIONAL" and not np.isin(pixels, (0, int(elements.MaximumFractionalValue))).all():
        raise DataError("segmentations contain probabilities; export binary segmentations")
    to_voxels = np.linalg.inv(series.affine)
    shared = shared_groups(elements)
    for place, frame in enumerate(elements.PerFrameFunctionalGroupsSequence):
        voxels = _voxels(_corner(frame, shared), to_voxels)
        if kind == "LABELMAP":
            for value in sorted(set(np.unique(pixels[place]).tolist()) & names.keys()):
                yield names[value], _places(pixels[place] == value, voxels, series.shape)
            continue
        segment = int(functional_group("SegmentIdentificationSequence", frame, shared).ReferencedSegmentNumber)
        yield names[segment], _places(pixels[place] != 0, voxels, series.shape)


def _corner(frame: Any, shared: Any) -> np.ndarray:
    """Return a frame's affine matrix [4, 3], which maps (column, row, 1) to millimetres."""
    turn = np.array(functional_group("PlaneOrientationSequence", frame, shared).ImageOrientationPatient, float)
    between_rows, between_columns = map(float, functional_group("PixelMeasuresSequence", frame, shared).PixelSpacing)
    corner = np.zeros((4, 3))
    corner[:3, 0], corner[:3, 1] = turn[:3] * between_columns, turn[3:] * between_rows
    corner[:, 2] = *(float(v) for v in functional_group("PlanePositionSequence", frame, shared).ImagePositionPatient), 1
    return corner


def _voxels(corner: np.ndarray, to_voxels: np.ndarray) -> np.ndarray:
    """Return the integer matrix [3, 3] that maps a frame's (column, row, 1) to the series' (x, y, z); raise DataError
    if the grids do not match.
    """
    exact = (to_voxels @ corner)[:3]
    whole = np.rint(exact)
    steps = np.abs(whole[:, :2])
    if np.abs(exact[:, :2] - whole[:, :2]).max() > NEAR / 100 or (steps.sum(0) != 1).any() or steps.sum(1).max() > 1:
        raise DataError("segmentations lie on another grid than their series; export both on one grid")
    if np.abs(exact[:, 2] - whole[:, 2]).max() > NEAR:
        raise DataError("segmentations lie between the slices of their series; export both on one grid")
    return whole.astype(np.int64)


def _places(inside: np.ndarray, voxels: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return the indices (slice, row, column) of the voxels that a frame of a SEG file marks in a series."""
    rows, columns = np.nonzero(inside)
    x, y, z = voxels @ np.stack([columns, rows, np.ones_like(rows)])
    found = np.stack([z, y, x])
    if found.size and ((found < 0).any() or (found >= np.array(shape)[:, None]).any()):
        raise DataError("segmentations reach beyond their series; is a slice missing?")
    return tuple(found)


def mask_of_contours(path: Path, series: ImageSeries, number: Number) -> np.ndarray:
    """Return the labels in an RTSTRUCT file as an array [slices, rows, columns] on the grid of the series.

    A voxel belongs to a structure if its centre is inside a contour. As the DICOM standard requires, contours of one
    structure in a slice are combined by exclusive or, so that an inner contour is a hole.

    Args:
        number: Returns the label for a structure's name; 0 leaves the structure out.
    """

    def structures(elements: Any) -> Iterator[Drawn]:
        for name, contours in _drawn_structures(elements, series):
            if label := number(name):
                for z, inside in _drawn_slices(contours, series):
                    rows, columns = np.nonzero(inside)
                    yield label, (np.full_like(rows, z), rows, columns)

    return read_mask("contours", path, series, structures)


def _drawn_structures(elements: Any, series: ImageSeries) -> Iterator[tuple[str, Any]]:
    rois = {int(one.ROINumber): one for one in elements.StructureSetROISequence}
    for drawn in elements.get("ROIContourSequence") or ():
        roi = rois[int(drawn.ReferencedROINumber)]
        series.refuse_elsewhere(roi.get("ReferencedFrameOfReferenceUID", series.frame_of_reference), "contours")
        contours = drawn.get("ContourSequence") or ()
        images = (image for contour in contours for image in contour.get("ContourImageSequence") or ())
        series.refuse_lacking(images, "contours refer")
        yield str(roi.ROIName), contours


def _drawn_slices(contours: Any, series: ImageSeries) -> Iterator[tuple[int, np.ndarray]]:
    found: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(series.shape[1:], bool))
    to_voxels = np.linalg.inv(series.affine)
    points = 0
    for contour in contours:
        if str(contour.ContourGeometricType) != "CLOSED_PLANAR":
            continue  # a contour that is a point or an open line encloses no area
        corners = np.array(contour.ContourData, float).reshape(-1, 3)
        points += len(corners)
        if points > MOST_POINTS or not np.isfinite(corners).all():
            raise DataError("contours have too many points, or points that are not finite; export them again")
        voxels = corners @ to_voxels[:3, :3].T + to_voxels[:3, 3]
        z = round(float(voxels[:, 2].mean()))
        if np.abs(voxels[:, 2] - z).max() > BESIDE or not 0 <= z < series.shape[0]:
            raise DataError("contours don't lie on the slices of their series; is a slice missing?")
        found[z] ^= _inside(voxels[:, :2], series.shape[1:])
    yield from sorted(found.items())


def _inside(corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of the pixels whose centres are inside a polygon with corners (column, row)."""
    with MedsiloError.needing(NEEDED):
        from matplotlib.path import Path as Polygon

    inside = np.zeros(shape, bool)
    low = np.clip(np.floor(corners.min(0)).astype(int), 0, None)
    high = np.minimum(np.ceil(corners.max(0)).astype(int) + 1, shape[::-1])
    if (high <= low).any():
        return inside
    columns, rows = np.meshgrid(np.arange(low[0], high[0]), np.arange(low[1], high[1]))
    centres = np.stack([columns.ravel(), rows.ravel()], axis=1)
    inside[low[1] : high[1], low[0] : high[0]] = Polygon(corners).contains_points(centres).reshape(columns.shape)
    return inside
