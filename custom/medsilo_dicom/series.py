"""One DICOM series as a volume: its slices in order, where they lie, and their values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from medsilo.extend import DataError
from medsilo_dicom.header import PLAIN, Header, library, read_header

UNEVEN = 1.1  # the largest step between slices, over the smallest
ALONG = 1e-3  # that unit vectors may differ
SHEAR = 2e-3  # that slices may drift sideways, per millimetre along the stack: a tenth of a degree
RLE = "1.2.840.10008.1.2.5"


@dataclass(frozen=True)
class ImageSeries:
    """The slices of a volume in order, and its grid. affine: [4, 4] from voxel (x, y, z) to millimetres, LPS."""

    slices: tuple[Header, ...]
    affine: np.ndarray

    @property
    def uid(self) -> str:
        """The series' own."""
        return self.slices[0].series

    @property
    def frame_of_reference(self) -> str:
        """The coordinate system in which it lies."""
        return self.slices[0].alike[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slices, rows, columns."""
        return (len(self.slices), *self.slices[0].shape)


def make_series(headers: Sequence[Header]) -> ImageSeries:
    """Put the files of one series in order, or raise a DataError that says why they are not one volume."""
    for header in headers:
        if header.wrong:
            raise DataError(header.wrong, private=str(header.path))
    if any(header.burned_in for header in headers):
        raise DataError("series are flagged to have annotations burned into their pixels; remove them there")
    if len(headers) < 2:
        raise DataError("series have one slice only; a volume needs more")
    _refuse_mixture(headers)
    return _stacked(headers)


def _refuse_mixture(headers: Sequence[Header]) -> None:
    """Refuse slices that differ where those of one volume don't."""
    for what, values in (
        ("sizes", {header.shape for header in headers}),
        ("phases, echoes, kernels or patients", {header.alike for header in headers}),
    ):
        if len(values) > 1:
            raise DataError(f"series have slices of several {what}; export each volume as a series of its own")
    for what, several in (
        ("orientations", [header.orientation for header in headers]),
        ("pixel spacings", [header.spacing for header in headers]),
    ):
        if np.ptp(np.array(several), axis=0).max() > ALONG:
            raise DataError(f"series have slices of several {what}; export each volume as a series of its own")


def _stacked(headers: Sequence[Header]) -> ImageSeries:
    first = headers[0]
    along, down = np.array(first.orientation[:3]), np.array(first.orientation[3:])
    if max(abs(np.linalg.norm(along) - 1), abs(np.linalg.norm(down) - 1), abs(along @ down)) > ALONG:
        raise DataError("series have rows and columns that are not at right angles; export them again")
    along, down = along / np.linalg.norm(along), down / np.linalg.norm(down)
    normal = np.cross(along, down)
    order = sorted(headers, key=lambda header: (float(np.array(header.position) @ normal), header.instance))
    places = np.array([header.position for header in order])
    heights = (places - places[0]) @ normal
    steps = np.diff(heights)
    _refuse_doubles(heights)
    if steps.max() > UNEVEN * steps.min():
        raise DataError("series have slices at uneven distances, as if one were missing; copy or export them again")
    drift = np.linalg.norm(places - places[0] - heights[:, None] * normal, axis=1).max()
    if drift > max(SHEAR * heights[-1], 0.01) or abs(first.tilt) > 0.1:
        raise DataError("series were taken with a tilted gantry, so that their slices are shifted; straighten them")
    affine = np.eye(4)
    rows, columns = first.spacing
    affine[:3, :3] = np.stack([along * columns, down * rows, normal * heights[-1] / len(steps)], axis=1)
    affine[:3, 3] = places[0]
    return ImageSeries(tuple(order), affine)


def _refuse_doubles(heights: np.ndarray) -> None:
    there = Counter(np.round(heights, 3).tolist()).values()
    if max(there) == 1:
        return
    if min(there) > 1:
        raise DataError("series have several slices at each place: phases or time points; export each as its own")
    raise DataError("series have a slice twice; remove the copies")


def read_again(files: Sequence[Path]) -> ImageSeries:
    """Return the series of these files, all of which must still be as they were."""
    found = [read_header(path) for path in files]
    headers = [header for header in found if header]
    if len(headers) < len(files) or len({header.series for header in headers}) > 1:
        raise DataError("series have a damaged file; copy or export them again")
    return make_series(headers)


def values_of(series: ImageSeries) -> np.ndarray:
    """Return a series' values in their own units (Hounsfield's, for CT), float32 [slices, rows, columns]."""
    values = np.empty(series.shape, np.float32)
    for number, header in enumerate(series.slices):
        try:
            values[number] = _slice(header.path)
        except Exception as error:  # decoders raise anything over damaged pixels
            damaged = "series have pixels that can't be read; copy or export them again"
            raise DataError(damaged, private=f"{header.path}: {error}") from error
    return values


def _slice(path: Path) -> np.ndarray:
    elements = library().dcmread(BytesIO(path.read_bytes()))
    if str(elements.file_meta.TransferSyntaxUID) not in (*PLAIN, RLE):
        return _decompressed(path)
    slope, intercept = elements.get("RescaleSlope"), elements.get("RescaleIntercept")
    stored = elements.pixel_array.astype(np.float64)
    return stored * float(1 if slope is None else slope) + float(intercept or 0)


def _decompressed(path: Path) -> np.ndarray:
    """Return the values of a compressed slice; GDCM has the decoders, and applies slope and intercept itself."""
    import SimpleITK

    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(str(path))
    return SimpleITK.GetArrayFromImage(reader.Execute())[0]
