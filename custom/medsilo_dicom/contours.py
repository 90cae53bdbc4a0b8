"""Masks from contours (RTSTRUCT), on the grid of the series that they were drawn on.

A voxel is inside where its centre is. Several contours of one structure in one slice are combined as the standard has
it (exclusive or), so that one within another is a hole.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from medsilo.extend import DataError
from medsilo_dicom.segments import Drawn, Number, read_mask
from medsilo_dicom.series import ImageSeries

BESIDE = 0.1  # of a step between slices that a contour may lie beside one
MOST = 10_000_000  # points of a file


def mask_of_contours(path: Path, series: ImageSeries, number: Number) -> np.ndarray:
    """Return the labels of an RTSTRUCT file on a series' grid, [slices, rows, columns]."""

    def drawn(elements: Any) -> Iterator[Drawn]:
        for name, contours in _structures(elements, series):
            if label := number(name):
                for z, inside in _slices(contours, series):
                    rows, columns = np.nonzero(inside)
                    yield label, (np.full_like(rows, z), rows, columns)

    return read_mask("contours", path, series, drawn)


def _structures(elements: Any, series: ImageSeries) -> Iterator[tuple[str, Any]]:
    rois = {int(one.ROINumber): one for one in elements.StructureSetROISequence}
    for drawn in elements.get("ROIContourSequence") or ():
        roi = rois[int(drawn.ReferencedROINumber)]
        series.refuse_elsewhere(roi.get("ReferencedFrameOfReferenceUID", series.frame_of_reference), "contours")
        contours = drawn.get("ContourSequence") or ()
        images = (image for contour in contours for image in contour.get("ContourImageSequence") or ())
        series.refuse_lacking(images, "contours refer")
        yield str(roi.ROIName), contours


def _slices(contours: Any, series: ImageSeries) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each slice that a structure is in, and where it is there."""
    found: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(series.shape[1:], bool))
    to_voxels = np.linalg.inv(series.affine)
    points = 0
    for contour in contours:
        if str(contour.ContourGeometricType) != "CLOSED_PLANAR":
            continue  # points and open lines enclose nothing
        corners = np.array(contour.ContourData, float).reshape(-1, 3)
        points += len(corners)
        if points > MOST or not np.isfinite(corners).all():
            raise DataError("contours have points without end; export them again")
        voxels = corners @ to_voxels[:3, :3].T + to_voxels[:3, 3]
        z = round(float(voxels[:, 2].mean()))
        if np.abs(voxels[:, 2] - z).max() > BESIDE or not 0 <= z < series.shape[0]:
            raise DataError("contours don't lie on the slices of their series; is a slice missing?")
        found[z] ^= _inside(voxels[:, :2], series.shape[1:])
    yield from sorted(found.items())


def _inside(corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return which pixels' centres a polygon encloses. corners: (column, row)."""
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
